"""Between the exception tree and gRPC statuses, in both directions: the one table of codes. docs/errors.md shows it.

Details of a status: google.rpc.ErrorInfo always (reason, domain "slipstream", metadata), BadRequest for a field,
RetryInfo for "come back later". A client gets back the class that the server raised.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import grpc
from google.protobuf import any_pb2
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from runtime.eagle3.reasons import RejectReason
from runtime.errors import (
    CapacityExhausted,
    ContextLengthExceeded,
    DrafterNotFound,
    DrafterRejected,
    EngineUnavailable,
    FeatureBudgetExceeded,
    FeatureError,
    FeatureNotFound,
    HistoryDiverged,
    HistoryMismatch,
    InvalidRequest,
    LeaseLost,
    PermissionDenied,
    RunTakenOver,
    SavedSessionRejected,
    SessionBusy,
    SessionNotFound,
    SlipstreamError,
    Unauthenticated,
)

DOMAIN = "slipstream"
# A status travels in headers, of which clients take 8 KiB: the message percent-encoded, and twice more in the details.
MAX_MESSAGE_BYTES = 1000
MAX_METADATA_BYTES = 200

CODES: dict[type[SlipstreamError], grpc.StatusCode] = {
    InvalidRequest: grpc.StatusCode.INVALID_ARGUMENT,
    Unauthenticated: grpc.StatusCode.UNAUTHENTICATED,
    PermissionDenied: grpc.StatusCode.PERMISSION_DENIED,
    SessionNotFound: grpc.StatusCode.NOT_FOUND,
    SessionBusy: grpc.StatusCode.ABORTED,
    HistoryMismatch: grpc.StatusCode.FAILED_PRECONDITION,
    HistoryDiverged: grpc.StatusCode.FAILED_PRECONDITION,
    CapacityExhausted: grpc.StatusCode.RESOURCE_EXHAUSTED,
    EngineUnavailable: grpc.StatusCode.UNAVAILABLE,
    DrafterRejected: grpc.StatusCode.FAILED_PRECONDITION,
    DrafterNotFound: grpc.StatusCode.NOT_FOUND,
    SavedSessionRejected: grpc.StatusCode.FAILED_PRECONDITION,
    FeatureNotFound: grpc.StatusCode.NOT_FOUND,
    FeatureBudgetExceeded: grpc.StatusCode.RESOURCE_EXHAUSTED,
    LeaseLost: grpc.StatusCode.FAILED_PRECONDITION,
    RunTakenOver: grpc.StatusCode.FAILED_PRECONDITION,
}
CODES_OF_REASONS: dict[str, grpc.StatusCode] = {  # of classes whose reasons differ in kind
    RejectReason.UNKNOWN_VERSION: grpc.StatusCode.NOT_FOUND,
    "SAVED_NOT_FOUND": grpc.StatusCode.NOT_FOUND,
    "SAVED_EXISTS": grpc.StatusCode.ALREADY_EXISTS,
}
_SESSION_REASONS = ("UNKNOWN", "CLOSED", "EVICTED_TTL", "EVICTED_LRU")
_IN_METADATA = ("param", "session_id", "expected", "actual", "version", "run_id")

Rebuild = Callable[[str, str, Mapping[str, str]], SlipstreamError]  # reason, message, metadata


def code_of(error: Exception) -> grpc.StatusCode:
    """The code of the error's reason, of its class or of its nearest base in the table; INTERNAL for everything else."""
    by_reason = CODES_OF_REASONS.get(error.reason) if isinstance(error, DrafterRejected | SavedSessionRejected) else None
    return by_reason or next((CODES[kind] for kind in type(error).__mro__ if kind in CODES), grpc.StatusCode.INTERNAL)


def to_status(error: Exception) -> status_pb2.Status:
    """The rich status of an error. What is not one of ours says only that it is the server's fault: its text may hold secrets."""
    code: int = code_of(error).value[0]
    if not isinstance(error, SlipstreamError):
        info = error_details_pb2.ErrorInfo(reason=SlipstreamError.reason, domain=DOMAIN)
        return status_pb2.Status(
            code=code, message="The server failed on this request; its log has the cause.", details=[_any(info)]
        )
    message = _short(error.message, MAX_MESSAGE_BYTES)
    metadata = {name: _short(str(getattr(error, name)), MAX_METADATA_BYTES) for name in _IN_METADATA if hasattr(error, name)}
    details = [_any(error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN, metadata=metadata))]
    if isinstance(error, InvalidRequest):
        violation = error_details_pb2.BadRequest.FieldViolation(field=metadata["param"], description=message)
        details.append(_any(error_details_pb2.BadRequest(field_violations=[violation])))
    if isinstance(error, CapacityExhausted):
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromMilliseconds(round(error.retry_after_s * 1000))
        details.append(_any(retry))
    return status_pb2.Status(code=code, message=message, details=details)


def _short(text: str, max_bytes: int) -> str:
    """The beginning of a text that quotes something long."""
    data = text.encode(errors="replace")
    return text if len(data) <= max_bytes else data[: max_bytes - 3].decode(errors="ignore") + "..."


def _any(message: Message) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(message)
    return packed


_REBUILD: dict[str, Rebuild] = {
    InvalidRequest.reason: lambda _, message, more: InvalidRequest(more["param"], message),
    ContextLengthExceeded.reason: lambda _, message, more: ContextLengthExceeded(more["param"], message),
    Unauthenticated.reason: lambda _, message, more: Unauthenticated(message),
    PermissionDenied.reason: lambda _, message, more: PermissionDenied(message),
    SessionBusy.reason: lambda _, message, more: SessionBusy(more["session_id"]),
    HistoryMismatch.reason: lambda _, message, more: HistoryMismatch(int(more["expected"]), int(more["actual"])),
    HistoryDiverged.reason: lambda _, message, more: HistoryDiverged(more["session_id"], int(more["actual"])),
    EngineUnavailable.reason: lambda _, message, more: EngineUnavailable(message),
    DrafterNotFound.reason: lambda _, message, more: DrafterNotFound(more["version"]),
    FeatureError.reason: lambda _, message, more: FeatureError(message),
    FeatureNotFound.reason: lambda _, message, more: FeatureNotFound(message),
    LeaseLost.reason: lambda _, message, more: LeaseLost(more["run_id"], [], message),
    RunTakenOver.reason: lambda _, message, more: RunTakenOver(more["run_id"]),
    **dict.fromkeys(_SESSION_REASONS, lambda reason, message, more: SessionNotFound(more["session_id"], reason)),
    **dict.fromkeys(RejectReason, lambda reason, message, more: DrafterRejected(reason, message)),
}


def from_rpc_error(error: grpc.RpcError) -> SlipstreamError | None:
    """The exception that the server raised; None if the status is not one of ours (a proxy's, or gRPC's own).

    error: what a call of grpc or of grpc.aio raises.
    """
    status = rpc_status.from_call(_CallView(error))
    if status is None and error.code() is grpc.StatusCode.UNAVAILABLE:
        return EngineUnavailable(f"The server cannot be reached: {error.details()}")
    if status is None:
        return None
    info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
    for detail in status.details:
        for message in (info, retry):
            detail.Unpack(message)
    if info.domain != DOMAIN:
        return None
    if info.reason == CapacityExhausted.reason:
        return CapacityExhausted(status.message, retry.retry_delay.ToMilliseconds() / 1000)
    if info.reason.startswith("SAVED_"):
        return SavedSessionRejected(info.reason, status.message)
    if info.reason in _REBUILD:
        return _REBUILD[info.reason](info.reason, status.message, info.metadata)
    return SlipstreamError(status.message)


class _CallView:
    """What rpc_status wants to see of a failed call, of either of gRPC's two libraries."""

    def __init__(self, error: grpc.RpcError) -> None:
        self.code, self.details = error.code, error.details
        self._error = error

    def trailing_metadata(self) -> Any:
        return tuple(self._error.trailing_metadata() or ())

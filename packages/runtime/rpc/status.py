"""Between the exception tree and gRPC statuses, in both directions: the one table of codes.

Details of a status: google.rpc.ErrorInfo always (reason, domain "slipstream", metadata), BadRequest for a field,
RetryInfo for "come back later". A client gets back the class that the server raised.
"""

from __future__ import annotations

import grpc
from google.protobuf import any_pb2
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from runtime.errors import (
    CapacityExhausted,
    ContextLengthExceeded,
    EngineUnavailable,
    HistoryMismatch,
    InvalidRequest,
    SessionBusy,
    SessionNotFound,
    SlipstreamError,
)

DOMAIN = "slipstream"

CODES: dict[type[SlipstreamError], grpc.StatusCode] = {
    InvalidRequest: grpc.StatusCode.INVALID_ARGUMENT,
    SessionNotFound: grpc.StatusCode.NOT_FOUND,
    SessionBusy: grpc.StatusCode.ABORTED,
    HistoryMismatch: grpc.StatusCode.FAILED_PRECONDITION,
    CapacityExhausted: grpc.StatusCode.RESOURCE_EXHAUSTED,
    EngineUnavailable: grpc.StatusCode.UNAVAILABLE,
}


def code_of(error: Exception) -> grpc.StatusCode:
    """The code of the error's class or of its nearest base in the table; INTERNAL for everything else."""
    return next((CODES[kind] for kind in type(error).__mro__ if kind in CODES), grpc.StatusCode.INTERNAL)


def to_status(error: Exception) -> status_pb2.Status:
    """The rich status of an error. What is not one of ours says only that it is the server's fault: its text may hold secrets."""
    code: int = code_of(error).value[0]
    if not isinstance(error, SlipstreamError):
        info = error_details_pb2.ErrorInfo(reason=SlipstreamError.reason, domain=DOMAIN)
        return status_pb2.Status(
            code=code, message="The server failed on this request; its log has the cause.", details=[_any(info)]
        )
    metadata = {name: str(getattr(error, name)) for name in ("param", "session_id", "expected", "actual") if hasattr(error, name)}
    details = [_any(error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN, metadata=metadata))]
    if isinstance(error, InvalidRequest):
        violation = error_details_pb2.BadRequest.FieldViolation(field=error.param, description=error.message)
        details.append(_any(error_details_pb2.BadRequest(field_violations=[violation])))
    if isinstance(error, CapacityExhausted):
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromMilliseconds(round(error.retry_after_s * 1000))
        details.append(_any(retry))
    return status_pb2.Status(code=code, message=error.message, details=details)


def _any(message: Message) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(message)
    return packed


def from_rpc_error(error: grpc.RpcError) -> SlipstreamError | None:
    """The exception that the server raised; None if the status is not one of ours (a proxy's, or gRPC's own)."""
    status = rpc_status.from_call(error)
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
    metadata = info.metadata
    match error.code():
        case grpc.StatusCode.INVALID_ARGUMENT:
            kind = ContextLengthExceeded if info.reason == ContextLengthExceeded.reason else InvalidRequest
            return kind(metadata["param"], status.message)
        case grpc.StatusCode.NOT_FOUND:
            return SessionNotFound(metadata["session_id"], info.reason)
        case grpc.StatusCode.ABORTED:
            return SessionBusy(metadata["session_id"])
        case grpc.StatusCode.FAILED_PRECONDITION:
            return HistoryMismatch(int(metadata["expected"]), int(metadata["actual"]))
        case grpc.StatusCode.RESOURCE_EXHAUSTED:
            return CapacityExhausted(status.message, retry.retry_delay.ToMilliseconds() / 1000)
        case grpc.StatusCode.UNAVAILABLE:
            return EngineUnavailable(status.message)
    return SlipstreamError(status.message)

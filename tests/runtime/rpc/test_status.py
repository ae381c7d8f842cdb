"""Statuses: over a real channel, a client catches the very exception that the server raised, with all it carries."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent import futures
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from runtime.errors import (
    CapacityExhausted,
    ContextLengthExceeded,
    DrafterNotFound,
    DrafterRejected,
    EngineUnavailable,
    FeatureNotFound,
    HistoryMismatch,
    InvalidRequest,
    PermissionDenied,
    SavedSessionRejected,
    SessionBusy,
    SessionNotFound,
    SlipstreamError,
    Unauthenticated,
)
from runtime.rpc.client import RuntimeClient
from runtime.rpc.connection import Retry
from runtime.rpc.status import code_of, to_status
from runtime.rpc.v1 import runtime_pb2_grpc


class Failing(runtime_pb2_grpc.RuntimeServiceServicer):
    """Fails every call with the same error."""

    error: Exception = EngineUnavailable("unset")

    def GetSession(self, request: Any, context: grpc.ServicerContext) -> Any:
        context.abort_with_status(rpc_status.to_status(to_status(self.error)))

    def Generate(self, request: Any, context: grpc.ServicerContext) -> Any:
        context.abort_with_status(rpc_status.to_status(to_status(self.error)))

    def ListSessions(self, request: Any, context: grpc.ServicerContext) -> Any:
        context.abort(grpc.StatusCode.PERMISSION_DENIED, "a proxy says no")


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[Failing, str]]:
    server = grpc.server(futures.ThreadPoolExecutor(2))
    servicer = Failing()
    runtime_pb2_grpc.add_RuntimeServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield servicer, f"127.0.0.1:{port}"
    server.stop(0).wait()


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (InvalidRequest("stop", "No."), grpc.StatusCode.INVALID_ARGUMENT),
        (ContextLengthExceeded("max_tokens", "Too long."), grpc.StatusCode.INVALID_ARGUMENT),
        (SessionNotFound("s", "EVICTED_LRU"), grpc.StatusCode.NOT_FOUND),
        (SessionBusy("s"), grpc.StatusCode.ABORTED),
        (HistoryMismatch(3, 4), grpc.StatusCode.FAILED_PRECONDITION),
        (CapacityExhausted("Full.", 2.5), grpc.StatusCode.RESOURCE_EXHAUSTED),
        (EngineUnavailable("Gone."), grpc.StatusCode.UNAVAILABLE),
        (Unauthenticated("Who?"), grpc.StatusCode.UNAUTHENTICATED),
        (PermissionDenied("Not you."), grpc.StatusCode.PERMISSION_DENIED),
        (DrafterNotFound("0123456789abcdef"), grpc.StatusCode.NOT_FOUND),
        (DrafterRejected("UNKNOWN_VERSION", "None."), grpc.StatusCode.NOT_FOUND),
        (DrafterRejected("NON_FINITE", "Broken."), grpc.StatusCode.FAILED_PRECONDITION),
        (SavedSessionRejected("SAVED_NOT_FOUND", "None."), grpc.StatusCode.NOT_FOUND),
        (SavedSessionRejected("SAVED_EXISTS", "There."), grpc.StatusCode.ALREADY_EXISTS),
        (SavedSessionRejected("SAVED_STORAGE", "Full."), grpc.StatusCode.FAILED_PRECONDITION),
        (SavedSessionRejected("SAVED_OTHER_TARGET", "Another."), grpc.StatusCode.FAILED_PRECONDITION),
        (FeatureNotFound("Gone."), grpc.StatusCode.NOT_FOUND),
    ],
)
def test_an_error_survives_the_wire(served: tuple[Failing, str], error: SlipstreamError, code: grpc.StatusCode) -> None:
    servicer, address = served
    servicer.error = error
    with RuntimeClient(address, retry=Retry(max_attempts=1)) as client:
        for call in (lambda: client.get_session("s"), lambda: list(client.generate("s"))):
            with pytest.raises(type(error)) as caught:
                call()
            assert type(caught.value) is type(error)
            assert vars(caught.value) == vars(error)
            assert caught.value.reason == error.reason
            cause = caught.value.__cause__
            assert isinstance(cause, grpc.RpcError)
            assert cause.code() is code


def test_what_is_not_ours_is_internal_and_keeps_its_secret(served: tuple[Failing, str]) -> None:
    servicer, address = served
    servicer.error = RuntimeError("password 123")
    with RuntimeClient(address) as client, pytest.raises(SlipstreamError) as caught:
        client.get_session("s")
    assert type(caught.value) is SlipstreamError
    assert "password" not in str(caught.value)
    assert code_of(servicer.error) is grpc.StatusCode.INTERNAL


@pytest.mark.parametrize("what", ["x" * 100_000, "\u4e2d" * 5_000, "\x00" * 100_000, "a" * 998 + "\u4e2d" * 10])
def test_an_error_that_quotes_something_long_arrives_shortened(served: tuple[Failing, str], what: str) -> None:
    servicer, address = served
    for error in (SessionNotFound(what, "CLOSED"), InvalidRequest(what, what), DrafterNotFound(what)):
        servicer.error = error
        with RuntimeClient(address) as client, pytest.raises(type(error)) as caught:
            client.get_session("s")
        assert caught.value.reason == error.reason
        assert 100 < len(caught.value.message.encode()) <= 1200


def test_foreign_statuses_pass_as_they_are(served: tuple[Failing, str]) -> None:
    with RuntimeClient(served[1]) as client, pytest.raises(grpc.RpcError) as caught:
        client.list_sessions()
    assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED


def test_a_server_that_is_not_there_is_unavailable() -> None:
    with (
        RuntimeClient("127.0.0.1:1", retry=Retry(max_attempts=1)) as client,
        pytest.raises(EngineUnavailable, match="cannot be reached"),
    ):
        client.get_session("s")


def test_a_field_violation_and_a_retry_delay_are_in_the_details() -> None:
    violation, retry, info = error_details_pb2.BadRequest(), error_details_pb2.RetryInfo(), error_details_pb2.ErrorInfo()
    details = to_status(InvalidRequest("top_p", "No.")).details
    assert details[0].Unpack(info)
    assert (info.domain, info.reason) == ("slipstream", "INVALID_REQUEST")
    assert details[1].Unpack(violation)
    assert [(one.field, one.description) for one in violation.field_violations] == [("top_p", "No.")]
    assert to_status(CapacityExhausted("Full.", 2.5)).details[1].Unpack(retry)
    assert retry.retry_delay.ToMilliseconds() == 2500

"""The clients against a server that fails as it is told: what is called again, when, and what never is. Both clients alike."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from typing import Any

import grpc
import pytest
from grpc_status import rpc_status

from runtime.errors import CapacityExhausted, EngineUnavailable, InvalidRequest, SessionBusy, SlipstreamError
from runtime.rpc import generation_codec
from runtime.rpc.aio import AsyncRuntimeClient
from runtime.rpc.client import RuntimeClient
from runtime.rpc.connection import Retry
from runtime.rpc.status import to_status
from runtime.rpc.v1 import runtime_pb2 as pb
from runtime.rpc.v1 import runtime_pb2_grpc
from runtime.types import Done, SamplingParams, SpeculationStats, Started, Tokens, Usage

GONE = EngineUnavailable("Gone.")
EVENTS = [
    Started("r", "s", "ngram", "target", 3),
    Tokens((1, 2), "ab", (), (False, True)),
    Done("stop", 2, Usage(3, 2, 0), SpeculationStats(), (), 5),
]
QUICK = Retry(max_attempts=3, first_s=0.001)


class Script(runtime_pb2_grpc.RuntimeServiceServicer):
    """Fails with the errors of its list, one a call, and then does what is asked. Events before a failure: `num_before`."""

    def __init__(self) -> None:
        self.errors: list[SlipstreamError] = []
        self.num_before = 0
        self.requests: list[Any] = []
        self.metadata: list[dict[str, Any]] = []

    def _take(self, request: Any, context: grpc.ServicerContext) -> None:
        self.requests.append(request)
        self.metadata.append(dict(context.invocation_metadata()))
        if self.errors:
            context.abort_with_status(rpc_status.to_status(to_status(self.errors.pop(0))))

    def CreateSession(self, request: Any, context: grpc.ServicerContext) -> Any:
        self._take(request, context)
        return pb.Session(session_id="s", state=pb.SESSION_STATE_IDLE)

    GetSession = ForkSession = RestoreSession = CreateSession

    def ListSessions(self, request: Any, context: grpc.ServicerContext) -> Any:
        self._take(request, context)
        return pb.ListSessionsResponse()

    def AppendTokens(self, request: Any, context: grpc.ServicerContext) -> Any:
        self._take(request, context)
        return pb.AppendTokensResponse(history_length=3)

    def CloseSession(self, request: Any, context: grpc.ServicerContext) -> Any:
        self._take(request, context)
        return pb.CloseSessionResponse()

    def SaveSession(self, request: Any, context: grpc.ServicerContext) -> Any:
        self._take(request, context)
        return pb.SavedSession(name=request.name)

    def ListSavedSessions(self, request: Any, context: grpc.ServicerContext) -> Any:
        self._take(request, context)
        return pb.ListSavedSessionsResponse()

    def DeleteSavedSession(self, request: Any, context: grpc.ServicerContext) -> Any:
        self._take(request, context)
        return pb.DeleteSavedSessionResponse()

    def Generate(self, request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
        for event in EVENTS[: self.num_before]:
            yield generation_codec.event_message(event)
        self._take(request, context)
        for event in EVENTS[self.num_before :]:
            yield generation_codec.event_message(event)


@pytest.fixture
def script() -> Iterator[Script]:
    server = grpc.server(futures.ThreadPoolExecutor(2))
    script = Script()
    runtime_pb2_grpc.add_RuntimeServiceServicer_to_server(script, server)
    script.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"  # type: ignore[attr-defined]
    server.start()
    yield script
    server.stop(0).wait()


Ask = Callable[..., Any]  # ask(method, *arguments, **connection): what a client's method gives; of generate, its events


def ask_sync(address: str, method: str, *arguments: Any, connection: dict[str, Any], **more: Any) -> Any:
    with RuntimeClient(address, **connection) as client:
        result = getattr(client, method)(*arguments, **more)
        return list(result) if method == "generate" else result


def ask_async(address: str, method: str, *arguments: Any, connection: dict[str, Any], **more: Any) -> Any:
    async def ask() -> Any:
        async with AsyncRuntimeClient(address, **connection) as client:
            result = getattr(client, method)(*arguments, **more)
            return [event async for event in result] if method == "generate" else await result

    return asyncio.run(ask())


@pytest.fixture(params=[ask_sync, ask_async])
def ask(request: pytest.FixtureRequest, script: Script) -> Ask:
    def call(method: str, *arguments: Any, connection: dict[str, Any] | None = None, **more: Any) -> Any:
        return request.param(script.address, method, *arguments, connection={"retry": QUICK} | (connection or {}), **more)  # type: ignore[attr-defined]

    return call


SAFE: list[tuple[str, tuple[Any, ...]]] = [
    ("create_session", ()),
    ("append", ("s", [1, 2, 3])),
    ("get_session", ("s",)),
    ("list_sessions", ()),
    ("fork_session", ("s",)),
    ("restore_session", ("name",)),
    ("list_saved_sessions", ()),
]


@pytest.mark.parametrize(("method", "arguments"), SAFE)
def test_what_is_safe_is_called_again_until_it_works(script: Script, ask: Ask, method: str, arguments: tuple[Any, ...]) -> None:
    script.errors = [GONE, GONE]
    ask(method, *arguments)
    assert len(script.requests) == 3
    assert script.requests[0] == script.requests[1] == script.requests[2]
    if "request_id" in script.requests[0].DESCRIPTOR.fields_by_name:
        assert len(script.requests[0].request_id) == 32, "made up, so that the server does it once"


@pytest.mark.parametrize(("method", "arguments"), SAFE[:3])
def test_it_gives_up_after_so_many_attempts(script: Script, ask: Ask, method: str, arguments: tuple[Any, ...]) -> None:
    script.errors = [GONE] * 5
    with pytest.raises(EngineUnavailable):
        ask(method, *arguments)
    assert len(script.requests) == 3


@pytest.mark.parametrize(
    ("method", "arguments"), [("close_session", ("s",)), ("save_session", ("s", "name")), ("delete_saved_session", ("name",))]
)
def test_what_may_have_happened_is_not_called_again(script: Script, ask: Ask, method: str, arguments: tuple[Any, ...]) -> None:
    script.errors = [GONE]
    with pytest.raises(EngineUnavailable):
        ask(method, *arguments)
    assert len(script.requests) == 1
    script.errors = [CapacityExhausted("Full.", 0.01)]
    ask(method, *arguments)
    assert len(script.requests) == 3, "but what was refused has not happened"


@pytest.mark.parametrize("error", [InvalidRequest("text", "No."), SessionBusy("s"), SlipstreamError("Fault.")])
def test_what_waiting_does_not_cure_is_not_called_again(script: Script, ask: Ask, error: SlipstreamError) -> None:
    script.errors = [error]
    with pytest.raises(type(error)):
        ask("append", "s", text="x")
    assert len(script.requests) == 1


def test_it_waits_as_long_as_the_server_says(script: Script, ask: Ask) -> None:
    script.errors = [CapacityExhausted("Full.", 0.3)]
    began = time.monotonic()
    ask("list_sessions")
    assert time.monotonic() - began >= 0.3


def test_it_does_not_wait_beyond_its_time_limit(script: Script, ask: Ask) -> None:
    script.errors = [CapacityExhausted("Full.", 30.0)]
    began = time.monotonic()
    with pytest.raises(CapacityExhausted):
        ask("list_sessions", connection={"timeout_s": 2.0})
    assert time.monotonic() - began < 2
    assert len(script.requests) == 1


def test_waits_double_and_have_a_limit() -> None:
    retry = Retry(first_s=1.0, max_s=3.0)
    for num_failed, most in ((1, 1.0), (2, 2.0), (3, 3.0), (9, 3.0), (5000, 3.0)):
        assert all(most / 2 <= retry.wait_s(num_failed) <= most for _ in range(50))


def test_a_key_travels_with_every_call(script: Script, ask: Ask) -> None:
    ask("list_sessions", connection={"api_key": "k-0123456789abcdef"})
    ask("generate", "s", connection={"api_key": "k-0123456789abcdef"})
    ask("list_sessions")
    assert [one.get("authorization") for one in script.metadata] == ["Bearer k-0123456789abcdef"] * 2 + [None]


# --- generations ---


def test_events_arrive_as_they_were_sent(script: Script, ask: Ask) -> None:
    params = SamplingParams(max_tokens=7, top_k=3)
    assert ask("generate", "s", params, request_id="r", expected_history_length=3) == EVENTS
    [request] = script.requests
    assert generation_codec.sampling_params(request, 320) == params
    assert (request.request_id, request.expected_history_length) == ("r", 3)


def test_a_generation_that_was_refused_is_begun_again(script: Script, ask: Ask) -> None:
    script.errors = [CapacityExhausted("Full.", 0.01), CapacityExhausted("Full.", 0.01)]
    assert ask("generate", "s") == EVENTS
    assert len(script.requests) == 3


def test_a_generation_that_may_have_run_is_begun_again_only_where_that_cannot_run_it_twice(script: Script, ask: Ask) -> None:
    script.errors = [GONE]
    with pytest.raises(EngineUnavailable):
        ask("generate", "s")
    assert len(script.requests) == 1
    script.errors = [GONE]
    assert ask("generate", "s", expected_history_length=3) == EVENTS
    assert len(script.requests) == 3


@pytest.mark.parametrize("num_before", [1, 2])
@pytest.mark.parametrize("error", [GONE, CapacityExhausted("Full.", 0.01)])
def test_a_generation_is_never_begun_again_after_its_first_event(
    script: Script, ask: Ask, num_before: int, error: SlipstreamError
) -> None:
    script.errors, script.num_before = [error], num_before
    with pytest.raises(type(error)):
        ask("generate", "s", expected_history_length=3)
    assert len(script.requests) == 1


def test_leaving_a_stream_cancels_it(script: Script) -> None:
    with RuntimeClient(script.address) as client:  # type: ignore[attr-defined]
        with client.generate("s") as stream:
            assert next(iter(stream)) == EVENTS[0]
        with pytest.raises(grpc.RpcError) as ended:
            list(stream)
        assert ended.value.code() is grpc.StatusCode.CANCELLED

    async def scenario() -> None:
        async with AsyncRuntimeClient(script.address) as client:  # type: ignore[attr-defined]
            async with client.generate("s") as stream:
                async for event in stream:
                    assert event == EVENTS[0]
                    break
            with pytest.raises(asyncio.CancelledError):
                [event async for event in stream]

    asyncio.run(scenario())


def test_both_clients_have_the_same_methods() -> None:
    def methods(kind: type) -> set[str]:
        return {name for name in dir(kind) if not name.startswith("_")}

    assert methods(RuntimeClient) == methods(AsyncRuntimeClient)

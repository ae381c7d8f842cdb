"""A small synchronous client of `RuntimeService`. Errors come back as the classes of `runtime.errors`.

    with RuntimeClient("127.0.0.1:50051") as client:
        session = client.create_session()
        client.append(session.session_id, text="Once upon a time")
        for event in client.generate(session.session_id, SamplingParams(max_tokens=32)):
            if isinstance(event, Tokens):
                print(event.text, end="", flush=True)

Not a pool and no retries: a call that fails is the caller's to repeat, with the request ids that make it safe.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType

import grpc

from runtime.engine.base import AppendResult
from runtime.rpc import codec
from runtime.rpc.status import from_rpc_error
from runtime.rpc.v1 import runtime_pb2 as pb
from runtime.rpc.v1 import runtime_pb2_grpc
from runtime.types import Done, SamplingParams, SessionInfo, SessionOptions, Started, Tokens


class GenerationStream:
    """The events of one generation: iterate it. `cancel` stops the work; the session keeps what was committed."""

    def __init__(self, call: grpc._CallIterator[pb.GenerateResponse], session_id: str) -> None:
        self._call = call
        self._session_id = session_id

    def __iter__(self) -> Iterator[Started | Tokens | Done]:
        with _own_errors():
            for message in self._call:
                yield codec.event(message, self._session_id)

    def cancel(self) -> None:
        self._call.cancel()


class RuntimeClient:
    def __init__(self, address: str, *, timeout_s: float | None = 60.0) -> None:
        """timeout_s holds for each call but `generate`, which ends when its generation does."""
        self._channel = grpc.insecure_channel(address)
        self._stub = runtime_pb2_grpc.RuntimeServiceStub(self._channel)  # type: ignore[no-untyped-call]
        self._timeout_s = timeout_s

    def __enter__(self) -> RuntimeClient:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        self._channel.close()

    def create_session(self, options: SessionOptions | None = None, *, request_id: str = "") -> SessionInfo:
        request = codec.create_request(options or SessionOptions(), request_id)
        with _own_errors():
            return codec.session_info(self._stub.CreateSession(request, timeout=self._timeout_s))

    def append(
        self,
        session_id: str,
        token_ids: Sequence[int] = (),
        *,
        text: str = "",
        expected_history_length: int | None = None,
        request_id: str = "",
    ) -> AppendResult:
        """Append token ids or text: exactly one of them."""
        request = pb.AppendTokensRequest(
            session_id=session_id,
            request_id=request_id,
            expected_history_length=expected_history_length,
            token_ids=token_ids,
            text=text,
        )
        with _own_errors():
            reply = self._stub.AppendTokens(request, timeout=self._timeout_s)
        return AppendResult(reply.history_length, reply.cached_tokens)

    def generate(
        self,
        session_id: str,
        params: SamplingParams | None = None,
        *,
        expected_history_length: int | None = None,
        request_id: str = "",
    ) -> GenerationStream:
        request = codec.generate_request(
            session_id, params or SamplingParams(), request_id=request_id, expected_history_length=expected_history_length
        )
        return GenerationStream(self._stub.Generate(request), session_id)

    def close_session(self, session_id: str) -> None:
        with _own_errors():
            self._stub.CloseSession(pb.CloseSessionRequest(session_id=session_id), timeout=self._timeout_s)

    def get_session(self, session_id: str) -> SessionInfo:
        with _own_errors():
            return codec.session_info(self._stub.GetSession(pb.GetSessionRequest(session_id=session_id), timeout=self._timeout_s))

    def list_sessions(self) -> list[SessionInfo]:
        with _own_errors():
            reply = self._stub.ListSessions(pb.ListSessionsRequest(), timeout=self._timeout_s)
        return [codec.session_info(message) for message in reply.sessions]


@contextmanager
def _own_errors() -> Iterator[None]:
    """Turn the server's statuses back into our exceptions; others (cancelled, deadline) pass as grpc.RpcError."""
    try:
        yield
    except grpc.RpcError as error:
        own = from_rpc_error(error)
        if own is None:
            raise
        raise own from error

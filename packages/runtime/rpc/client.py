"""A synchronous client of `RuntimeService`. Errors come back as the classes of `runtime.errors`; `aio.py` is its twin.

    with RuntimeClient("127.0.0.1:50051") as client:
        session = client.create_session()
        client.append(session.session_id, text="Once upon a time")
        for event in client.generate(session.session_id, SamplingParams(max_tokens=32)):
            if isinstance(event, Tokens):
                print(event.text, end="", flush=True)

Calls that failed are repeated where that is safe (see connection.py): calls that make or change something carry a request id
of their own unless the caller gives one. A generation is begun again only before its first event, and after a lost
connection only with expected_history_length, which makes a second one impossible. What is gRPC's own (a deadline, a cancelled
call) passes as grpc.RpcError.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any, Self, Unpack

import grpc

from runtime.engine.base import AppendResult
from runtime.rpc import codec, generation_codec
from runtime.rpc.codec import SavedSession
from runtime.rpc.connection import Attempts, Client, Connection, Options, own_errors
from runtime.rpc.v1 import runtime_pb2 as pb
from runtime.rpc.v1 import runtime_pb2_grpc
from runtime.types import Done, HistoryTruncated, SamplingParams, SessionInfo, SessionOptions, Started, Tokens


class GenerationStream:
    """The events of one generation: iterate it. `cancel`, or leaving its `with` block, stops the work; the session keeps what
    was committed."""

    def __init__(self, connection: Connection, method: Any, request: pb.GenerateRequest, timeout_s: float | None) -> None:
        self._connection = connection
        self._method = method
        self._request = request
        self._timeout_s = timeout_s
        self._is_cancelled = False
        self._call = self._begin()

    def _begin(self) -> Any:
        return self._method(self._request, timeout=self._timeout_s, metadata=self._connection.metadata)

    def __iter__(self) -> Iterator[Started | Tokens | HistoryTruncated | Done]:
        attempts = Attempts(self._connection, is_safe=self._request.HasField("expected_history_length"))
        while True:
            try:
                first = next(self._call, None)
                break
            except grpc.RpcError as error:
                wait_s = attempts.wait_after(error)
            time.sleep(wait_s)
            if self._is_cancelled:
                return
            self._call = self._begin()
        if first is None:
            return
        yield generation_codec.event(first, self._request.session_id)
        with own_errors():
            for message in self._call:
                yield generation_codec.event(message, self._request.session_id)

    def cancel(self) -> None:
        self._is_cancelled = True
        self._call.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.cancel()


class RuntimeClient(Client):
    """timeout_s holds for each call but `generate`, which has its own."""

    def __init__(self, address: str, **options: Unpack[Options]) -> None:
        super().__init__(address, **options)
        self._stub = runtime_pb2_grpc.RuntimeServiceStub(self._channel)  # type: ignore[no-untyped-call]

    def create_session(self, options: SessionOptions | None = None, *, request_id: str = "") -> SessionInfo:
        request = codec.create_request(options or SessionOptions(), request_id or new_id())
        return codec.session_info(self._call(self._stub.CreateSession, request))

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
        request = codec.append_request(
            session_id, token_ids, text, request_id=request_id or new_id(), expected_history_length=expected_history_length
        )
        reply = self._call(self._stub.AppendTokens, request)
        return AppendResult(reply.history_length, reply.cached_tokens)

    def generate(
        self,
        session_id: str,
        params: SamplingParams | None = None,
        *,
        expected_history_length: int | None = None,
        request_id: str = "",
        timeout_s: float | None = None,
    ) -> GenerationStream:
        request = generation_codec.generate_request(
            session_id, params or SamplingParams(), request_id=request_id, expected_history_length=expected_history_length
        )
        return GenerationStream(self._connection, self._stub.Generate, request, timeout_s)

    def close_session(self, session_id: str) -> None:
        self._call(self._stub.CloseSession, pb.CloseSessionRequest(session_id=session_id), is_safe=False)

    def get_session(self, session_id: str) -> SessionInfo:
        return codec.session_info(self._call(self._stub.GetSession, pb.GetSessionRequest(session_id=session_id)))

    def list_sessions(self) -> list[SessionInfo]:
        reply = self._call(self._stub.ListSessions, pb.ListSessionsRequest())
        return [codec.session_info(message) for message in reply.sessions]

    def fork_session(
        self,
        session_id: str,
        *,
        options: SessionOptions | None = None,
        history_length: int | None = None,
        request_id: str = "",
    ) -> SessionInfo:
        """A new session with the first `history_length` tokens of this one; None for all of them, and for its options."""
        request = codec.fork_request(session_id, options, request_id=request_id or new_id(), history_length=history_length)
        return codec.session_info(self._call(self._stub.ForkSession, request))

    def save_session(self, session_id: str, name: str) -> SavedSession:
        """Write it to the server's disk. Not repeated by itself: a name is taken once."""
        request = pb.SaveSessionRequest(session_id=session_id, name=name)
        return codec.saved_session(self._call(self._stub.SaveSession, request, is_safe=False))

    def restore_session(self, name: str, *, request_id: str = "") -> SessionInfo:
        request = pb.RestoreSessionRequest(name=name, request_id=request_id or new_id())
        return codec.session_info(self._call(self._stub.RestoreSession, request))

    def list_saved_sessions(self) -> list[SavedSession]:
        reply = self._call(self._stub.ListSavedSessions, pb.ListSavedSessionsRequest())
        return [codec.saved_session(message) for message in reply.saved_sessions]

    def delete_saved_session(self, name: str) -> None:
        self._call(self._stub.DeleteSavedSession, pb.DeleteSavedSessionRequest(name=name), is_safe=False)


def new_id() -> str:
    return uuid.uuid4().hex

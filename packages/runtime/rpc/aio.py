"""The asyncio twin of `client.py`, with the same methods, rules and errors.

async with AsyncRuntimeClient("127.0.0.1:50051") as client:
    session = await client.create_session()
    await client.append(session.session_id, text="Once upon a time")
    async for event in client.generate(session.session_id, SamplingParams(max_tokens=32)):
        if isinstance(event, Tokens):
            print(event.text, end="", flush=True)
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from types import TracebackType
from typing import Any, Self, Unpack

import grpc

from runtime.engine.base import AppendResult
from runtime.rpc import codec, generation_codec
from runtime.rpc.client import new_id
from runtime.rpc.codec import SavedSession
from runtime.rpc.connection import Attempts, Connection, Options, own_errors
from runtime.rpc.v1 import runtime_pb2 as pb
from runtime.rpc.v1 import runtime_pb2_grpc
from runtime.types import Done, HistoryTruncated, SamplingParams, SessionInfo, SessionOptions, Started, Tokens


class AsyncGenerationStream:
    """The events of one generation: iterate it. `cancel`, or leaving its `async with` block, stops the work."""

    def __init__(self, connection: Connection, method: Any, request: pb.GenerateRequest, timeout_s: float | None) -> None:
        self._connection = connection
        self._method = method
        self._request = request
        self._timeout_s = timeout_s
        self._is_cancelled = False
        self._call = self._begin()

    def _begin(self) -> Any:
        return self._method(self._request, timeout=self._timeout_s, metadata=self._connection.metadata)

    async def __aiter__(self) -> AsyncIterator[Started | Tokens | HistoryTruncated | Done]:
        attempts = Attempts(self._connection, is_safe=self._request.HasField("expected_history_length"))
        while True:
            try:
                first = await self._call.read()
                break
            except grpc.RpcError as error:
                wait_s = attempts.wait_after(error)
            await asyncio.sleep(wait_s)
            if self._is_cancelled:
                return
            self._call = self._begin()
        message = first
        with own_errors():
            while message is not grpc.aio.EOF:
                yield generation_codec.event(message, self._request.session_id)
                message = await self._call.read()

    def cancel(self) -> None:
        self._is_cancelled = True
        self._call.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.cancel()


class AsyncRuntimeClient:
    """Belongs to the event loop in which it is made. timeout_s holds for each call but `generate`, which has its own."""

    def __init__(self, address: str, **options: Unpack[Options]) -> None:
        self._connection = Connection(address, **options)
        self._channel = self._connection.async_channel()
        self._stub: Any = runtime_pb2_grpc.RuntimeServiceStub(self._channel)  # type: ignore[no-untyped-call]

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()

    async def close(self) -> None:
        await self._channel.close()

    async def create_session(self, options: SessionOptions | None = None, *, request_id: str = "") -> SessionInfo:
        request = codec.create_request(options or SessionOptions(), request_id or new_id())
        return codec.session_info(await self._call(self._stub.CreateSession, request))

    async def append(
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
        reply = await self._call(self._stub.AppendTokens, request)
        return AppendResult(reply.history_length, reply.cached_tokens)

    def generate(
        self,
        session_id: str,
        params: SamplingParams | None = None,
        *,
        expected_history_length: int | None = None,
        request_id: str = "",
        timeout_s: float | None = None,
    ) -> AsyncGenerationStream:
        request = generation_codec.generate_request(
            session_id, params or SamplingParams(), request_id=request_id, expected_history_length=expected_history_length
        )
        return AsyncGenerationStream(self._connection, self._stub.Generate, request, timeout_s)

    async def close_session(self, session_id: str) -> None:
        await self._call(self._stub.CloseSession, pb.CloseSessionRequest(session_id=session_id), is_safe=False)

    async def get_session(self, session_id: str) -> SessionInfo:
        return codec.session_info(await self._call(self._stub.GetSession, pb.GetSessionRequest(session_id=session_id)))

    async def list_sessions(self) -> list[SessionInfo]:
        reply = await self._call(self._stub.ListSessions, pb.ListSessionsRequest())
        return [codec.session_info(message) for message in reply.sessions]

    async def fork_session(
        self,
        session_id: str,
        *,
        options: SessionOptions | None = None,
        history_length: int | None = None,
        request_id: str = "",
    ) -> SessionInfo:
        """A new session with the first `history_length` tokens of this one; None for all of them, and for its options."""
        request = codec.fork_request(session_id, options, request_id=request_id or new_id(), history_length=history_length)
        return codec.session_info(await self._call(self._stub.ForkSession, request))

    async def save_session(self, session_id: str, name: str) -> SavedSession:
        """Write it to the server's disk. Not repeated by itself: a name is taken once."""
        request = pb.SaveSessionRequest(session_id=session_id, name=name)
        return codec.saved_session(await self._call(self._stub.SaveSession, request, is_safe=False))

    async def restore_session(self, name: str, *, request_id: str = "") -> SessionInfo:
        request = pb.RestoreSessionRequest(name=name, request_id=request_id or new_id())
        return codec.session_info(await self._call(self._stub.RestoreSession, request))

    async def list_saved_sessions(self) -> list[SavedSession]:
        reply = await self._call(self._stub.ListSavedSessions, pb.ListSavedSessionsRequest())
        return [codec.saved_session(message) for message in reply.saved_sessions]

    async def delete_saved_session(self, name: str) -> None:
        await self._call(self._stub.DeleteSavedSession, pb.DeleteSavedSessionRequest(name=name), is_safe=False)

    async def _call(self, method: Callable[..., Any], request: Any, *, is_safe: bool = True) -> Any:
        attempts = Attempts(self._connection, is_safe=is_safe)
        while True:
            try:
                return await method(request, timeout=attempts.timeout_s(), metadata=self._connection.metadata)
            except grpc.RpcError as error:
                wait_s = attempts.wait_after(error)
            await asyncio.sleep(wait_s)

"""The gRPC surface: `RuntimeService`, health and reflection over the engine. Knows messages; all else is handed to it.

A client that cancels, or whose deadline passes, cancels this coroutine: the generation is stopped and its session survives.
Errors become rich statuses in one place, `_statuses`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health
from grpc_reflection.v1alpha import reflection
from grpc_status import rpc_status

from runtime.engine.base import Engine
from runtime.errors import InvalidRequest, SlipstreamError
from runtime.rpc import codec
from runtime.rpc.status import to_status
from runtime.rpc.v1 import runtime_pb2 as pb
from runtime.rpc.v1 import runtime_pb2_grpc
from runtime.types import Done
from serving.generations import Generations
from serving.prompts import Prompts

SERVICE = pb.DESCRIPTOR.services_by_name["RuntimeService"].full_name

Context = grpc.aio.ServicerContext[Any, Any]


class RuntimeServicer(runtime_pb2_grpc.RuntimeServiceServicer):
    def __init__(self, engine: Engine, generations: Generations, prompts: Prompts) -> None:
        self._engine = engine
        self._generations = generations
        self._prompts = prompts

    async def CreateSession(self, request: pb.CreateSessionRequest, context: Context) -> pb.Session:
        async with _statuses(request, context):
            options = codec.session_options(request)
            info = self._engine.create_session(options, request.request_id or None)
            return codec.session_message(info, self._engine.info.vocab_size)

    async def AppendTokens(self, request: pb.AppendTokensRequest, context: Context) -> pb.AppendTokensResponse:
        async with _statuses(request, context):
            result = self._engine.append(
                request.session_id,
                await self._token_ids(request),
                expected_history_length=_optional(request, "expected_history_length"),
                request_id=request.request_id or None,
            )
            return pb.AppendTokensResponse(history_length=result.history_length, cached_tokens=result.cached_tokens)

    async def _token_ids(self, request: pb.AppendTokensRequest) -> list[int]:
        if bool(request.token_ids) == bool(request.text):
            raise InvalidRequest("token_ids", "Give either token_ids or text, one of them and not empty.")
        if request.token_ids:
            return list(request.token_ids)
        return await self._prompts.of(request.text)

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> None:
        async with _statuses(request, context):
            params = codec.sampling_params(request, self._engine.info.vocab_size)
            stream = await self._generations.in_session(
                request.session_id,
                params,
                expected_history_length=_optional(request, "expected_history_length"),
                request_id=request.request_id or None,
            )
            try:
                while not isinstance(event := await stream.next(), Done):
                    await context.write(codec.event_message(event))
                await context.write(codec.event_message(event))
            finally:
                stream.cancel()

    async def CloseSession(self, request: pb.CloseSessionRequest, context: Context) -> pb.CloseSessionResponse:
        async with _statuses(request, context):
            self._engine.close_session(request.session_id)
            return pb.CloseSessionResponse()

    async def GetSession(self, request: pb.GetSessionRequest, context: Context) -> pb.Session:
        async with _statuses(request, context):
            return codec.session_message(self._engine.get_session(request.session_id), self._engine.info.vocab_size)

    async def ListSessions(self, request: pb.ListSessionsRequest, context: Context) -> pb.ListSessionsResponse:
        async with _statuses(request, context):
            infos = sorted(self._engine.list_sessions(), key=lambda info: info.created_at)
            vocab_size = self._engine.info.vocab_size
            return pb.ListSessionsResponse(sessions=[codec.session_message(info, vocab_size) for info in infos])


def _optional(request: Any, name: str) -> int | None:
    return getattr(request, name) if request.HasField(name) else None


@asynccontextmanager
async def _statuses(request: Message, context: Context) -> AsyncIterator[None]:
    """Refuse fields that we do not know, and end the call with the status of any of our errors."""
    try:
        codec.refuse_unknown(request)
        yield
    except SlipstreamError as error:
        await context.abort_with_status(rpc_status.to_status(to_status(error)))


class GrpcServer:
    """One port and its services: bind, then register, then start."""

    def __init__(self, max_request_bytes: int) -> None:
        # Without so_reuseport a second server on the same port fails instead of taking half of the calls.
        options = [("grpc.so_reuseport", 0), ("grpc.max_receive_message_length", max_request_bytes)]
        self._server = grpc.aio.server(options=options)
        self._health = health.HealthServicer()

    def bind(self, host: str, port: int) -> int:
        """Take the port, 0 for a free one; returns it. Calls wait until `start`. OSError if it cannot be had."""
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        try:
            return self._server.add_insecure_port(address)
        except RuntimeError as error:
            raise OSError(str(error)) from error

    def register(self, servicer: RuntimeServicer) -> None:
        runtime_pb2_grpc.add_RuntimeServiceServicer_to_server(servicer, self._server)  # type: ignore[no-untyped-call]
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        health_name = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
        reflection.enable_server_reflection((SERVICE, health_name, reflection.SERVICE_NAME), self._server)

    async def start(self) -> None:
        await self._health.set(SERVICE, health_pb2.HealthCheckResponse.SERVING)
        await self._server.start()

    async def announce_stop(self) -> None:
        """Health says NOT_SERVING from now on; calls go on."""
        await self._health.enter_graceful_shutdown()

    async def stop(self, grace_s: float) -> None:
        await self._server.stop(grace_s)

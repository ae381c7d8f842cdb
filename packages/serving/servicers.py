"""`RuntimeService` over the engine. Knows messages; all else is handed to it."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

from runtime.engine.base import Engine
from runtime.errors import InvalidRequest
from runtime.rpc import codec
from runtime.rpc.v1 import runtime_pb2 as pb
from runtime.rpc.v1 import runtime_pb2_grpc
from runtime.types import Done, SessionInfo, SessionOptions
from serving.generations import Generations
from serving.grpc_server import Context, Gate, GrpcServer, statuses
from serving.prompts import Prompts
from serving.saved_sessions import SavedSessions

SERVICE = pb.DESCRIPTOR.services_by_name["RuntimeService"]


class RuntimeServicer(runtime_pb2_grpc.RuntimeServiceServicer):
    def __init__(
        self,
        engine: Engine,
        generations: Generations,
        prompts: Prompts,
        saved: SavedSessions,
        gate: Gate,
        *,
        default_ttl_s: float,
    ) -> None:
        self._engine = engine
        self._generations = generations
        self._prompts = prompts
        self._saved = saved
        self._gate = gate
        self._default_ttl_s = default_ttl_s

    def register_at(self, server: GrpcServer) -> None:
        server.register(SERVICE, runtime_pb2_grpc.add_RuntimeServiceServicer_to_server, self)

    # --- sessions ---

    async def CreateSession(self, request: pb.CreateSessionRequest, context: Context) -> pb.Session:
        async with statuses(context, request):
            with codec.within_options():
                options = self._gate.key_of(context).consent(codec.session_options(request.options))
                return self._describe(self._engine.create_session(options, request.request_id or None))

    async def AppendTokens(self, request: pb.AppendTokensRequest, context: Context) -> pb.AppendTokensResponse:
        async with statuses(context, request):
            self._idle(request.session_id, context)
            token_ids = await self._token_ids(request)
            self._generations.check_free(request.session_id)
            result = self._engine.append(
                request.session_id,
                token_ids,
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

    async def CloseSession(self, request: pb.CloseSessionRequest, context: Context) -> pb.CloseSessionResponse:
        async with statuses(context, request):
            self._engine.close_session(request.session_id)
            return pb.CloseSessionResponse()

    async def GetSession(self, request: pb.GetSessionRequest, context: Context) -> pb.Session:
        async with statuses(context, request):
            return self._describe(self._engine.get_session(request.session_id))

    async def ListSessions(self, request: pb.ListSessionsRequest, context: Context) -> pb.ListSessionsResponse:
        async with statuses(context, request):
            infos = sorted(self._engine.list_sessions(), key=lambda info: info.created_at)
            return pb.ListSessionsResponse(sessions=[self._describe(info) for info in infos])

    async def ForkSession(self, request: pb.ForkSessionRequest, context: Context) -> pb.Session:
        async with statuses(context, request):
            self._generations.check_free(request.session_id)
            info = await asyncio.to_thread(
                self._engine.fork_session,
                request.session_id,
                options=self._options_of_fork(request, context),
                request_id=request.request_id or None,
                history_length=_optional(request, "history_length"),
            )
            return self._describe(info)

    def _options_of_fork(self, request: pb.ForkSessionRequest, context: Context) -> SessionOptions:
        options = self._engine.get_session(request.session_id).options
        if request.HasField("options"):
            with codec.within_options():
                given = codec.session_options(request.options)
            kept = given.cache_policy if request.options.HasField("cache_policy") else options.cache_policy
            options = replace(given, cache_policy=kept)
        return self._gate.key_of(context).consent(options)

    # --- saved sessions ---

    async def SaveSession(self, request: pb.SaveSessionRequest, context: Context) -> pb.SavedSession:
        async with statuses(context, request):
            self._idle(request.session_id, context)
            with self._saved.new(request.name) as directory:
                await asyncio.to_thread(self._engine.save_session, request.session_id, directory)
                return codec.saved_session_message(self._saved.describe(request.name))

    async def RestoreSession(self, request: pb.RestoreSessionRequest, context: Context) -> pb.Session:
        async with statuses(context, request):
            directory = self._saved.existing(request.name)
            info = await asyncio.to_thread(self._engine.restore_session, directory, request_id=request.request_id or None)
            try:
                self._gate.key_of(context).check_may_use(info)
            except PermissionError:
                self._engine.close_session(info.session_id)
                raise
            return self._describe(info)

    async def ListSavedSessions(self, request: pb.ListSavedSessionsRequest, context: Context) -> pb.ListSavedSessionsResponse:
        async with statuses(context, request):
            return pb.ListSavedSessionsResponse(saved_sessions=[codec.saved_session_message(one) for one in self._saved.list()])

    async def DeleteSavedSession(self, request: pb.DeleteSavedSessionRequest, context: Context) -> pb.DeleteSavedSessionResponse:
        async with statuses(context, request):
            await asyncio.to_thread(self._saved.delete, request.name)
            return pb.DeleteSavedSessionResponse()

    # --- generation ---

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> None:
        async with statuses(context, request):
            self._idle(request.session_id, context)
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

    # --- steps of several ---

    def _idle(self, session_id: str, context: Context) -> None:
        """Refuse what cannot work before anything waits: a session that is not here, not free, or not for this key."""
        self._generations.check_free(session_id)
        self._gate.key_of(context).check_may_use(self._engine.get_session(session_id))

    def _describe(self, info: SessionInfo) -> pb.Session:
        return codec.session_message(info, vocab_size=self._engine.info.vocab_size, default_ttl_s=self._default_ttl_s)


def _optional(request: Any, name: str) -> int | None:
    return getattr(request, name) if request.HasField(name) else None

"""What `RuntimeService` does, without a transport: messages in, messages out, errors raised. Both surfaces are made of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from runtime.engine.base import Engine
from runtime.errors import DrafterNotFound, InvalidRequest, SessionBusy
from runtime.rpc import codec, generation_codec
from runtime.rpc.v1 import runtime_pb2 as pb
from runtime.types import Grammar, SessionInfo, SessionOptions, Switch
from serving.auth import Key
from serving.generations import Generations, Stream
from serving.prompts import Prompts
from serving.saved_sessions import SavedSessions


class SessionCalls:
    """One method per call, for the caller that has `key`. SlipstreamError."""

    def __init__(
        self,
        engine: Engine,
        generations: Generations,
        prompts: Prompts,
        saved: SavedSessions,
        load_drafter: Callable[[str], None],
        *,
        compile_grammar: Callable[[Grammar], object],
        default_ttl_s: float,
    ) -> None:
        """load_drafter: brings a version that a session is pinned to into the engine. compile_grammar: has one ready that the
        engine is about to want. Both block."""
        self._engine = engine
        self._generations = generations
        self._prompts = prompts
        self._saved = saved
        self._load_drafter = load_drafter
        self._compile = compile_grammar
        self._default_ttl_s = default_ttl_s

    # --- sessions ---

    async def create(self, request: pb.CreateSessionRequest, key: Key) -> pb.Session:
        with codec.within_options():
            options = key.consent(codec.session_options(request.options))
            make = partial(self._engine.create_session, options, codec.request_id(request))
            return self._describe(await self._with_drafter(make))

    async def append(self, request: pb.AppendTokensRequest, key: Key) -> pb.AppendTokensResponse:
        self._idle(request.session_id, key)
        token_ids = await self._token_ids(request)
        result = self._engine.append(
            request.session_id,
            token_ids,
            expected_history_length=_optional(request, "expected_history_length"),
            request_id=codec.request_id(request),
        )
        return pb.AppendTokensResponse(history_length=result.history_length, cached_tokens=result.cached_tokens)

    async def _token_ids(self, request: pb.AppendTokensRequest) -> list[int]:
        if bool(request.token_ids) == bool(request.text):
            raise InvalidRequest("token_ids", "Give either token_ids or text, one of them and not empty.")
        if request.token_ids:
            return list(request.token_ids)
        return await self._prompts.of(request.text)

    async def close(self, request: pb.CloseSessionRequest, key: Key) -> pb.CloseSessionResponse:
        self._engine.close_session(request.session_id)
        return pb.CloseSessionResponse()

    async def get(self, request: pb.GetSessionRequest, key: Key) -> pb.Session:
        return self._describe(self._engine.get_session(request.session_id))

    async def list(self, request: pb.ListSessionsRequest, key: Key) -> pb.ListSessionsResponse:
        infos = sorted(self._engine.list_sessions(), key=lambda info: info.created_at)
        return pb.ListSessionsResponse(sessions=[self._describe(info) for info in infos])

    async def fork(self, request: pb.ForkSessionRequest, key: Key) -> pb.Session:
        with codec.within_options():
            make = partial(
                self._engine.fork_session,
                request.session_id,
                options=self._options_of_fork(request, key),
                request_id=codec.request_id(request),
                history_length=_optional(request, "history_length"),
            )
            return self._describe(await self._with_drafter(make))

    def _options_of_fork(self, request: pb.ForkSessionRequest, key: Key) -> SessionOptions:
        parent = options = self._engine.get_session(request.session_id).options
        if request.HasField("options"):
            given = codec.session_options(request.options)
            kept = given.cache_policy if request.options.HasField("cache_policy") else parent.cache_policy
            options = replace(given, cache_policy=kept)
        if parent.capture is Switch.OFF:  # what was said there must not become a row, whoever asks for it
            options = replace(options, capture=Switch.OFF)
        return key.consent(options)

    # --- saved sessions ---

    async def save(self, request: pb.SaveSessionRequest, key: Key) -> pb.SavedSession:
        self._idle(request.session_id, key)
        write = partial(self._engine.save_session, request.session_id)
        return codec.saved_session_message(await asyncio.to_thread(self._saved.save, request.name, write))

    async def restore(self, request: pb.RestoreSessionRequest, key: Key) -> pb.Session:
        directory = self._saved.existing(request.name)
        info = await self._with_drafter(partial(self._engine.restore_session, directory, request_id=codec.request_id(request)))
        try:
            key.check_may_use(info)
        except PermissionError:
            self._engine.close_session(info.session_id)
            raise
        return self._describe(info)

    async def list_saved(self, request: pb.ListSavedSessionsRequest, key: Key) -> pb.ListSavedSessionsResponse:
        return pb.ListSavedSessionsResponse(saved_sessions=[codec.saved_session_message(one) for one in self._saved.list()])

    async def delete_saved(self, request: pb.DeleteSavedSessionRequest, key: Key) -> pb.DeleteSavedSessionResponse:
        await asyncio.to_thread(self._saved.delete, request.name)
        return pb.DeleteSavedSessionResponse()

    # --- generation ---

    async def generate(self, request: pb.GenerateRequest, key: Key) -> Stream:
        """The events of the generation; the caller cancels the stream when it reads no more."""
        self._idle(request.session_id, key)
        params = generation_codec.sampling_params(request, self._engine.info.vocab_size)
        if params.grammar is not None:  # compiling may take seconds: not on the event loop; held, so that it is once
            _held = await asyncio.to_thread(self._compile, params.grammar)
        return await self._generations.in_session(
            request.session_id,
            params,
            expected_history_length=_optional(request, "expected_history_length"),
            request_id=codec.request_id(request),
        )

    # --- steps of several ---

    async def _with_drafter(self, make: Callable[[], SessionInfo]) -> SessionInfo:
        """Make a session; if the drafter that it is pinned to is not loaded, load it first."""
        try:
            return await asyncio.to_thread(make)
        except DrafterNotFound as missing:
            await asyncio.to_thread(self._load_drafter, missing.version)
            return await asyncio.to_thread(make)

    def _idle(self, session_id: str, key: Key) -> None:
        """Refuse what cannot work before anything waits: a session that is not here, not free, or not for this key."""
        session = self._engine.get_session(session_id)
        if session.state != "idle":
            raise SessionBusy(session_id)
        key.check_may_use(session)

    def _describe(self, info: SessionInfo) -> pb.Session:
        return codec.session_message(info, vocab_size=self._engine.info.vocab_size, default_ttl_s=self._default_ttl_s)


def _optional(request: Any, name: str) -> int | None:
    return getattr(request, name) if request.HasField(name) else None

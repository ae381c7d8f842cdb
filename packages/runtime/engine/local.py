"""LocalEngine: our scheduler over a `Target` and a `Drafter`, on one thread of its own.

This file is the door: it checks calls and keeps the sessions. When what runs is in `loop.py`, what one step does in `step.py`.
Callers wait for the engine's thread only where K/V is copied (fork, save, restore) or drafters change hands, and the sessions
concerned are held meanwhile: whoever else wants them hears that they are busy.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from runtime.backends.base import Target, TargetInfo
from runtime.config import SessionsConfig, SpeculationConfig
from runtime.drafters.base import Drafter
from runtime.engine.base import AppendResult, EngineStats, OnEvent
from runtime.engine.loop import EngineLoop
from runtime.engine.request import Request
from runtime.engine.step import Stepper
from runtime.errors import ContextLengthExceeded, DrafterNotFound, InvalidRequest, SessionNotFound, SlipstreamError
from runtime.features.tap import Tap
from runtime.models.tokenizer import Tokenizer
from runtime.sessions import saved
from runtime.sessions.saved import SavedSession
from runtime.sessions.session import Session, State
from runtime.sessions.store import SessionStore
from runtime.speculation.grammar import Grammars
from runtime.types import SamplingParams, SessionInfo, SessionOptions, SessionState, check_token_ids


class LocalEngine:
    """Implements `runtime.engine.base.Engine`."""

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        tokenizer: Tokenizer,
        speculation: SpeculationConfig,
        sessions: SessionsConfig,
        tap: Tap | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self._info = target.info
        self.grammars = Grammars(tokenizer, target.info.vocab_size)
        self._stepper = Stepper(target, drafter, speculation, sessions, tap)
        self._store = SessionStore(sessions)
        self._loop = EngineLoop(self._stepper, self._store, sessions)
        self._lock = self._loop.lock

    # --- the Engine protocol ---

    @property
    def info(self) -> TargetInfo:
        return self._info

    @property
    def drafter_version(self) -> str:
        return self._stepper.drafting.active.version

    @property
    def num_threads(self) -> int:
        """CPU threads that a forward has, once the engine was started."""
        return self._loop.num_threads

    @property
    def is_running(self) -> bool:
        return self._loop.is_running

    def start(self) -> None:
        self._stepper.prepare()
        self._loop.start()

    def stop(self) -> None:
        self._loop.stop()

    def create_session(self, options: SessionOptions | None = None, request_id: str | None = None) -> SessionInfo:
        with self._lock:
            return self._describe(self._new_session(options or SessionOptions(), request_id))

    def append(
        self,
        session_id: str,
        token_ids: Sequence[int],
        *,
        expected_history_length: int | None = None,
        request_id: str | None = None,
    ) -> AppendResult:
        check_token_ids(token_ids, self._info.vocab_size)
        with self._lock:
            session = self._store.get(session_id)
            session.check_idle()
            if request_id and request_id in session.appends:
                return AppendResult(session.appends[request_id], session.cached)
            session.check_length(expected_history_length)
            self._check_length(len(session.history) + len(token_ids))
            self._store.touch(session)
            return AppendResult(session.append(token_ids, request_id), session.cached)

    def generate(
        self,
        session_id: str,
        params: SamplingParams,
        *,
        on_event: OnEvent,
        expected_history_length: int | None = None,
        request_id: str | None = None,
        entropy: int | None = None,
    ) -> Request:
        """entropy: what a request without a seed draws its numbers from, so that a measurement can be repeated; a seed would
        make its drafts certain. None: at random."""
        try:
            params.check(self._info.vocab_size)
            grammar = None if params.grammar is None else self.grammars.new_state(params.grammar)
            with self._lock:
                self._loop.check_available()
                session = self._store.get(session_id)
                session.check_ready()
                session.check_length(expected_history_length)
                if grammar is not None and (params.ignore_eos or session.options.eos_token_ids is not None):
                    raise InvalidRequest(
                        "grammar", "A grammar ends with the model's own eos_token_ids, neither ignored nor replaced."
                    )
                max_tokens = self._room(session, params.max_tokens)
                request = Request(session, params, max_tokens, on_event, request_id, self._info, self.tokenizer, grammar, entropy)
                session.begin()
                self._store.touch(session)
                self._loop.submit(request)
                return request
        except SlipstreamError:
            self.give_back(session_id)
            raise

    def reserve_session(self, session_id: str) -> None:
        with self._lock:
            session = self._store.get(session_id)
            session.check_idle()
            session.reserve()
            self._store.touch(session)

    def give_back(self, session_id: str) -> None:
        with self._lock:
            for session in self._store:
                if session.id == session_id and session.state is State.RESERVED:
                    session.end()

    def _room(self, session: Session, max_tokens: int | None) -> int:
        """How many tokens may be generated; refuses what does not fit before anything changes."""
        if not session.history:
            raise InvalidRequest("session_id", f"Session {session.id!r} has an empty history; append tokens first.")
        room = self._info.max_positions - len(session.history)
        if room < (max_tokens or 1):
            raise ContextLengthExceeded(
                "max_tokens",
                f"{len(session.history)} prompt tokens and max_tokens {max_tokens or 1} need "
                f"{len(session.history) + (max_tokens or 1)} positions; the context holds {self._info.max_positions}.",
            )
        return room if max_tokens is None else max_tokens

    def close_session(self, session_id: str) -> None:
        with self._lock:
            is_generating = self._store.get(session_id).is_generating
            session = self._store.remove(session_id, "CLOSED")
            if not is_generating:  # else the loop, which sees is_closed, buries it
                self._loop.bury_later(session)

    def get_session(self, session_id: str) -> SessionInfo:
        with self._lock:
            return self._describe(self._store.get(session_id))

    def list_sessions(self) -> list[SessionInfo]:
        with self._lock:
            return [self._describe(session) for session in self._store]

    def open_session(
        self, token_ids: Sequence[int], options: SessionOptions | None = None, session_id: str | None = None
    ) -> SessionInfo:
        options = options or SessionOptions()
        if not token_ids:
            raise InvalidRequest("token_ids", "A session is opened with at least one token; the prompt is empty.")
        check_token_ids(token_ids, self._info.vocab_size)
        self._check_length(len(token_ids))
        with self._lock:
            session = self._store.find_continued(token_ids, options) if session_id is None else self._store.get(session_id)
            if session_id is not None and session is not None:
                session.check_continued_by(token_ids)
            if session is None:
                session = self._new_session(options, is_anonymous=True)
            session.append(token_ids[len(session.history) :], None)
            session.reserve()
            self._store.touch(session)
            return self._describe(session)

    def fork_session(
        self,
        session_id: str,
        *,
        options: SessionOptions | None = None,
        request_id: str | None = None,
        history_length: int | None = None,
    ) -> SessionInfo:
        with self._lock:
            if (made := self._store.created_by(request_id)) is None:
                parent = self._store.get(session_id)
                length = _fork_length(parent, history_length)
                if options is not None and options.cache_policy != parent.options.cache_policy:
                    raise InvalidRequest(
                        "cache_policy", f"A fork keeps its parent's cache policy, {parent.options.cache_policy}; leave it out."
                    )
                self._store.touch(parent)
                parent.hold()  # before room is made for the child
                try:
                    child = self._new_session(options or parent.options, request_id)
                except SlipstreamError:
                    parent.end()
                    raise
                child.append(parent.history[:length], None)
                child.hold()
        if made is not None:
            return self._made_before(made)
        return self._fill(child, partial(self._stepper.holdings.fork, parent, child, self._store), parent)

    def save_session(self, session_id: str, directory: Path) -> SessionInfo:
        with self._lock:
            self._loop.check_available()
            session = self._store.get(session_id)
            session.hold()
            self._store.touch(session)
        try:
            kv, features = self._loop.call(partial(self._stepper.holdings.save, session))
            saved.write(
                directory,
                SavedSession(
                    history=list(session.history),
                    options=session.options,
                    target_fingerprint=self._info.fingerprint,
                    tokenizer_hash=self.tokenizer.hash,
                    cached=session.cached if kv else 0,
                    kv=kv,
                    features=features,
                ),
            )
        finally:
            with self._lock:
                session.end()
        return self._describe(session)

    def restore_session(self, directory: Path, *, request_id: str | None = None) -> SessionInfo:
        with self._lock:
            made = self._store.created_by(request_id)
        if made is not None:
            return self._made_before(made)
        found = saved.read(
            directory,
            target_fingerprint=self._info.fingerprint,
            tokenizer_hash=self.tokenizer.hash,
            vocab_size=self._info.vocab_size,
        )
        ttl_s = found.options.ttl_s  # of a server that allowed more, maybe
        options = found.options if ttl_s is None else replace(found.options, ttl_s=min(ttl_s, self._store.max_ttl_s))
        with self._lock:
            session = self._new_session(options, request_id)
            if session.history or not session.is_idle:  # another call with this request id was faster
                made = session
            else:
                session.append(found.history, None)
                session.hold()
        if made is not None:
            return self._made_before(made)
        return self._fill(session, partial(self._stepper.holdings.restore, session, found, self._store))

    def _fill(self, session: Session, copy: Callable[[], None], *held: Session) -> SessionInfo:
        """Let the engine's thread give a new session its K/V; it and those held beside it are idle afterwards."""

        def errand() -> None:
            try:
                copy()
            finally:
                with self._lock:
                    for each in (session, *held):
                        each.end()

        try:
            self._loop.call(errand)
        except Exception:
            with self._lock, contextlib.suppress(SessionNotFound):
                self._loop.bury_later(self._store.remove(session.id, "CLOSED"))
            raise
        return self._describe(session)

    def _made_before(self, session: Session) -> SessionInfo:
        """Of a request id that is used again: the session that it made, once it is filled."""
        self._loop.call(lambda: None)
        return self._describe(session)

    def swap_drafter(self, drafter: Drafter) -> float:
        def swap() -> float:
            with self._lock:
                sessions, pinned = list(self._store), self._loop.pinned_versions()
            started = time.perf_counter()
            self._stepper.drafting.swap(drafter, sessions, pinned)
            return time.perf_counter() - started

        return self._loop.call(swap)

    def add_drafter(self, drafter: Drafter) -> None:
        self._loop.call(partial(self._stepper.drafting.add, drafter))

    def stats(self) -> EngineStats:
        with self._lock:
            return replace(
                self._stepper.stats(),
                num_running=self._loop.num_running,
                num_waiting=self._loop.num_waiting,
                num_preempted=self._loop.num_preempted,
                num_sessions=len(self._store),
                num_evicted=dict(self._store.num_evicted),
            )

    # --- under the lock ---

    def _new_session(self, options: SessionOptions, request_id: str | None = None, *, is_anonymous: bool = False) -> Session:
        """Checked, and with room made for it; or the one that this request id made before."""
        self._loop.check_available()
        check_token_ids(options.eos_token_ids or (), self._info.vocab_size, param="eos_token_ids")
        check_token_ids(options.stop_token_ids, self._info.vocab_size, param="stop_token_ids")
        options.cache_policy.check()
        options.drafter_policy.check()
        version = options.drafter_policy.version
        if version and version not in self._stepper.drafting.loaded:
            raise DrafterNotFound(version)
        session, victim = self._store.create(options, request_id, is_anonymous=is_anonymous)
        if victim is not None:
            self._loop.bury_later(victim)
        return session

    def _check_length(self, length: int) -> None:
        if length >= self._info.max_positions:
            raise ContextLengthExceeded(
                "token_ids",
                f"The history would have {length} tokens; the context holds {self._info.max_positions}, one of them to "
                "generate. Append fewer, or start a new session.",
            )

    def _describe(self, session: Session) -> SessionInfo:
        now = time.monotonic()
        return SessionInfo(
            session_id=session.id,
            state=_STATE_NAMES.get(session.state, "generating"),  # a session being copied is as busy as one that generates
            history_length=len(session.history),
            cached_tokens=session.cached,
            options=session.options,
            target_fingerprint=self._info.fingerprint,
            drafter_version=session.options.drafter_policy.version or self.drafter_version,
            max_context_tokens=self._info.max_positions,
            created_at=session.created_at,
            last_used_at=time.time() - (now - session.used_at),
            dropped_tokens=session.dropped,
        )


_STATE_NAMES: dict[State, SessionState] = {State.IDLE: "idle", State.RESERVED: "reserved"}


def _fork_length(parent: Session, asked: int | None) -> int:
    length = len(parent.history)
    if asked is not None and not 0 <= asked <= length:
        raise InvalidRequest("history_length", f"history_length is {asked}; the session holds {length} tokens to fork from.")
    return length if asked is None else asked

"""LocalEngine: our scheduler over a `Target` and a `Drafter`, on one thread of its own.

This file is the door: it checks calls, keeps the sessions under a lock and hands work to the loop. What one step does is
in `step.py`. The lock is held for bookkeeping only, never during a forward; targets and drafters are touched by the loop
alone. What other threads want of it at the next step boundary (a swap, freeing a closed session) waits in `_errands`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial

from runtime.backends.base import Target, TargetInfo
from runtime.config import SessionsConfig, SpeculationConfig
from runtime.drafters.base import Drafter
from runtime.engine.base import AppendResult, EngineStats, OnEvent
from runtime.engine.request import Request
from runtime.engine.step import Stepper
from runtime.errors import ContextLengthExceeded, EngineUnavailable, InvalidRequest
from runtime.features.tap import Tap
from runtime.models.tokenizer import Tokenizer
from runtime.sessions.session import Session
from runtime.sessions.store import SessionStore
from runtime.speculation.grammar import Grammars
from runtime.types import SamplingParams, SessionInfo, SessionOptions, check_token_ids

log = logging.getLogger(__name__)

REAP_INTERVAL_S = 1.0


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
        self._config = sessions
        self._stepper = Stepper(target, drafter, speculation, sessions, tap)
        self._store = SessionStore(sessions)
        self._running: dict[Session, Request] = {}  # taking part in steps
        self._waiting: deque[Request] = deque()
        self._errands: deque[Callable[[], None]] = deque()
        self._is_stopping = False
        self._wake = threading.Condition()
        self._thread = threading.Thread(target=self._loop, name="slipstream-engine", daemon=True)

    # --- the Engine protocol ---

    @property
    def info(self) -> TargetInfo:
        return self._info

    @property
    def drafter_version(self) -> str:
        return self._stepper.drafter.version

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive() and not self._is_stopping

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        with self._wake:
            self._is_stopping = True
            self._wake.notify()
        if self._thread.is_alive():
            self._thread.join()

    def create_session(self, options: SessionOptions | None = None, request_id: str | None = None) -> SessionInfo:
        options = options or SessionOptions()
        check_token_ids(options.eos_token_ids or (), self._info.vocab_size, param="eos_token_ids")
        check_token_ids(options.stop_token_ids, self._info.vocab_size, param="stop_token_ids")
        with self._wake:
            self._check_available()
            session, victim = self._store.create(options, request_id)
            if victim is not None:
                self._run_later(partial(self._stepper.holdings.release, victim))
            return self._describe(session)

    def append(
        self,
        session_id: str,
        token_ids: Sequence[int],
        *,
        expected_history_length: int | None = None,
        request_id: str | None = None,
    ) -> AppendResult:
        check_token_ids(token_ids, self._info.vocab_size)
        with self._wake:
            session = self._store.get(session_id)
            session.check_idle()
            if request_id and request_id in session.appends:
                return AppendResult(session.appends[request_id], session.cached)
            session.check_length(expected_history_length)
            length = len(session.history) + len(token_ids)
            if length >= self._info.max_positions:
                raise ContextLengthExceeded(
                    "token_ids",
                    f"The history would have {length} tokens; the context holds {self._info.max_positions}, one of them to "
                    "generate. Append fewer, or start a new session.",
                )
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
    ) -> Request:
        params.check(self._info.vocab_size)
        grammar = None if params.grammar is None else self.grammars.new_state(params.grammar)
        with self._wake:
            self._check_available()
            session = self._store.get(session_id)
            session.check_idle()
            session.check_length(expected_history_length)
            if grammar is not None and (params.ignore_eos or session.options.eos_token_ids is not None):
                raise InvalidRequest(
                    "grammar", "A grammar ends with the model's own eos_token_ids, neither ignored nor replaced."
                )
            max_tokens = self._room(session, params.max_tokens)
            request = Request(session, params, max_tokens, on_event, request_id, self._info, self.tokenizer, grammar)
            session.begin()
            self._store.touch(session)
            self._waiting.append(request)
            self._wake.notify()
            return request

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
        with self._wake:
            session = self._store.remove(session_id, "CLOSED")
            if not session.is_generating:  # a running one is released by the loop, which sees is_closed
                self._run_later(partial(self._stepper.holdings.release, session))
            self._wake.notify()

    def get_session(self, session_id: str) -> SessionInfo:
        with self._wake:
            return self._describe(self._store.get(session_id))

    def list_sessions(self) -> list[SessionInfo]:
        with self._wake:
            return [self._describe(session) for session in self._store]

    def swap_drafter(self, drafter: Drafter) -> float:
        done: Future[float] = Future()

        def swap() -> None:
            started = time.perf_counter()
            self._stepper.swap(drafter, self._store)
            done.set_result(time.perf_counter() - started)

        with self._wake:
            self._check_available()
            self._run_later(swap)
        while True:
            try:
                return done.result(timeout=REAP_INTERVAL_S)
            except TimeoutError:
                if not self._thread.is_alive():
                    raise EngineUnavailable("The engine stopped before the drafter was switched.") from None

    def stats(self) -> EngineStats:
        with self._wake:
            return replace(
                self._stepper.stats(),
                num_running=len(self._running),
                num_waiting=len(self._waiting),
                num_sessions=len(self._store),
                num_evicted=dict(self._store.num_evicted),
            )

    # --- under the lock ---

    def _check_available(self) -> None:
        if not self.is_running:
            raise EngineUnavailable("The engine is not running.")

    def _run_later(self, errand: Callable[[], None]) -> None:
        self._errands.append(errand)
        self._wake.notify()

    def _describe(self, session: Session) -> SessionInfo:
        now = time.monotonic()
        return SessionInfo(
            session_id=session.id,
            state="generating" if session.is_generating else "idle",
            history_length=len(session.history),
            cached_tokens=session.cached,
            options=session.options,
            target_fingerprint=self._info.fingerprint,
            drafter_version=self.drafter_version,
            max_context_tokens=self._info.max_positions,
            created_at=session.created_at,
            last_used_at=time.time() - (now - session.used_at),
        )

    # --- the loop's thread ---

    def _loop(self) -> None:
        try:
            while self._tick():
                pass
        except Exception:
            log.exception("The engine loop failed; the engine is down.")
        finally:
            self._shut_down()

    def _tick(self) -> bool:
        """Wait for work, run one step, settle what ended. False: time to stop."""
        with self._wake:
            if not (self._running or self._waiting or self._errands or self._is_stopping):
                self._wake.wait(REAP_INTERVAL_S)
            if self._is_stopping:
                return False
            errands, self._errands = self._errands, deque()
            errands.extend(partial(self._stepper.holdings.release, session) for session in self._store.expire())
            self._admit()
            batch = list(self._running.values())
        for errand in errands:
            errand()
        self._stepper.step(batch)
        self._settle(batch)
        return True

    def _admit(self) -> None:
        """Move waiting generations into the running batch, in order of arrival, while there is room.

        Unwanted ones pass at once, whatever the room: the step ends them without a forward.
        """
        unwanted = [request for request in self._waiting if request.is_unwanted]
        for request in unwanted:
            self._waiting.remove(request)
            self._running[request.session] = request
        while self._waiting and len(self._running) < self._config.max_batch_sessions:
            request = self._waiting[0]
            if not self._stepper.make_room([*self._running.values(), request], self._store) and self._running:
                return
            self._running[request.session] = self._waiting.popleft()
        self._stepper.make_room(self._running.values(), self._store)  # those that run grow, and those that ended are idle

    def _settle(self, batch: Sequence[Request]) -> None:
        """A session is idle again before its last event leaves, so that whoever hears it may go on at once."""
        ended = [request for request in batch if request.is_over]
        with self._wake:
            for request in ended:
                del self._running[request.session]
                request.session.end()
        for request in ended:
            if request.session.is_closed:
                self._stepper.holdings.release(request.session)
            request.report()

    def _shut_down(self) -> None:
        with self._wake:
            self._is_stopping = True
            requests = [*self._running.values(), *self._waiting]
            self._running.clear()
            self._waiting.clear()
            sessions = list(self._store)
            errands, self._errands = self._errands, deque()
        for errand in errands:
            errand()
        for request in requests:
            request.session.end()
            request.fail(EngineUnavailable("The engine is shutting down; what was committed before is in the history."))
            request.report()
        for session in {*sessions, *(request.session for request in requests)}:
            self._stepper.holdings.release(session)

"""Running generations for both surfaces: a permit, a start, events on the event loop, and everything given back at the end.

The engine speaks on its own thread; `Stream` carries each event to the event loop the moment it comes. Each stream has its
own unbounded queue: a slow reader holds back only itself, and the tokens of one generation are few. What has to happen at
the end (permit back, times recorded) hangs on the generation's last event, not on the reader, so a reader that fails,
leaves or is cancelled leaks nothing. Calls into the engine are bookkeeping and do not block.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from runtime.engine.base import Engine, Generation
from runtime.errors import InvalidRequest, PermissionDenied, SlipstreamError
from runtime.types import Done, Event, Failed, HistoryTruncated, SamplingParams, SessionOptions, Started, Switch, Tokens
from serving.admission import Admission

log = logging.getLogger(__name__)


class Observer(Protocol):
    """Watches one generation from the request's arrival on. Made when it arrives, so that waiting for a permit counts."""

    def see(self, event: Event, at: float) -> None:
        """`at`: time.perf_counter() when the engine sent the event."""
        ...


class Stream:
    """The events of one generation: Started, Tokens..., Done. A Failed is raised as its error."""

    def __init__(self, observers: Sequence[Observer], on_end: Callable[[], None]) -> None:
        self.generation: Generation | None = None
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._observers = observers
        self._on_end = on_end

    def put(self, event: Event) -> None:
        """From any thread."""
        self._loop.call_soon_threadsafe(self._take, event, time.perf_counter())

    def _take(self, event: Event, at: float) -> None:
        for observer in self._observers:
            observer.see(event, at)
        self._events.put_nowait(event)
        if isinstance(event, Done | Failed):
            self._on_end()

    async def next(self) -> Started | Tokens | HistoryTruncated | Done:
        """The next event. Not to be called again after Done or an exception, which is always a SlipstreamError."""
        event = await self._events.get()
        if isinstance(event, Failed):
            if isinstance(event.error, SlipstreamError):
                raise event.error
            log.error("A generation failed.", exc_info=event.error)
            raise SlipstreamError("The server failed on this request; its log has the cause.") from event.error
        return event

    def cancel(self) -> None:
        """Stop the work, if it still runs. Nobody needs to read on."""
        if self.generation is not None:
            self.generation.cancel()


class Generations:
    def __init__(self, engine: Engine, admission: Admission, new_observers: Sequence[Callable[[], Observer]]) -> None:
        self._engine = engine
        self._admission = admission
        self._new_observers = new_observers

    def _observers(self) -> list[Observer]:
        return [new() for new in self._new_observers]

    async def in_session(
        self,
        session_id: str,
        params: SamplingParams,
        *,
        expected_history_length: int | None = None,
        request_id: str | None = None,
    ) -> Stream:
        """Continue a session that somebody else owns. It is busy from now on: what cannot work does not wait for a permit."""
        self._engine.reserve_session(session_id)
        observers = self._observers()
        with contextlib.ExitStack() as undo:
            undo.callback(self._engine.give_back, session_id)
            permit = await self._admission.acquire()
            undo.callback(permit.release)
            stream = Stream(observers, on_end=permit.release)
            stream.generation = self._engine.generate(
                session_id,
                params,
                on_event=stream.put,
                expected_history_length=expected_history_length,
                request_id=request_id,
            )
            undo.pop_all()
        return stream

    def _check_consent(self, session_id: str, options: SessionOptions) -> None:
        """A session that is continued keeps its own options; what must not be captured keeps out of one that may be."""
        if options.capture is Switch.OFF and self._engine.get_session(session_id).options.capture is not Switch.OFF:
            raise PermissionDenied(
                f"Nothing of this request may be kept, and session {session_id!r} may be captured; leave x-session-id out, or "
                "name a session of which nothing is kept."
            )

    async def answers(
        self, asked: Sequence[tuple[Sequence[int], SamplingParams]], options: SessionOptions, session_id: str | None = None
    ) -> list[Stream]:
        """One request's answers, each to a prompt of its own. Sessions are found by what they hold, and kept for the next turn.

        session_id: continue this one; then there is one prompt, which begins with its history. HistoryDiverged if it does not.
        They take one permit together, so that no request waits half admitted for places that others half hold.
        """
        if session_id is not None and len(asked) > 1:
            raise InvalidRequest("n", f"x-session-id binds one answer to one session; this request asks for {len(asked)}.")
        if session_id is not None:
            self._check_consent(session_id, options)
        arrived = [self._observers() for _ in asked]
        permit = await self._admission.acquire()
        num_left = len(asked)

        def end() -> None:
            nonlocal num_left
            num_left -= 1
            if not num_left:
                permit.release()

        streams: list[Stream] = []
        with contextlib.ExitStack() as undo:
            undo.callback(permit.release)
            for (prompt, params), observers in zip(asked, arrived, strict=True):
                session = self._engine.open_session(prompt, options, session_id)
                stream = Stream(observers, on_end=end)
                stream.generation = self._engine.generate(session.session_id, params, on_event=stream.put)
                undo.callback(stream.cancel)
                streams.append(stream)
            undo.pop_all()
        return streams

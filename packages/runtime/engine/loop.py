"""The engine's thread: whose turn it is, one step after the other, and what must happen between two steps.

The lock is held for bookkeeping only, never during a forward or a copy; targets and drafters are touched by this thread alone.
What other threads want of it at the next step boundary (a swap, a fork, freeing a closed session) waits as an errand.

    waiting --admit--> running --settle--> over        in order of arrival, while there is room
    waiting <--preempt-- running                       the youngest, when those that run have outgrown the K/V budget
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from functools import partial
from typing import TypeVar

import torch

from runtime.config import SessionsConfig
from runtime.engine.holdings import Readers
from runtime.engine.request import Request
from runtime.engine.step import Stepper
from runtime.errors import EngineUnavailable
from runtime.sessions.session import Session
from runtime.sessions.store import SessionStore
from runtime.threads import give_back_team

log = logging.getLogger(__name__)

REAP_INTERVAL_S = 1.0

T = TypeVar("T")


class EngineLoop:
    def __init__(self, stepper: Stepper, store: SessionStore, config: SessionsConfig) -> None:
        self.lock = threading.Condition()  # over the store, its sessions and what is in here
        self._stepper = stepper
        self._store = store
        self._max_batch_sessions = min(config.max_batch_sessions, stepper.max_sessions)
        self._running: dict[Session, Request] = {}  # taking part in steps, in order of arrival
        self._waiting: deque[Request] = deque()
        self._errands: deque[Callable[[], None]] = deque()
        self.num_preempted = 0
        self._is_stopping = False
        self.num_threads = 1  # of the engine's thread
        self._has_cores = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="slipstream-engine", daemon=True)

    # --- any thread ---

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive() and not self._is_stopping

    def start(self) -> None:
        """With as many CPU threads as torch has for the caller; those that the caller's operations woke go."""
        self.num_threads = torch.get_num_threads()
        give_back_team()
        self._thread.start()
        self._has_cores.wait()

    def stop(self) -> None:
        with self.lock:
            self._is_stopping = True
            self.lock.notify()
        if self._thread.is_alive():
            self._thread.join()

    def call(self, errand: Callable[[], T]) -> T:
        """Run it on the engine's thread between two steps, and wait for what it returns or raises."""
        assert threading.current_thread() is not self._thread, "the engine's thread cannot wait for itself"
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(errand())
            except Exception as error:  # whatever it is, it is the caller's
                future.set_exception(error)

        with self.lock:
            self.check_available()
            self.run_later(run)
        while not wait([future], REAP_INTERVAL_S).done:
            if not self._thread.is_alive() and not future.done():
                raise EngineUnavailable("The engine stopped before it came to this.")
        return future.result()

    # --- under the lock ---

    def check_available(self) -> None:
        if not self.is_running:
            raise EngineUnavailable("The engine is not running.")

    def submit(self, request: Request) -> None:
        self._waiting.append(request)
        self.lock.notify()

    def run_later(self, errand: Callable[[], None]) -> None:
        self._errands.append(errand)
        self.lock.notify()

    def bury_later(self, *sessions: Session) -> None:
        """Free what hangs on sessions that are gone. (One that was generating is buried when its generation has ended.)"""
        for session in sessions:
            self.run_later(partial(self._bury, session))

    def pinned_versions(self) -> set[str]:
        """Drafter versions that some session is pinned to."""
        return {session.options.drafter_policy.version for session in self._store} - {""}

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    # --- the engine's thread ---

    def _loop(self) -> None:
        torch.set_num_threads(self.num_threads)  # this thread's, whatever is set elsewhere from now on
        self._has_cores.set()
        try:
            while self._tick():
                pass
        except Exception:
            log.exception("The engine loop failed; the engine is down.")
        finally:
            self._shut_down()

    def _tick(self) -> bool:
        """Wait for work, run one step, settle what ended. False: time to stop."""
        if not (self._running or self._waiting or self._errands):
            give_back_team()
        with self.lock:
            if not (self._running or self._waiting or self._errands or self._is_stopping):
                self.lock.wait(REAP_INTERVAL_S)
            if self._is_stopping:
                return False
            self.bury_later(*self._store.expire())
            errands, self._errands = self._errands, deque()
            self._admit()
            self._preempt()
            batch = list(self._running.values())
        for errand in errands:
            errand()
        self._stepper.step(batch)
        self._settle(batch)
        return True

    def _admit(self) -> None:
        """Move waiting generations into the running batch, in order of arrival, while there is room.

        Unwanted ones pass at once, whatever the room: the step ends them without a forward. One whose prompt begins like one
        that is being read right now lets the others pass until it can have that one's K/V, which is no later than when the
        prompt has been read or its generation has ended.
        """
        for request in [request for request in self._waiting if request.is_unwanted]:
            self._waiting.remove(request)
            self._running[request.session] = request
        if not self._waiting:
            return
        num_passed, num_bytes = 0, sum(map(self._stepper.growth_bytes, self._running.values()))
        reading = Readers(self._running)
        for request in list(self._waiting):
            if max(len(self._running), num_passed) >= self._max_batch_sessions:
                break
            if self._stepper.awaits_prefix(request, reading):
                num_passed += 1
                continue
            num_bytes += self._stepper.growth_bytes(request)
            if not self._stepper.make_room(num_bytes, self._store) and self._running:
                break
            self._waiting.remove(request)
            self._running[request.session] = request
            reading.add(request.session)

    def _preempt(self) -> None:
        """The budget holds the next step: idle sessions give up their K/V first, then the youngest generations, which wait.

        The oldest always goes on, so nothing stands still; one that is about to end is let end.
        """
        running = [request for request in self._running.values() if not request.is_unwanted]
        if self._stepper.surely_has_room(len(running)):
            return
        while not self._stepper.make_room(sum(map(self._stepper.step_bytes, running)), self._store) and len(running) > 1:
            youngest = next((request for request in running[:0:-1] if not request.is_ending), None)
            if youngest is None:
                return
            running.remove(youngest)
            del self._running[youngest.session]
            self._waiting.appendleft(youngest)
            self._stepper.holdings.release(youngest.session)
            self.num_preempted += 1

    def _settle(self, batch: Sequence[Request]) -> None:
        """A session is idle again before its last event leaves, so that whoever hears it may go on at once."""
        ended = [request for request in batch if request.is_over]
        with self.lock:
            for request in ended:
                del self._running[request.session]
                request.session.end()
                if not request.session.is_closed:
                    self._store.touch(request.session)  # used until now
        for request in ended:
            if request.session.is_closed:
                self._bury(request.session)
            request.report()

    def _bury(self, session: Session) -> None:
        self._stepper.holdings.release(session)
        if version := session.options.drafter_policy.version:
            with self.lock:
                is_in_use = version in self.pinned_versions()
            if not is_in_use:
                self._stepper.drafting.forget(version)

    def _shut_down(self) -> None:
        with self.lock:
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

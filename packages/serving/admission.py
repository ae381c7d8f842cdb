"""Admission: how many generations may be at work at once, and what happens to those beyond. Knows no transport.

One permit per generation, of either surface. Whoever gets one gives it back exactly once: `serving.generations` ties that
to the generation's last event, which the engine always sends. Belongs to the event loop; nothing here blocks.
"""

from __future__ import annotations

import asyncio
import math
import time

from runtime.errors import CapacityExhausted, EngineUnavailable
from serving.config import AdmissionConfig, AdmissionPolicy

MIN_RETRY_AFTER_S, MAX_RETRY_AFTER_S = 1.0, 60.0


class Permit:
    """The right to run one generation. `release` may be called again; only the first call counts."""

    def __init__(self, admission: Admission) -> None:
        self._admission: Admission | None = admission
        self._taken_at = time.monotonic()

    def release(self) -> None:
        admission, self._admission = self._admission, None
        if admission is not None:
            admission._give_back(time.monotonic() - self._taken_at)


class Admission:
    def __init__(self, config: AdmissionConfig) -> None:
        self._config = config
        self._free = asyncio.Semaphore(config.max_concurrent)
        self._is_closed = False
        self._mean_hold_s = MIN_RETRY_AFTER_S
        self.num_running = 0
        self.num_waiting = 0

    async def acquire(self) -> Permit:
        """A permit, at once or after waiting. CapacityExhausted if refused, EngineUnavailable once closed."""
        self._check_open()
        if self._free.locked():
            self._check_may_wait()
        self.num_waiting += 1
        try:
            async with asyncio.timeout(self._config.queue_max_wait_s):
                await self._free.acquire()
        except TimeoutError:
            raise self._refusal(f"No generation ended in {self._config.queue_max_wait_s:g} s of waiting.") from None
        finally:
            self.num_waiting -= 1
        self.num_running += 1
        permit = Permit(self)
        if self._is_closed:
            permit.release()
            self._check_open()
        return permit

    def close(self) -> None:
        """Admit nothing more. What runs goes on; what waits is refused when its turn comes."""
        self._is_closed = True

    def _check_open(self) -> None:
        if self._is_closed:
            raise EngineUnavailable("The server is shutting down and takes no new generations. Send it to another one.")

    def _check_may_wait(self) -> None:
        if self._config.policy is AdmissionPolicy.REJECT:
            raise self._refusal(f"All {self._config.max_concurrent} places for requests are taken.")
        if self.num_waiting >= self._config.queue_max_len:
            raise self._refusal(f"{self.num_waiting} requests are waiting for a place already.")

    def _refusal(self, message: str) -> CapacityExhausted:
        retry_after_s = self._retry_after_s()
        return CapacityExhausted(f"{message} Try again in {retry_after_s:g} s.", retry_after_s)

    def _retry_after_s(self) -> float:
        """When a place is likely: those ahead, at the pace at which generations have been ending. Whole seconds."""
        expected_s = self._mean_hold_s * (self.num_waiting + 1) / self._config.max_concurrent
        return float(math.ceil(min(max(expected_s, MIN_RETRY_AFTER_S), MAX_RETRY_AFTER_S)))

    def _give_back(self, held_s: float) -> None:
        self._mean_hold_s += 0.1 * (held_s - self._mean_hold_s)
        self.num_running -= 1
        self._free.release()

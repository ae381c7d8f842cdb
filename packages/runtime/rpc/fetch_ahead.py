"""Rows on their way before they are asked for: a trainer leases many and reads them one by one, and each takes a round trip.

A few are fetched at once, in the order of their leases, as long as those that nobody took yet fit into a number of bytes.
Whatever goes wrong here is nobody's loss: who takes such a row fetches it then, and hears what is wrong with it. Knows no
connection.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor

from runtime.features.refs import SampleRef
from runtime.features.row import FeatureRow

Fetch = Callable[[SampleRef], FeatureRow | None]
"""One attempt; None if it did not work out."""

Key = tuple[str, int]  # sample id, generation

NUM_AT_ONCE = 4
MAX_BYTES = 256 << 20


class FetchAhead:
    """May be used from any thread."""

    def __init__(self, fetch: Fetch, *, num_at_once: int = NUM_AT_ONCE, max_bytes: int = MAX_BYTES) -> None:
        self._fetch = fetch
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._waiting: deque[SampleRef] = deque()
        self._begun: dict[Key, tuple[Future[FeatureRow | None], int]] = {}  # and the row's bytes
        self._num_bytes = 0  # of what was begun and not taken
        self._workers = ThreadPoolExecutor(num_at_once, thread_name_prefix="fetch-ahead")

    def begin(self, refs: Iterable[SampleRef]) -> None:
        """These will be taken soon, in this order."""
        with self._lock:
            self._waiting += refs
            self._go_on()

    def take(self, ref: SampleRef) -> FeatureRow | None:
        """The row, waiting for it if it is on its way; None if it was not begun, or did not come."""
        with self._lock:
            found = self._begun.pop((ref.sample_id, ref.generation), None)
            if found is None:
                self._leave_out({ref.sample_id})
                return None
        row = found[0].result()
        with self._lock:
            self._num_bytes -= found[1]
            self._go_on()
        return row

    def drop(self, sample_ids: Iterable[str] | None = None) -> None:
        """Nobody will take these; None: nobody will take any."""
        with self._lock:
            begun = {sample_id for sample_id, _ in self._begun}
            names = begun | {ref.sample_id for ref in self._waiting} if sample_ids is None else set(sample_ids)
            self._leave_out(names)
            for key in [key for key in self._begun if key[0] in names]:
                self._num_bytes -= self._begun.pop(key)[1]
            self._go_on()

    def close(self) -> None:
        """Does not wait for what is on its way."""
        self.drop()
        self._workers.shutdown(wait=False, cancel_futures=True)

    def _leave_out(self, sample_ids: set[str]) -> None:
        self._waiting = deque(ref for ref in self._waiting if ref.sample_id not in sample_ids)

    def _go_on(self) -> None:
        while self._waiting and (not self._begun or self._num_bytes + self._waiting[0].num_bytes <= self._max_bytes):
            ref = self._waiting.popleft()
            if (ref.sample_id, ref.generation) not in self._begun:
                self._begun[ref.sample_id, ref.generation] = (self._workers.submit(self._fetch, ref), ref.num_bytes)
                self._num_bytes += ref.num_bytes

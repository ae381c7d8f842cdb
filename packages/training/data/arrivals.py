"""Where fresh rows come from: a ledger that a server fills, or the channel of a producer in this process. Each row is leased
for the run before it is handed out, and is acknowledged once it was trained or found unusable.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from runtime.features.channel import ConsumerView
from runtime.features.leases import Leases, LiveRows
from runtime.features.ledger import Ledger
from runtime.features.refs import SampleRef


class Arrivals(Protocol):
    @property
    def is_live(self) -> bool:
        """More may come before any of the rows in hand is trained."""
        ...

    @property
    def is_over(self) -> bool:
        """Everything was taken, and nothing more will come."""
        ...

    def take(self, num_rows: int) -> list[SampleRef]:
        """Up to num_rows rows, leased for this run; none when none are there now. A row may come again that is in hand
        already: its lease ran out. ProducerFailed when rows broke off."""
        ...

    def done(self, sample_ids: Sequence[str]) -> None:
        """These rows were trained for the first time, or cannot be used."""
        ...


class LedgerArrivals:
    """Rows that somebody commits to the ledger, at any time. Flow control is the store's budget, and the tap sheds."""

    is_over = False

    def __init__(self, store: LiveRows, ledger: Leases, run_id: str, lease_timeout_s: float) -> None:
        self._store = store
        self._largest_bytes = 0  # of the rows that came
        self._ledger = ledger
        self._run_id = run_id
        self._lease_timeout_s = lease_timeout_s

    @property
    def is_live(self) -> bool:
        """Not where the tap sheds, or the budget is full, because so many rows wait to be trained: no other one comes then."""
        if self._ledger.is_shedding():
            return False
        return self._store.free_bytes() > self._largest_bytes or self._ledger.status()["durable"] > 0

    def take(self, num_rows: int) -> list[SampleRef]:
        refs = self._ledger.lease(self._run_id, num_rows, self._lease_timeout_s)
        self._largest_bytes = max([self._largest_bytes, *(ref.num_bytes for ref in refs)])
        return refs

    def done(self, sample_ids: Sequence[str]) -> None:
        """Nobody waits for it."""


class ChannelArrivals:
    """Rows that a producer of this process commits and then publishes; it waits while too many are not acknowledged."""

    def __init__(self, channel: ConsumerView, ledger: Ledger, run_id: str, lease_timeout_s: float) -> None:
        self._channel = channel
        self._ledger = ledger
        self._run_id = run_id
        self._lease_timeout_s = lease_timeout_s

    @property
    def is_live(self) -> bool:
        return self._channel.is_live

    @property
    def is_over(self) -> bool:
        return self._channel.is_over

    def take(self, num_rows: int) -> list[SampleRef]:
        told = [ref.sample_id for ref in self._channel.get(num_rows, timeout_s=0)]
        if not told:
            return []
        refs = self._ledger.claim(self._run_id, told, self._lease_timeout_s)
        self._channel.ack(set(told) - {ref.sample_id for ref in refs})  # those whose features are gone
        return refs

    def done(self, sample_ids: Sequence[str]) -> None:
        self._channel.ack(sample_ids)

"""What a trainer asks of a ledger, whether the ledger lies in a file here or behind a server: `Leases`.

`Ledger` has it, and so has the client of a server's FeatureService. Contracts are told at `Ledger`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Protocol

from runtime.features.flow import Watermarks
from runtime.features.ledger import Checkpoint
from runtime.features.refs import SampleRef
from runtime.features.row import FeatureRow
from runtime.features.store import Lease


class Leases(Protocol):
    def lease(self, run_id: str, limit: int, timeout_s: float) -> list[SampleRef]: ...

    def heartbeat(self, run_id: str, timeout_s: float) -> int: ...

    def recover(self, run_id: str) -> int: ...

    def fail(self, run_id: str, sample_id: str, reason: str, retryable: bool) -> bool: ...

    def record_checkpoint(
        self,
        run_id: str,
        path: str | Path,
        step: int,
        trained_sample_ids: Iterable[str],
        *,
        metrics: Mapping[str, float] | None = None,
    ) -> Checkpoint: ...

    def recorded(self, sample_ids: Iterable[str]) -> None: ...

    def latest_checkpoint(self, run_id: str) -> Checkpoint | None: ...

    def durable(self, run_id: str, limit: int) -> list[SampleRef]: ...

    def heldout(self, limit: int = -1) -> list[SampleRef]: ...

    def status(self) -> dict[str, int]: ...

    def watermarks(self) -> Watermarks | None: ...

    def is_shedding(self) -> bool: ...


class Rows(Protocol):
    """What a trainer asks of a feature store."""

    def get(self, ref: SampleRef) -> tuple[FeatureRow, Lease]: ...


class LiveRows(Rows, Protocol):
    """What a trainer asks of a store that others fill meanwhile."""

    def free_bytes(self) -> int:
        """What is left of its budget."""
        ...

"""Where the tensors of training rows lie: the protocol that every kind of store keeps, and the kinds by name.

    ref = store.put(meta, row)            what travels is the reference
    row, lease = store.get(ref)           reading takes nothing away
    store.release(lease)                  it is consumed: its features go

Rows are consumed once. Each put of a sample id makes a new generation and the older ones are dead: get of their references
is a KeyError, release of them changes nothing. Knows nothing of splits, attempts or training: that is the ledger's.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Protocol, cast

import torch

from runtime.config import FeaturesConfig, StoreKind
from runtime.errors import FeatureNotFound
from runtime.features.refs import SampleMeta, SampleRef
from runtime.features.row import FeatureRow

# kind -> module with `open_store(config, root, dtype) -> FeatureStore`
STORES = {
    StoreKind.MEMORY: "runtime.features.memory",
    StoreKind.DIRECTORY: "runtime.features.directory",
    StoreKind.MOONCAKE: "runtime.features.mooncake",
}


@dataclass(frozen=True)
class Lease:
    """That somebody holds one generation of a sample. Letting go of it without release leaves the row as it was."""

    sample_id: str
    generation: int
    uri: str


Handle = SampleRef | Lease


@dataclass(frozen=True)
class StoreHealth:
    used_bytes: int
    budget_bytes: int
    num_rows: int
    free_bytes: int | None  # of the disk or memory behind the store; None: not known
    problem: str = ""  # why rows cannot be stored or read now; empty if all is well


class FeatureStore(Protocol):
    """Any number of threads may use one store at once; of directory and mooncake, any number of processes too."""

    @property
    def budget_bytes(self) -> int: ...

    @property
    def dtype(self) -> torch.dtype:
        """What hidden states are stored in."""
        ...

    def put(self, meta: SampleMeta, row: FeatureRow) -> SampleRef:
        """Store the row. FeatureBudgetExceeded when it does not fit, FeatureError when it cannot be written: nothing stays."""
        ...

    def get(self, ref: SampleRef) -> tuple[FeatureRow, Lease]:
        """The row, on the CPU, and the hold on it, whose age for gc begins anew. FeatureNotFound (a KeyError) when this
        generation is gone, FeatureUnavailable when it cannot be reached now, FeatureError when it is damaged."""
        ...

    def exists(self, ref: SampleRef) -> bool:
        """Whether get would find a row of the right size. Cheap. FeatureUnavailable when that cannot be told now."""
        ...

    def release(self, handle: Handle) -> bool:
        """The consumer is done with this generation: its features go. Again, or with a stale handle: no-op, False."""
        ...

    def abort(self, sample_id: str) -> None:
        """The producer gives the sample up: every generation goes, half-written ones too. Idempotent."""
        ...

    def delete(self, refs: Iterable[SampleRef]) -> int:
        """Release many; returns the bytes of those that this call released."""
        ...

    def gc(self, max_hold_age_s: float, needed: Collection[tuple[str, int]] | None = None) -> int:
        """Take back what nobody will release: what killed writers left and, if `needed` (sample id, generation) is given,
        rows not in it that nobody put or got within the age. Returns how many went."""
        ...

    def free_bytes(self) -> int:
        """What is left of the budget."""
        ...

    def used_bytes(self) -> int:
        """What counts against the budget: also rows being written, and released ones that are not removed yet."""
        ...

    def health(self) -> StoreHealth: ...

    def close(self) -> None:
        """Idempotent. Later calls raise FeatureError."""
        ...


def open_store(config: FeaturesConfig, root: Path, *, dtype: torch.dtype = torch.bfloat16) -> FeatureStore:
    """The store that `config` names; `root` is the directory of what it keeps on this machine."""
    return cast(FeatureStore, import_module(STORES[config.store]).open_store(config, root, dtype))


def gone(handle: Handle, place: str) -> FeatureNotFound:
    return FeatureNotFound(
        f"The features of {handle.sample_id} (generation {handle.generation}) are not in {place} any more: "
        "they were released, replaced or shed. Skip this row."
    )

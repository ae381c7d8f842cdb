"""Feature store in the memory of one process: what the interleaved loop consumes from. Rows die with the process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType

import torch

from runtime.config import FeaturesConfig
from runtime.errors import FeatureBudgetExceeded, FeatureError
from runtime.features.refs import SampleMeta, SampleRef
from runtime.features.row import FeatureRow, specs_of
from runtime.features.store import Handle, Lease, StoreHealth, gone


@dataclass
class _Object:
    generation: int
    tensors: dict[str, torch.Tensor]
    num_bytes: int
    held_at: float


class MemoryStore:
    """Rows as tensors of their own; a reader shares their memory and must not write to it."""

    def __init__(self, budget_bytes: int, *, dtype: torch.dtype = torch.bfloat16, clock: Callable[[], float] = time.time) -> None:
        self.budget_bytes = budget_bytes
        self.dtype = dtype
        self._clock = clock
        self._lock = threading.Lock()
        self._objects: dict[str, _Object] = {}
        self._used_bytes = 0
        self._last_generation = time.time_ns() // 1000  # so that they grow over restarts too
        self._is_closed = False

    def put(self, meta: SampleMeta, row: FeatureRow) -> SampleRef:
        tensors = row.tensors(self.dtype)
        num_bytes = sum(value.nbytes for value in tensors.values())
        with self._lock:
            self._check_open()
            if self._used_bytes + num_bytes > self.budget_bytes:
                raise FeatureBudgetExceeded(num_bytes, self._used_bytes, self.budget_bytes)
            self._used_bytes += num_bytes  # before the copy is made, so that memory never goes over
        try:
            owned = {name: value.clone() for name, value in tensors.items()}  # what came may be a view, or change
        except BaseException:
            with self._lock:
                self._used_bytes -= num_bytes
            raise
        with self._lock:
            self._check_open()
            self._last_generation += 1
            generation = self._last_generation
            self._remove(meta.sample_id)
            self._objects[meta.sample_id] = _Object(generation, owned, num_bytes, self._clock())
        return SampleRef(
            **asdict(meta),
            uri=f"memory:{meta.sample_id}.{generation}",
            generation=generation,
            features=MappingProxyType(specs_of(owned)),
            num_tokens=row.num_tokens,
            num_bytes=num_bytes,
            labels=MappingProxyType(dict(row.labels)),
        )

    def get(self, ref: SampleRef) -> tuple[FeatureRow, Lease]:
        with self._lock:
            self._check_open()
            found = self._find(ref)
            if found is None:
                raise gone(ref, "memory")
            found.held_at = self._clock()
            return FeatureRow.from_tensors(found.tensors, ref.labels), Lease(ref.sample_id, ref.generation, ref.uri)

    def exists(self, ref: SampleRef) -> bool:
        with self._lock:
            return self._find(ref) is not None

    def release(self, handle: Handle) -> bool:
        with self._lock:
            self._check_open()
            return self._find(handle) is not None and self._remove(handle.sample_id)

    def abort(self, sample_id: str) -> None:
        with self._lock:
            self._remove(sample_id)

    def delete(self, refs: Iterable[SampleRef]) -> int:
        return sum(ref.num_bytes for ref in refs if self.release(ref))

    def gc(self, max_hold_age_s: float, needed: Collection[tuple[str, int]] | None = None) -> int:
        before = self._clock() - max_hold_age_s
        if needed is None:
            return 0
        with self._lock:
            doomed = [
                sample_id
                for sample_id, found in self._objects.items()
                if found.held_at < before and (sample_id, found.generation) not in needed
            ]
            return sum(self._remove(sample_id) for sample_id in doomed)

    def free_bytes(self) -> int:
        return self.budget_bytes - self.used_bytes()

    def used_bytes(self) -> int:
        return self._used_bytes

    def health(self) -> StoreHealth:
        return StoreHealth(self._used_bytes, self.budget_bytes, len(self._objects), self.budget_bytes - self._used_bytes)

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            self._objects.clear()
            self._used_bytes = 0

    def _find(self, handle: Handle) -> _Object | None:
        found = self._objects.get(handle.sample_id)
        return found if found is not None and found.generation == handle.generation else None

    def _remove(self, sample_id: str) -> bool:
        found = self._objects.pop(sample_id, None)
        if found is not None:
            self._used_bytes -= found.num_bytes
        return found is not None

    def _check_open(self) -> None:
        if self._is_closed:
            raise FeatureError("The memory store is closed, and its rows are gone. Open another one.")


def open_store(config: FeaturesConfig, root: Path, dtype: torch.dtype) -> MemoryStore:
    return MemoryStore(config.budget_mib << 20, dtype=dtype)

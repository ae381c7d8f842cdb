"""The replay buffer of an online run: rows that were trained, and which of them to train again.

A row may be drawn until its passes are used up. Newer rows are drawn more often by `data.recency`, rows of rare slices by
`data.slice_balance`, which also decides who leaves a full buffer: the oldest row of all, or that of the largest slice. A slice
of the traffic that no longer comes so stays in the buffer, and `data.replay_share` keeps training on it beside fresh rows.
Knows no store and no ledger.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from runtime.features.refs import SampleRef
from training.config import DataConfig


@dataclass
class Replayed:
    ref: SampleRef
    num_passes: int


class ReplayBuffer:
    def __init__(self, config: DataConfig, rows: Iterable[Replayed] = ()) -> None:
        """rows: oldest first."""
        self._config = config
        self._rows = {row.ref.sample_id: row for row in rows}  # oldest first

    def __contains__(self, name: str) -> bool:
        return name in self._rows

    def __len__(self) -> int:
        return len(self._rows)

    def ref(self, name: str) -> SampleRef:
        return self._rows[name].ref

    def passes(self) -> list[tuple[str, int]]:
        """(name, how often it was trained) of every row, oldest first."""
        return [(name, row.num_passes) for name, row in self._rows.items()]

    @property
    def num_left(self) -> int:
        """Rows whose passes are not used up."""
        return sum(row.num_passes < self._config.passes for row in self._rows.values())

    def trained(self, ref: SampleRef) -> None:
        """A step was made on the row; a new one joins, and others leave if there is no room."""
        known = self._rows.get(ref.sample_id)
        if known is not None:
            known.num_passes += 1
            return
        self._rows[ref.sample_id] = Replayed(ref, 1)
        while len(self._rows) > self._config.replay_rows:
            del self._rows[self._next_to_leave()]

    def drop(self, name: str) -> None:
        del self._rows[name]

    def order(self, generator: torch.Generator, *, with_used_up: bool) -> list[str]:
        """Names in the order in which they are to be trained again, drawn by their weights without replacement."""
        names = [name for name, row in self._rows.items() if with_used_up or row.num_passes < self._config.passes]
        uniform = torch.rand(len(names), generator=generator, dtype=torch.float64).clamp_min(1e-300)
        keys = uniform.log() / self._weights(names)  # the highest keys are a weighted draw without replacement
        return [names[i] for i in keys.argsort(descending=True).tolist()]

    def _weights(self, names: list[str]) -> torch.Tensor:
        """float64 [len(names)], all above 0."""
        age = torch.linspace(0.0, 1.0, len(names), dtype=torch.float64) if len(names) > 1 else torch.ones(len(names))
        weights = torch.exp2(self._config.recency * age).double()
        balance = self._config.slice_balance
        if balance > 0:
            slices = [self._rows[name].ref.slice for name in names]
            counts = Counter(slices)
            even = torch.tensor([len(names) / (len(counts) * counts[each]) for each in slices], dtype=torch.float64)
            weights *= (1 - balance) + balance * even
        return weights

    def _next_to_leave(self) -> str:
        if self._config.slice_balance == 0:
            return next(iter(self._rows))
        [(largest, _)] = Counter(row.ref.slice for row in self._rows.values()).most_common(1)
        return next(name for name, row in self._rows.items() if row.ref.slice == largest)

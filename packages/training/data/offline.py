"""Epochs over the rows that a feature directory holds; nothing there changes, and nothing is leased. Knows no network."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from runtime.errors import FeatureError
from runtime.features.ledger import Ledger
from runtime.features.store import FeatureStore
from training.config import DataConfig
from training.data.batches import TrainingRow
from training.data.stream import Check, decode, encode, num_within, read_row, share_of

logger = logging.getLogger(__name__)


class OfflineStream:
    """Epochs over fixed rows in a random order each; the last batch of an epoch may be smaller.

    All ranks go through the same order in step: the first takes the first batch of what is left, the second the one behind it,
    and so on. So they remember the same, whatever each of them could read of its share.
    """

    is_live = False

    def __init__(
        self,
        store: FeatureStore,
        ledger: Ledger,
        config: DataConfig,
        check: Check,
        seed: int,
        *,
        rank: int = 0,
        num_ranks: int = 1,
    ) -> None:
        self._store = store
        self._rank, self._num_ranks = rank, num_ranks
        self._config = config
        self._generator = torch.Generator().manual_seed(seed)
        self._check = check
        self._refs = {ref.sample_id: ref for ref in ledger.trainable()}
        self._unusable: set[str] = set()  # could not be read here, or are not for this drafter
        self._epoch = 0
        self._left: list[str] = []  # of this epoch, over all ranks
        self._num_trained = 0  # here
        self._begin_epoch()

    def preview(self, num_rows: int, num_tokens: int) -> list[TrainingRow]:
        rows: list[TrainingRow] = []
        for name in self._left[self._rank :: self._num_ranks]:
            if len(rows) == num_rows or sum(int(row.features.generated.sum()) for row in rows) >= num_tokens:
                break
            rows += self._load([name])
        return rows

    def token_counts(self, vocab_size: int) -> torch.Tensor | None:
        return None

    def next_batch(self) -> list[TrainingRow]:
        return self._load(self._deal()[self._rank])

    def _deal(self) -> list[list[str]]:
        """The rows of the next step, by rank."""
        batches: list[list[str]] = []
        left = self._left
        for _ in range(self._num_ranks):
            sizes = [self._refs[name].num_tokens for name in left[: self._config.batch_rows]]
            batches.append(left[: num_within(sizes, self._config.max_batch_tokens)])
            left = left[len(batches[-1]) :]
        return batches

    def trained(self, rows: Sequence[TrainingRow]) -> None:
        self._num_trained += len(rows)
        self._is_over_for({name for names in self._deal() for name in names})

    def is_exhausted(self) -> bool:
        return not self._left

    def look_ahead(self) -> None:
        """Rows come with their states."""

    def keep_alive(self) -> None:
        """Nothing is leased."""

    def state(self) -> dict[str, Any]:
        return {
            "epoch": self._epoch,
            "left": self._left,
            "num_trained": self._num_trained,
            "generator": encode(self._generator),
        }

    def restore(self, states: Sequence[Mapping[str, Any]]) -> None:
        state = states[0]
        self._epoch = state["epoch"]
        self._left = state["left"]
        trained = [each["num_trained"] for each in states]
        self._num_trained = share_of(trained, self._rank, self._num_ranks)
        decode(state["generator"], self._generator)
        if self._left:
            self._is_over_for(set(self._left) - self._refs.keys())
        else:
            self._begin_epoch()  # the run had ended, and may have more passes now

    def unsaved(self) -> list[str]:
        return []

    def saved(self) -> None:
        """Nothing is leased."""

    def figures(self) -> dict[str, int]:
        counts = {"rows": len(self._refs), "rows_left_out": len(self._unusable)}
        return {**counts, "rows_trained": self._num_trained, "epoch": self._epoch}

    def close(self) -> None:
        """Nothing was taken."""

    def _begin_epoch(self) -> None:
        names = list(self._refs) if self._epoch < self._config.passes else []
        self._left = [names[i] for i in torch.randperm(len(names), generator=self._generator).tolist()]

    def _is_over_for(self, names: Collection[str]) -> None:
        """These rows are done in this epoch; after the last one the next epoch begins."""
        self._left = [name for name in self._left if name not in names]
        if not self._left:
            self._epoch += 1
            self._begin_epoch()

    def _load(self, names: Sequence[str]) -> list[TrainingRow]:
        """The rows that can be used; the others are told of once, and passed over."""
        rows: list[TrainingRow] = []
        for name in names:
            try:
                if name not in self._unusable:
                    rows.append(read_row(self._store, self._refs[name], self._check))
            except FeatureError as error:
                logger.warning("row %s is not used: %s", name, error)
                self._unusable.add(name)
        return rows

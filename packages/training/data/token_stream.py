"""Epochs over a corpus of token rows, whose hidden states are computed batch by batch.

The order of an epoch follows from the seed and the epoch alone, so a position in it is all that a checkpoint needs:

    rows -> shuffled -> within windows by length -> cut into batches of data.max_batch_tokens -> batches shuffled

With several ranks, step s trains the batches s * ranks .. (s + 1) * ranks - 1 of the order, one on each. On a CUDA device the
target's forward for the next batch is launched behind each step: the device computes it while the host prepares the next one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from runtime.errors import ConfigError
from training.config import DataConfig
from training.data.batches import TrainingRow, cut_by_tokens
from training.data.prefill import Prefill
from training.data.stream import share_of

WINDOW_ROWS = 4096  # among which rows are sorted by length


class TokenStream:
    """Implements `Stream`."""

    is_live = False

    def __init__(
        self,
        prefill: Prefill,
        rows: Sequence[int],
        run_id: str,
        config: DataConfig,
        seed: int,
        *,
        rank: int = 0,
        num_ranks: int = 1,
        looks_ahead: bool | None = None,  # None: on a CUDA device, where what is launched runs beside the host
    ) -> None:
        """rows: of the corpus, those to be trained on."""
        self._looks_ahead = prefill.device.type == "cuda" if looks_ahead is None else looks_ahead
        self._prefill = prefill
        self._rows = np.asarray(rows, dtype=np.int64)
        self._run_id = run_id
        self._config = config
        self._seed = seed
        self._rank = rank
        self._num_ranks = num_ranks
        self._epoch = 0
        self._next = 0  # batch of the epoch, over all ranks
        self._num_trained = 0
        self._ahead: tuple[tuple[int, int], list[TrainingRow]] | None = None  # (epoch, batch) -> its rows
        self._order: list[list[int]] = self._plan(0)

    def preview(self, num_rows: int, num_tokens: int) -> list[TrainingRow]:
        rows: list[int] = []
        seen = 0
        for row in (row for batch in self._order for row in batch):
            if len(rows) == num_rows or seen >= num_tokens:
                break
            rows.append(row)
            seen += int(self._prefill.corpus.generated_of(row).sum())
        return self._prefill.rows(rows)

    def token_counts(self, vocab_size: int) -> torch.Tensor | None:
        return self._prefill.corpus.token_counts(vocab_size)

    def next_batch(self) -> list[TrainingRow]:
        batch = self._next + self._rank
        if self._ahead is not None and self._ahead[0] == (self._epoch, batch):
            return self._ahead[1]
        return self._prefill.rows(self._order[batch]) if batch < len(self._order) else []

    def look_ahead(self) -> None:
        """Launch the forward for the batch after this one; within the epoch, which is simple and nearly always."""
        batch = self._next + self._num_ranks + self._rank
        if self._looks_ahead and batch < len(self._order):
            self._ahead = ((self._epoch, batch), self._prefill.rows(self._order[batch]))

    def trained(self, rows: Sequence[TrainingRow]) -> None:
        self._num_trained += len(rows)
        self._next += self._num_ranks
        if self._next >= len(self._order):
            self._epoch, self._next = self._epoch + 1, 0
            self._order = self._plan(self._epoch)

    def is_exhausted(self) -> bool:
        return not self._order

    def keep_alive(self) -> None:
        """Nothing is leased."""

    def state(self) -> dict[str, Any]:
        return {"order": self._digest(), "epoch": self._epoch, "batch": self._next, "num_trained": self._num_trained}

    def restore(self, states: Sequence[Mapping[str, Any]]) -> None:
        """ConfigError if the position is one of another order."""
        state = states[0]
        if state["order"] != self._digest():
            raise ConfigError(
                "data.corpus, data.heldout_fraction (if it is null, trainer.gate.min_heldout_rows), data.max_batch_tokens, "
                f"trainer.accumulation or trainer.seed is not what run {self._run_id!r} began with, so its place in the rows is "
                f"lost; keep them, or begin another run with trainer.run_id=..., from its weights by trainer.init={self._run_id}."
            )
        self._epoch = state["epoch"]
        self._num_trained = share_of([each["num_trained"] for each in states], self._rank, self._num_ranks)
        self._order = self._plan(self._epoch)  # none: the run had ended; it goes on if it has more passes now
        self._next = state["batch"]

    def unsaved(self) -> list[str]:
        return []

    def saved(self) -> None:
        """Nothing is leased."""

    def figures(self) -> dict[str, int]:
        steps = -(-len(self._order) // self._num_ranks)
        return {
            "rows": len(self._rows),
            "rows_trained": self._num_trained,
            "epoch": self._epoch,
            "step_of_epoch": self._next // self._num_ranks,
            "steps_of_epoch": steps,
        }

    def close(self) -> None:
        """Nothing was taken."""

    # --- the order ---

    def _plan(self, epoch: int) -> list[list[int]]:
        """The batches of an epoch; none beyond the last."""
        if epoch >= self._config.passes or not len(self._rows):
            return []
        generator = torch.Generator().manual_seed(_seed_of(self._seed, epoch))
        rows = self._rows[torch.randperm(len(self._rows), generator=generator).numpy()]
        lengths = self._prefill.corpus.lengths
        windows = [rows[start : start + WINDOW_ROWS] for start in range(0, len(rows), WINDOW_ROWS)]
        by_length = np.concatenate([window[np.argsort(lengths[window], kind="stable")] for window in windows])
        batches = list(cut_by_tokens(by_length.tolist(), lengths[by_length].tolist(), self._config.max_batch_tokens))
        return [batches[i] for i in torch.randperm(len(batches), generator=generator).tolist()]

    def _digest(self) -> str:
        parts = (self._prefill.corpus.digest, hashlib.sha256(self._rows.tobytes()).hexdigest())
        key = "\0".join([*parts, str(self._config.max_batch_tokens), str(self._seed)])
        return hashlib.sha256(key.encode()).hexdigest()


def _seed_of(seed: int, epoch: int) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}\0{epoch}".encode()).digest()[:7])

"""Rows for the trainer: a live stream, each row admitted once and replayed a few times, or a directory in epochs.

A stream hands out batches and hears which were trained. Online, a row is leased, trained as soon as a batch is there, and
becomes durable with the checkpoint that holds its effect; until then a crash gives it back to the queue. Rows that were
trained fill up later batches, drawn at random, until each has had its passes. What a stream remembers goes into the
checkpoint as JSON. Knows no network. A row that cannot be used is failed in the ledger with a sentence, never skipped quietly.
"""

from __future__ import annotations

import base64
import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from runtime.errors import EngineUnavailable, FeatureError, FeatureNotFound, FeatureUnavailable, ProducerFailed
from runtime.features.leases import Leases, Rows
from runtime.features.ledger import Ledger
from runtime.features.refs import SampleRef
from runtime.features.store import FeatureStore
from training.config import DataConfig
from training.data.arrivals import Arrivals, LedgerArrivals
from training.data.batches import TrainingRow, supervised

logger = logging.getLogger(__name__)

HEARTBEATS_PER_LEASE = 4

Check = Callable[[SampleRef], str | None]
"""Why a row does not fit the drafter in training; None if it does."""


class Stream(Protocol):
    """A source of training rows."""

    @property
    def is_live(self) -> bool:
        """More rows may come before any of these is trained."""
        ...

    def preview(self, num_rows: int) -> list[TrainingRow]:
        """Up to num_rows rows that will be trained next, without consuming them."""
        ...

    def next_batch(self) -> list[TrainingRow]:
        """Rows for one step; none when there is nothing to train on now."""
        ...

    def trained(self, rows: Sequence[TrainingRow]) -> None:
        """A step was made on what next_batch gave."""
        ...

    def is_exhausted(self) -> bool:
        """Nothing will ever come any more."""
        ...

    def keep_alive(self) -> None:
        """Call now and then during long work: rows in hand stay ours."""
        ...

    def state(self) -> dict[str, Any]:
        """JSON for the checkpoint that is about to be written."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None: ...

    def record(self, path: Path, step: int, metrics: Mapping[str, float]) -> None:
        """The checkpoint at path is safe on disk: its rows are durable from here on."""
        ...

    def figures(self) -> dict[str, int]:
        """Counts for the display: rows admitted, waiting, in replay."""
        ...

    def close(self) -> None:
        """Give back what was taken and is in no checkpoint."""
        ...


@dataclass
class _Replayed:
    ref: SampleRef
    num_passes: int


class OnlineStream:
    def __init__(
        self,
        store: Rows,
        ledger: Leases,
        run_id: str,
        config: DataConfig,
        check: Check,
        seed: int,
        arrivals: Arrivals | None = None,  # None: whatever comes into the ledger
    ) -> None:
        self._store = store
        self._ledger = ledger
        self._run_id = run_id
        self._config = config
        self._check = check
        self._generator = torch.Generator().manual_seed(seed)
        self._unread: deque[SampleRef] = deque()  # leased, and not looked at: their store does not answer
        self._is_store_silent = False
        self._fresh: dict[str, tuple[SampleRef, TrainingRow]] = {}  # leased, not trained
        self._replay: dict[str, _Replayed] = {}  # trained, oldest first
        self._unsaved: dict[str, None] = {}  # trained since the last checkpoint, in this order
        self._num_admitted = 0
        self._arrived_at = self._beat_at = time.monotonic()
        ledger.recover(run_id)
        self._arrivals = arrivals or LedgerArrivals(ledger, run_id, config.lease_timeout_s)

    @property
    def is_live(self) -> bool:
        return self._arrivals.is_live

    def preview(self, num_rows: int) -> list[TrainingRow]:
        self._lease(num_rows)
        return [row for _, row in list(self._fresh.values())[:num_rows]]

    def next_batch(self) -> list[TrainingRow]:
        """Fresh rows first, then a random choice of rows whose passes are not used up. While rows may still be arriving, a
        batch waits until it is full."""
        size = self._config.batch_rows
        self._lease(size)
        fresh = [row for _, row in list(self._fresh.values())[:size]]
        again = [name for name, entry in self._replay.items() if entry.num_passes < self._config.passes]
        is_waiting = self.is_live and time.monotonic() - self._arrived_at < self._config.fill_wait_s
        if len(fresh) + len(again) < size and is_waiting:
            return []
        order = torch.randperm(len(again), generator=self._generator).tolist() if len(fresh) < size else []
        replayed = self._load_again([again[i] for i in order], size - len(fresh))
        return _cut(fresh + replayed, self._config.max_batch_tokens)

    def trained(self, rows: Sequence[TrainingRow]) -> None:
        admitted = [row.sample_id for row in rows if row.sample_id in self._fresh]
        for row in rows:
            if row.sample_id in self._fresh:
                self._replay[row.sample_id] = _Replayed(self._fresh.pop(row.sample_id)[0], 1)
            else:
                self._replay[row.sample_id].num_passes += 1
        self._unsaved |= dict.fromkeys(admitted)
        self._num_admitted += len(admitted)
        self._arrivals.done(admitted)
        while len(self._replay) > self._config.replay_rows:
            del self._replay[next(iter(self._replay))]
        self.keep_alive()

    def is_exhausted(self) -> bool:
        is_over = self._arrivals.is_over and not self._unread and not self._fresh
        return is_over and all(entry.num_passes >= self._config.passes for entry in self._replay.values())

    def keep_alive(self) -> None:
        now = time.monotonic()
        if now - self._beat_at >= self._config.lease_timeout_s / HEARTBEATS_PER_LEASE:
            self._beat_at = now
            self._ledger.heartbeat(self._run_id, self._config.lease_timeout_s)

    def state(self) -> dict[str, Any]:
        return {
            "passes": [[name, entry.num_passes] for name, entry in self._replay.items()],
            "num_admitted": self._num_admitted,
            "generator": _encode(self._generator),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Rows that the checkpoint holds and whose features are still kept are replayed on; others it held are over."""
        refs = {ref.sample_id: ref for ref in self._ledger.durable(self._run_id, 2 * self._config.replay_rows)}
        self._replay = {name: _Replayed(refs[name], passes) for name, passes in state["passes"] if name in refs}
        self._num_admitted = state["num_admitted"]
        _decode(state["generator"], self._generator)

    def record(self, path: Path, step: int, metrics: Mapping[str, float]) -> None:
        self._ledger.record_checkpoint(self._run_id, path, step, self._unsaved, metrics=metrics)
        self._unsaved.clear()

    def figures(self) -> dict[str, int]:
        again = sum(entry.num_passes < self._config.passes for entry in self._replay.values())
        waiting = len(self._fresh) + self._ledger.status()["pending"]
        return {"rows_admitted": self._num_admitted, "rows_waiting": waiting, "rows_to_replay": again}

    def close(self) -> None:
        try:
            self._ledger.recover(self._run_id)
        except EngineUnavailable as error:
            logger.warning("rows in hand could not be given back (%s); they return when their leases run out", error)

    def _lease(self, num_rows: int) -> None:
        """Have num_rows fresh rows in hand if the queue holds them. Rows that cannot be used are failed and replaced; a
        store that does not answer costs none, and is asked again at the next call."""
        self.keep_alive()
        try:
            self._read_in()
            while (missing := num_rows - len(self._fresh)) > 0:
                refs = self._arrivals.take(missing)
                self._unread += refs
                self._read_in()
                if len(refs) < missing:
                    break
            self._is_store_silent = False
        except FeatureUnavailable as error:
            self._say_silent(error)
        except ProducerFailed:
            if not self._fresh:  # what came before it is trained first
                raise

    def _read_in(self) -> None:
        while self._unread:
            ref = self._unread[0]
            is_ours = any(ref.sample_id in ours for ours in (self._fresh, self._replay, self._unsaved))
            row = None if is_ours else self._load(ref)  # ours: its lease ran out, and it came again
            if row is not None:
                self._fresh[ref.sample_id] = (ref, row)
                self._arrived_at = time.monotonic()
            self._unread.popleft()

    def _say_silent(self, error: FeatureUnavailable) -> None:
        if not self._is_store_silent:
            logger.warning("rows cannot be read now, and are waited for: %s", error)
        self._is_store_silent = True

    def _load(self, ref: SampleRef) -> TrainingRow | None:
        try:
            return read_row(self._store, ref, self._check)
        except FeatureUnavailable:
            raise
        except FeatureError as error:
            logger.warning("row %s is not used: %s", ref.sample_id, error)
            self._ledger.fail(self._run_id, ref.sample_id, str(error), retryable=False)
            self._arrivals.done([ref.sample_id])
            return None

    def _load_again(self, names: Sequence[str], num_rows: int) -> list[TrainingRow]:
        """The first num_rows of these rows that can be read now. Rows shed or damaged meanwhile leave the replay; for the
        ledger they stay what they are, for they were trained."""
        rows: list[TrainingRow] = []
        for name in names:
            if len(rows) == num_rows:
                break
            try:
                rows.append(TrainingRow(name, self._store.get(self._replay[name].ref)[0]))
            except FeatureUnavailable as error:
                self._say_silent(error)
                break
            except FeatureError as error:
                logger.log(logging.DEBUG if isinstance(error, FeatureNotFound) else logging.WARNING, "not replayed: %s", error)
                del self._replay[name]
        return rows


class OfflineStream:
    """Epochs over fixed rows in a random order each; the last batch of an epoch may be smaller."""

    is_live = False

    def __init__(self, store: FeatureStore, ledger: Ledger, run_id: str, config: DataConfig, check: Check, seed: int) -> None:
        self._store = store
        self._ledger = ledger
        self._run_id = run_id
        self._config = config
        self._generator = torch.Generator().manual_seed(seed)
        self._check = check
        self._refs = {ref.sample_id: ref for ref in ledger.trainable()}
        self._num_left_out = 0  # could not be read, or are not for this drafter
        self._epoch = 0
        self._left: list[str] = []  # of this epoch
        self._num_trained = 0
        self._begin_epoch()

    def preview(self, num_rows: int) -> list[TrainingRow]:
        return self._load(self._left[:num_rows])

    def next_batch(self) -> list[TrainingRow]:
        return _cut(self._load(self._left[: self._config.batch_rows]), self._config.max_batch_tokens)

    def trained(self, rows: Sequence[TrainingRow]) -> None:
        done = {row.sample_id for row in rows}
        self._num_trained += len(done)
        self._is_over_for(done)

    def is_exhausted(self) -> bool:
        return not self._left

    def keep_alive(self) -> None:
        """Nothing is leased."""

    def state(self) -> dict[str, Any]:
        return {
            "epoch": self._epoch,
            "left": self._left,
            "num_trained": self._num_trained,
            "generator": _encode(self._generator),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        self._epoch = state["epoch"]
        self._left = state["left"]
        self._num_trained = state["num_trained"]
        _decode(state["generator"], self._generator)
        if self._left:
            self._is_over_for(set(self._left) - self._refs.keys())
        else:
            self._begin_epoch()  # the run had ended, and may have more passes now

    def record(self, path: Path, step: int, metrics: Mapping[str, float]) -> None:
        self._ledger.record_checkpoint(self._run_id, path, step, [], metrics=metrics)

    def figures(self) -> dict[str, int]:
        counts = {"rows": len(self._refs), "rows_left_out": self._num_left_out}
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
        """The rows that can be used; the others leave the stream."""
        rows: list[TrainingRow] = []
        for name in names:
            try:
                rows.append(read_row(self._store, self._refs[name], self._check))
            except FeatureError as error:
                logger.warning("row %s is not used: %s", name, error)
                self._num_left_out += 1
                del self._refs[name]
                self._is_over_for({name})
        return rows


def read_row(store: Rows, ref: SampleRef, check: Check) -> TrainingRow:
    """The row, if a drafter can be trained on it and judged by it. FeatureError says why not."""
    reason = check(ref)
    if reason is not None:
        raise FeatureError(reason)
    features, _ = store.get(ref)
    if not (features.hidden.aux.isfinite().all() and features.hidden.last.isfinite().all()):
        raise FeatureError("it holds states that are not finite")
    if not len(supervised(features.generated)[0]):
        raise FeatureError("it has no position to learn from: a turn of two generated tokens is the least")
    return TrainingRow(ref.sample_id, features)


def _cut(rows: Sequence[TrainingRow], max_tokens: int) -> list[TrainingRow]:
    """The leading rows of at most max_tokens tokens, at least one."""
    kept: list[TrainingRow] = []
    num_tokens = 0
    for row in rows:
        num_tokens += row.num_tokens
        if kept and num_tokens > max_tokens:
            break
        kept.append(row)
    return kept


def _encode(generator: torch.Generator) -> str:
    return base64.b64encode(generator.get_state().numpy().tobytes()).decode()


def _decode(text: str, generator: torch.Generator) -> None:
    generator.set_state(torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8))

"""Rows for the trainer: what a stream is, and the one of live rows, each admitted once and replayed a few times.

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
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any, Protocol

import torch

from runtime.errors import EngineUnavailable, FeatureError, FeatureNotFound, FeatureUnavailable, ProducerFailed
from runtime.features.leases import Leases, LiveRows, Rows
from runtime.features.ledger import member_of
from runtime.features.refs import SampleRef
from training.config import DataConfig
from training.data.arrivals import Arrivals, LedgerArrivals
from training.data.batches import TrainingRow, supervised
from training.data.replay import ReplayBuffer, Replayed

logger = logging.getLogger(__name__)

HEARTBEATS_PER_LEASE = 4
REACH_BALANCED = 32  # buffers full of rows, the newest, among which a resumed run looks for those that it kept of every slice

Check = Callable[[SampleRef], str | None]
"""Why a row does not fit the drafter in training; None if it does."""


class Stream(Protocol):
    """A source of training rows."""

    @property
    def is_live(self) -> bool:
        """More rows may come before any of these is trained."""
        ...

    def preview(self, num_rows: int, num_tokens: int) -> list[TrainingRow]:
        """Rows that will be trained next, without consuming them: enough for num_tokens generated tokens, and little more;
        at most num_rows, and no more than there are."""
        ...

    def token_counts(self, vocab_size: int) -> torch.Tensor | None:
        """int64 [V]: how often each token was generated in all rows that there will ever be; None where nobody can know."""
        ...

    def next_batch(self) -> list[TrainingRow]:
        """Rows for one step; none when there is nothing to train on now."""
        ...

    def look_ahead(self) -> None:
        """A step was launched on what next_batch gave: begin what the next batch needs, while a device computes."""
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

    def restore(self, states: Sequence[Mapping[str, Any]]) -> None:
        """What the streams of all ranks remembered, by rank. Their number may have changed since."""
        ...

    def unsaved(self) -> list[str]:
        """Leased rows that were trained since the last checkpoint: the one about to be written makes them durable."""
        ...

    def saved(self) -> None:
        """That checkpoint is safe on disk, and the ledger knows of it."""
        ...

    def figures(self) -> dict[str, int]:
        """Numbers for the display, always the same ones. Those named rows_... are this rank's share of a total, the others are
        alike on all ranks, or the first one's count."""
        ...

    def close(self) -> None:
        """Give back what was taken and is in no checkpoint."""
        ...


class OnlineStream:
    def __init__(
        self,
        store: LiveRows,
        ledger: Leases,
        run_id: str,
        config: DataConfig,
        check: Check,
        seed: int,
        arrivals: Arrivals | None = None,  # None: whatever comes into the ledger
        *,
        rank: int = 0,
        num_ranks: int = 1,  # that share the rows of this run, each under a name of its own
    ) -> None:
        self._store = store
        self._ledger = ledger
        self._run_id = run_id
        self._name = run_id if rank == 0 else member_of(run_id, rank)
        self._rank, self._num_ranks = rank, num_ranks
        self._config = config
        self._check = check
        self._generator = torch.Generator().manual_seed(seed + rank)
        self._unread: deque[SampleRef] = deque()  # leased, and not looked at: their store does not answer
        self._is_store_silent = False
        self._fresh: dict[str, tuple[SampleRef, TrainingRow]] = {}  # leased, not trained
        self._replay = ReplayBuffer(config)  # trained
        self._newest_at: float | None = None  # when the newest row that was trained was made, Unix seconds
        self._unsaved: dict[str, None] = {}  # trained since the last checkpoint, in this order
        self._num_admitted = 0
        self._arrived_at = self._beat_at = time.monotonic()
        ledger.recover(self._name)
        self._arrivals = arrivals or LedgerArrivals(store, ledger, self._name, config.lease_timeout_s)

    @property
    def is_live(self) -> bool:
        return self._arrivals.is_live

    def preview(self, num_rows: int, num_tokens: int) -> list[TrainingRow]:
        """Leases no more than it shows: others may want the rest."""
        while True:
            rows = [row for _, row in list(self._fresh.values())[:num_rows]]
            if len(rows) == num_rows or sum(int(row.features.generated.sum()) for row in rows) >= num_tokens:
                return rows
            self._lease(min(len(self._fresh) + self._config.batch_rows, num_rows))
            if len(self._fresh) <= len(rows):
                return rows

    def token_counts(self, vocab_size: int) -> torch.Tensor | None:
        return None

    def next_batch(self) -> list[TrainingRow]:
        """Fresh rows first, up to what data.replay_share leaves them, then rows that were trained before: beside fresh ones
        any, else those whose passes are not used up. While rows may still be arriving, a batch waits until it is full."""
        size = self._config.batch_rows
        is_live = self.is_live  # asked first: rows may come, and nothing more, right after they were looked for
        reserved = min(round(size * self._config.replay_share), len(self._replay), size - 1)
        self._lease(size - reserved)
        fresh = [row for _, row in list(self._fresh.values())[: size - reserved]]
        is_early = time.monotonic() - self._arrived_at < self._config.fill_wait_s
        if len(fresh) + max(self._replay.num_left, reserved) < size and is_early and is_live:
            return []
        replayed: list[TrainingRow] = []
        if fresh and reserved:
            replayed = self._load_again(self._replay.order(self._generator, with_used_up=True), reserved)
        if len(fresh) + len(replayed) < size:
            known = {row.sample_id for row in replayed}
            order = [name for name in self._replay.order(self._generator, with_used_up=False) if name not in known]
            replayed += self._load_again(order, size - len(fresh) - len(replayed))
        rows = fresh + replayed
        return rows[: num_within([row.num_tokens for row in rows], self._config.max_batch_tokens)]

    def trained(self, rows: Sequence[TrainingRow]) -> None:
        admitted = [row.sample_id for row in rows if row.sample_id in self._fresh]
        again = [self._replay.ref(row.sample_id) for row in rows if row.sample_id not in self._fresh]
        for ref in [*again, *(self._fresh.pop(name)[0] for name in admitted)]:  # whoever joins may make another leave
            self._replay.trained(ref)
            self._newest_at = max(ref.created_at, self._newest_at or ref.created_at)
        self._unsaved |= dict.fromkeys(admitted)
        self._num_admitted += len(admitted)
        self._arrivals.done(admitted)
        self.keep_alive()

    def is_exhausted(self) -> bool:
        is_over = self._arrivals.is_over and not self._unread and not self._fresh
        return is_over and self._replay.num_left == 0

    def look_ahead(self) -> None:
        """Rows come with their states."""

    def keep_alive(self) -> None:
        now = time.monotonic()
        if now - self._beat_at >= self._config.lease_timeout_s / HEARTBEATS_PER_LEASE:
            self._beat_at = now
            self._ledger.heartbeat(self._name, self._config.lease_timeout_s)

    def state(self) -> dict[str, Any]:
        return {
            "passes": [list(each) for each in self._replay.passes()],
            "num_admitted": self._num_admitted,
            "generator": encode(self._generator),
        }

    def restore(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Rows that the checkpoint holds and whose features are still kept are replayed on; others it held are over. As many
        ranks as before: each goes on with its own. Others: the rows are dealt out anew."""
        reach = 2 if self._config.slice_balance == 0 else REACH_BALANCED
        num_kept = reach * self._config.replay_rows * max(len(states), self._num_ranks)
        refs = {ref.sample_id: ref for ref in self._ledger.durable(self._run_id, num_kept)}  # newest first
        if len(states) == self._num_ranks:
            passes = states[self._rank]["passes"]
        else:
            known = dict(entry for state in states for entry in state["passes"])
            oldest_first = [[name, known[name]] for name in reversed(refs) if name in known]
            passes = oldest_first[self._rank :: self._num_ranks]
        kept = (Replayed(refs[name], num_passes) for name, num_passes in passes if name in refs)
        self._replay = ReplayBuffer(self._config, kept)
        self._num_admitted = share_of([state["num_admitted"] for state in states], self._rank, self._num_ranks)
        if self._rank < len(states):
            decode(states[self._rank]["generator"], self._generator)

    def unsaved(self) -> list[str]:
        return list(self._unsaved)

    def saved(self) -> None:
        if self._rank > 0:  # the first rank recorded them
            self._ledger.recorded(self._unsaved)
        self._unsaved.clear()

    def figures(self) -> dict[str, int]:
        pending = self._ledger.status()["pending"] if self._rank == 0 else 0  # of all ranks
        return {
            "rows_admitted": self._num_admitted,
            "rows_waiting": len(self._fresh) + pending,
            "rows_to_replay": self._replay.num_left,
            "lag_s": 0 if self._newest_at is None else max(round(time.time() - self._newest_at), 0),
        }

    def close(self) -> None:
        try:
            self._ledger.recover(self._name)
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
            self._ledger.fail(self._name, ref.sample_id, str(error), retryable=False)
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
                rows.append(TrainingRow(name, self._store.get(self._replay.ref(name))[0]))
            except FeatureUnavailable as error:
                self._say_silent(error)
                break
            except FeatureError as error:
                logger.log(logging.DEBUG if isinstance(error, FeatureNotFound) else logging.WARNING, "not replayed: %s", error)
                self._replay.drop(name)
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


def share_of(counts: Sequence[int], rank: int, num_ranks: int) -> int:
    """A rank's part of what ranks counted: its own, or, where their number changed, all of it for the first."""
    if len(counts) == num_ranks:
        return counts[rank]
    return sum(counts) if rank == 0 else 0


def num_within(sizes: Sequence[int], max_tokens: int) -> int:
    """How many of these leading rows have at most max_tokens tokens together, at least one."""
    return max(sum(total <= max_tokens for total in accumulate(sizes)), min(len(sizes), 1))


def encode(generator: torch.Generator) -> str:
    """The state of a generator, for JSON; `decode` sets it."""
    return base64.b64encode(generator.get_state().numpy().tobytes()).decode()


def decode(text: str, generator: torch.Generator) -> None:
    generator.set_state(torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8))

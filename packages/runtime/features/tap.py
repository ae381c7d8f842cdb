"""The tap: finished turns of live traffic become training rows, without the engine ever waiting.

`offer` decides in microseconds and puts the turn into a bounded queue; one writer thread cuts it into rows, copies the
hidden states to the CPU in the stored dtype, has them redacted and classified, and puts them into the store and the ledger.
What does not fit is shed and counted by reason, and so is everything while trainers are too far behind: from a high watermark
of rows or bytes that are in no checkpoint yet until they are down to the low one. A killed server loses what its queue held, at
most `capture.queue_max_rows` turns; what counts as captured is safe.

Kept is what all agree to: the server (`capture.enabled`), the client's key and the session (the engine offers nothing of a
session that is captured OFF, whoever said so), the sampling rate and the redaction hook.
"""

from __future__ import annotations

import hashlib
import logging
import math
import threading
import time
from array import array
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Protocol

import torch

from runtime.backends.base import TargetInfo
from runtime.config import CaptureConfig, require
from runtime.errors import FeatureBudgetExceeded, FeatureError
from runtime.features.cut import Cut, cut_turn
from runtime.features.flow import Gate, Watermarks
from runtime.features.hooks import Hook, checked_slice, redacted
from runtime.features.ledger import Ledger
from runtime.features.plane import collect_garbage, make_room, retain
from runtime.features.refs import SLICE_LABEL, SampleMeta, unit_hash
from runtime.features.row import FeatureRow
from runtime.features.store import FeatureStore
from runtime.hidden_states import HiddenStates
from runtime.types import Switch

logger = logging.getLogger(__name__)

LOG_EVERY_S = 60.0
GC_EVERY_S = 300.0
HEADER_BYTES = 512  # of a row's file, at most
HELDOUT_SHARE = 0.25  # of the store's budget: what is held out never gives up its room, and must leave some for training


class Outcome(StrEnum):
    """What became of what was offered. OFFERED and CUT count up; TRUNCATED, MASKED and UNCLASSIFIED are remarks on captured
    rows; EXPIRED ones were captured once; the rest sum to OFFERED + CUT."""

    OFFERED = "offered"  # turns
    CUT = "cut"  # rows beyond the first that a long turn was cut into
    TRUNCATED = "truncated"  # rows that lost the start of their prompt to max_row_tokens
    MASKED = "masked"  # rows of which the redaction hook took tokens
    UNCLASSIFIED = "unclassified"  # turns whose classifier failed: their rows are of no slice
    EXPIRED = "expired"  # rows whose features capture.max_age_s or max_trained_rows took away
    CAPTURED = "captured"
    DUPLICATE = "duplicate"
    REDACTED = "redacted"
    SKIPPED_SHORT = "skipped_short"
    SKIPPED_NO_CONSENT = "skipped_no_consent"  # the session did not ask for capture, and the server does not by default
    SKIPPED_SAMPLED_OUT = "skipped_sampled_out"
    SHED_QUEUE_FULL = "shed_queue_full"
    SHED_BACKLOG = "shed_backlog"  # trainers are too far behind: capture.high_rows, high_mib
    SHED_BUDGET = "shed_budget"
    SHED_CLOSED = "shed_closed"
    SHED_DROPPED = "shed_dropped"  # a cache policy had dropped tokens that the row would start with
    FAILED_IO = "failed_io"
    FAILED_NON_FINITE = "failed_non_finite"
    FAILED_REDACTION = "failed_redaction"  # nothing is kept that a hook might have taken away
    FAILED_UNEXPECTED = "failed_unexpected"


@dataclass(frozen=True)
class CapturedTurn:
    """One finished turn of a session, as the engine hands it over. The hidden parts may be views of larger buffers."""

    session_id: str
    token_ids: tuple[int, ...]  # [n] or [n+1]: the whole kept history, the last token included
    generated: tuple[bool, ...]  # per token: generated in this turn
    hidden: tuple[HiddenStates, ...]  # parts that concatenate to positions first_position .. n-1
    labels: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    drafter_version: str = ""
    source: str = "session"
    capture: Switch = Switch.INHERIT  # what the session said
    first_position: int = 0  # more: the session's cache policy dropped tokens, and states with them
    num_unseen: int = 0  # tokens out of sight under that policy: the last states are not those of the whole history

    def __post_init__(self) -> None:
        num_tokens, num_positions = len(self.token_ids), self.first_position + sum(len(part) for part in self.hidden)
        assert len(self.generated) == num_tokens, f"{len(self.generated)} marks for {num_tokens} tokens"
        assert num_positions >= num_tokens - 1, f"{num_positions} positions for {num_tokens} tokens"


class Tap(Protocol):
    """What the engine sees."""

    def offer(self, turn: CapturedTurn) -> bool:
        """Hand over a turn. Never blocks, never raises; False: not taken, and counted by reason."""
        ...

    def close(self) -> None:
        """Write what is queued, within a time limit, and stop."""
        ...


class FeatureTap:
    """A tap into a store and a ledger."""

    def __init__(
        self,
        store: FeatureStore,
        ledger: Ledger,
        config: CaptureConfig,
        *,
        run_id: str,  # of this server
        target_info: TargetInfo,
        tokenizer_hash: str = "",
        vocabulary_hash: str = "",
        redact: Hook | None = None,
        classify: Hook | None = None,
        decode: Callable[[Sequence[int]], str] = lambda token_ids: "",  # the text that hooks are given
        queue_max_bytes: int = 1 << 30,  # hidden states waiting for the writer
    ) -> None:
        self._store = store
        self._ledger = ledger
        self._config = config
        self._run_id = run_id
        self._info = target_info
        self._tokenizer_hash = tokenizer_hash
        self._vocabulary_hash = vocabulary_hash
        self._redact = redact
        self._classify = classify
        self._decode = decode
        queue_max_rows = config.queue_max_rows
        self._queue_gate = Gate(Watermarks(queue_max_rows, queue_max_rows // 2, queue_max_bytes, queue_max_bytes // 2))
        marks = _watermarks(config, store.budget_bytes)
        ledger.set_watermarks(marks)
        self._backlog_gate = Gate(marks)  # the writer's alone
        self._wake = threading.Condition()
        self._queue: deque[CapturedTurn] = deque()
        self._queued_bytes = 0
        self._is_closing = False
        self._counts = dict.fromkeys(Outcome, 0)
        self._counts_lock = threading.Lock()
        self._last_log_at = -LOG_EVERY_S
        self._next_gc_at = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="feature-tap", daemon=True)
        self._thread.start()

    # --- the engine's side ---

    def offer(self, turn: CapturedTurn) -> bool:
        self._count(Outcome.OFFERED)
        refusal = self._refusal(turn)
        if refusal is None:
            refusal = self._enqueue(turn)
        if refusal is not None:
            self._count(refusal)
        return refusal is None

    def _refusal(self, turn: CapturedTurn) -> Outcome | None:
        if turn.capture is not Switch.ON and not (turn.capture is Switch.INHERIT and self._config.by_default):
            return Outcome.SKIPPED_NO_CONSENT
        if turn.generated.count(True) < self._config.min_generated_tokens or len(turn.token_ids) < 2:
            return Outcome.SKIPPED_SHORT
        if unit_hash("capture", f"{turn.session_id}:{len(turn.token_ids)}") >= self._config.sampling_rate:
            return Outcome.SKIPPED_SAMPLED_OUT
        is_whole = not turn.first_position and not turn.num_unseen
        return None if is_whole else Outcome.SHED_DROPPED  # a row has no holes, and starts where its history does

    def _enqueue(self, turn: CapturedTurn) -> Outcome | None:
        size = _hidden_bytes(turn)
        with self._wake:
            if self._is_closing:
                return Outcome.SHED_CLOSED
            if not self._queue_gate.is_open:
                return Outcome.SHED_QUEUE_FULL
            self._queue.append(turn)
            self._queued_bytes += size
            self._queue_gate.more(len(self._queue), self._queued_bytes)
            self._wake.notify()
            return None

    def close(self, timeout_s: float = 10.0) -> None:
        """Write what is queued; what is not written in time is shed. Idempotent."""
        with self._wake:
            self._is_closing = True
            self._wake.notify()
        self._thread.join(timeout_s)
        with self._wake:
            self._count(Outcome.SHED_CLOSED, len(self._queue))
            self._queue.clear()
        self._thread.join(timeout_s)

    def counters(self) -> dict[str, int]:
        """Counts since start, every key of `Outcome` there."""
        with self._counts_lock:
            return {outcome.value: count for outcome, count in self._counts.items()}

    def queue_depth(self) -> int:
        """Turns waiting for the writer."""
        return len(self._queue)

    def _count(self, outcome: Outcome, by: int = 1) -> None:
        with self._counts_lock:
            self._counts[outcome] += by

    # --- the writer's side ---

    def _run(self) -> None:
        while not (self._is_closing and not self._queue):
            turn = self._take()
            if turn is not None:
                self._write_turn(turn)
            del turn  # or its tensors would live until the next one comes
            if time.monotonic() >= self._next_gc_at:
                self._next_gc_at = time.monotonic() + min(GC_EVERY_S, (self._config.max_age_s or math.inf) / 10)
                self._keep_house()

    def _take(self) -> CapturedTurn | None:
        """The next turn; None when there is none yet and something else may be due."""
        with self._wake:
            if not self._queue and not self._is_closing:
                self._wake.wait(max(self._next_gc_at - time.monotonic(), 0.0))
            if not self._queue:
                return None
            turn = self._queue.popleft()
            self._queued_bytes -= _hidden_bytes(turn)
            self._queue_gate.fewer(len(self._queue), self._queued_bytes)
            return turn

    def _write_turn(self, turn: CapturedTurn) -> None:
        cuts = cut_turn(turn.generated, self._config.max_row_tokens)
        self._count(Outcome.CUT, len(cuts) - 1)
        labels = self._labels(turn, cuts)
        for index, cut in enumerate(cuts):
            self._count(self._guarded_write(turn, labels, index, cut))

    def _labels(self, turn: CapturedTurn, cuts: Sequence[Cut]) -> Mapping[str, str]:
        """The turn's own labels; the slice by the classifier, unless the client named it."""
        if self._classify is None or SLICE_LABEL in turn.labels:
            return turn.labels
        token_ids = turn.token_ids[cuts[0].start : cuts[-1].stop]
        try:
            return {**turn.labels, SLICE_LABEL: checked_slice(self._classify(token_ids, self._decode(token_ids)))}
        except BaseException as error:  # a guest's code may raise anything, and must not end this thread
            self._log_rarely(error)
            self._count(Outcome.UNCLASSIFIED)
            return turn.labels

    def _guarded_write(self, turn: CapturedTurn, labels: Mapping[str, str], index: int, cut: Cut) -> Outcome:
        """The boundary of the thread: whatever one row does, the next one is still written and the server still serves."""
        try:
            return self._write_row(turn, labels, index, cut)
        except FeatureBudgetExceeded:
            return Outcome.SHED_BUDGET
        except FeatureError as error:
            self._log_rarely(error)
            return Outcome.FAILED_IO
        except Exception as error:  # a device may raise anything
            self._log_rarely(error)
            return Outcome.FAILED_UNEXPECTED

    def _write_row(self, turn: CapturedTurn, labels: Mapping[str, str], index: int, cut: Cut) -> Outcome:
        turn_key = f"{self._run_id}:{turn.session_id}:{hashlib.sha256(array('q', turn.token_ids).tobytes()).hexdigest()}"
        meta = self._meta(turn, turn_key, index)
        if self._ledger.known([meta.sample_id]):
            return Outcome.DUPLICATE
        refusal = self._lack_of_room(turn, cut)
        if refusal is not None:
            return refusal  # before the states are copied for nothing
        hidden = _copy_positions(turn.hidden, cut.start, cut.stop - 1, self._store.dtype)
        if not (hidden.aux.isfinite().all() and hidden.last.isfinite().all()):
            return Outcome.FAILED_NON_FINITE
        generated = torch.tensor(turn.generated[cut.start : cut.stop])
        generated[: cut.taught_from - cut.start] = False
        whole = FeatureRow(torch.tensor(turn.token_ids[cut.start : cut.stop]), generated, hidden, labels)
        row = self._redacted(whole)
        if not isinstance(row, FeatureRow):
            return row
        if not self._store_row(meta, row, unit_hash("split", turn_key)):
            return Outcome.DUPLICATE
        if cut.start > 0 and index == 0:
            self._count(Outcome.TRUNCATED)
        if row is not whole:
            self._count(Outcome.MASKED)
        return Outcome.CAPTURED

    def _redacted(self, row: FeatureRow) -> FeatureRow | Outcome:
        if self._redact is None:
            return row
        token_ids = tuple(row.token_ids.tolist())
        try:
            return redacted(row, self._redact(token_ids, self._decode(token_ids))) or Outcome.REDACTED
        except BaseException as error:  # as above; nothing is kept then
            self._log_rarely(error)
            return Outcome.FAILED_REDACTION

    def _meta(self, turn: CapturedTurn, turn_key: str, index: int) -> SampleMeta:
        return SampleMeta(
            sample_id=hashlib.sha256(f"{turn_key}:{index}".encode()).hexdigest()[:32],
            run_id=self._run_id,
            source=f"{turn.source}/{turn.session_id}",
            target_fingerprint=self._info.fingerprint,
            aux_layer_ids=self._info.aux_layer_ids,
            drafter_version=turn.drafter_version,
            tokenizer_hash=self._tokenizer_hash,
            vocabulary_hash=self._vocabulary_hash,
        )

    def _store_row(self, meta: SampleMeta, row: FeatureRow, chance: float) -> bool:
        """Put and commit. All rows of one turn share their chance of being offered to the held-out reservoir."""
        ref = self._store.put(meta, row)
        try:
            if chance >= self._config.heldout_fraction:
                return self._ledger.commit(ref, "train")
            max_bytes = int(HELDOUT_SHARE * self._store.budget_bytes)
            is_new, pushed_out = self._ledger.hold_out(ref, self._config.heldout_max_rows, max_bytes)
        except FeatureError:
            self._store.release(ref)
            raise
        self._store.delete(pushed_out)
        return is_new

    def _lack_of_room(self, turn: CapturedTurn, cut: Cut) -> Outcome | None:
        was_open = self._backlog_gate.is_open
        is_open = self._backlog_gate.now(*self._ledger.backlog())
        if is_open != was_open:
            self._ledger.set_shedding(not is_open)
        if not is_open:
            return Outcome.SHED_BACKLOG
        width = turn.hidden[0].aux.shape[1] + turn.hidden[0].last.shape[1]
        num_bytes = (cut.stop - cut.start) * (width * self._store.dtype.itemsize + 9) + HEADER_BYTES
        make_room(self._store, self._ledger, num_bytes)
        return None if self._store.used_bytes() + num_bytes <= self._store.budget_bytes else Outcome.SHED_BUDGET

    def _keep_house(self) -> None:
        try:
            self._count(Outcome.EXPIRED, retain(self._store, self._ledger, self._config))
            collect_garbage(self._store, self._ledger)
        except (FeatureError, OSError) as error:
            self._log_rarely(error)

    def _log_rarely(self, error: BaseException) -> None:
        if time.monotonic() - self._last_log_at >= LOG_EVERY_S:
            self._last_log_at = time.monotonic()
            trace = None if isinstance(error, FeatureError | OSError) else error
            logger.warning("The tap could not keep a row (counted, said at most once a minute): %s", error, exc_info=trace)


def _watermarks(config: CaptureConfig, budget_bytes: int) -> Watermarks:
    """ConfigError for a high watermark that the store's budget can never reach."""
    high_bytes = int((1 - HELDOUT_SHARE) * budget_bytes) if config.high_mib is None else config.high_mib << 20
    ok = high_bytes <= budget_bytes
    require(ok, "capture.high_mib", config.high_mib, f"at most features.budget_mib, {budget_bytes >> 20}, or null")
    low_bytes = high_bytes // 2 if config.low_mib is None else config.low_mib << 20
    ok = low_bytes <= high_bytes
    require(ok, "capture.low_mib", config.low_mib, f"at most the high watermark, {high_bytes >> 20}, or null")
    return Watermarks(config.high_rows, config.low_rows, high_bytes, low_bytes)


def _hidden_bytes(turn: CapturedTurn) -> int:
    return sum(part.aux.nbytes + part.last.nbytes for part in turn.hidden)


def _copy_positions(parts: tuple[HiddenStates, ...], start: int, stop: int, dtype: torch.dtype) -> HiddenStates:
    """Positions start .. stop-1 of the concatenation of parts, copied to the CPU as dtype without concatenating first."""
    aux = torch.empty((stop - start, parts[0].aux.shape[1]), dtype=dtype)  # [n, 3*Ht]
    last = torch.empty((stop - start, parts[0].last.shape[1]), dtype=dtype)  # [n, Ht]
    offset = 0
    for part in parts:
        low, high = max(start, offset), min(stop, offset + len(part))
        if low < high:
            aux[low - start : high - start].copy_(part.aux[low - offset : high - offset].detach())
            last[low - start : high - start].copy_(part.last[low - offset : high - offset].detach())
        offset += len(part)
    return HiddenStates(aux, last)

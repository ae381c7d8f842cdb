"""The gate and the way out: a candidate is published only if it drafts better than what is served now, beyond chance.

Both run the same chain simulation on the same held-out rows of live traffic. The difference of their acceptance lengths is
bootstrapped over rows, pairs kept together, and its one-sided lower bound must be above 0. Nor may the candidate forget: on no
slice of the traffic that has rows enough may it lose more than a set share.

What counts as served now: the version that this run published last, while the server has not decided on it; else the
registry's active version; else the drafter that training started from; else (from scratch) n-gram lookup, which serves without
a drafter. What is judged is the exported checkpoint, byte for byte what a server would load.
"""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from runtime import eagle3
from runtime.drafters.ngram import NgramDrafter
from runtime.errors import DrafterRejected, FeatureError
from runtime.features.leases import Leases, Rows
from runtime.features.refs import SLICE_LABEL, SampleRef
from runtime.registry import VersionRecord, VersionState
from training.data.batches import TrainingRow
from training.data.stream import Check, read_row
from training.judging import bootstrap
from training.judging.config import GateConfig
from training.judging.simulation import Counts, TargetView, depth_acceptance, evaluate, evaluate_ngram, total

logger = logging.getLogger(__name__)

NGRAM = NgramDrafter.version  # what serves while there is no drafter
_UNDECIDED = (VersionState.STAGED, VersionState.VALIDATED)


@dataclass(frozen=True)
class Baseline:
    """What a candidate must beat. `directory` None: n-gram lookup."""

    version: str
    directory: Path | None


@dataclass(frozen=True)
class Verdict:
    """What the gate found."""

    is_better: bool
    reason: str
    baseline: Baseline
    metrics: dict[str, float]


@dataclass(frozen=True)
class Published:
    version: str
    state: VersionState
    reason: str


def lower_bound(
    candidate: Sequence[Counts], baseline: Sequence[Counts], *, confidence: float, resamples: int, seed: int
) -> float:
    """One-sided lower confidence bound of candidate's acceptance length minus baseline's, by a paired bootstrap over rows."""
    ours, theirs = ([(each.num_accepted, each.num_steps) for each in counts] for counts in (candidate, baseline))
    return bootstrap.lower(bootstrap.differences(ours, theirs, resamples=resamples, seed=seed), confidence)


@dataclass(frozen=True)
class SliceComparison:
    """A slice of the traffic by its held-out rows."""

    name: str
    num_rows: int
    candidate: float  # acceptance lengths
    baseline: float

    @property
    def loss(self) -> float:
        """The share of the baseline's acceptance length that the candidate gives away; negative: it gains."""
        return 1.0 - self.candidate / self.baseline

    def figures(self) -> dict[str, float]:
        return {
            "rows": float(self.num_rows),
            "acceptance_length": self.candidate,
            "baseline_acceptance_length": self.baseline,
        }


def compare_slices(
    rows: Sequence[TrainingRow], candidate: Sequence[Counts], baseline: Sequence[Counts], *, min_rows: int
) -> list[SliceComparison]:
    """Slices of at least min_rows rows, by name. Rows of no slice are of none."""
    groups: dict[str, list[int]] = defaultdict(list)
    for index, row in enumerate(rows):
        groups[row.features.labels.get(SLICE_LABEL, "")].append(index)
    return [
        SliceComparison(
            name, len(of_one), *(total(counts[i] for i in of_one).mean_acceptance_length for counts in (candidate, baseline))
        )
        for name, of_one in sorted(groups.items())
        if name and len(of_one) >= min_rows
    ]


class Versions(Protocol):
    """What the gate asks of a registry, whether it lies in a directory here or behind a server. Contracts: at `Registry`."""

    @property
    def root(self) -> Path: ...

    @property
    def where(self) -> str: ...

    def active(self) -> str | None: ...

    def path(self, version: str) -> Path: ...

    def get(self, version: str) -> VersionRecord: ...

    def publish(
        self,
        checkpoint_dir: Path,
        *,
        parent: str | None,
        step: int,
        target_fingerprint: str,
        metrics: Mapping[str, float],
        notes: str = "",
    ) -> str: ...


def in_turns(refs: Sequence[SampleRef]) -> list[SampleRef]:
    """One of each slice after the other, the order within a slice kept."""
    seen: Counter[str] = Counter()
    places: list[tuple[int, int]] = []
    for index, ref in enumerate(refs):
        places.append((seen[ref.slice], index))
        seen[ref.slice] += 1
    return [refs[index] for _, index in sorted(places)]


class Gate:
    """Judges candidates on held-out rows and publishes those that pass."""

    def __init__(
        self,
        config: GateConfig,
        store: Rows,
        ledger: Leases,
        registry: Versions,
        *,
        check: Check,
        embedding: torch.Tensor,  # [V, Ht]
        lm_head: torch.Tensor,  # [V, Ht]
        target_fingerprint: str,
        start: Baseline,
        seed: int,
    ) -> None:
        self._config = config
        self._store = store
        self._ledger = ledger
        self._registry = registry
        self._check = check
        self._embedding = embedding
        self._target = TargetView(lm_head)
        self._target_fingerprint = target_fingerprint
        self._start = start
        self._seed = seed
        self._rows: dict[str, TrainingRow] = {}  # held-out rows in memory, by sample id
        self._passed_over: set[str] = set()  # held-out rows that cannot be used
        self._known: dict[tuple[str, str], Counts] = {}  # (version, sample id) -> counts of baselines
        self.last_published: str | None = None
        self._last_seen: Published | None = None

    def resume(self, start: Baseline, last_published: str | None) -> None:
        """What a checkpoint remembers."""
        self._start, self.last_published = start, last_published

    # --- judging ---

    def acceptance_length(self, model: eagle3.Eagle3Model) -> float | None:
        """Of a drafter on the held-out rows that `judge` would take; None while there are too few."""
        rows = self._heldout()
        if len(rows) < self._config.min_heldout_rows:
            return None
        return total(evaluate(model, rows, self._config.draft_tokens, self._target)).mean_acceptance_length

    def num_heldout(self) -> int:
        """Held-out rows that candidates are compared on now."""
        return len(self._heldout())

    def judge(self, candidate: Path, num_compared: int = 1) -> Verdict | None:
        """The candidate in this directory against the baseline; None while there are too few held-out rows to say anything.
        num_compared: of how many it is the best on the same rows; the bound allows for all of them."""
        rows = self._heldout()
        if len(rows) < self._config.min_heldout_rows:
            return None
        served = self.baseline()
        confidence = 1 - (1 - self._config.confidence) / num_compared
        counts = evaluate(self._load(candidate), rows, self._config.draft_tokens, self._target)
        baseline, before = self._baseline_counts(served, rows)
        bound = lower_bound(counts, before, confidence=confidence, resamples=self._config.resamples, seed=self._seed)
        after, was = total(counts), total(before)
        slices = compare_slices(rows, counts, before, min_rows=self._config.min_heldout_rows)
        metrics = {
            "acceptance_length": after.mean_acceptance_length,
            "baseline_acceptance_length": was.mean_acceptance_length,
            "lower_bound": bound,
            "heldout_rows": float(len(rows)),
            "heldout_steps": after.num_steps,
            **{f"acceptance_at_{k}": rate for k, rate in enumerate(depth_acceptance(after))},
            **{f"slice/{each.name}/{key}": value for each in slices for key, value in each.figures().items()},
        }
        figures = f"{after.mean_acceptance_length:.3f} against {was.mean_acceptance_length:.3f} of {baseline.version}"
        detail = f"{figures} on {len(rows)} held-out rows, lower bound of the difference {bound:+.3f}"
        forgotten = [each for each in slices if each.loss > self._config.max_slice_loss]
        if forgotten:
            lost = ", ".join(f"{each.name!r} {each.loss:.1%}" for each in forgotten)
            detail = f"{detail}, but it loses more than {self._config.max_slice_loss:.1%} on slices: {lost}"
        if self.baseline() != served:  # judging takes a while
            return Verdict(False, f"{detail}, and another version went live meanwhile", baseline, metrics)
        return Verdict(bound > 0.0 and not forgotten, detail, baseline, metrics)

    def baseline(self) -> Baseline:
        """What is served now, as far as this directory tells."""
        record = self._last_record()
        if record is not None and record.state in _UNDECIDED:
            return Baseline(record.version, record.path)
        active = self._registry.active()
        return self._start if active is None else Baseline(active, self._registry.path(active))

    def _baseline_counts(self, baseline: Baseline, rows: Sequence[TrainingRow]) -> tuple[Baseline, list[Counts]]:
        if baseline.directory is None:
            return baseline, evaluate_ngram(rows, self._config.draft_tokens)
        unknown = [row for row in rows if (baseline.version, row.sample_id) not in self._known]
        if unknown:
            try:
                model = self._load(baseline.directory)
            except DrafterRejected as error:
                logger.warning("baseline %s cannot be read, n-gram lookup takes its place: %s", baseline.version, error)
                return Baseline(NGRAM, None), evaluate_ngram(rows, self._config.draft_tokens)
            found = evaluate(model, unknown, self._config.draft_tokens, self._target)
            self._known |= {(baseline.version, row.sample_id): each for row, each in zip(unknown, found, strict=True)}
        self._known = {key: each for key, each in self._known.items() if key[0] == baseline.version and key[1] in self._rows}
        return baseline, [self._known[baseline.version, row.sample_id] for row in rows]

    def _heldout(self) -> list[TrainingRow]:
        """The newest held-out rows that can be used, of each slice as many as of the others while it has them; oldest first.
        Those in memory are not read again."""
        refs = self._ledger.heldout()
        age = {ref.sample_id: index for index, ref in enumerate(refs)}
        rows: dict[str, TrainingRow] = {}
        for ref in in_turns(refs):
            if len(rows) == self._config.max_heldout_rows:
                break
            row = self._rows.get(ref.sample_id) or self._read(ref)
            if row is not None:
                rows[ref.sample_id] = row
        self._passed_over &= age.keys()
        self._rows = {name: rows[name] for name in sorted(rows, key=lambda name: -age[name])}
        self._target.keep(self._rows)
        return list(self._rows.values())

    def _read(self, ref: SampleRef) -> TrainingRow | None:
        """None, told once, if the row is damaged or another drafter's."""
        try:
            return read_row(self._store, ref, self._check)
        except FeatureError as error:
            if ref.sample_id not in self._passed_over:
                logger.warning("held-out row %s is passed over: %s", ref.sample_id, error)
                self._passed_over.add(ref.sample_id)
            return None

    def _load(self, directory: Path) -> eagle3.Eagle3Model:
        model = eagle3.load(directory, self._embedding, dtype=torch.float32, device=self._embedding.device)
        return model.requires_grad_(False)

    # --- publishing ---

    def publish(self, candidate: Path, verdict: Verdict, step: int, *, before: Callable[[], None]) -> str:
        """Put the candidate into the registry as a staged version; the server takes it from there. `before` makes a
        checkpoint: a version that anyone sees was trained from weights that are safe, by a run that remembers its name."""
        previous = self._last_record()
        start = self._start.version if self._start.directory is not None else None
        self.last_published = eagle3.version_id(candidate)
        before()
        return self._registry.publish(
            candidate,
            parent=previous.version if previous is not None else start,
            step=step,
            target_fingerprint=self._target_fingerprint,
            metrics=verdict.metrics,
            notes=verdict.reason,
        )

    def is_undecided(self) -> bool:
        """The server has not said yet what becomes of the version published last."""
        record = self._last_record()
        return record is not None and record.state in _UNDECIDED

    def news(self) -> Published | None:
        """The state of the version published last, if it changed since the last call."""
        record = self._last_record()
        if record is None:
            return None
        seen = Published(record.version, record.state, record.reason)
        if seen == self._last_seen:
            return None
        self._last_seen = seen
        return seen

    def _last_record(self) -> VersionRecord | None:
        """What the registry says about the version published last; None if there is none, or if it was removed."""
        try:
            return None if self.last_published is None else self._registry.get(self.last_published)
        except DrafterRejected:
            return None

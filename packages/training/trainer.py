"""The trainer's loop: take a batch, learn, save, judge. Everything else is one call away.

It begins with the run's latest checkpoint, or with a starting point once the first rows are there. A stop asked for from
outside ends the step in hand, saves, and returns. Where several processes train the run, each has a trainer and a stream of
its own, and they go through the loop in step: the first one's clock and judgement count, and it alone writes. Knows no command
line and no signal.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from runtime.eagle3 import save
from runtime.errors import ConfigError
from runtime.features.leases import Leases
from runtime.files import temporary_directory
from training.config import DataConfig, TrainerConfig
from training.data.batches import TrainingRow, group_by_tokens
from training.data.stream import Stream
from training.judging.gate import Baseline, Gate
from training.learning import checkpoint
from training.learning.distributed import ALONE, World
from training.learning.hedge import Learning, restore
from training.learning.start import continue_from, from_scratch, generated_counts
from training.learning.target_weights import TargetWeights
from training.reporting.progress import Progress

logger = logging.getLogger(__name__)

CONDITIONING_TOKENS = 256  # generated tokens to see before training continues from a drafter
BETTER = 8  # times as many tokens are looked at where they are there already: no more, since other workers want rows too
MAX_FIRST_ROWS = 512  # from scratch


@dataclass
class _Clock:
    """When something was done last, in seconds and in steps."""

    at_s: float = field(default_factory=time.monotonic)
    at_step: int = 0

    def is_due(self, step: int, every_s: float, every_steps: int | None) -> bool:
        if step == self.at_step:
            return False
        if every_steps is not None:
            return step - self.at_step >= every_steps
        return time.monotonic() - self.at_s >= every_s

    def reset(self, step: int) -> None:
        self.at_s, self.at_step = time.monotonic(), step


class Trainer:
    def __init__(
        self,
        config: TrainerConfig,
        data: DataConfig,
        *,
        run_dir: Path,
        structure: Mapping[str, Any],  # settings that a resumed run must share
        target: TargetWeights,
        ledger: Leases,
        gate: Gate,
        start: Baseline,
        progress: Progress,
        stop: threading.Event,
        registry_poll_s: float,
        after_step: Callable[[Learning], None] = lambda learner: None,
        world: World = ALONE,
    ) -> None:
        self._config = config
        self._data = data
        self._run_dir = run_dir
        self._structure = dict(structure)
        self._target = target
        self._after_step = after_step
        self._world = world
        self._stream: Stream  # of the fit in progress
        self._ledger = ledger
        self._gate = gate
        self._start = start
        self._progress = progress
        self._stop = stop
        self._registry_poll_s = registry_poll_s
        self._looked_at = 0.0
        self._began_at = time.monotonic()
        self._began_step = 0
        self._idle_since: float | None = None  # None: not waiting for rows
        self._saved = _Clock()
        self._judged = _Clock()
        self._metrics: dict[str, float] = {}  # of the last evaluation

    def fit(self, stream: Stream) -> None:
        """Train on the stream until it or the run ends. Whatever raises on the way, what was taken goes back to its source."""
        self._stream = stream
        self._world.while_waiting = stream.keep_alive
        try:
            self._check_ranks()
            learner = self._resume() or self._begin()
            if learner is not None:
                self._loop(learner)
                self._end(learner)
        finally:
            self._stream.close()

    def _loop(self, learner: Learning) -> None:
        self._idle_since = None
        self._began_step = learner.num_steps
        self._saved.reset(learner.num_steps)
        self._judged.reset(learner.num_steps)
        while not self._is_over(learner):
            began_at = time.perf_counter()
            rows = self._stream.next_batch()
            [num_rows] = self._world.sum([len(rows)])
            if num_rows:
                self._learn(learner, rows, round(num_rows), began_at)
            else:
                self._wait(learner)
            saves = self._saved.is_due(learner.num_steps, self._config.checkpoint_every_s, self._config.checkpoint_every_steps)
            judges = self._judged.is_due(learner.num_steps, self._config.evaluate_every_s, self._config.evaluate_every_steps)
            saves, judges = self._decide(saves, judges)
            if saves:
                self._save(learner)
            if judges:
                self._judge(learner)
            self._look_at_registry()

    # --- the verbs: every rank does them at the same time ---

    def _learn(self, learner: Learning, rows: Sequence[TrainingRow], num_rows: int, began_at: float) -> None:
        """A step on this rank's rows, which may be none, and on those of the others: num_rows in all. began_at: when the rows
        were asked for, which is part of what a step takes: the target may have had to read them."""
        batches = group_by_tokens(rows, self._data.max_batch_tokens)
        result = learner.step(*batches, meanwhile=self._stream.look_ahead)
        self._stream.trained(rows)
        self._idle_since = None
        result = dataclasses.replace(result, seconds=time.perf_counter() - began_at)
        self._progress.stepped(result, num_rows, self._figures())
        self._after_step(learner)

    def _wait(self, learner: Learning) -> None:
        """Nothing to train on: use the pause to judge and to save what was learned, else sleep. A producer may wait for
        the room that rows give up once they are durable."""
        self._stream.keep_alive()
        is_pause = self._idle_s() >= self._data.fill_wait_s
        judges = is_pause and learner.num_steps > self._judged.at_step and self._config.evaluate_every_steps is None
        judges, saves = self._decide(judges, is_pause and learner.num_steps > self._saved.at_step)
        if judges:
            self._judge(learner)
        elif saves:
            self._save(learner)
        else:
            self._sleep()

    def _save(self, learner: Learning) -> None:
        """Write a checkpoint, then make the ledger record it together with the rows it holds, whichever rank trained on them."""
        tensors = learner.tensors()
        streams = self._world.gather([self._stream.state(), self._stream.unsaved()])
        if self._world.is_first:
            state = {
                "structure": self._structure,
                "start": [self._start.version, None if self._start.directory is None else str(self._start.directory)],
                "last_published": self._gate.last_published,
                "learner": learner.state(),
                "streams": [state for state, _ in streams],
            }
            directory = checkpoint.save(self._checkpoints, learner.num_steps, tensors, state)
            sample_ids = [sample_id for _, unsaved in streams for sample_id in unsaved]
            self._ledger.record_checkpoint(self._config.name, directory, learner.num_steps, sample_ids, metrics=self._metrics)
            checkpoint.prune(self._checkpoints, self._config.keep_checkpoints, directory)
            self._progress.saved(learner.num_steps, directory)
        self._stream.saved()
        self._saved.reset(learner.num_steps)

    def _judge(self, learner: Learning) -> None:
        """Export a candidate, evaluate it against what is served, publish it if it is better. The first rank judges."""
        self._judged.reset(learner.num_steps)
        candidate = learner.candidate(self._gate.acceptance_length)
        if self._world.is_first:
            with temporary_directory(self._run_dir) as directory:
                save(candidate, directory)
                self._judge_exported(learner, directory)
        elif self._decide(False)[0]:
            self._save(learner)
        self._judged.at_s = time.monotonic()
        self._stream.keep_alive()

    def _judge_exported(self, learner: Learning, candidate: Path) -> None:
        verdict = self._gate.judge(candidate, learner.num_heads)
        if verdict is None:
            self._progress.not_judged(learner.num_steps, self._gate.num_heldout(), self._config.gate.min_heldout_rows)
        else:
            self._progress.judged(learner.num_steps, verdict)
            self._metrics = verdict.metrics
        [publishes] = self._decide(verdict is not None and verdict.is_better and self._config.gate.enabled)
        if verdict is not None and publishes:
            version = self._gate.publish(candidate, verdict, learner.num_steps, before=lambda: self._save(learner))
            self._progress.published(learner.num_steps, version, verdict)

    def _look_at_registry(self) -> None:
        if self._world.is_first and time.monotonic() - self._looked_at >= self._registry_poll_s:
            self._looked_at = time.monotonic()
            self._tell_news()

    def _tell_news(self) -> None:
        news = self._gate.news()
        if news is not None:
            self._progress.decided(news)

    def _end(self, learner: Learning) -> None:
        if learner.num_steps > self._saved.at_step:
            self._save(learner)
        is_stopped = self._is_stopped()
        if not is_stopped:
            if learner.num_steps > self._judged.at_step:
                self._judge(learner)
            if self._world.is_first:
                self._settle()
        has_learned = learner.num_steps > self._began_step
        published = self._gate.last_published
        self._progress.ended(self._config.name, learner.num_steps, published, is_stopped=is_stopped, has_learned=has_learned)

    def _settle(self) -> None:
        deadline = time.monotonic() + self._config.settle_s
        while self._gate.is_undecided() and time.monotonic() < deadline and not self._stop.wait(self._data.poll_s):
            self._stream.keep_alive()
        self._tell_news()

    # --- the beginning ---

    def _check_ranks(self) -> None:
        """That the ranks of this run have the same settings and see the same files."""
        start = None if self._start.directory is None else self._start.version
        groups = {"trainer": dataclasses.asdict(self._config), "data": dataclasses.asdict(self._data)}
        settings = {f"{group}.{name}": value for group, values in groups.items() for name, value in values.items()}
        self._world.check_same(self._structure | settings | {"the starting drafter": start})

    def _resume(self) -> Learning | None:
        """The learner of the run's latest checkpoint; None if the run is new."""
        latest = self._ledger.latest_checkpoint(self._config.name) if self._world.is_first else None
        name = self._world.share(None if latest is None else Path(latest.path).name)
        if name is None:
            self._check_place()
            return None
        directory = self._checkpoints / name  # wherever the state directory is now
        tensors, state = checkpoint.load(directory)
        self._check_structure(state["structure"])
        version, start = state["start"]
        self._start = Baseline(version, None if start is None else Path(start))
        self._gate.resume(self._start, state["last_published"])
        self._stream.restore(state["streams"])
        learner = restore(tensors, state["learner"], self._target, self._config, self._world)
        [_] = self._world.any(False)  # all have read
        if self._world.is_first:
            checkpoint.prune(self._checkpoints, self._config.keep_checkpoints, directory)
        self._progress.began(f"resumed at step {learner.num_steps} from {directory}", learner.num_steps)
        return learner

    def _check_place(self) -> None:
        """A run of this name whose rows come from elsewhere has another ledger; its checkpoints are not this one's to prune."""
        if self._world.is_first:
            for directory in checkpoint.finished(self._checkpoints):
                self._check_structure(checkpoint.load_state(directory)["structure"])
                logger.warning("%s is left aside: no ledger knows of it, so the run begins anew", directory)

    def _check_structure(self, before: Mapping[str, Any]) -> None:
        for name, now in self._structure.items():
            if before.get(name) != now:
                raise ConfigError(
                    f"{name} is {now!r}, but run {self._config.name!r} began with {before.get(name)!r}; keep that, or begin "
                    "another run with trainer.run_id=..."
                )

    def _begin(self) -> Learning | None:
        """A learner from the starting point, once enough rows are there; None if the run is over before."""
        is_scratch = self._start.directory is None
        counts = self._stream.token_counts(self._target.vocab_size) if is_scratch else None
        if is_scratch and counts is None:
            rows = self._first_rows(-(-MAX_FIRST_ROWS // self._world.size), self._config.vocabulary_tokens)
        else:
            rows = self._first_rows(self._data.batch_rows, CONDITIONING_TOKENS)
        [num_rows] = self._world.sum([len(rows)])
        if not num_rows:
            logger.info("the run is over before there were rows to learn from")
            return None
        if self._start.directory is None:
            learner = from_scratch(self._target, self._config, rows, self._world, counts)
            said = f"from scratch, draft vocabulary of {len(learner.vocabulary)} from {_told(counts, learner, num_rows)}"
        else:
            learner = continue_from(self._start.directory, self._target, self._config, rows, self._world)
            said = f"from drafter {self._start.version} ({self._start.directory})"
        self._progress.began(f"{said}, learning rate {learner.learning_rate:g}", 0)
        return learner

    def _first_rows(self, max_rows: int, num_tokens: int) -> list[TrainingRow]:
        """The first rows of this rank: max_rows of them, or until all ranks together have num_tokens generated tokens, or what
        there is when nothing more will come."""
        while True:
            is_live = self._stream.is_live  # asked first: the last rows may come, and nothing more, right after a look
            rows = self._stream.preview(max_rows, BETTER * num_tokens)
            [seen] = self._world.sum([int(generated_counts(rows, self._target.vocab_size).sum())])
            is_full, is_live = self._world.any(len(rows) == max_rows, is_live)
            if seen >= num_tokens or is_full or not is_live or self._is_over(None):
                return [] if self._is_stopped() else rows
            self._progress.gathering(round(seen), num_tokens)
            self._sleep()

    def _sleep(self) -> None:
        """Until rows may have come."""
        if self._idle_since is None:
            self._idle_since = time.monotonic()
        self._progress.waiting(self._figures())
        self._stop.wait(self._data.poll_s)

    # --- the end ---

    def _is_over(self, learner: Learning | None) -> bool:
        config = self._config
        steps = learner.num_steps if learner is not None else 0
        is_late = config.max_time_s is not None and time.monotonic() - self._began_at >= config.max_time_s
        is_idle = config.idle_timeout_s is not None and self._idle_s() >= config.idle_timeout_s
        is_mine = self._world.is_first  # whose clock counts
        ends, goes_on = self._world.any(
            self._stop.is_set() or (is_mine and (is_late or is_idle)), not self._stream.is_exhausted()
        )
        return ends or not goes_on or (config.max_steps is not None and steps >= config.max_steps)

    def _is_stopped(self) -> bool:
        """Whether any rank was asked to stop."""
        return self._world.any(self._stop.is_set())[0]

    def _decide(self, *wishes: bool) -> list[bool]:
        """What the first rank wishes, on every rank: its clock counts, and its judgement."""
        return self._world.any(*(wish and self._world.is_first for wish in wishes))

    def _figures(self) -> dict[str, int]:
        """Counts of the streams of all ranks: rows_... are added up, the others are the same everywhere."""
        figures = self._stream.figures()
        totals = zip(figures, self._world.sum(list(figures.values())), strict=True)
        return figures | {name: round(total) for name, total in totals if name.startswith("rows_")}

    def _idle_s(self) -> float:
        return 0.0 if self._idle_since is None else time.monotonic() - self._idle_since

    @property
    def _checkpoints(self) -> Path:
        return self._run_dir / "checkpoints"


def _told(counts: torch.Tensor | None, learner: Learning, num_rows: float) -> str:
    """What the draft vocabulary was counted over."""
    if counts is None:
        return f"{num_rows:.0f} rows"
    total = int(counts.sum())
    covered = int(counts[learner.vocabulary.target_ids.cpu()].sum()) / max(total, 1)
    return f"the {total} generated tokens of all rows, {covered:.1%} of which it has"

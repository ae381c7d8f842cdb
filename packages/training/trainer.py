"""The trainer's loop: take a batch, learn, save, judge. Everything else is one call away.

It begins with the run's latest checkpoint, or with a starting point once the first rows are there. A stop asked for from
outside ends the step in hand, saves, and returns. Knows no command line and no signal.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from runtime.errors import ConfigError
from runtime.features.leases import Leases
from runtime.files import temporary_directory
from training.config import DataConfig, TrainerConfig
from training.data.batches import TrainingRow
from training.data.stream import Stream
from training.judging.gate import Baseline, Gate
from training.learning import checkpoint
from training.learning.learner import Learner
from training.learning.start import continue_from, from_scratch, generated_counts
from training.learning.target_weights import TargetWeights
from training.reporting.progress import Progress

logger = logging.getLogger(__name__)

CONDITIONING_TOKENS = 256  # generated tokens to see before training continues from a drafter
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
        after_step: Callable[[Learner], None] = lambda learner: None,
    ) -> None:
        self._config = config
        self._data = data
        self._run_dir = run_dir
        self._structure = dict(structure)
        self._target = target
        self._after_step = after_step
        self._stream: Stream  # of the fit in progress
        self._ledger = ledger
        self._gate = gate
        self._start = start
        self._progress = progress
        self._stop = stop
        self._registry_poll_s = registry_poll_s
        self._looked_at = 0.0
        self._began_at = time.monotonic()
        self._idle_since: float | None = None  # None: not waiting for rows
        self._saved = _Clock()
        self._judged = _Clock()
        self._metrics: dict[str, float] = {}  # of the last evaluation

    def fit(self, stream: Stream) -> None:
        """Train on the stream until it or the run ends. Whatever raises on the way, what was taken goes back to its source."""
        self._stream = stream
        try:
            learner = self._resume() or self._begin()
            if learner is not None:
                self._loop(learner)
                self._end(learner)
        finally:
            self._stream.close()

    def _loop(self, learner: Learner) -> None:
        self._idle_since = None
        self._saved.reset(learner.num_steps)
        self._judged.reset(learner.num_steps)
        while not self._is_over(learner):
            rows = self._stream.next_batch()
            if rows:
                self._learn(learner, rows)
            else:
                self._wait(learner)
            if self._saved.is_due(learner.num_steps, self._config.checkpoint_every_s, self._config.checkpoint_every_steps):
                self._save(learner)
            if self._judged.is_due(learner.num_steps, self._config.evaluate_every_s, self._config.evaluate_every_steps):
                self._judge(learner)
            self._look_at_registry()

    # --- the verbs ---

    def _learn(self, learner: Learner, rows: Sequence[TrainingRow]) -> None:
        result = learner.step(rows)
        self._stream.trained(rows)
        self._idle_since = None
        self._progress.stepped(result, len(rows), self._stream.figures())
        self._after_step(learner)

    def _wait(self, learner: Learner) -> None:
        """Nothing to train on: use the pause to judge and to save what was learned, else sleep. A producer may wait for
        the room that rows give up once they are durable."""
        self._stream.keep_alive()
        is_pause = self._idle_s() >= self._data.fill_wait_s
        if is_pause and learner.num_steps > self._judged.at_step and self._config.evaluate_every_steps is None:
            self._judge(learner)
        elif is_pause and learner.num_steps > self._saved.at_step:
            self._save(learner)
        else:
            self._sleep()

    def _save(self, learner: Learner) -> None:
        """Write a checkpoint, then make the ledger record it together with the rows it holds."""
        state = {
            "structure": self._structure,
            "start": [self._start.version, None if self._start.directory is None else str(self._start.directory)],
            "last_published": self._gate.last_published,
            "learner": learner.state(),
            "stream": self._stream.state(),
        }
        directory = checkpoint.save(self._checkpoints, learner.num_steps, learner.tensors(), state)
        self._stream.record(directory, learner.num_steps, self._metrics)
        checkpoint.prune(self._checkpoints, self._config.keep_checkpoints, directory)
        self._saved.reset(learner.num_steps)
        self._progress.saved(learner.num_steps, directory)

    def _judge(self, learner: Learner) -> None:
        """Export a candidate, evaluate it against what is served, publish it if it is better."""
        self._judged.reset(learner.num_steps)
        with temporary_directory(self._run_dir) as candidate:
            learner.export(candidate)
            verdict = self._gate.judge(candidate)
            self._progress.judged(learner.num_steps, verdict)
            if verdict is not None:
                self._metrics = verdict.metrics
            if verdict is not None and verdict.is_better and self._config.gate.enabled:
                version = self._gate.publish(candidate, verdict, learner.num_steps, before=lambda: self._save(learner))
                self._progress.published(learner.num_steps, version, verdict)
        self._judged.at_s = time.monotonic()
        self._stream.keep_alive()

    def _look_at_registry(self) -> None:
        if time.monotonic() - self._looked_at >= self._registry_poll_s:
            self._looked_at = time.monotonic()
            self._tell_news()

    def _tell_news(self) -> None:
        news = self._gate.news()
        if news is not None:
            self._progress.decided(news)

    def _end(self, learner: Learner) -> None:
        if learner.num_steps > self._saved.at_step:
            self._save(learner)
        if self._stop.is_set():
            return
        if learner.num_steps > self._judged.at_step:
            self._judge(learner)
        deadline = time.monotonic() + self._config.settle_s
        while self._gate.is_undecided() and time.monotonic() < deadline and not self._stop.wait(self._data.poll_s):
            self._stream.keep_alive()
        self._tell_news()

    # --- the beginning ---

    def _resume(self) -> Learner | None:
        """The learner of the run's latest checkpoint; None if the run is new."""
        latest = self._ledger.latest_checkpoint(self._config.name)
        if latest is None:
            return None
        directory = self._checkpoints / Path(latest.path).name  # wherever the state directory is now
        tensors, state = checkpoint.load(directory)
        self._check_structure(state["structure"])
        version, start = state["start"]
        self._start = Baseline(version, None if start is None else Path(start))
        self._gate.resume(self._start, state["last_published"])
        self._stream.restore(state["stream"])
        learner = Learner.restore(tensors, state["learner"], self._target, self._config)
        checkpoint.prune(self._checkpoints, self._config.keep_checkpoints, directory)
        self._progress.began(f"resumed at step {learner.num_steps} from {directory}", learner.num_steps)
        return learner

    def _check_structure(self, before: Mapping[str, Any]) -> None:
        for name, now in self._structure.items():
            if before.get(name) != now:
                raise ConfigError(
                    f"{name} is {now!r}, but run {self._config.name!r} began with {before.get(name)!r}; keep that, or begin "
                    "another run with trainer.run_id=..."
                )

    def _begin(self) -> Learner | None:
        """A learner from the starting point, once enough rows are there; None if the run is over before."""
        is_scratch = self._start.directory is None
        if is_scratch:
            rows = self._first_rows(MAX_FIRST_ROWS, self._config.vocabulary_tokens)
        else:
            rows = self._first_rows(self._data.batch_rows, CONDITIONING_TOKENS)
        if not rows:
            logger.info("the run is over before there were rows to learn from")
            return None
        if self._start.directory is None:
            learner = from_scratch(self._target, self._config, rows)
            said = f"from scratch, draft vocabulary of {len(learner.vocabulary)} from {len(rows)} rows"
        else:
            learner = continue_from(self._start.directory, self._target, self._config, rows)
            said = f"from drafter {self._start.version} ({self._start.directory})"
        self._progress.began(f"{said}, learning rate {learner.learning_rate:g}", 0)
        return learner

    def _first_rows(self, max_rows: int, num_tokens: int) -> list[TrainingRow]:
        """The first rows: max_rows of them, or num_tokens generated tokens, or what there is when nothing more will come."""
        while True:
            rows = self._stream.preview(max_rows)
            seen = int(generated_counts(rows, self._target.vocab_size).sum())
            if seen >= num_tokens or len(rows) == max_rows or not self._stream.is_live or self._is_over(None):
                return [] if self._stop.is_set() else rows
            self._sleep()

    def _sleep(self) -> None:
        """Until rows may have come."""
        if self._idle_since is None:
            self._idle_since = time.monotonic()
        self._progress.waiting(self._stream.figures())
        self._stop.wait(self._data.poll_s)

    # --- the end ---

    def _is_over(self, learner: Learner | None) -> bool:
        config = self._config
        steps = learner.num_steps if learner is not None else 0
        return (
            self._stop.is_set()
            or (config.max_steps is not None and steps >= config.max_steps)
            or (config.max_time_s is not None and time.monotonic() - self._began_at >= config.max_time_s)
            or (config.idle_timeout_s is not None and self._idle_s() >= config.idle_timeout_s)
            or self._stream.is_exhausted()
        )

    def _idle_s(self) -> float:
        return 0.0 if self._idle_since is None else time.monotonic() - self._idle_since

    @property
    def _checkpoints(self) -> Path:
        return self._run_dir / "checkpoints"

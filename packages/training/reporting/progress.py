"""What a run tells: a live panel on a terminal, plain log lines elsewhere, and one JSON line per event in metrics.jsonl.

That file is the one place where figures are written; a tracker gets its figures from the same lines. Knows nothing about how
numbers come about. A resumed run appends, and its curves go on where they were (`History`).
"""

from __future__ import annotations

import datetime
import json
import logging
import math
import os
import threading
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table

from training.data.conversations import by_reason
from training.data.corpus import Found
from training.interleaved.producer import HELDOUT, ROW, UNUSABLE, Round
from training.judging.gate import Published, Verdict
from training.learning.learner import StepResult
from training.reporting.history import METRICS_FILE, History
from training.reporting.metrics import TrainMetrics
from training.reporting.trackers import Sink

logger = logging.getLogger(__name__)

LOG_EVERY_S = 5.0
GATHERED = "generated tokens to begin with"
SMOOTHING = 0.9  # of the loss shown
SMOOTHED_STEPS = 64  # of a resumed run, so that what is shown goes on where it was
TRACKED = {"step": "train", "judged": "heldout", "published": "published"}  # events, and what their figures begin with there


@dataclass(frozen=True)
class Ends:
    """Ends of a run that are known when it begins."""

    max_steps: int | None = None
    max_time_s: float | None = None
    passes: int | None = None  # over figures["rows"], of which figures["rows_trained"] are done


class Progress:
    def __init__(
        self,
        run_dir: Path,
        console: Console,
        metrics: TrainMetrics | None = None,
        tracker: Sink | None = None,
        ends: Ends | None = None,
    ) -> None:
        self._run_dir = run_dir
        self._tracker = tracker
        self._left = _Left(ends or Ends())
        run_dir.mkdir(parents=True, exist_ok=True)
        _mend(run_dir / METRICS_FILE)
        self._file = (run_dir / METRICS_FILE).open("a", encoding="utf-8")
        self._console = console
        self._metrics = metrics or TrainMetrics()
        self._shown: dict[str, str] = {}
        self._producer: dict[str, str] = {}  # its side of an interleaved run, from its thread
        self._writing = threading.Lock()
        self._loss: float | None = None
        self._logged_at = 0.0
        self._exit = ExitStack()
        self._live: Live | None = None

    def __enter__(self) -> Progress:
        if self._console.is_terminal:
            self._live = self._exit.enter_context(Live(console=self._console, refresh_per_second=4, get_renderable=self._panel))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._exit.close()
        self._file.close()
        if self._tracker is not None:
            self._tracker.close()

    # --- events ---

    def began(self, how: str, step: int) -> None:
        self._write("began", step=step, how=how)
        self._left.begin(step)
        for entry in list(History.read(self._run_dir).steps.values())[-SMOOTHED_STEPS:]:
            self._smooth(entry["loss"])
        if self._tracker is not None:
            self._tracker.begin(step)
        self._shown.pop(GATHERED, None)
        self._say(f"training begins {how}" if step == 0 else how)

    def stepped(self, result: StepResult, num_rows: int, figures: Mapping[str, int]) -> None:
        acceptance = [hits / max(drafted, 1) for hits, drafted in zip(result.num_accepted, result.num_drafted, strict=True)]
        rate = result.num_tokens / max(result.seconds, 1e-9)
        self._metrics.stepped(result.step, result.loss, result.num_tokens, result.learning_rate)
        self._metrics.waiting(figures)
        self._smooth(result.loss)
        if not math.isfinite(result.grad_norm):
            self._say(f"step {result.step}: the gradient is not finite, nothing was changed")
        self._write(
            "step",
            step=result.step,
            loss=result.loss,
            depth_losses=result.depth_losses,
            acceptance=acceptance,
            expected_acceptance=result.depth_acceptance,
            num_supervised=result.num_supervised,
            num_tokens=result.num_tokens,
            num_rows=num_rows,
            grad_norm=result.grad_norm,
            learning_rate=result.learning_rate,
            seconds=result.seconds,
            tokens_per_s=rate,
            **figures,
        )
        newest = {
            "step": f"{result.step}",
            "loss": "not finite" if self._loss is None else f"{self._loss:.3f}",
            "accepted by depth": " ".join(f"{share:.3f}" for share in acceptance),
            "learning rate": f"{result.learning_rate:.3g}",
            "tokens/s": f"{rate:.0f}",
        } | _words(figures)
        self._shown = newest | {name: shown for name, shown in self._shown.items() if name not in newest}
        self._left.after(result.step, num_rows, figures)
        self._tell_time_left()
        self._log_now_and_then()

    def gathering(self, num_tokens: int, needed: int) -> None:
        """A new run waits for its first rows: how many generated tokens there are, and with how many it begins."""
        self._shown[GATHERED] = f"{num_tokens} of {needed}"

    def waiting(self, figures: Mapping[str, int]) -> None:
        self._metrics.waiting(figures)
        self._shown = self._shown | _words(figures) | {"tokens/s": "waiting for rows"}
        self._tell_time_left()
        self._log_now_and_then(every_s=12 * LOG_EVERY_S)

    def saved(self, step: int, directory: Path) -> None:
        self._write("saved", step=step, path=str(directory))

    def not_judged(self, step: int, num_rows: int, needed: int) -> None:
        self._say(
            f"step {step}: {num_rows} held-out rows, too few to judge by (trainer.gate.min_heldout_rows is {needed}); more rows "
            "hold out more, and so does a larger capture.heldout_fraction (of a server), producer.heldout_fraction "
            "(mode=interleaved) or data.heldout_fraction (mode=offline)"
        )

    def judged(self, step: int, verdict: Verdict) -> None:
        self._write("judged", step=step, baseline=verdict.baseline.version, is_better=verdict.is_better, **verdict.metrics)
        self._metrics.judged(verdict.metrics["acceptance_length"])
        self._shown["held-out acceptance"] = f"{verdict.metrics['acceptance_length']:.3f}"
        self._say(f"step {step}: acceptance length {verdict.reason}: {'better' if verdict.is_better else 'not published'}")

    def published(self, step: int, version: str, verdict: Verdict) -> None:
        self._write("published", step=step, version=version, baseline=verdict.baseline.version, **verdict.metrics)
        self._shown["published"] = version
        self._say(f"step {step}: published version {version}")

    def decided(self, news: Published) -> None:
        self._write("version", version=news.version, state=news.state.value, reason=news.reason)
        self._shown["published"] = f"{news.version} ({news.state.value})"
        self._say(f"version {news.version} is {news.state.value}{': ' + news.reason if news.reason else ''}")

    def ended(self, run: str, step: int, version: str | None, *, is_stopped: bool, has_learned: bool) -> None:
        """The last word. version: what the run published last; has_learned: since it began or was resumed."""
        if is_stopped:
            said = f"stopped at step {step}; the same command goes on from there"
        elif not has_learned:
            said = (
                f"run {run} is at step {step}, as before: raise data.passes, trainer.max_steps or trainer.max_time_s, or, for "
                f"other rows, begin another run with trainer.run_id=... (trainer.init={run} goes on from what it has learned)"
            )
        else:
            said = f"the run is over at step {step}"
        published = f"its last version is {version}" if version else "it has published no version"
        self._say(f"{said}; {published}; mode=export export.drafter={run} writes what it has learned")

    # --- events of a corpus ---

    def tokenising(self, done: int, total: int) -> None:
        self._shown["lines tokenised"] = f"{done} of {total}"
        self._log_now_and_then()

    def corpus(self, found: Found) -> None:
        corpus = found.corpus
        counts = {"left_out": dict(found.left_out), "truncated": dict(found.truncated)}
        self._write("corpus", rows=len(corpus), tokens=corpus.num_tokens, generated_tokens=corpus.num_generated, **counts)
        self._shown.pop("lines tokenised", None)
        left_out = {"left out": found.left_out.total(), "truncated": found.truncated.total()}
        self._shown |= {name: f"{count}" for name, count in left_out.items() if count}
        self._say(f"corpus: {found.told()}")

    # --- events of an interleaved run's producer, from its thread ---

    def prompts(self, num_prompts: int, left_out: Mapping[str, int]) -> None:
        self._shown.pop("lines tokenised", None)
        self._write("prompts", prompts=num_prompts, left_out=dict(left_out))
        but = "".join(f", {each}" for each in by_reason(left_out))
        self._say(f"{num_prompts} prompts{but}")

    def producing(self, figures: Mapping[str, str]) -> None:
        self._producer = dict(figures)

    def produced(self, made: Round) -> None:
        self._write("round", **made.figures)
        not_asked = f", {made.num_not_asked} questions not asked: no place for them" if made.num_not_asked else ""
        self._say(
            f"round {made.number}: {made.num_answers} answers{not_asked}, {made.kept[ROW]} rows, {made.kept[HELDOUT]} held out, "
            f"{made.kept[UNUSABLE]} unusable, {made.tokens_per_s:.0f} tokens/s, acceptance length "
            f"{made.speculation.mean_acceptance_length:.3f} (drafter {made.drafter_version})"
        )

    def all_rounds_made(self, num_rounds: int | None) -> None:
        self._write("all_rounds_made", rounds=num_rounds)
        self._say(f"the producer has made all its rounds (producer.max_rounds is {num_rounds}); what is left is trained")

    # --- how it is told ---

    def _tell_time_left(self) -> None:
        left_s = self._left.seconds()
        if left_s is not None:
            self._shown["time left"] = f"{datetime.timedelta(seconds=round(left_s))}"

    def _smooth(self, loss: float | None) -> None:
        if loss is not None and math.isfinite(loss):
            self._loss = loss if self._loss is None else SMOOTHING * self._loss + (1 - SMOOTHING) * loss

    def _write(self, event: str, **values: Any) -> None:
        entry = {"event": event, "time": time.time()} | {name: _finite(value) for name, value in values.items()}
        with self._writing:
            self._file.write(json.dumps(entry, allow_nan=False) + "\n")
            self._file.flush()
        if self._tracker is not None and event in TRACKED:
            self._tracker.put(_flat(TRACKED[event], values), values["step"])

    def _say(self, text: str) -> None:
        if self._live is not None:
            self._console.print(text, markup=False, highlight=False)
        else:
            logger.info("%s", text)

    def _log_now_and_then(self, every_s: float = LOG_EVERY_S) -> None:
        if self._live is None and time.monotonic() - self._logged_at >= every_s:
            self._logged_at = time.monotonic()
            for side, figures in (("", self._shown), ("answers: ", self._producer)):
                if figures:
                    logger.info("%s%s", side, ", ".join(f"{name} {value}" for name, value in figures.items()))

    def _panel(self) -> Table:
        """The trainer's figures and, beside them, the producer's."""
        sides = Table(show_header=False, box=None)
        tables = [_table(figures) for figures in (self._shown, self._producer) if figures]
        sides.add_row(*tables)
        return sides


class _Left:
    """How long until the first end that is known, going by the pace since the run began here."""

    def __init__(self, ends: Ends) -> None:
        self._ends = ends
        self._began_at = time.monotonic()
        self._began_step = self._step = self._num_rows = 0
        self._figures: Mapping[str, int] = {}

    def begin(self, step: int) -> None:
        self._began_step = self._step = step

    def after(self, step: int, num_rows: int, figures: Mapping[str, int]) -> None:
        """A step was made, on num_rows rows."""
        self._step, self._figures = step, figures
        self._num_rows += num_rows

    def seconds(self) -> float | None:
        """None where no end is known."""
        elapsed_s = time.monotonic() - self._began_at
        known: list[float] = []
        if self._ends.max_time_s is not None:
            known.append(self._ends.max_time_s - elapsed_s)
        if self._ends.max_steps is not None and self._step > self._began_step:
            known.append((self._ends.max_steps - self._step) * elapsed_s / (self._step - self._began_step))
        if self._ends.passes is not None and self._num_rows and "rows" in self._figures:
            rows_left = self._figures["rows"] * self._ends.passes - self._figures.get("rows_trained", 0)
            known.append(rows_left * elapsed_s / self._num_rows)
        return max(min(known), 0.0) if known else None


def _flat(prefix: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Lists are by depth, from 1."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, list):
            flat |= {f"{prefix}/{name}_{depth}": each for depth, each in enumerate(value, 1)}
        elif name != "step":
            flat[f"{prefix}/{name}"] = value
    return flat


def _words(figures: Mapping[str, int]) -> dict[str, str]:
    """Figures of a stream as they are shown."""
    shown = {name.replace("_", " "): f"{value}" for name, value in figures.items()}
    if "epoch" in shown:
        shown["epochs done"] = shown.pop("epoch")
    if "steps of epoch" in shown:
        shown["step of epoch"] += f" of {shown.pop('steps of epoch')}"
    return shown


def _table(figures: Mapping[str, str]) -> Table:
    table = Table(show_header=False, box=None)
    for name, value in list(figures.items()):
        table.add_row(name, value)
    return table


def _mend(path: Path) -> None:
    """Cut off a last line that a killed run left half-written."""
    if path.exists():
        data = path.read_bytes()
        os.truncate(path, data.rfind(b"\n") + 1)


def _finite(value: Any) -> Any:
    """JSON knows no infinity: null stands for what is not a number."""
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value

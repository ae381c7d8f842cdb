"""The picture of a run: loss, acceptance by depth, learning rate and speed over steps, verdicts on held-out rows, publications.

Drawn from metrics.jsonl alone, so any run can be drawn again, also one that was killed.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from training.reporting.history import History

PLOT_FILE = "progress.png"
SMOOTHED_POINTS = 200  # a curve of more is drawn pale, and its moving mean over it


def draw(run_dir: Path) -> Path | None:
    """Write progress.png beside the metrics; None if no step was made yet."""
    history = History.read(run_dir)
    if not history.steps:
        return None
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(9, 12), layout="constrained")
    FigureCanvasAgg(figure)
    loss, depth, held_out, rate, speed = figure.subplots(5, 1, sharex=True, height_ratios=(3, 3, 3, 1.5, 1.5))
    at = list(history.steps)
    entries = list(history.steps.values())
    curve(loss, at, [entry["loss"] for entry in entries], "training loss")
    loss.set_ylabel("training loss")
    for k in range(max(len(entry["acceptance"]) for entry in entries)):
        shares = [entry["acceptance"][k] if k < len(entry["acceptance"]) else None for entry in entries]
        curve(depth, at, shares, f"depth {k + 1}")
    depth.set_ylabel("drafts accepted\n(training rows)")
    depth.legend(loc="best", fontsize="small")
    _draw_verdicts(held_out, history)
    curve(rate, at, [entry.get("learning_rate") for entry in entries], "learning rate")
    rate.set_ylabel("learning rate")
    curve(speed, at, [entry["num_tokens"] / max(entry["seconds"] or 0.0, 1e-9) for entry in entries], "tokens/s")
    speed.set_ylabel("tokens/s in steps")
    speed.set_xlabel("step")
    speed.xaxis.set_major_locator(MaxNLocator(integer=True))
    resumed = [entry["step"] for entry in history.began if entry["step"] > 0]
    for axes in (loss, depth, held_out, rate, speed):
        for step in resumed:
            axes.axvline(step, linewidth=0.8, color="0.8", zorder=0)
    figure.suptitle(f"{run_dir.name}: {len(at)} steps{', resumed at grey lines' if resumed else ''}")
    path = run_dir / PLOT_FILE
    figure.savefig(path, dpi=120)
    return path


def _draw_verdicts(axes: Any, history: History) -> None:
    at = list(history.judged)
    verdicts = list(history.judged.values())
    axes.set_ylabel("acceptance length\n(held-out rows)")
    if not verdicts:
        axes.text(0.5, 0.5, "not judged on held-out rows yet", transform=axes.transAxes, ha="center", va="center", color="0.5")
        axes.set_yticks([])
        return
    axes.plot(at, [each["acceptance_length"] for each in verdicts], marker="o", label="candidate")
    axes.plot(at, [each["baseline_acceptance_length"] for each in verdicts], marker=".", linestyle="--", label="served")
    for number, step in enumerate(history.published):
        axes.axvline(step, linestyle=":", linewidth=0.8, color="black", label=None if number else "published")
    axes.legend(loc="best", fontsize="small")


def curve(axes: Any, at: Sequence[int], values: Sequence[float | None], label: str) -> None:
    """A line where values are numbers; a long one also as its moving mean."""
    numbers = [float("nan") if value is None else value for value in values]
    if len(numbers) <= SMOOTHED_POINTS:
        axes.plot(at, numbers, linewidth=0.8, label=label)
        return
    [pale] = axes.plot(at, numbers, linewidth=0.5, alpha=0.3)
    width = len(numbers) // SMOOTHED_POINTS + 1
    bounds = [*range(0, len(numbers), width), len(numbers)]
    chunks = [[value for value in numbers[begin:end] if value == value] for begin, end in pairwise(bounds)]
    means = [sum(chunk) / len(chunk) if chunk else float("nan") for chunk in chunks]
    axes.plot([at[(begin + end - 1) // 2] for begin, end in pairwise(bounds)], means, color=pale.get_color(), label=label)

"""The picture of a run: loss and acceptance by depth over steps, held-out acceptance length, published versions marked.

Reads metrics.jsonl alone, so any run can be drawn again. Where a step appears twice (a crash took it back), the later counts.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from training.reporting.progress import METRICS_FILE

PLOT_FILE = "progress.png"


def draw(run_dir: Path) -> Path | None:
    """Write progress.png beside the metrics; None if no step was made yet."""
    steps, judged, published = read(run_dir / METRICS_FILE)
    if not steps:
        return None
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 8), layout="constrained")
    FigureCanvasAgg(figure)
    loss, depth, held_out = figure.subplots(3, 1, sharex=True)
    at = sorted(steps)
    loss.plot(at, [steps[step]["loss"] for step in at], linewidth=0.8)
    loss.set_ylabel("training loss")
    for k in range(max(len(steps[step]["acceptance"]) for step in at)):
        shares = [steps[step]["acceptance"][k] if k < len(steps[step]["acceptance"]) else None for step in at]
        depth.plot(at, shares, linewidth=0.8, label=f"depth {k + 1}")
    depth.set_ylabel("drafts accepted (training rows)")
    depth.legend(loc="best", fontsize="small")
    at = sorted(judged)
    held_out.plot(at, [judged[step]["acceptance_length"] for step in at], marker="o", label="candidate")
    held_out.plot(at, [judged[step]["baseline_acceptance_length"] for step in at], marker=".", linestyle="--", label="served")
    for step in published:
        held_out.axvline(step, linestyle=":", linewidth=0.8, color="black")
    held_out.set_ylabel("acceptance length (held-out rows)")
    held_out.set_xlabel("step (dotted: a version was published)")
    held_out.legend(loc="best", fontsize="small")
    path = run_dir / PLOT_FILE
    figure.savefig(path, dpi=120)
    return path


def read(path: Path) -> tuple[dict[int, dict[str, Any]], dict[int, dict[str, Any]], list[int]]:
    """(steps, judgements, steps of publications) of a metrics file; a last line cut short by a crash is left out."""
    events: dict[str, dict[int, dict[str, Any]]] = {"step": {}, "judged": {}, "published": {}}
    if path.exists():
        for line in path.read_text(encoding="utf-8").split("\n")[:-1]:
            entry = json.loads(line)
            if entry["event"] in events:
                events[entry["event"]][entry["step"]] = entry
    return events["step"], events["judged"], sorted(events["published"])

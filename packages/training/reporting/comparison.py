"""Runs of a sweep side by side: one table, one picture, from the metrics.jsonl of each.

The best is the one whose weights, judged last, draft longest on held-out rows; where none was judged, the one that drafts
longest on the rows it trained on. That is said, as runs may have been judged on different rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from runtime.files import dump_json, write_atomic
from training.reporting.history import Entry, History
from training.reporting.plot import curve

LAST_SHARE = 0.1  # of the steps, over which "at the end" is a mean
COLUMNS = (
    ("run", "{}"),
    ("changed", "{}"),
    ("began with", "{}"),
    ("ended", "{}"),
    ("steps", "{:,}"),
    ("tokens", "{:,}"),
    ("seconds in steps", "{:.0f}"),
    ("tokens/s", "{:,.0f}"),
    ("loss at the end", "{:.4f}"),
    ("acceptance length, training rows", "{:.3f}"),
    ("acceptance length, held-out rows", "{:.3f}"),
    ("held-out rows", "{:.0f}"),
    ("published", "{}"),
)
WIDE = 160  # characters of a terminal, from which on all columns are shown
UNBROKEN = 32  # characters of a cell that stay on one line
NARROW = {
    "changed",
    "steps",
    "loss at the end",
    "acceptance length, training rows",
    "acceptance length, held-out rows",
    "published",
}


@dataclass(frozen=True)
class Outcome:
    """One run of a sweep. Figures are None where the run did not come so far."""

    run: str
    changed: str  # the settings in which it differs from the others
    start: str | None  # the drafter that it began with
    ended: str
    steps: int
    tokens: int
    seconds: float  # in steps
    tokens_per_s: float | None
    loss: float | None
    training_acceptance: float | None  # 1 + accepted drafts at each depth, of supervised positions
    heldout_acceptance: float | None
    heldout_rows: float | None
    published: int

    @staticmethod
    def of(run: str, history: History, changed: str, ended: str, start: str | None) -> Outcome:
        verdict: Entry = next(reversed(history.judged.values()), {})
        seconds = float(sum(entry.get("seconds") or 0.0 for entry in history.steps.values()))
        tokens = history.total("num_tokens")
        lengths = [1 + sum(entry["acceptance"]) for entry in history.steps.values()]
        last = lengths[-max(round(len(lengths) * LAST_SHARE), 1) :]
        return Outcome(
            run=run,
            changed=changed,
            start=start,
            ended=ended,
            steps=len(history.steps),
            tokens=tokens,
            seconds=seconds,
            tokens_per_s=tokens / seconds if seconds else None,
            loss=history.last("loss", LAST_SHARE),
            training_acceptance=sum(last) / len(last) if last else None,
            heldout_acceptance=verdict.get("acceptance_length"),
            heldout_rows=verdict.get("heldout_rows"),
            published=len(history.published),
        )


def best(outcomes: Sequence[Outcome]) -> Outcome | None:
    """None where no run made a step."""
    judged = [each for each in outcomes if each.heldout_acceptance is not None]
    if judged:
        return max(judged, key=lambda each: each.heldout_acceptance or 0.0)
    trained = [each for each in outcomes if each.training_acceptance is not None]
    return max(trained, key=lambda each: each.training_acceptance or 0.0) if trained else None


def compare(runs: Sequence[tuple[Outcome, History]], directory: Path, console: Console) -> None:
    """Write sweep.json, sweep.md and sweep.png into the directory, and show the table."""
    outcomes = [outcome for outcome, _ in runs]
    directory.mkdir(parents=True, exist_ok=True)
    winner = best(outcomes)
    record = {"runs": [asdict(each) for each in outcomes], "best": winner.run if winner else None}
    write_atomic(directory / "sweep.json", dump_json(record))
    write_atomic(directory / "sweep.md", _markdown(outcomes, winner).encode())
    _draw(runs, directory / "sweep.png")
    console.print(_table(outcomes, winner, is_narrow=console.width < WIDE))
    console.print(_verdict(winner), markup=False, highlight=False)


def _table(outcomes: Sequence[Outcome], winner: Outcome | None, *, is_narrow: bool) -> Table:
    """All columns where there is room for them; sweep.md has them in any case."""
    shown = [index for index, (name, _) in enumerate(COLUMNS) if name in NARROW or not is_narrow]
    rows = [[cell.replace(", ", "\n") for cell in _cells(each)] for each in outcomes]
    table = Table(title=f"{len(outcomes)} runs", title_justify="left")
    for index in shown:
        name, longest = COLUMNS[index][0], max(len(line) for cells in rows for line in cells[index].split("\n"))
        table.add_column(name, overflow="fold", no_wrap=len(name) <= longest <= UNBROKEN)
    for each, cells in zip(outcomes, rows, strict=True):
        table.add_row(*(cells[index] for index in shown), style="bold" if each is winner else None)
    return table


def _verdict(winner: Outcome | None) -> str:
    if winner is None:
        return "No run made a step."
    by = "held-out rows" if winner.heldout_acceptance is not None else "the rows trained on, as none was judged on held-out ones"
    return f"Best: {winner.run} ({winner.changed or 'as configured'}), by acceptance length on {by}."


def _cells(outcome: Outcome) -> list[str]:
    values = asdict(outcome).values()
    return ["-" if value is None else form.format(value) for value, (_, form) in zip(values, COLUMNS, strict=True)]


def _markdown(outcomes: Sequence[Outcome], winner: Outcome | None) -> str:
    header = [name for name, _ in COLUMNS]
    rows = [header, ["---"] * len(header), *(_cells(each) for each in outcomes)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in rows) + f"\n\n{_verdict(winner)}\n"


def _draw(runs: Sequence[tuple[Outcome, History]], path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(9, 9), layout="constrained")
    FigureCanvasAgg(figure)
    loss, accepted, held_out = figure.subplots(3, 1, sharex=True)
    for outcome, history in runs:
        at: list[int] = list(history.steps)
        label = outcome.changed or outcome.run
        curve(loss, at, [entry["loss"] for entry in history.steps.values()], label)
        curve(accepted, at, [1 + sum(entry["acceptance"]) for entry in history.steps.values()], label)
        judged: list[Any] = [entry["acceptance_length"] for entry in history.judged.values()]
        held_out.plot(list(history.judged), judged, marker="o", label=label)
    loss.set_ylabel("training loss")
    accepted.set_ylabel("acceptance length\n(training rows)")
    held_out.set_ylabel("acceptance length\n(held-out rows)")
    held_out.set_xlabel("step")
    held_out.xaxis.set_major_locator(MaxNLocator(integer=True))
    for axes in (loss, accepted, held_out):
        axes.ticklabel_format(axis="y", useOffset=False)
    loss.legend(loc="best", fontsize="small")
    figure.savefig(path, dpi=120)

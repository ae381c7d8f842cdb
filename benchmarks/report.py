"""The one page that a demo leaves: report.md with every number, acceptance.png with the run at a glance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import machine
from client import Answer, tokens_per_second
from evaluation import NEAR_TIE, Difference, Evaluation, lift
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

MOVING_REQUESTS = 20
PLOT = "acceptance.png"


@dataclass(frozen=True)
class Activation:
    version: str
    at: float  # Unix seconds


@dataclass
class Run:
    """Everything that a demo saw."""

    is_from_scratch: bool
    max_tokens: int
    concurrency: int
    source: str  # of the passages
    before: Evaluation | None = None
    after: Evaluation | None = None
    traffic: list[Answer] = field(default_factory=list)  # in the order in which they were complete
    traffic_s: float = 0.0
    num_rows: int = 0  # tapped
    num_train_steps: int = 0
    failures: list[str] = field(default_factory=list)
    activations: list[Activation] = field(default_factory=list)  # by the server, after the gate
    judged: list[str] = field(default_factory=list)  # the gate's verdicts in words
    seconds: float = 0.0

    def verdict(self) -> list[str]:
        """Why this run is not a success; empty if it is one."""
        reasons = [f"{len(self.failures)} requests failed, the first with: {self.failures[0]}"] if self.failures else []
        unexplained = [difference for difference in self._differences() if not difference.is_near_tie]
        if unexplained:
            reasons.append(f"{len(unexplained)} outputs differed with speculation, not at a near-tie")
        if self.is_from_scratch:
            return reasons
        if not self.activations:
            reasons.append("no new drafter version was activated")
        elif self.before and self.after and self.after.acceptance_length <= self.before.acceptance_length:
            reasons.append("the activated drafter is no better on held-out prompts")
        return reasons

    def _differences(self) -> list[Difference]:
        return [difference for evaluation in (self.before, self.after) if evaluation for difference in evaluation.differences]


def write(run: Run, directory: Path) -> Path:
    """Write both files; returns the page."""
    assert run.before is not None
    assert run.after is not None
    plot(run, directory / PLOT)
    page = directory / "report.md"
    page.write_text("\n\n".join([*_outcome(run, run.before, run.after), *_loop(run), *_equality(run), *_machine(run)]) + "\n")
    return page


def _outcome(run: Run, before: Evaluation, after: Evaluation) -> list[str]:
    gain, low, high = lift(before, after)
    reasons = run.verdict()
    title = "A cold start" if run.is_from_scratch else "The loop did not close" if reasons else "The loop, closed"
    first, last = before.speculative[-1].drafter_version, after.speculative[-1].drafter_version
    rows = [
        ("before", before.acceptance_length, tokens_per_second(before.speculative), before.speedup),
        ("after", after.acceptance_length, tokens_per_second(after.speculative), after.speedup),
    ]
    table = ["| | acceptance length | tokens/s | against plain decoding beside it |", "|---|---|---|---|"]
    table += [f"| {name} | {length:.3f} | {rate:.1f} | x {speedup:.2f} |" for name, length, rate, speedup in rows]
    for name, evaluation in (("before", before), ("after", after)):
        table.append(f"| plain, measured {name} | 1 | {tokens_per_second(evaluation.plain):.1f} | x 1 |")
    return [
        f"# {title}",
        *(f"**{reason[0].upper()}{reason[1:]}.**" for reason in reasons),
        f"Acceptance length on {len(before.pairs)} held-out prompts: **{before.acceptance_length:.2f} before (`{first}`), "
        f"{after.acceptance_length:.2f} after {run.traffic_s:.0f} s of live training (`{last}`): {gain:+.2f}** "
        f"(95 % interval {low:+.2f} to {high:+.2f}, bootstrap over prompts).",
        "\n".join(table),
        f"Greedy, at most {run.max_tokens} tokens, one request at a time; tokens/s over whole requests, prompt included. Each "
        "prompt was answered with and without speculation, one right after the other. The trainer was not running.",
    ]


def _loop(run: Run) -> list[str]:
    versions = "\n".join(f"- `{one.version}`, {_after_requests(run, one)} requests in" for one in run.activations) or "- none"
    return [
        f"![Acceptance length over requests]({PLOT})",
        "## The run",
        f"Traffic: {run.source}; {run.concurrency} requests at a time. {len(run.traffic)} requests served, {len(run.failures)} "
        f"failed, {run.num_rows} rows tapped, {run.num_train_steps} training steps. Whole demo: {run.seconds:.0f} s.",
        "Versions that passed the gate and went live:",
        versions,
        "What the gate found:\n\n" + ("\n".join(f"- {verdict}" for verdict in run.judged) or "- nothing yet"),
    ]


def _equality(run: Run) -> list[str]:
    assert run.before is not None
    assert run.after is not None
    lines = []
    for name, evaluation in (("before", run.before), ("after", run.after)):
        same = len(evaluation.pairs) - len(evaluation.differences)
        lines.append(f"- {name}: {same} of {len(evaluation.pairs)} answers byte-equal with and without speculation")
        lines += [f"  - {_in_words(difference)}" for difference in evaluation.differences]
    return ["## Same output", "\n".join(lines)]


def _in_words(difference: Difference) -> str:
    place = f"prompt {difference.prompt}, token {difference.token}: {difference.speculative!r} against {difference.plain!r}"
    if difference.gap is None:
        return f"{place}: **not explained**"
    kind = f"near-tie, within {NEAR_TIE:g}" if difference.is_near_tie else "**not a near-tie**"
    return f"{place}, best two logits {difference.gap:.1e} apart ({kind})"


def _machine(run: Run) -> list[str]:
    return ["## Machine", "\n".join(f"- {name}: {value}" for name, value in machine.describe().items())]


def _after_requests(run: Run, activation: Activation) -> int:
    return sum(answer.at < activation.at for answer in run.traffic)


def moving_lengths(answers: Sequence[Answer], window: int = MOVING_REQUESTS) -> list[float]:
    """Acceptance length over the last `window` answers, for each answer."""
    lengths = []
    for end in range(1, len(answers) + 1):
        recent = answers[max(end - window, 0) : end]
        lengths.append(1.0 + sum(one.num_accepted for one in recent) / max(sum(one.num_steps for one in recent), 1))
    return lengths


def plot(run: Run, path: Path) -> None:
    """Acceptance length of each request as it was served, its moving mean, the swaps, and both held-out levels."""
    figure = Figure(figsize=(9, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    at = range(1, len(run.traffic) + 1)
    axes.plot(at, [1 + one.num_accepted / max(one.num_steps, 1) for one in run.traffic], ".", color="0.75", label="one request")
    axes.plot(at, moving_lengths(run.traffic), color="tab:blue", label=f"mean of the last {MOVING_REQUESTS}")
    for index, activation in enumerate(run.activations):
        label = "a new drafter goes live" if index == 0 else None
        axes.axvline(_after_requests(run, activation) + 0.5, color="tab:red", linestyle="--", linewidth=1, label=label)
    for name, evaluation, colour in (("before", run.before, "0.4"), ("after", run.after, "tab:green")):
        if evaluation is not None:
            level = evaluation.acceptance_length
            axes.axhline(level, color=colour, linestyle=":", label=f"held-out prompts {name}: {level:.2f}")
    axes.set_xlabel("requests served")
    axes.set_ylabel("acceptance length (tokens per target forward)")
    figure.legend(loc="outside upper center", ncols=3, fontsize="small")
    figure.savefig(path, dpi=120)

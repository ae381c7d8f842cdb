"""How fast the trainer trains, and in how much memory, beside other trainers: the same rows, shapes and machine, one call.

    python benchmarks/training_speed.py --out speed.json          on CUDA: 8 rows of 2048 tokens, SmolLM2's shapes
    python benchmarks/training_speed.py --lengths real            as many tokens in rows as long as real answers
    python benchmarks/training_speed.py --shape tiny --rows 2 --length 64 --rounds 2        on any machine, in seconds
    PYTHONPATH=DIR python benchmarks/training_speed.py            with other trainers, unpacked into DIR

A step is everything from rows to changed weights: batch, all depths forward and backward, both heads, clipping, AdamW. Arms take
turns in every round, and the median round counts. Tokens are those of the rows, context included, padding not; memory is the
most that an arm holds in a step, its weights and moments included; on a CPU it is what the process grew by, and known only of an
arm that runs alone. Rows are new in every round, so nothing that an arm remembers of them helps.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch
from command_line import parser_of, positive
from machine import describe
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from training_arms import ARMS, SHAPES, Shape, Step, Target, make_rows, missing

from training.data.batches import TrainingRow

console = Console(highlight=False)


@dataclass
class Figures:
    """One arm's rounds."""

    held_bytes: int = 0  # weights, moments and whatever else stays between steps
    seconds: list[float] = field(default_factory=list)
    peak_bytes: list[int] = field(default_factory=list)

    def summary(self, num_tokens: Sequence[int], *, has_memory: bool) -> dict[str, object]:
        rates = [tokens / seconds for tokens, seconds in zip(num_tokens, self.seconds, strict=True)]
        return {
            "tokens_per_s": round(statistics.median(rates), 1),
            "tokens_per_s_rounds": [round(rate, 1) for rate in rates],
            "peak_mib": round(max(self.peak_bytes) / 2**20, 1) if has_memory else None,
        }


class Memory:
    """Bytes in use: of a CUDA device by torch's count, else of this process."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def now(self) -> int:
        if self._device.type == "cuda":
            torch.cuda.synchronize()
            return torch.cuda.memory_allocated()
        return self._of_process("VmRSS")

    def reset_peak(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        else:
            Path("/proc/self/clear_refs").write_text("5")

    def peak(self) -> int:
        return torch.cuda.max_memory_allocated() if self._device.type == "cuda" else self._of_process("VmHWM")

    def _of_process(self, name: str) -> int:
        [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name)]
        return int(line.split()[1]) * 1024


def lengths_of(args: argparse.Namespace, rng: random.Random) -> list[tuple[int, int]]:
    """(prompt, answer) tokens of each row of one round."""
    total = args.rows * args.length
    if args.lengths == "full":
        return [(args.length // 4, args.length - args.length // 4)] * args.rows
    lengths: list[tuple[int, int]] = []
    while total > 0:  # about as chat, code and mathematics are answered: a few dozen to a few hundred tokens
        prompt, answer = (max(4, min(int(rng.lognormvariate(mu, 0.7)), args.length // 2)) for mu in (4.3, 5.0))
        lengths.append((prompt, answer))
        total -= prompt + answer
    return lengths


def build(names: Sequence[str], target: Target, memory: Memory) -> tuple[dict[str, Step], dict[str, Figures], dict[str, str]]:
    """(arms, their figures so far, why others are left out)."""
    arms: dict[str, Step] = {}
    figures: dict[str, Figures] = {}
    absent = {name: reason for name in names if (reason := missing(name))}
    for name in names:
        if name in absent:
            continue
        before = memory.now()
        try:
            arms[name] = ARMS[name](target)
        except Exception as error:  # other people's code, in versions that we do not choose
            absent[name] = failure(name, error)
            continue
        figures[name] = Figures(held_bytes=memory.now() - before)
    return arms, figures, absent


def failure(name: str, error: Exception) -> str:
    """Why another trainer is left out. Our own fails the benchmark."""
    if name == "slipstream":
        raise error
    return f"{type(error).__name__}: {error}"[:500]


def measure(step: Step, rows: Sequence[TrainingRow], memory: Memory) -> tuple[float, int, int]:
    """(seconds of a step, bytes that it held beyond what was there before, bytes that it left there)."""
    before = memory.now()
    memory.reset_peak()
    started = time.perf_counter()
    step(rows)
    after = memory.now()  # waits for the device
    return time.perf_counter() - started, memory.peak() - before, after - before


def run(args: argparse.Namespace, shape: Shape, device: torch.device) -> dict[str, object]:
    memory, rng = Memory(device), random.Random(0)
    target = Target.make(shape, device)
    arms, figures, absent = build(args.arms, target, memory)
    num_tokens: list[int] = []
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("rounds", total=(args.warmup + args.rounds) * len(arms))
        for number in range(-args.warmup, args.rounds):
            rows = make_rows(shape, lengths_of(args, rng), device, seed=number + args.warmup)
            if number >= 0:
                num_tokens.append(sum(row.num_tokens for row in rows))
            names = list(arms)
            for name in names[number % len(names) :] + names[: number % len(names)]:  # each goes first in its turn
                progress.update(task, description=name)
                try:
                    seconds, peak, left = measure(arms[name], rows, memory)
                except Exception as error:  # as above; what it recorded so far does not count
                    absent[name] = failure(name, error)
                    del arms[name]
                    continue
                if number >= 0:
                    figures[name].seconds.append(seconds)
                    figures[name].peak_bytes.append(figures[name].held_bytes + peak)
                else:
                    figures[name].held_bytes += max(left, 0)  # the moments, made in the first step
                progress.advance(task)
    has_memory = device.type == "cuda" or len(figures) == 1
    return {
        "machine": describe(),
        "device": device.type,
        "shape": asdict(shape),
        "rows": args.rows,
        "length": args.length,
        "lengths": args.lengths,
        "tokens_a_step": statistics.median(num_tokens),
        "arms": {name: figures[name].summary(num_tokens, has_memory=has_memory) for name in arms},
        "absent": absent,
    }


def show(result: dict[str, object]) -> None:
    arms: dict[str, dict[str, float]] = result["arms"]  # type: ignore[assignment]
    ours = arms.get("slipstream", {})
    table = Table("trainer", "tokens/s", "peak MiB", "ours to it: tokens/s", "memory")
    for name, arm in arms.items():
        ratios = (f"{ours[key] / arm[key]:.2f}" if ours.get(key) and arm[key] else "" for key in ("tokens_per_s", "peak_mib"))
        table.add_row(name, f"{arm['tokens_per_s']:,.0f}", f"{arm['peak_mib']:,.0f}" if arm["peak_mib"] else "", *ratios)
    console.print(table)
    for name, reason in result["absent"].items():  # type: ignore[attr-defined]
        console.print(f"left out: {name}, {reason}")
    console.print(", ".join(result["machine"].values()))  # type: ignore[attr-defined]


def arms_of(text: str) -> list[str]:
    if unknown := [name for name in text.split(",") if name not in ARMS]:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is no trainer that is known here; there are {', '.join(ARMS)}")
    return text.split(",")


def main(argv: Sequence[str] | None = None) -> dict[str, object]:
    parser = parser_of(__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--shape", choices=list(SHAPES), default="smollm2")
    parser.add_argument("--depths", type=positive, help="instead of the shape's own")
    parser.add_argument("--draft-vocab", type=positive, help="instead of the shape's own")
    parser.add_argument("--rows", type=positive, default=8, help="of a step")
    parser.add_argument("--length", type=positive, default=2048, help="tokens of a row")
    parser.add_argument("--lengths", choices=["full", "real"], default="full", help="real: rows * length tokens in answers")
    parser.add_argument("--rounds", type=positive, default=15, help="that count")
    parser.add_argument("--warmup", type=int, default=3, help="rounds before those")
    parser.add_argument("--arms", type=arms_of, default=",".join(ARMS), help="trainers, with commas between them")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    changes = {"depths": args.depths, "draft_vocab": args.draft_vocab}
    shape = replace(SHAPES[args.shape], **{name: value for name, value in changes.items() if value})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of other trainers, about versions
        result = run(args, shape, torch.device(args.device))
    show(result)
    if args.out:
        args.out.write_text(json.dumps(result, indent=1))
    return result


if __name__ == "__main__":
    main()

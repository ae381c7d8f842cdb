"""Acceptance length of a drafter on a file of prompts, through the real engine: chains, greedy, first turns.

The file is JSONL with `turns` or `conversations` and a `category`, as Spec-Bench has it. Several sessions run at once; the
system message is the chat template's own. Acceptance length is 1 + accepted draft tokens / verification steps, counts first
and division last, so always say how long the answers were: the longer, the more a small model repeats itself.

    python benchmarks/acceptance.py PROMPTS.jsonl --per-category 8 --json acceptance.json
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import machine

from runtime.config import (
    BackendConfig,
    DrafterConfig,
    DrafterKind,
    ModelConfig,
    SessionsConfig,
    SpeculationConfig,
    SpeculationMode,
)
from runtime.engine.build import build_engine
from runtime.engine.local import LocalEngine
from runtime.errors import SlipstreamError
from runtime.types import Done, Event, Failed, SamplingParams

ALL = "all"


@dataclass(frozen=True)
class Prompt:
    category: str
    text: str


@dataclass(frozen=True)
class Count:
    """What one answer took."""

    category: str
    num_tokens: int
    num_steps: int
    num_accepted: int


def read(path: Path, per_category: int | None, seed: int) -> list[Prompt]:
    """First user turns, at most per_category of each category (chosen by the seed)."""
    groups: dict[str, list[Prompt]] = defaultdict(list)
    for line in path.read_text().splitlines():
        record = json.loads(line)
        text = record["turns"][0] if record.get("turns") else record["conversations"][0]["content"]
        category = record.get("category", ALL)
        groups[category].append(Prompt(category, text))
    rng = random.Random(seed)
    return [
        prompt
        for group in groups.values()
        for prompt in (group if per_category is None else rng.sample(group, min(per_category, len(group))))
    ]


class Runner:
    """Keeps several sessions of an engine busy until every prompt is answered."""

    def __init__(self, engine: LocalEngine, max_tokens: int, concurrency: int) -> None:
        self._engine = engine
        self._params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
        self._concurrency = concurrency
        self._seats = threading.Semaphore(concurrency)
        self._counts: list[Count] = []
        self._failures: list[Exception] = []

    def run(self, prompts: Sequence[Prompt]) -> list[Count]:
        for number, prompt in enumerate(prompts):
            self._seats.acquire()  # given back when an answer ends
            self._check()
            self._start(prompt)
            if sys.stderr.isatty():
                print(f"\r{number + 1} of {len(prompts)} started", end="", file=sys.stderr, flush=True)
        for _ in range(self._concurrency):
            self._seats.acquire()
        self._check()
        return self._counts

    def _start(self, prompt: Prompt) -> None:
        session = self._engine.create_session().session_id
        self._engine.append(session, self._engine.tokenizer.encode_chat([{"role": "user", "content": prompt.text}]))

        def on_event(event: Event) -> None:
            if isinstance(event, Done):
                stats = event.speculation
                count = Count(prompt.category, event.usage.completion_tokens, stats.num_steps, stats.num_accepted)
                self._counts.append(count)
                self._engine.close_session(session)
                self._seats.release()
            elif isinstance(event, Failed):
                self._failures.append(event.error)
                self._seats.release()

        self._engine.generate(session, self._params, on_event=on_event)

    def _check(self) -> None:
        if self._failures:
            raise self._failures[0]


def table(counts: Sequence[Count]) -> dict[str, dict[str, float]]:
    """By category and over all."""
    groups: dict[str, list[Count]] = {ALL: list(counts)}
    for count in counts:
        groups.setdefault(count.category, []).append(count)
    return {
        category: {
            "prompts": len(group),
            "acceptance_length": 1 + sum(one.num_accepted for one in group) / max(sum(one.num_steps for one in group), 1),
            "mean_tokens": sum(one.num_tokens for one in group) / len(group),
        }
        for category, group in groups.items()
    }


def main() -> int:
    options = arguments().parse_args()
    prompts = read(options.prompts, options.per_category, options.seed)
    drafter = DrafterConfig() if options.drafter is None else DrafterConfig(DrafterKind.EAGLE3, str(options.drafter))
    sessions = SessionsConfig(max_batch_sessions=options.concurrency)
    speculation = SpeculationConfig(mode=SpeculationMode.FIXED, max_draft_tokens=options.draft_tokens)
    try:
        engine = build_engine(ModelConfig(options.model), BackendConfig(), drafter, speculation, sessions)
        engine.start()
        began = time.monotonic()
        try:
            counts = Runner(engine, options.max_tokens, options.concurrency).run(prompts)
        finally:
            engine.stop()
    except SlipstreamError as error:
        print(f"acceptance: {error}", file=sys.stderr)
        return 1
    result = {
        "prompts_file": options.prompts.name,
        "model": options.model,
        "drafter_version": engine.drafter_version,
        "draft_tokens": options.draft_tokens,
        "max_tokens": options.max_tokens,
        "concurrency": options.concurrency,
        "seconds": round(time.monotonic() - began, 1),
        "categories": table(counts),
        "machine": machine.describe(),
    }
    show(result)
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=2) + "\n")
    return 0


def show(result: dict[str, object]) -> None:
    categories = result["categories"]
    assert isinstance(categories, dict)
    print(f"\nChain of {result['draft_tokens']}, greedy, first turns, at most {result['max_tokens']} tokens, ", end="")
    print(f"drafter {result['drafter_version']} of {result['model']}, {result['seconds']} s in all\n")
    print("| category | prompts | acceptance length | mean tokens |\n|---|---|---|---|")
    for name, row in categories.items():
        print(f"| {name} | {row['prompts']} | {row['acceptance_length']:.3f} | {row['mean_tokens']:.0f} |")
    described = result["machine"]
    assert isinstance(described, dict)
    print("\n" + "\n".join(f"- {name}: {value}" for name, value in described.items()))


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts", type=Path, help="JSONL with turns or conversations, and category")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--drafter", type=Path, help="an EAGLE3 checkpoint directory; the embedded one if left out")
    parser.add_argument("--draft-tokens", type=int, default=5, help="length of a chain")
    parser.add_argument("--max-tokens", type=int, default=256, help="of one answer")
    parser.add_argument("--concurrency", type=int, default=8, help="sessions at once")
    parser.add_argument("--per-category", type=int, help="so many prompts of each category; all if left out")
    parser.add_argument("--seed", type=int, default=0, help="which prompts of a category")
    parser.add_argument("--json", type=Path, help="write everything there too")
    return parser


if __name__ == "__main__":
    sys.exit(main())

"""What the tap costs: throughput with it on and off, in turns on one engine; and memory over many requests that nobody trains on.

An arm is one round of the same prompts: with capture, every answer's hidden states become a row on disk, and the round is over
when the last row is written; without, the engine hands nothing over. Rounds come in pairs whose order alternates, so that a
machine that gets slower or faster weighs on both arms alike. What counts is the ratio within each pair.

    python benchmarks/capture.py                                            SmolLM2-135M, 8 sessions at once
    python benchmarks/capture.py --model tiny --pairs 20 --require 0.98     exit code 1 if the median ratio is below
    python benchmarks/capture.py --model tiny --requests 10000              memory of the process while the store is full

For memory it is how many requests came that counts, not how long they are: answers are short there, and the store is of a size
that about half of them fill. --without-tap runs the same requests uncaptured, for comparison.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path

import machine
import psutil
import traffic
from command_line import parser_of, positive
from console import Board

from runtime.backends import load_target
from runtime.config import (
    BackendConfig,
    CaptureConfig,
    DrafterConfig,
    FeaturesConfig,
    ModelConfig,
    SessionsConfig,
    SpeculationConfig,
    SpeculationMode,
)
from runtime.drafters.loading import load_drafter
from runtime.engine.local import LocalEngine
from runtime.errors import SlipstreamError
from runtime.features import FeatureTap, open_feature_plane
from runtime.models import Tokenizer, resolve
from runtime.types import Done, Event, Failed, SamplingParams, SessionOptions, Switch

NUM_SAMPLES = 20  # of memory, over a run
WARM_SHARE = 0.25  # of the requests, before memory is looked at: buffers, caches and the store fill up first


@dataclass(frozen=True)
class Round:
    """One arm of one pair."""

    num_tokens: int
    seconds: float
    cpu_s: float  # of the whole process, the tap's writer included

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.seconds

    @property
    def tokens_per_cpu_s(self) -> float:
        return self.num_tokens / self.cpu_s


@dataclass(frozen=True)
class Pair:
    with_tap: Round
    without_tap: Round

    @property
    def ratio(self) -> float:
        return self.with_tap.tokens_per_s / self.without_tap.tokens_per_s

    @property
    def cpu_ratio(self) -> float:
        """The same per second of processor time: what is left of the noise where others use the machine too."""
        return self.with_tap.tokens_per_cpu_s / self.without_tap.tokens_per_cpu_s


class Bench:
    """An engine with a tap into a feature plane of its own, and sessions that keep it busy."""

    def __init__(self, options: argparse.Namespace, root: Path) -> None:
        resolved = resolve(options.model)
        target = load_target(BackendConfig(num_threads=options.threads), ModelConfig(options.model), resolved)
        tokenizer = Tokenizer.load(resolved.path)
        self.store, self.ledger = open_feature_plane(root, FeaturesConfig(budget_mib=options.budget_mib))
        capture = CaptureConfig(min_generated_tokens=2, queue_max_rows=4 * options.concurrency)
        self.tap = FeatureTap(self.store, self.ledger, capture, run_id="bench", target_info=target.info)
        self.engine = LocalEngine(
            target,
            load_drafter(DrafterConfig(), target),
            tokenizer,
            SpeculationConfig(mode=SpeculationMode.FIXED),
            SessionsConfig(max_batch_sessions=options.concurrency, max_sessions=2 * options.concurrency),
            self.tap,
        )
        self._concurrency = options.concurrency
        self._max_tokens = options.max_tokens
        self._failure: Exception | None = None

    def start(self) -> None:
        self.engine.start()

    def stop(self) -> None:
        self.engine.stop()
        self.tap.close()
        self.store.close()
        self.ledger.close()

    def run(self, prompts: Sequence[str], switch: Switch) -> int:
        """Answer all prompts, with as many at once as there are seats; returns the tokens made."""
        seats = threading.Semaphore(self._concurrency)
        num_tokens = 0
        params = SamplingParams(max_tokens=self._max_tokens, temperature=0.0, ignore_eos=True)

        def start(prompt: str) -> None:
            session_id = self.engine.create_session(SessionOptions(capture=switch)).session_id
            self.engine.append(session_id, self.engine.tokenizer.encode(prompt))

            def on_event(event: Event) -> None:
                nonlocal num_tokens
                if isinstance(event, Done):
                    num_tokens += event.usage.completion_tokens
                elif isinstance(event, Failed):
                    self._failure = event.error
                if isinstance(event, Done | Failed):
                    self.engine.close_session(session_id)
                    seats.release()

            self.engine.generate(session_id, params, on_event=on_event)

        for prompt in prompts:
            seats.acquire()
            if self._failure is not None:
                raise self._failure
            start(prompt)
        for _ in range(self._concurrency):
            seats.acquire()
        return num_tokens

    def round(self, prompts: Sequence[str], switch: Switch) -> Round:
        began, cpu_began = time.perf_counter(), time.process_time()
        num_tokens = self.run(prompts, switch)
        self.wait_for_rows()
        return Round(num_tokens, time.perf_counter() - began, time.process_time() - cpu_began)

    def wait_for_rows(self) -> None:
        """Until everything that was offered is a row or was counted as none."""
        while not self._is_settled():
            time.sleep(0.001)

    def _is_settled(self) -> bool:
        counts = self.tap.counters()
        offered = counts["offered"] + counts["cut"]
        return offered == sum(
            count for name, count in counts.items() if name.startswith(("captured", "shed", "skipped", "failed"))
        )

    def empty(self) -> None:
        """As if a trainer had been through, so that each round finds room."""
        refs = self.ledger.trainable() + self.ledger.heldout()
        self.store.delete(refs)
        self.ledger.forget([ref.sample_id for ref in refs])


def measure_cost(bench: Bench, options: argparse.Namespace, board: Board) -> list[Pair]:
    board.stage(f"{options.pairs} pairs of {options.round_requests} requests")
    prompts = list(islice(traffic.passages(options.seed), options.round_requests))
    for switch in (Switch.ON, Switch.OFF):
        bench.round(prompts, switch)  # warm
    pairs = []
    for number in range(options.pairs):
        order = [Switch.ON, Switch.OFF] if number % 2 else [Switch.OFF, Switch.ON]
        rounds = {}
        for switch in order:
            bench.empty()
            rounds[switch] = bench.round(prompts, switch)
        pair = Pair(rounds[Switch.ON], rounds[Switch.OFF])
        pairs.append(pair)
        board.say(f"pair {number + 1}: ratio {pair.ratio:.3f}, of processor time {pair.cpu_ratio:.3f}")
    return pairs


def summary(pairs: Sequence[Pair], seed: int) -> dict[str, float]:
    """The median of the ratios and of the speeds; `_low` and `_high`: a 95 % bootstrap interval of the median."""
    found = {
        "tokens_per_s_with": statistics.median(pair.with_tap.tokens_per_s for pair in pairs),
        "tokens_per_s_without": statistics.median(pair.without_tap.tokens_per_s for pair in pairs),
    }
    for name, ratios in (("ratio", [pair.ratio for pair in pairs]), ("cpu_ratio", [pair.cpu_ratio for pair in pairs])):
        rng = random.Random(seed)
        medians = sorted(statistics.median(rng.choices(ratios, k=len(ratios))) for _ in range(2000))
        found |= {name: statistics.median(ratios), f"{name}_low": medians[50], f"{name}_high": medians[1949]}
    return found


def measure_memory(bench: Bench, options: argparse.Namespace, board: Board) -> list[tuple[int, float]]:
    """(requests answered, resident MiB), with no trainer to take a row."""
    num_requests, switch = options.requests, Switch.OFF if options.without_tap else Switch.ON
    board.stage(f"{num_requests} requests")
    passages = traffic.passages(options.seed)
    process, samples = psutil.Process(), []
    step = max(num_requests // NUM_SAMPLES, 1)
    for answered in range(step, num_requests + 1, step):
        bench.run(list(islice(passages, step)), switch)
        bench.wait_for_rows()
        samples.append((answered, process.memory_info().rss / 2**20))
        counts, used = bench.tap.counters(), bench.store.used_bytes() / 2**20
        shed = sum(count for name, count in counts.items() if name.startswith("shed"))
        board.say(
            f"{answered} requests: {samples[-1][1]:.1f} MiB resident, {counts['captured']} rows of {used:.0f} MiB, {shed} shed"
        )
    return samples


def growth_mib(samples: Sequence[tuple[int, float]]) -> float:
    """How much higher the second half of a warm process reaches than the first."""
    warm = [mib for answered, mib in samples if answered > WARM_SHARE * samples[-1][0]]
    half = len(warm) // 2
    return max(warm[half:]) - max(warm[:half])


def arguments() -> argparse.ArgumentParser:
    parser = parser_of(__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--threads", type=positive, help="of the forward; torch's own choice if left out")
    parser.add_argument("--concurrency", type=positive, default=8, help="sessions at once")
    parser.add_argument("--max-tokens", type=positive, help="of one answer; 64, or 16 where memory is measured")
    parser.add_argument("--pairs", type=positive, default=10, help="rounds of each arm")
    parser.add_argument("--round-requests", type=positive, default=16, help="requests of one round")
    parser.add_argument("--require", type=float, help="the least median ratio; below it the exit code is 1")
    parser.add_argument("--requests", type=positive, help="measure memory over so many requests instead")
    parser.add_argument("--without-tap", action="store_true", help="of those requests, capture none")
    parser.add_argument("--max-growth-mib", type=float, default=16.0, help="of memory; above it the exit code is 1")
    parser.add_argument("--budget-mib", type=positive, help="of the store; 256, or what half of the requests fill")
    parser.add_argument("--seed", type=int, default=0, help="of the prompts")
    parser.add_argument("--json", type=Path, help="write everything there too")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    options = arguments().parse_args(argv)
    options.max_tokens = options.max_tokens or (16 if options.requests else 64)
    options.budget_mib = options.budget_mib or (max(options.requests // 10, 1) if options.requests else 256)
    with tempfile.TemporaryDirectory(prefix="slipstream-capture-") as root, Board() as board:
        try:
            bench = Bench(options, Path(root))
            bench.start()
            try:
                result, is_good = (_memory if options.requests else _cost)(bench, options, board)
                result["outcomes"] = {name: count for name, count in bench.tap.counters().items() if count}
            finally:
                bench.stop()
        except SlipstreamError as error:
            print(f"capture: {error}", file=sys.stderr)
            return 1
    settings = {name: value for name, value in vars(options).items() if name != "json"}
    result |= {"settings": settings, "machine": machine.describe()}
    print("\n".join(f"- {name}: {value}" for name, value in machine.describe().items()))
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=2) + "\n")
    return 0 if is_good else 1


def _cost(bench: Bench, options: argparse.Namespace, board: Board) -> tuple[dict[str, object], bool]:
    pairs = measure_cost(bench, options, board)
    found = summary(pairs, options.seed)
    print(
        f"{options.model}, {options.concurrency} sessions at once, answers of {options.max_tokens} tokens, {options.pairs} pairs "
        f"of {options.round_requests} requests: {found['tokens_per_s_with']:.1f} tokens/s with the tap, "
        f"{found['tokens_per_s_without']:.1f} without"
    )
    for name, what in (("ratio", "throughput"), ("cpu_ratio", "tokens per second of processor time")):
        print(f"ratio of {what}: {found[name]:.3f}, 95 % interval {found[f'{name}_low']:.3f} to {found[f'{name}_high']:.3f}")
    return {"pairs": [asdict(pair) for pair in pairs], **found}, options.require is None or found["ratio"] >= options.require


def _memory(bench: Bench, options: argparse.Namespace, board: Board) -> tuple[dict[str, object], bool]:
    samples = measure_memory(bench, options, board)
    growth = growth_mib(samples)
    print(
        f"{options.model}, {options.requests} requests, no trainer, a store of {options.budget_mib} MiB: resident "
        f"{samples[0][1]:.1f} MiB after the first {samples[0][0]}, {samples[-1][1]:.1f} MiB at the end, growth {growth:+.1f} MiB"
    )
    return {"samples": samples, "growth_mib": growth}, growth <= options.max_growth_mib


if __name__ == "__main__":
    sys.exit(main())

"""The engine's speed beside Hugging Face's, and whether every token is right: a table, and everything as JSON.

Prompts come from JSONL files with `turns` or `conversations`; their `category` is the domain. Six sections:

    single    one greedy request at a time: HF generate, (CUDA: HF with a static cache and a graph), ours plain, a fixed chain,
              adaptive. Every emitted token is held against the float32 model: within 1e-3 of the best logit in float32, 0.4 in
              bfloat16; where answers part, the place and both gaps are listed. A token further away makes the run fail, and so
              does plain decoding that says something else when asked again.
    equality  the same answers alone and plain as in random batches and speculated for: where they part, the two tokens lie within
              1e-3 of each other, and with --numerics invariant they part nowhere, or the run fails
    forward   v(m): what m new tokens in one forward of the target cost beside one
    batch     throughput of several sessions at once, plain and with the fixed chain
    never     adaptive depth beside every fixed one, 0 included, by domain and number of requests at once
    flat      many short requests: memory, and K/V back to the start

    python benchmarks/engine.py spec_bench.jsonl humaneval.jsonl --out engine.json [--quick] [--device cuda]
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import engine_sections
import engine_tables
import machine
import torch
from command_line import parser_of, positive
from engine_arms import Arm, HfGenerate, HfStatic, Ours, Served, read_plain
from engine_sections import Encoded
from prompts import prompt_file
from prompts import read as read_prompts
from transformers.utils import logging as transformers_logging

from runtime.config import (
    BackendConfig,
    DrafterConfig,
    DrafterKind,
    Dtype,
    ModelConfig,
    Numerics,
    SpeculationConfig,
    SpeculationMode,
    TreeShape,
)
from runtime.errors import SlipstreamError
from runtime.models import ResolvedModel, Tokenizer, resolve
from runtime.threads import give_back_team
from training.judging.oracle import LIMITS, Oracle

SECTIONS = ("single", "equality", "forward", "batch", "never", "flat")
DEPTHS = (0, 1, 3, 5, 7)
PLAIN, CHAIN = "ours, plain", "ours, chain of 5"
WAYS: dict[str, dict[str, Any]] = {PLAIN: {"speculate": False}, CHAIN: {"max_draft_tokens": 5}}


@dataclass(frozen=True)
class Plan:
    """How much of everything."""

    per_domain: int = 10
    max_tokens: int = 128
    equality_prompts: int = 100
    equality_tokens: int = 48
    forward_sizes: tuple[int, ...] = (1, 2, 4, 6, 8, 16)
    forward_rounds: int = 30
    batch_sizes: tuple[int, ...] = (1, 2, 4, 8, 16)
    batch_tokens: int = 96
    concurrencies: tuple[int, ...] = (1, 2, 4, 8, 16)
    domains: tuple[str, ...] = ()  # of the section never; none: the first ones
    num_domains: int = 4
    never_tokens: int = 64
    place_tokens: int = 192  # that each of so many at once makes there,
    cell_tokens: int = 384  # and that all of them do at least
    rounds: int = 3
    flat_requests: int = 10_000
    flat_concurrency: int = 64

    def on(self, device: str) -> Plan:
        if device == "cpu":
            return self
        more = (*self.batch_sizes, 32, 64)
        # So many that a cell takes about a second: that the domain is another is noticed within two tenths of one.
        tokens = {"never_tokens": 256, "place_tokens": 1024, "cell_tokens": 2048}
        return replace(self, batch_sizes=more, concurrencies=more, forward_rounds=100, **tokens)


QUICK = Plan(
    per_domain=1,
    max_tokens=32,
    equality_prompts=10,
    equality_tokens=16,
    forward_sizes=(1, 4, 8),
    forward_rounds=5,
    batch_sizes=(1, 8),
    batch_tokens=32,
    concurrencies=(1, 4),
    num_domains=2,
    never_tokens=24,
    place_tokens=72,
    cell_tokens=72,
    rounds=1,
    flat_requests=200,
    flat_concurrency=16,
)


class Bench:
    """One model on one device; parts are made when a section first needs them, and shared by those that follow."""

    def __init__(self, options: argparse.Namespace, plan: Plan) -> None:
        self.plan = plan
        self._resolved: ResolvedModel = resolve(options.model)
        self._model = ModelConfig(options.model, Dtype(options.dtype), options.device)
        self._backend = BackendConfig(options.backend, options.threads, Numerics(options.numerics))
        self._drafter = DrafterConfig() if options.drafter is None else DrafterConfig(DrafterKind.EAGLE3, str(options.drafter))
        self._adaptive_depth: int = options.adaptive_depth
        self._seed: int = options.seed
        self._engines: dict[SpeculationMode, Served] = {}
        self._stack = ExitStack()
        self.prompts, self.num_skipped = self._read(options.prompts, options.seed)
        known = sorted({prompt.domain for prompt in self.prompts})
        if strange := sorted(set(plan.domains) - set(known)):
            raise SystemExit(f"engine: no prompt is of the category {', '.join(strange)}; there are {', '.join(known)}.")
        self.info = self.served(SpeculationMode.FIXED).target.info

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *_error: object) -> None:
        self._stack.close()

    def _read(self, paths: Sequence[Path], seed: int) -> tuple[list[Encoded], int]:
        """First turns as chats; those that do not fit the context are left out and counted."""
        tokenizer = Tokenizer.load(self._resolved.path)
        config = json.loads((self._resolved.path / "config.json").read_text())
        limit = config["max_position_embeddings"] - max(self.plan.max_tokens, self.plan.never_tokens)
        texts = [prompt for path in paths for prompt in read_prompts(path, self.plan.per_domain, seed)]
        prompts = [Encoded(one.category, tokenizer.encode_chat([{"role": "user", "content": one.text}])) for one in texts]
        kept = [prompt for prompt in prompts if len(prompt.token_ids) < limit]
        return kept, len(prompts) - len(kept)

    def served(self, mode: SpeculationMode) -> Served:
        if mode not in self._engines:
            depth = max(DEPTHS) if mode is SpeculationMode.FIXED else self._adaptive_depth
            shape = TreeShape.CHAIN if mode is SpeculationMode.FIXED else TreeShape.AUTO
            speculation = SpeculationConfig(mode=mode, shape=shape, max_draft_tokens=depth)
            most = max(*self.plan.batch_sizes, *self.plan.concurrencies, self.plan.flat_concurrency)
            engine = Served(self._resolved, self._model, self._backend, self._drafter, speculation, most)
            self._stack.callback(engine.stop)
            self._engines[mode] = engine
        return self._engines[mode]

    def single(self) -> dict[str, Any]:
        plan, info = self.plan, self.info
        dtype: torch.dtype = getattr(torch, info.dtype)
        plain = read_plain(self._resolved, dtype, info.device)
        fixed, adaptive = self.served(SpeculationMode.FIXED), self.served(SpeculationMode.ADAPTIVE)
        arms: list[Arm] = [HfGenerate(plain, info.eos_token_ids)]
        if info.device != "cpu":
            arms.append(HfStatic(plain, info.eos_token_ids))
        arms += [Ours(PLAIN, fixed, **WAYS[PLAIN]), Ours(CHAIN, fixed, **WAYS[CHAIN]), Ours("ours, adaptive", adaptive)]
        rates, answers = engine_sections.single(arms, self.prompts, plan.max_tokens, say)
        few = self.prompts[:5]
        [again] = [arm for arm in arms if arm.name == PLAIN]
        exact = plain if dtype is torch.float32 else read_plain(self._resolved, torch.float32, info.device)
        return {
            "arms": rates,
            "correctness": engine_sections.correctness(answers, self.prompts, Oracle(exact), LIMITS[info.dtype], PLAIN),
            "repeats": engine_sections.repeats(again, few, answers[PLAIN][: len(few)], plan.max_tokens),
        }

    def equality(self) -> dict[str, Any]:
        plan, info = self.plan, self.info
        prompts = self.prompts
        if len(prompts) > plan.equality_prompts:
            prompts = random.Random(self._seed).sample(prompts, plan.equality_prompts)
        engines = {
            "chains of every depth": self.served(SpeculationMode.FIXED),
            "adaptive": self.served(SpeculationMode.ADAPTIVE),
        }
        oracle = Oracle(read_plain(self._resolved, torch.float32, info.device))
        limit = 0.0 if self._backend.numerics is Numerics.INVARIANT else LIMITS[info.dtype]
        return engine_sections.equality(engines, prompts, plan.equality_tokens, self._seed, oracle, limit, say)

    def forward(self) -> dict[str, Any]:
        plan = self.plan
        target = self.served(SpeculationMode.FIXED).target
        return engine_sections.forward(target, plan.forward_sizes, context=256, rounds=plan.forward_rounds)

    def batch(self) -> dict[str, Any]:
        plan, served = self.plan, self.served(SpeculationMode.FIXED)
        return engine_sections.batch(served, WAYS, self.prompts, plan.batch_sizes, plan.batch_tokens, plan.rounds, say)

    def never(self) -> dict[str, Any]:
        plan = self.plan
        domains = plan.domains or sorted({prompt.domain for prompt in self.prompts})[: plan.num_domains]
        return engine_sections.never_slower(
            self.served(SpeculationMode.ADAPTIVE),
            self.served(SpeculationMode.FIXED),
            [prompt for prompt in self.prompts if prompt.domain in domains],
            DEPTHS,
            plan.concurrencies,
            plan.never_tokens,
            (plan.place_tokens, plan.cell_tokens),
            plan.rounds,
            say,
        )

    def flat(self) -> dict[str, Any]:
        plan = self.plan
        return engine_sections.flatness(self.served(SpeculationMode.ADAPTIVE), plan.flat_requests, plan.flat_concurrency, say)


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    options = arguments().parse_args(argv)
    transformers_logging.disable_progress_bar()
    try:
        with Bench(options, plan_of(options)) as bench:
            result = run(bench, options)
    except SlipstreamError as error:
        print(f"engine: {error}", file=sys.stderr)
        return 1
    print(engine_tables.page(result))
    single, equality = result["sections"].get("single"), result["sections"].get("equality")
    if single is not None and not (single["correctness"]["ok"] and single["repeats"]["ok"]):
        print(
            "engine: a token lies too far below the best logit, or an answer came out otherwise when asked again", file=sys.stderr
        )
        return 1
    if equality is not None and not equality["ok"]:
        print("engine: an answer in a batch parts from the one alone where no near-tie excuses it", file=sys.stderr)
        return 1
    return 0


def run(bench: Bench, options: argparse.Namespace) -> dict[str, Any]:
    """All sections that were asked for; what is known is written after each."""
    result: dict[str, Any] = {
        "model": bench.info.name,
        "dtype": bench.info.dtype,
        "device": bench.info.device,
        "backend": options.backend,
        "numerics": options.numerics,
        "adaptive_depth": options.adaptive_depth,
        "drafter_version": bench.served(SpeculationMode.FIXED).engine.drafter_version,
        "threads": torch.get_num_threads(),
        "prompts": {"files": [path.name for path in options.prompts], "used": len(bench.prompts), "too_long": bench.num_skipped},
        "plan": {name: getattr(bench.plan, name) for name in bench.plan.__dataclass_fields__},
        "machine": machine.describe(),
        "sections": {},
    }
    for section in options.sections:
        say(f"section {section}")
        give_back_team()  # of this thread, which computed in the section before
        result["sections"][section] = getattr(bench, section)()
        if options.out is not None:
            options.out.write_text(json.dumps(result, indent=2) + "\n")
    return result


def plan_of(options: argparse.Namespace) -> Plan:
    plan = QUICK if options.quick else Plan().on("cpu" if options.device == "cpu" or not torch.cuda.is_available() else "cuda")
    names = ("per_domain", "max_tokens", "equality_prompts", "flat_requests", "rounds")
    given = {name: value for name in names if (value := getattr(options, name))}
    lists = {name: tuple(value) for name in ("concurrencies", "domains") if (value := getattr(options, name))}
    return replace(plan, **given, **lists)


def arguments() -> argparse.ArgumentParser:
    parser = parser_of(__doc__)
    parser.add_argument("prompts", type=prompt_file, nargs="+", help="JSONL files with turns or conversations, and category")
    parser.add_argument("--out", type=Path, help="write everything there as JSON")
    parser.add_argument("--quick", action="store_true", help="a little of everything, in a minute or two")
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=SECTIONS)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--drafter", type=Path, help="an EAGLE3 checkpoint directory; the embedded one if left out")
    parser.add_argument("--device", default="cpu", help="cpu, cuda, auto")
    parser.add_argument("--dtype", choices=[one.value for one in Dtype], default=Dtype.AUTO.value)
    default_depth = SpeculationConfig().max_draft_tokens
    parser.add_argument("--adaptive-depth", type=positive, default=default_depth, help="greatest depth of the adaptive arms")
    parser.add_argument("--backend", default=BackendConfig().name, help="of our arms: transformers or mlx")
    parser.add_argument("--numerics", choices=[one.value for one in Numerics], default=Numerics.DEFAULT.value)
    parser.add_argument("--threads", type=positive, help="CPU threads of a forward; torch's own choice if left out")
    parser.add_argument("--per-domain", type=positive, help="prompts of each category")
    parser.add_argument("--prompts", type=positive, dest="equality_prompts", help="of the section equality, drawn from all")
    parser.add_argument("--max-tokens", type=positive, help="of an answer, in the section single")
    parser.add_argument("--rounds", type=positive, help="of the sections batch and never")
    parser.add_argument("--at", type=positive, nargs="+", dest="concurrencies", help="requests at once, in the section never")
    parser.add_argument("--domains", nargs="+", help="categories of the section never; its first four if left out")
    parser.add_argument("--flat-requests", type=positive, help="of the section flat")
    parser.add_argument("--seed", type=int, default=0, help="which prompts of a category")
    return parser


if __name__ == "__main__":
    sys.exit(main())

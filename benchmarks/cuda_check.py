"""What is to be measured of the engine on a CUDA device, part by part, each within minutes: a table, and everything as JSON.

    tests      all tests that need the device, in a process of their own; a failure makes the run fail
    steps      a whole step on the device by number of sessions and depth, and how many plain steps that is
    baselines  at 1 and 32 sessions: Hugging Face's generate, and its modules with a static cache in a CUDA graph; ours plain,
               with a chain of 5, and adaptive. Every token of ours is held against the float32 model: within 1e-3 of the best
               logit in float32, 0.4 in bfloat16, or the run fails
    sampled    greedy requests beside sampled ones, and those with top_p
    many       as many plain sessions at once as a capture has, ids only

On a CPU the parts run too, small and without `tests` and `steps`, which need the device. The comparison of adaptive
with every fixed depth is `engine.py --device cuda --sections never`.

    python benchmarks/cuda_check.py prompts.jsonl --out check.json --parts steps baselines sampled many
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import machine
import torch
from command_line import parser_of, positive
from engine import say
from engine_arms import Served, StaticSteps, read_plain
from engine_sections import turns
from engine_tables import table
from prompts import prompt_file
from prompts import read as read_prompts

from runtime.backends.base import Segment
from runtime.backends.whole_steps import Fuses
from runtime.config import BackendConfig, DrafterConfig, ModelConfig, SpeculationConfig, SpeculationMode, TreeShape
from runtime.errors import SlipstreamError
from runtime.models import Tokenizer, resolve
from training.judging.oracle import LIMITS, Oracle

PARTS = ("tests", "steps", "baselines", "sampled", "many")
NO_STEPS = "whole steps on the device need a CUDA device and a model that its kernels know"
TESTS = ("tests/runtime/backends/transformers/cuda", "tests/runtime/engine/test_fused.py")
PROMPT_TOKENS = 64
DEPTHS = (0, 1, 3, 5, 7)
STEP_ROUNDS, STEPS_IN_A_ROW = 6, 8
Row = dict[str, Any]


class Check:
    def __init__(self, options: argparse.Namespace) -> None:
        self.is_small = options.device == "cpu"
        self._resolved = resolve(options.model)
        self._model = ModelConfig(options.model, device=options.device)
        self._backend = BackendConfig(kv_pool_mib=options.pool_mib)
        self._tokenizer = Tokenizer.load(self._resolved.path)
        texts = [prompt for path in options.prompts for prompt in read_prompts(path, None, 0)]
        encoded = [self._tokenizer.encode_chat([{"role": "user", "content": one.text}]) for one in texts]
        # All of one length, since a static cache knows no other; the end of the prompt is what is to be answered.
        self.prompts = [ids[-PROMPT_TOKENS:] for ids in encoded if len(ids) >= PROMPT_TOKENS]
        self._served: dict[tuple[SpeculationMode, int], Served] = {}
        self.rounds: int = options.rounds
        self.max_tokens: int = options.max_tokens
        self.sizes: Sequence[int] = options.sizes
        if not self.prompts:
            raise SystemExit(f"cuda_check: no prompt has {PROMPT_TOKENS} tokens; give longer ones.")

    def served(self, mode: SpeculationMode, num_sessions: int, depth: int = max(DEPTHS)) -> Served:
        """One engine at a time: each has a pool of its own."""
        if (mode, num_sessions) not in self._served:
            self.stop()
            shape = TreeShape.CHAIN if mode is SpeculationMode.FIXED else TreeShape.AUTO
            speculation = SpeculationConfig(mode=mode, shape=shape, max_draft_tokens=depth)
            self._served[mode, num_sessions] = Served(
                self._resolved, self._model, self._backend, DrafterConfig(), speculation, num_sessions
            )
        return self._served[mode, num_sessions]

    def stop(self) -> None:
        for served in self._served.values():
            served.stop()
        self._served.clear()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def chosen(self, size: int) -> list[list[int]]:
        return [self.prompts[index % len(self.prompts)] for index in range(size)]

    # --- parts ---

    def tests(self) -> Row:
        """Those of the device, as pytest says it."""
        if self.is_small:
            return {"ok": True, "skipped": "needs a CUDA device"}
        began = time.perf_counter()
        command = [sys.executable, "-m", "pytest", "-q", "--maxfail=10", "--no-header", *TESTS]
        done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent.parent, check=False)
        told = done.stdout.strip().splitlines()
        return {"ok": done.returncode == 0, "seconds": time.perf_counter() - began, "told": told[-60:]}

    def steps(self) -> Row:
        """Of sessions with a history of a few hundred tokens."""
        served = self.served(SpeculationMode.FIXED, max(self.sizes))
        target = served.target
        if not isinstance(target, Fuses):
            return {"skipped": NO_STEPS}
        decoder = _decoder(served)
        found: Row = {}
        for size in self.sizes:
            depths = [depth for depth in DEPTHS if depth <= decoder.depth_of(size)]
            seconds = _step_seconds(target, decoder, self.chosen(size), depths)
            found[str(size)] = {
                str(depth): {"ms": 1000 * taken, "plain_steps": taken / seconds[0]} for depth, taken in seconds.items()
            }
            say(f"steps of {size}")
        return found

    def baselines(self) -> Row:
        sizes = [1, 4] if self.is_small else [1, 32]
        served = self.served(SpeculationMode.FIXED, max(sizes))
        info = served.target.info
        plain = read_plain(self._resolved, getattr(torch, info.dtype), info.device)
        oracle = Oracle(read_plain(self._resolved, torch.float32, info.device))
        arms: dict[str, Callable[[list[list[int]]], list[list[int]]]] = {
            "HF generate": lambda prompts: _generate(plain, prompts, self.max_tokens),
            "HF static cache": _Static(plain, self.max_tokens),
            "ours, plain": self._ours(served, speculate=False),
            "ours, chain of 5": self._ours(served, max_draft_tokens=5),
        }
        found, answers = self._race(arms, sizes)
        self.stop()
        adaptive = {"ours, adaptive": self._ours(self.served(SpeculationMode.ADAPTIVE, max(sizes), 5))}
        more, more_answers = self._race(adaptive, sizes)
        gaps = _gaps(oracle, {**answers, **more_answers}, LIMITS[info.dtype])
        return {"tokens_per_s": {**found, **more}, "gaps": gaps, "ok": all(row["ok"] for row in gaps.values())}

    def sampled(self) -> Row:
        sizes = [1, 4] if self.is_small else [1, 8, 32]
        served = self.served(SpeculationMode.FIXED, max(sizes))
        arms = {}
        for name, fields in {
            "greedy": {},
            "temperature 0.8": {"temperature": 0.8},
            "temperature 0.8, seeds": {"temperature": 0.8, "seed": 1},
            "temperature 0.8, top_p 0.95": {"temperature": 0.8, "top_p": 0.95},
        }.items():
            arms[f"{name}, plain"] = self._ours(served, speculate=False, **fields)
            arms[f"{name}, chain of 5"] = self._ours(served, max_draft_tokens=5, **fields)
        return {"tokens_per_s": self._race(arms, sizes)[0]}

    def many(self) -> Row:
        sizes = [8, 64] if self.is_small else [256, 512, 1024, 2048]
        self.stop()
        served = self.served(SpeculationMode.FIXED, max(sizes), 0)
        arms = {"ids only": self._ours(served, detokenize=False), "with text": self._ours(served)}
        return {"tokens_per_s": self._race(arms, sizes)[0]}

    # --- how they are measured ---

    def _ours(self, served: Served, **fields: Any) -> Callable[[list[list[int]]], list[list[int]]]:
        def answer(prompts: list[list[int]]) -> list[list[int]]:
            return [one.token_ids for one in served.run(prompts, len(prompts), self.max_tokens, ignore_eos=True, **fields)]

        return answer

    def _race(
        self, arms: dict[str, Callable[[list[list[int]]], list[list[int]]]], sizes: Sequence[int]
    ) -> tuple[Row, dict[str, list[tuple[list[int], list[int]]]]]:
        """Tokens per second of whole requests, prompts included, by arm and number at once; prompts and what was said."""
        found: dict[str, dict[int, list[float]]] = {name: {size: [] for size in sizes} for name in arms}
        answers: dict[str, list[tuple[list[int], list[int]]]] = {name: [] for name in arms}
        for number in range(-1, self.rounds):  # the first one is for warming up
            for size in sizes:
                prompts = self.chosen(size)
                for name in turns(list(arms), number):
                    began = time.perf_counter()
                    said = arms[name](prompts)
                    if number >= 0:
                        found[name][size].append(sum(map(len, said)) / (time.perf_counter() - began))
                    if number == 0:
                        answers[name] += zip(prompts, said, strict=True)
                say(f"{size} at once, round {number + 1} of {self.rounds}")
        return {name: {str(size): median(rates) for size, rates in row.items()} for name, row in found.items()}, answers


def _decoder(served: Served) -> Any:
    fused = served.engine._stepper._fused
    assert fused is not None
    return fused._decoder


def _step_seconds(target: Fuses, decoder: Any, prompts: Sequence[Sequence[int]], depths: Sequence[int]) -> dict[int, float]:
    """Medians by depth, which take turns: a few steps of each from the same histories on."""
    caches = [target.new_cache() for _ in prompts]
    histories = [list(prompt) * 4 for prompt in prompts]
    for cache, history in zip(caches, histories, strict=True):
        target.forward([Segment(cache, history[:-1], num_logits=0)])
        target.commit(cache, range(len(history) - 1))
    seconds: dict[int, list[float]] = {depth: [] for depth in depths}
    for number in range(-1, STEP_ROUNDS):  # the first one is for warming up
        for depth in turns(list(depths), number):
            for step in range(-2, STEPS_IN_A_ROW):
                began = time.perf_counter()
                decoder.launch(caches, histories, [None] * len(caches), depth)
                decoder.collect([True] * len(caches))
                if number >= 0 and step >= 0:
                    seconds[depth].append(time.perf_counter() - began)
            for cache, history in zip(caches, histories, strict=True):
                decoder.leave(cache)
                target.truncate(cache, len(history) - 1)
    for cache in caches:
        target.drop(cache)
    return {depth: median(taken) for depth, taken in seconds.items()}


@torch.inference_mode()
def _generate(model: Any, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
    ids = torch.tensor(prompts, device=model.device)
    settings = {"do_sample": False, "max_new_tokens": max_tokens, "min_new_tokens": max_tokens, "pad_token_id": 0}
    said = model.generate(ids, attention_mask=torch.ones_like(ids), **settings)[:, ids.shape[1] :].tolist()
    return [list(row) for row in said]


class _Static:
    """As many sequences at once as there are prompts, each number with a graph of its own."""

    def __init__(self, model: Any, max_tokens: int) -> None:
        self._model, self._max_tokens = model, max_tokens
        self._by_number: dict[int, StaticSteps] = {}

    @torch.inference_mode()
    def __call__(self, prompts: list[list[int]]) -> list[list[int]]:
        if len(prompts) not in self._by_number:
            self._by_number[len(prompts)] = StaticSteps(self._model, len(prompts[0]) + self._max_tokens, len(prompts))
        steps = self._by_number[len(prompts)]
        rows = [steps.prefill(prompts)]
        rows += [steps.next() for _ in range(self._max_tokens - 1)]
        return [list(column) for column in zip(*rows, strict=True)]


def _gaps(oracle: Oracle, answers: dict[str, list[tuple[list[int], list[int]]]], limit: float) -> Row:
    """How far below the float32 model's best logit the tokens lie; only ours must keep the limit."""
    found: Row = {}
    for name, pairs in answers.items():
        gaps = [gap for prompt, said in pairs for gap in oracle.gaps(prompt, said)]
        is_ok = max(gaps) <= limit or not name.startswith("ours")
        found[name] = {"tokens": len(gaps), "not_the_best": sum(gap > 0 for gap in gaps), "largest": max(gaps), "ok": is_ok}
    return found


# --- what is told ---


def page(result: Row) -> str:
    parts = [f"{result['model']} on {result['device']}, {result['max_tokens']} tokens, median of {result['rounds']} rounds"]
    for name, part in result["parts"].items():
        parts.append(f"## {name} ({part['seconds_in_all']:.0f} s)")
        if rates := part.get("tokens_per_s"):
            sizes = list(next(iter(rates.values())))
            header = ["tok/s, whole requests", *(f"{size} at once" for size in sizes)]
            parts.append(table(header, [[arm, *(row[size] for size in sizes)] for arm, row in rates.items()]))
        elif name == "steps" and "skipped" not in part:
            rows = [(size, row) for size, row in part.items() if size.isdigit()]
            header = ["sessions", *(f"depth {depth}: ms, plain steps" for depth in DEPTHS)]
            cells = [[size, *(_step_cell(row.get(str(depth))) for depth in DEPTHS)] for size, row in rows]
            parts.append(table(header, cells))
        else:
            parts.append("\n".join(part.get("told", [part.get("skipped", "")])))
        if gaps := part.get("gaps"):
            header = ["arm", "tokens", "not the best", "largest gap"]
            parts.append(table(header, [[arm, row["tokens"], row["not_the_best"], row["largest"]] for arm, row in gaps.items()]))
    parts.append("\n".join(f"- {name}: {value}" for name, value in result["machine"].items()))
    return "\n\n".join(parts)


def _step_cell(row: Row | None) -> str:
    return "-" if row is None else f"{row['ms']:.2f}, {row['plain_steps']:.2f}"


def main(argv: Sequence[str] | None = None) -> int:
    options = arguments().parse_args(argv)
    try:
        check = Check(options)
        result = run(check, options)
    except SlipstreamError as error:
        print(f"cuda_check: {error}", file=sys.stderr)
        return 1
    print(page(result))
    return 0 if all(part.get("ok", True) for part in result["parts"].values()) else 1


def run(check: Check, options: argparse.Namespace) -> Row:
    """What is known is written after each part."""
    result: Row = {
        "model": options.model,
        "device": options.device,
        "max_tokens": options.max_tokens,
        "rounds": options.rounds,
        "machine": machine.describe(),
        "parts": {},
    }
    try:
        for name in options.parts:
            say(f"part {name}")
            began = time.perf_counter()
            result["parts"][name] = getattr(check, name)()
            result["parts"][name]["seconds_in_all"] = time.perf_counter() - began
            if options.out is not None:
                options.out.write_text(json.dumps(result, indent=2) + "\n")
    finally:
        check.stop()
    return result


def arguments() -> argparse.ArgumentParser:
    parser = parser_of(__doc__)
    parser.add_argument("prompts", type=prompt_file, nargs="+", help="JSONL files with turns or conversations")
    parser.add_argument("--out", type=Path, help="write everything there as JSON")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--device", default="cuda", help="cuda or cpu")
    parser.add_argument(
        "--sizes", type=positive, nargs="+", default=[1, 2, 4, 8, 16, 32, 64, 128], help="sessions of the part steps"
    )
    parser.add_argument("--max-tokens", type=positive, default=128, help="of an answer")
    parser.add_argument("--rounds", type=positive, default=3, help="of each measurement")
    parser.add_argument("--pool-mib", type=positive, help="device memory for K/V; a third of what is free if left out")
    return parser


if __name__ == "__main__":
    sys.exit(main())

"""What is measured of an engine, one function a section; each returns plain numbers for the JSON file.

Arms take turns within a section, prompt by prompt or round by round, so that a machine that changes its speed changes it for
all of them, and what is told is a median. Nothing here prints.
"""

from __future__ import annotations

import math
import random
import resource
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from statistics import mean, median
from typing import Any, TypeVar

import torch
from engine_arms import Answer, Arm, Served

from runtime.backends.base import Segment, Target
from runtime.types import SpeculationStats
from training.judging.oracle import Oracle

Row = dict[str, Any]
Say = Callable[[str], None]
Name = TypeVar("Name")
ADAPTIVE = "adaptive"  # the name of that arm
FULL_ROUNDS = 2  # of the section never, with all depths
LEAST_AGREED = 8  # tokens of an answer, or it is left out there
LEAST_EACH, LEAST_REQUESTS = 3, 4  # requests of each place, and of all, there
HOPEFUL = 0.85  # of the best depth's rate: what comes less near has no part in the rounds after those
STEADY = 0.01  # standard error of a ratio: a cell's rounds go on until it has it,
MOST_TIMES = 4  # up to so many times the rounds that all have


@dataclass(frozen=True)
class Encoded:
    domain: str
    token_ids: list[int]


def turns(names: Sequence[Name], number: int) -> list[Name]:
    """All of them; another one goes first each time."""
    start = number % len(names)
    return [*names[start:], *names[:start]]


def single(arms: Sequence[Arm], prompts: Sequence[Encoded], max_tokens: int, say: Say) -> tuple[Row, dict[str, list[Answer]]]:
    """One request at a time, in every arm. Rates in tokens per second; `ratio` is the median over prompts of the paired ones."""
    by_name = {arm.name: arm for arm in arms}
    for arm in arms:
        arm.answer(prompts[0].token_ids, 8)  # the first forwards of a process are slower
    answers: dict[str, list[Answer]] = {name: [] for name in by_name}
    for number, prompt in enumerate(prompts):
        for name in turns(list(by_name), number):
            answers[name].append(by_name[name].answer(prompt.token_ids, max_tokens))
        say(f"single {number + 1}/{len(prompts)}")
    domains = sorted({prompt.domain for prompt in prompts})
    found: Row = {}
    for name, mine in answers.items():
        found[name] = _rates(mine)
        found[name]["domains"] = {}
        for domain in domains:
            chosen = [index for index, prompt in enumerate(prompts) if prompt.domain == domain]
            found[name]["domains"][domain] = _rates([mine[index] for index in chosen])
            found[name]["domains"][domain]["ratio"] = _ratios(answers, mine, chosen)
        found[name]["ratio"] = _ratios(answers, mine, range(len(prompts)))
    return found, answers


def _rates(answers: Sequence[Answer]) -> Row:
    num_steps = sum(answer.stats.num_steps for answer in answers)
    return {
        "decode_tokens_per_s": median(answer.decode_rate for answer in answers),
        "step_ms": 1000 * median(answer.step_seconds for answer in answers),
        "request_tokens_per_s": sum(len(answer.token_ids) for answer in answers) / sum(answer.seconds for answer in answers),
        "acceptance_length": 1 + sum(answer.stats.num_accepted for answer in answers) / num_steps if num_steps else None,
    }


def _ratios(answers: dict[str, list[Answer]], mine: Sequence[Answer], chosen: Iterable[int]) -> Row:
    """Of this arm's decoding rate to that of every arm."""
    return {
        name: median(mine[index].decode_rate / max(other[index].decode_rate, 1e-9) for index in chosen)
        for name, other in answers.items()
    }


def correctness(
    answers: dict[str, list[Answer]], prompts: Sequence[Encoded], oracle: Oracle, limit: float, reference: str
) -> Row:
    """Every token of every answer against the float32 model on the same prefix, and where answers part from those of `reference`.

    `limit`: how far below the best logit an emitted token may lie.
    """
    found: Row = {"limit": limit, "reference": reference, "arms": {}, "partings": []}
    for name, mine in answers.items():
        gaps = [oracle.gaps(prompt.token_ids, answer.token_ids) for prompt, answer in zip(prompts, mine, strict=True)]
        found["arms"][name] = {
            "largest_gap": max(map(max, gaps)),
            "not_the_best": sum(gap > 0 for row in gaps for gap in row),
            "tokens": sum(map(len, gaps)),
            "answers": len(mine),
        }
        for index, (answer, other) in enumerate(zip(mine, answers[reference], strict=True)):
            if answer.token_ids != other.token_ids:
                place = next(
                    (k for k, pair in enumerate(zip(answer.token_ids, other.token_ids, strict=False)) if pair[0] != pair[1]),
                    min(len(answer.token_ids), len(other.token_ids)),
                )
                parting = {"arm": name, "prompt": index, "token": place}
                other_gaps = oracle.gaps(prompts[index].token_ids, other.token_ids)
                both = zip(("gap", "gap_of_reference"), (gaps[index], other_gaps), strict=True)
                found["partings"].append(parting | {which: max(rows[place : place + 1], default=None) for which, rows in both})
    found["ok"] = all(row["largest_gap"] <= limit for row in found["arms"].values())
    return found


def equality(
    engines: dict[str, Served], prompts: Sequence[Encoded], max_tokens: int, seed: int, oracle: Oracle, limit: float, say: Say
) -> Row:
    """Whether an answer is the same alone and plain as among others and speculated for.

    The prompts are shuffled and cut into runs of random size, which each engine answers so many at a time and at a random
    depth. Answers may part where both tokens lie within `limit` of the best logit in float32; with limit 0 nowhere.
    """
    rng = random.Random(seed)
    first = next(iter(engines.values()))
    alone = [first.run([prompt.token_ids], 1, max_tokens, speculate=False)[0] for prompt in prompts]
    answers: dict[str, list[Answer]] = {"alone": alone}
    for name, served in engines.items():
        order = rng.sample(range(len(prompts)), len(prompts))
        found: dict[int, Answer] = {}
        while order:
            size = rng.randint(1, 16)
            chosen, order = order[:size], order[size:]
            texts = [prompts[index].token_ids for index in chosen]
            found |= zip(chosen, served.run(texts, len(texts), max_tokens, max_draft_tokens=rng.randint(1, 7)), strict=True)
            say(f"equality {name}: {len(prompts) - len(order)}/{len(prompts)}")
        answers[name] = [found[index] for index in range(len(prompts))]
    page = correctness(answers, prompts, oracle, limit, "alone")
    num_partings = {name: sum(one["arm"] == name for one in page["partings"]) for name in engines}
    apart = [max(one["gap"] or 0.0, one["gap_of_reference"] or 0.0) for one in page["partings"]]  # below the best logit
    page["equal"] = {name: len(prompts) - number for name, number in num_partings.items()}
    page["ok"] = not apart if limit == 0 else max(apart, default=0.0) <= limit
    return page


def forward(target: Target, sizes: Sequence[int], context: int, rounds: int) -> Row:
    """v(m): seconds of a whole forward of m new tokens behind `context` others, and how many times that of one token."""
    rng = random.Random(0)
    text = [rng.randrange(target.info.vocab_size) for _ in range(context)]
    cache = target.new_cache()
    try:
        target.forward([Segment(cache, text)])
        target.commit(cache, range(context))
        seconds: dict[int, list[float]] = {size: [] for size in sizes}
        for number in range(-2, rounds):  # the first two are for warming up
            for size in turns(list(sizes), number):
                began = time.perf_counter()
                [out] = target.forward([Segment(cache, text[:size], num_logits=size)])
                out.logits.sum().item()  # waits for the device
                if number >= 0:
                    seconds[size].append(time.perf_counter() - began)
    finally:
        target.drop(cache)
    one = median(seconds[1])
    return {str(size): {"seconds": median(times), "v": median(times) / one} for size, times in seconds.items()}


def repeats(arm: Arm, prompts: Sequence[Encoded], answers: Sequence[Answer], max_tokens: int) -> Row:
    """Whether equal shapes agree: the same arm asked again says the same."""
    again = [arm.answer(prompt.token_ids, max_tokens).token_ids for prompt in prompts]
    equal = sum(mine == other.token_ids for mine, other in zip(again, answers, strict=True))
    return {"arm": arm.name, "asked_again": len(again), "equal": equal, "ok": equal == len(again)}


def batch(
    served: Served,
    ways: dict[str, Row],
    prompts: Sequence[Encoded],
    sizes: Sequence[int],
    num_tokens: int,
    rounds: int,
    say: Say,
) -> Row:
    """So many sessions at once, in each way (the fields of its requests): tokens per second while all of them decode."""
    found: dict[str, dict[int, list[tuple[float, float]]]] = {way: {size: [] for size in sizes} for way in ways}
    for number in range(rounds):
        for size in turns(list(sizes), number):
            chosen = [prompts[index % len(prompts)].token_ids[:32] for index in range(size)]
            for way in turns(list(ways), number):
                answers = served.run(chosen, size, num_tokens, ignore_eos=True, **ways[way])
                began = max(answer.times[0] for answer in answers)
                last = min(answer.times[-1] for answer in answers)
                rate = sum(answer.num_between(began, last) for answer in answers) / max(last - began, 1e-9)
                found[way][size].append((rate, median(answer.step_seconds for answer in answers)))
        say(f"batch round {number + 1}/{rounds}")
    return {way: _by_size(measured) for way, measured in found.items()}


def _by_size(measured: dict[int, list[tuple[float, float]]]) -> Row:
    rates = {size: median(rate for rate, _ in pairs) for size, pairs in measured.items()}
    one = rates[min(rates)]
    return {
        str(size): {"tokens_per_s": rates[size], "times": rates[size] / one, "step_ms": 1000 * median(step for _, step in pairs)}
        for size, pairs in measured.items()
    }


def never_slower(
    adaptive: Served,
    fixed: Served,
    prompts: Sequence[Encoded],
    depths: Sequence[int],
    concurrencies: Sequence[int],
    max_tokens: int,
    num_tokens: tuple[int, int],
    rounds: int,
    say: Say,
) -> Row:
    """By domain and number of requests at once: tokens per second at each fixed depth and adaptively, and the ratio to the best.

    All arms do the same work, token by token: the fixed depths are asked first, and of each answer as much counts as they all
    give. In float32 that is all of it, nearly always. In bfloat16 shapes of forwards part them sooner, and then one arm has text
    that is easier to draft than another's, which says nothing of either. (`same` says how many of an arm's answers were as
    asked for.) There are so many of them that each of the places taken makes the first of num_tokens, and all together the
    second, or nearly.

    Adaptive meets every cell once before the first round. A round visits every cell, and in each all arms one after the other, so
    that what changes the machine for a while touches one round of a cell and not all. Which depth is the best is said by the
    other rounds than the one whose ratio is taken, or luck would choose it. Depths that `_Cell.arms` calls hopeless sit out the
    later rounds. Behind `rounds` rounds only cells go on whose ratio is not steady yet: with dozens at once Python is what takes
    the time, and how fast that is changes from one tenth of a second to the next. Ctrl-C ends it behind the first round.
    """
    arms: dict[str, tuple[Served, Row]] = {ADAPTIVE: (adaptive, {})}
    for depth in depths:
        arms[str(depth)] = (fixed, {"max_draft_tokens": depth} if depth else {"speculate": False})
    asked = [prompt.token_ids for prompt in prompts]
    answers = [fixed.run(asked, max(concurrencies), max_tokens, **fields) for served, fields in arms.values() if served is fixed]
    texts: dict[str, list[tuple[list[int], list[int]]]] = {}  # by domain, with its answer
    for prompt, *given in zip(prompts, *answers, strict=True):
        if len(agreed := _common_start([answer.token_ids for answer in given])) >= LEAST_AGREED:
            texts.setdefault(prompt.domain, []).append((prompt.token_ids, agreed))
    if not texts:
        raise SystemExit(f"engine: no answer is the same for {LEAST_AGREED} tokens at all depths; there is nothing to compare.")
    say(f"all depths agree on {mean(len(text) for here in texts.values() for _, text in here):.0f} tokens of an answer")
    cells = [_Cell(domain, num, arms) for domain in texts for num in concurrencies]

    def run(cell: _Cell, name: str) -> tuple[list[Answer], Sequence[list[int]]]:
        here, (served, fields) = texts[cell.domain], arms[name]
        of_place = max(num_tokens[0], num_tokens[1] / cell.concurrency)
        num_each = max(of_place / mean(len(text) for _, text in here), LEAST_EACH)
        num_requests = max(round(num_each * cell.concurrency), LEAST_REQUESTS)
        chosen, wanted = zip(*(here[index % len(here)] for index in range(num_requests)), strict=True)
        return served.run(chosen, cell.concurrency, list(map(len, wanted)), ignore_eos=True, **fields), wanted

    for cell in cells:
        run(cell, ADAPTIVE)
    say("adaptive has met every cell once, uncounted: what steps cost here it knows, as a server does that has served before")
    try:
        for number in range(rounds * MOST_TIMES):
            for cell in [cell for cell in cells if number < rounds or cell.error > STEADY]:
                given = {name: run(cell, name) for name in turns(cell.arms(), number)}
                for name, (answers, wanted) in given.items():
                    cell.note(name, answers, wanted)
                say(f"round {number + 1}/{rounds}: {cell.domain}, {cell.concurrency} at once: {cell} of the best depth")
    except KeyboardInterrupt:
        if not all(cell.num_rounds for cell in cells):
            raise
        say("stopped: what is told is of the rounds until now")
    return {"cells": [cell.row() for cell in cells], "smallest_ratio": min(cell.ratio for cell in cells)}


def _common_start(texts: Sequence[Sequence[int]]) -> list[int]:
    return [ids[0] for ids in takewhile(lambda ids: len(set(ids)) == 1, zip(*texts, strict=False))]


class _Cell:
    """What was measured of one domain with so many requests at once, round by round."""

    def __init__(self, domain: str, concurrency: int, arms: Iterable[str]) -> None:
        self.domain, self.concurrency = domain, concurrency
        self._rates: dict[str, list[float]] = {name: [] for name in arms}
        self._same: dict[str, list[bool]] = {name: [] for name in arms}
        self._drafted = SpeculationStats()  # adaptively

    def note(self, arm: str, answers: Sequence[Answer], wanted: Sequence[Sequence[int]]) -> None:
        self._rates[arm].append(_throughput(answers))
        self._same[arm] += [answer.token_ids == text for answer, text in zip(answers, wanted, strict=True)]
        for answer in answers if arm == ADAPTIVE else ():
            self._drafted.add(answer.stats)

    def arms(self) -> list[str]:
        """Those of the next round: adaptive, and the depths whose best round, of at least FULL_ROUNDS, came near the best."""
        best = {name: max(rates, default=0.0) for name, rates in self._rates.items() if name != ADAPTIVE}
        if self.num_rounds < FULL_ROUNDS:
            return list(self._rates)
        return [ADAPTIVE, *(name for name, rate in best.items() if rate >= HOPEFUL * max(best.values()))]

    @property
    def num_rounds(self) -> int:
        return len(self._rates[ADAPTIVE])

    def __str__(self) -> str:
        return f"{self.ratio:.3f} ± {self.error:.3f}"

    @property
    def ratio(self) -> float:
        return median(self._ratios())

    @property
    def error(self) -> float:
        """The ratio's standard error, as that of the median of normal values, by how far they lie from it; 0 where one is all."""
        ratios, middle = self._ratios(), self.ratio
        deviation = 1.4826 * median(abs(ratio - middle) for ratio in ratios)
        return 1.2533 * deviation / math.sqrt(len(ratios))

    def _ratios(self) -> list[float]:
        """By round: adaptive's rate to that of the depth that was best in all rounds but this."""
        others = [self._rates[name] for name in self.arms() if name != ADAPTIVE]
        ratios = []
        for number, rate in enumerate(self._rates[ADAPTIVE]):
            elsewhere = [k for k in range(self.num_rounds) if k != number] or [number]
            best = max(others, key=lambda rates: median(rates[k] for k in elsewhere))
            ratios.append(rate / best[number])
        return ratios

    def row(self) -> Row:
        return {
            "domain": self.domain,
            "concurrency": self.concurrency,
            "ratio": self.ratio,
            "error": self.error,
            "tokens_per_s": {name: median(rates) for name, rates in self._rates.items()},
            "rounds": self._rates,
            "same": {name: mean(same) for name, same in self._same.items()},
            "drafted_per_step": self._drafted.num_drafted / max(self._drafted.num_steps, 1),
        }


def _throughput(answers: Sequence[Answer]) -> float:
    """Tokens per second while all places are taken: until the last request begins. Behind that, how long the longest answers
    are would count, and not how many tokens so many requests at once get."""
    began, until = min(answer.began_at for answer in answers), max(answer.began_at for answer in answers)
    return sum(answer.num_between(began, until) for answer in answers) / (until - began)


def flatness(served: Served, num_requests: int, concurrency: int, say: Say) -> Row:
    """Many short requests: K/V is back to where it was, and memory does not grow over the second half of them.

    On a CPU it does at first: oneDNN keeps the kernels of its last thousand shapes, and requests bring many of those.
    """
    rng = random.Random(0)
    vocab_size = served.target.info.vocab_size
    kv_before = served.engine.stats().kv_bytes
    peaks: list[float] = []
    parts, began = 10, time.perf_counter()
    for part in range(parts):
        prompts = [[rng.randrange(vocab_size) for _ in range(rng.randint(4, 32))] for _ in range(num_requests // parts)]
        served.run(prompts, concurrency, max_tokens=rng.randint(4, 12), ignore_eos=True)
        peaks.append(_peak_mib())
        say(f"{(part + 1) * num_requests // parts} short requests, peak {peaks[-1]:.0f} MiB")
    return {
        "requests": num_requests,
        "concurrency": concurrency,
        "requests_per_s": num_requests / (time.perf_counter() - began),
        "peak_mib": peaks,
        "growth_mib": peaks[-1] - peaks[parts // 2 - 1],
        "kv_bytes_before": kv_before,
        "kv_bytes_after": served.settled_kv_bytes(),
    }


def _peak_mib() -> float:
    """Of this process, and of the CUDA device where there is one."""
    unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss
    host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20
    return float(host) + (torch.cuda.max_memory_allocated() / 2**20 if torch.cuda.is_available() else 0.0)

"""Measuring what a target's forward costs here, before the first request: the first estimate of `speculation.costs`.

It runs through the target's own door with caches of its own, which are gone afterwards. Of several rounds the fastest
counts: what disturbed the others is not the target's cost, and real steps correct the rest.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from runtime.backends.base import Segment, Target
from runtime.speculation.costs import Costs

CONTEXT_TOKENS = 64
ROWS = (1, 2, 4, 8, 16, 32)  # of one session
NUM_SESSIONS = 4  # of one row each, to be held against as many rows of one session
NUM_ROUNDS = 4  # the first of them warms up
BUDGET_S = 3.0  # no further round is begun after it


def measure_forward(target: Target) -> Costs:
    """Seconds of forwards of these many rows, every row with its logits."""
    token_ids = [index % target.info.vocab_size for index in range(CONTEXT_TOKENS)]
    caches = [target.new_cache() for _ in range(NUM_SESSIONS)]
    try:
        for cache in caches:
            target.forward([Segment(cache, token_ids)])
            target.commit(cache, range(CONTEXT_TOKENS))
        arms = {rows: [Segment(caches[0], token_ids[:rows], num_logits=rows)] for rows in ROWS}
        together = [Segment(cache, token_ids[:1]) for cache in caches]
        fastest: dict[int, float] = {}
        fastest_together = float("inf")
        started = time.perf_counter()
        for number in range(NUM_ROUNDS):
            if number > 1 and time.perf_counter() - started > BUDGET_S:
                break
            seconds = {rows: _seconds(target, segments) for rows, segments in arms.items()}
            seconds_together = _seconds(target, together)
            if number:
                fastest = {rows: min(taken, fastest.get(rows, taken)) for rows, taken in seconds.items()}
                fastest_together = min(fastest_together, seconds_together)
    finally:
        for cache in caches:
            target.drop(cache)
    return Costs(fastest, max(fastest_together - fastest[NUM_SESSIONS], 0.0) / (NUM_SESSIONS - 1))


def _seconds(target: Target, segments: Sequence[Segment]) -> float:
    started = time.perf_counter()
    outputs = target.forward(segments)
    for output in outputs:
        output.logits.argmax(dim=-1).tolist()  # waits for the device, as a step does
    return time.perf_counter() - started

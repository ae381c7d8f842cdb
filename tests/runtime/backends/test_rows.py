"""The arithmetic of rows against what a policy says, token by token."""

from __future__ import annotations

import random

import pytest

from runtime.backends.rows import Rows, drop_step
from runtime.types import CachePolicy

POLICIES = [
    CachePolicy(),
    CachePolicy(window=1),
    CachePolicy(sink=3, window=1),
    CachePolicy(window=20),
    CachePolicy(sink=5, window=20),
    CachePolicy(sink=4, window=200),
]


def grow(rows: Rows, num_tokens: int) -> None:
    """A chain, committed whole; then what is due is dropped, as a cache does it."""
    rows.parents = range(-1, num_tokens - 1)
    rows.commit(range(num_tokens))
    rows.dropped += rows.num_due()


def held(rows: Rows) -> list[int]:
    """Positions in row order."""
    sink = rows.policy.sink if rows.dropped else rows.length
    return [*range(min(sink, rows.length)), *range(sink + rows.dropped, rows.length)]


def seen_behind(policy: CachePolicy, length: int) -> set[int]:
    """What a token at position `length` sees of those before it."""
    window = policy.window if policy.window is not None else length + 1
    return {p for p in range(length) if p < policy.sink or p > length - window}


@pytest.mark.parametrize("policy", POLICIES, ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_what_the_next_tokens_see_is_held_and_little_more(policy: CachePolicy, seed: int) -> None:
    rng, rows = random.Random(seed), Rows(policy)
    while rows.length < 700:
        grow(rows, rng.choice([1, 1, 2, 7, 40, 150]))
        positions = held(rows)
        assert len(positions) == rows.num_rows == rows.length - rows.dropped
        assert [rows.row(position) for position in positions] == list(range(rows.num_rows))
        seen = seen_behind(policy, rows.length)
        assert seen <= set(positions)
        if policy.window is not None:
            assert len(positions) < len(seen) + 2 * drop_step(policy.window)


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_a_length_is_gone_back_to_exactly_if_what_is_seen_from_there_is_held(policy: CachePolicy) -> None:
    for length in range(401):
        rows = Rows(policy)
        grow(rows, 400)
        before, positions = (rows.length, rows.dropped), held(rows)
        if seen_behind(policy, length) <= set(positions):
            rows.truncate(length)
            assert rows.length == length
            assert held(rows) == [position for position in positions if position < length]
        else:
            with pytest.raises(ValueError, match=f"Cannot truncate to {length} tokens; the cache dropped"):
                rows.truncate(length)
            assert (rows.length, rows.dropped) == before


@pytest.mark.parametrize("length", [-1, 401])
def test_a_length_that_was_never_there_is_refused(length: int) -> None:
    rows = Rows(CachePolicy())
    grow(rows, 400)
    with pytest.raises(ValueError, match=f"Cannot truncate to {length} tokens; the cache holds 400"):
        rows.truncate(length)


def test_what_is_dropped_depends_on_the_length_alone() -> None:
    policy = CachePolicy(sink=2, window=30)
    slow, fast = Rows(policy), Rows(policy)
    for _ in range(300):
        grow(slow, 1)
    grow(fast, 300)
    assert slow.dropped == fast.dropped > 0


def test_only_a_root_path_is_committed() -> None:
    rows = Rows(CachePolicy())
    rows.parents = [-1, 0, 0]
    with pytest.raises(ValueError, match="no root path"):
        rows.commit([0, 1, 2])
    assert (rows.length, list(rows.parents)) == (0, [-1, 0, 0])
    rows.commit([0, 2])
    assert (rows.length, list(rows.parents)) == (2, [])

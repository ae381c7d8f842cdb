"""PrefixIndex: who holds K/V for the beginning of a history."""

from __future__ import annotations

import random
import time

import pytest

from runtime.sessions import prefixes
from runtime.sessions.prefixes import BLOCK_TOKENS, PrefixIndex, common_length
from runtime.sessions.session import Session
from runtime.types import CachePolicy, SessionOptions


def holder(history: list[int], cached: int | None = None, policy: CachePolicy | None = None, dropped: int = 0) -> Session:
    session = Session("s", SessionOptions(cache_policy=policy or CachePolicy()), ttl_s=1.0)
    session.append(history, None)
    session.cached, session.dropped = len(history) if cached is None else cached, dropped
    return session


def tokens(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(1000), k=length)


def index_of(*sessions: Session) -> PrefixIndex:
    index = PrefixIndex()
    for session in sessions:
        index.add(session)
    return index


def test_the_longest_common_beginning_is_found_to_the_token() -> None:
    shared = tokens(1, 300)
    short, long = holder([*shared[:100], *tokens(2, 50)]), holder([*shared[:211], *tokens(3, 400)])
    index = index_of(short, long, holder(tokens(4, 500)))
    new = holder([*shared, 5, 6, 7], cached=0)
    assert index.find(new, 302) == (long, 211)
    assert index.find(new, 170) == (long, 170)
    index.remove(long)
    assert index.find(new, 302) == (short, 100)
    index.remove(short)
    assert index.find(new, 302) is None


def test_only_what_is_cached_counts_and_it_may_grow_and_shrink() -> None:
    history = tokens(1, 300)
    other, new = holder(history, cached=40), holder([*history, 1], cached=0)
    index = index_of(other)
    assert index.find(new, 300) == (other, 40)
    other.cached = 300
    index.note(other)
    assert index.find(new, 300) == (other, 300)
    other.cached = 70
    index.note(other)
    assert index.find(new, 300) == (other, 70)
    other.cached = 0
    index.note(other)
    assert index.find(new, 300) is None
    assert len(index) == 0


def test_less_than_a_block_is_not_worth_it() -> None:
    other = holder(tokens(1, 100))
    assert index_of(other).find(holder([*tokens(1, BLOCK_TOKENS - 1), 9999], cached=0), BLOCK_TOKENS) is None


def test_a_session_is_not_its_own_holder_and_other_policies_never_meet() -> None:
    history = tokens(1, 100)
    own = holder(history)
    assert index_of(own, holder(history, policy=CachePolicy(4, 200))).find(own, 99) is None


def test_what_has_dropped_tokens_is_taken_as_a_whole_or_not_at_all() -> None:
    policy, history = CachePolicy(4, 32), tokens(1, 200)
    dropped, short = holder(history[:150], policy=policy, dropped=80), holder(history[:40], policy=policy)
    index = index_of(dropped, short)
    assert index.find(holder(history, 0, policy), 199) == (dropped, 150)
    assert index.find(holder([*history[:140], 9999], 0, policy), 140) == (short, 40)


def test_a_collision_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefixes, "hash", lambda value: 1, raising=False)
    liar, honest = holder(tokens(1, 100)), holder(tokens(2, 100))
    new = holder([*tokens(2, 90), 9999], cached=0)
    assert index_of(liar, honest).find(new, 90) == (honest, 90)
    assert index_of(liar).find(new, 90) is None


def test_a_look_up_does_not_read_the_histories_of_all() -> None:
    """256 sessions that begin with the same 8,000 tokens, and as many that do not: some milliseconds, not their sum."""
    shared = tokens(1, 8000)
    sessions = [holder([*shared, *tokens(seed, 100)]) for seed in range(256)] + [holder(tokens(s, 8000)) for s in range(256)]
    index = index_of(*sessions)
    new = holder([*shared, *tokens(7, 50), 9999], cached=0)
    assert index.find(new, 8050) == (sessions[7], 8050)  # takes all of them in, once
    seconds = []
    for _ in range(5):
        started = time.perf_counter()
        index.find(new, 8050)
        seconds.append(time.perf_counter() - started)
    assert min(seconds) < 0.02


def test_nothing_is_left_of_those_that_went() -> None:
    sessions = [holder(tokens(seed % 5, 100 + seed)) for seed in range(50)]
    index = index_of(*sessions)
    index.find(holder(tokens(1, 400), 0), 399)
    assert len(index) > 0
    for session in sessions:
        index.remove(session)
    assert len(index) == 0


def test_common_length() -> None:
    rng = random.Random(0)
    for _ in range(200):
        a = rng.choices(range(3), k=rng.randrange(20))
        b = [*a[: rng.randrange(20)], *rng.choices(range(3), k=rng.randrange(20))]
        limit = rng.randrange(30)
        expected = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
        assert common_length(a, b, limit) == min(expected, limit)

"""The K/V budget: idle sessions make room, and those that run together stay within it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from runtime.backends.base import Segment, SegmentOutput, Target
from runtime.types import SamplingParams

from .conftest import GREEDY, Listener, MakeEngine, prompt_of, run


def test_over_the_budget_idle_sessions_lose_their_cache_not_their_ids(make_engine: MakeEngine, target: Target) -> None:
    engine = make_engine(kv_budget_mib=16, max_sessions=64)
    per_token = target.cache_bytes(1000) // 1000
    prompt = prompt_of(1, 1500)
    needed = 16 * 2**20 // (per_token * 1500) + 2
    sessions = [engine.create_session().session_id for _ in range(needed)]
    for session_id in sessions:
        run(engine, prompt, SamplingParams(temperature=0.0, max_tokens=2), session_id)
    first = engine.get_session(sessions[0])
    assert (first.history_length, first.cached_tokens) == (1502, 0)
    assert engine.get_session(sessions[-1]).cached_tokens == 1502
    again, _ = run(engine, [], SamplingParams(temperature=0.0, max_tokens=4), sessions[0])
    assert len(again.token_ids) == 4


def test_the_budget_holds_for_those_that_come_together_and_for_what_they_leave(
    make_engine: MakeEngine, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    budget = 16 * 2**20
    held: list[int] = []
    forward = target.forward

    def watched(segments: Sequence[Segment]) -> list[SegmentOutput]:
        outputs = forward(segments)
        held.append(target.cache_bytes())
        return outputs

    monkeypatch.setattr(target, "forward", watched)
    engine = make_engine(kv_budget_mib=16)
    num_sessions = 2 * budget // target.cache_bytes(1500)
    assert num_sessions <= 16, "more than run at once"
    listeners = [Listener() for _ in range(num_sessions)]
    for seed, listener in enumerate(listeners):
        session_id = engine.create_session().session_id
        engine.append(session_id, prompt_of(seed, 1500))
        engine.generate(session_id, GREEDY, on_event=listener)
    for listener in listeners:
        listener.wait()
    assert budget / 2 < max(held) <= budget

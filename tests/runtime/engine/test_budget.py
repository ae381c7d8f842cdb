"""The K/V budget: idle sessions make room, and those that run together stay within it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from runtime.backends.base import Segment, SegmentOutput, Target
from runtime.errors import EngineUnavailable
from runtime.types import Done, SamplingParams, Tokens

from .conftest import (
    GREEDY,
    KeepingTap,
    Listener,
    MakeEngine,
    assert_greedy,
    endless,
    greedy_reference,
    prompt_of,
    random_drafter,
    run,
)


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


def test_those_that_outgrow_the_budget_take_turns_the_oldest_first(make_engine: MakeEngine, target: Target) -> None:
    """They start small, so all are let in; grown up, they are more than twice what the budget holds."""
    engine = make_engine(random_drafter(), prefill_chunk_tokens=16)
    budget = engine._stepper.holdings.budget_bytes = 5 * target.cache_bytes(256)
    held: list[int] = []
    forward = target.forward

    def watched(segments: Sequence[Segment]) -> list[SegmentOutput]:
        outputs = forward(segments)
        held.append(target.cache_bytes())
        return outputs

    target.forward = watched  # type: ignore[method-assign]
    params = SamplingParams(temperature=0.0, max_tokens=330, ignore_eos=True)
    listeners = [Listener() for _ in range(8)]
    ended: list[int] = []
    for seed, listener in enumerate(listeners):
        session_id = engine.create_session().session_id
        engine.append(session_id, prompt_of(seed, 20))

        def note(event: object, seed: int = seed, listener: Listener = listener) -> None:
            if isinstance(event, Done):
                ended.append(seed)
            listener(event)  # type: ignore[arg-type]

        engine.generate(session_id, params, on_event=note)
    dones = [listener.wait() for listener in listeners]
    target.forward = forward  # type: ignore[method-assign]
    assert engine.stats().num_preempted > 0
    assert max(held) <= budget < 8 * target.cache_bytes(350) / 2
    assert all(abs(place - seed) <= 1 for place, seed in enumerate(ended)), ended  # in order of arrival, but for lucky drafts
    for seed, (listener, done) in enumerate(zip(listeners, dones, strict=True)):
        assert_greedy(target, prompt_of(seed, 20), listener.token_ids)
        assert (done.usage.prompt_tokens, done.usage.completion_tokens, done.usage.cached_tokens) == (20, 330, 0)


def test_one_generation_larger_than_the_budget_still_runs(make_engine: MakeEngine, target: Target) -> None:
    engine = make_engine()
    engine._stepper.holdings.budget_bytes = target.cache_bytes(100)
    listeners = [Listener(), Listener()]
    for seed, listener in enumerate(listeners):
        session_id = engine.create_session().session_id
        engine.append(session_id, prompt_of(seed, 300))
        engine.generate(session_id, GREEDY, on_event=listener)
    for seed, listener in enumerate(listeners):
        listener.wait()
        assert listener.token_ids == greedy_reference(target, prompt_of(seed, 300), 40)


@pytest.mark.parametrize("tap", [None, KeepingTap()], ids=["untapped", "tapped"])
def test_a_generation_that_had_to_wait_can_be_cancelled(make_engine: MakeEngine, target: Target, tap: KeepingTap | None) -> None:
    engine = make_engine(prefill_chunk_tokens=16, tap=tap)
    engine._stepper.holdings.budget_bytes = 3 * target.cache_bytes(128)
    params = SamplingParams(temperature=0.0, max_tokens=1000, ignore_eos=True)
    listeners = [Listener(), Listener()]
    generations = []
    with engine._lock:
        for seed, listener in enumerate(listeners):
            session_id = engine.create_session().session_id
            engine.append(session_id, prompt_of(seed, 20))
            generations.append(engine.generate(session_id, params, on_event=listener))
    for listener in listeners:  # both are let in
        while not listener.token_ids:
            listener.next()
    while engine.stats().num_preempted == 0:  # and have grown
        listeners[0].next()
    generations[1].cancel()
    done = listeners[1].wait()
    assert (done.finish_reason, done.usage.completion_tokens) == ("cancelled", len(listeners[1].token_ids))
    assert 0 < done.usage.completion_tokens < 1000
    generations[0].cancel()
    listeners[0].wait()
    if tap is not None:
        assert [turn.session_id for turn in tap.turns] == [generations[0].session.id], "of the other no states are left"


@pytest.mark.parametrize("num_forwards", [1, 3])
def test_a_generation_that_reads_its_history_anew_can_be_cancelled(
    make_engine: MakeEngine, target: Target, num_forwards: int
) -> None:
    tap = KeepingTap()
    engine = make_engine(prefill_chunk_tokens=16, tap=tap)
    _, listener, generation = endless(engine)
    while len(listener.token_ids) < 200:
        listener.next()
    forward, num_left = target.forward, num_forwards

    def counted(segments: Sequence[Segment]) -> list[SegmentOutput]:
        nonlocal num_left
        num_left -= 1
        if not num_left:
            generation.cancel()
        return forward(segments)

    def take_away() -> None:
        engine._stepper.holdings.release(generation.session)
        target.forward = counted  # type: ignore[method-assign]

    engine._loop.call(take_away)
    assert listener.wait().finish_reason == "cancelled"
    target.forward = forward  # type: ignore[method-assign]
    assert tap.turns == []
    listener, _ = run(engine, [7], GREEDY, generation.session.id)
    assert_greedy(target, generation.session.history[:-40], listener.token_ids)


def test_forks_and_restores_stay_within_the_budget(make_engine: MakeEngine, target: Target, tmp_path: Path) -> None:
    engine = make_engine(prefix_reuse=False)
    parent = engine.create_session().session_id
    run(engine, prompt_of(1, 300), GREEDY, parent)
    engine.save_session(parent, tmp_path / "s")
    budget = engine._stepper.holdings.budget_bytes = 5 * target.cache_bytes(340) // 2
    forks = [engine.fork_session(parent).session_id for _ in range(4)]
    forks.append(engine.restore_session(tmp_path / "s").session_id)
    assert 0 < target.cache_bytes() <= budget
    infos = [engine.get_session(session_id) for session_id in (parent, *forks)]
    assert [info.cached_tokens for info in infos[-2:]] == [340, 340]  # the latest; the others made room
    assert {info.history_length for info in infos} == {340}
    listener, _ = run(engine, [7], GREEDY, forks[0])
    history = engine._store.get(forks[0]).history
    assert listener.token_ids == greedy_reference(target, history[:341], 40)


def test_no_room_on_the_device_fails_one_generation(
    make_engine: MakeEngine, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine()
    monkeypatch.setattr(target, "new_cache", lambda policy: (_ for _ in ()).throw(MemoryError("out of memory")))
    with pytest.raises(EngineUnavailable, match="out of memory"):
        run(engine, prompt_of(1), GREEDY)
    monkeypatch.undo()
    listener, _ = run(engine, prompt_of(1), GREEDY)
    assert listener.token_ids == greedy_reference(target, prompt_of(1), 40)


def test_k_v_goes_from_those_unused_the_longest(make_engine: MakeEngine, target: Target) -> None:
    """What counts is when a generation ended, not when it began."""
    engine = make_engine(prefix_reuse=False)
    slow, quick = (engine.create_session().session_id for _ in range(2))
    engine.append(slow, prompt_of(1))
    listener = Listener()
    engine.generate(slow, SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True), on_event=listener)
    run(engine, prompt_of(2), SamplingParams(temperature=0.0, max_tokens=1), quick)
    listener.wait()
    engine._stepper.holdings.budget_bytes = 5 * target.cache_bytes(128) // 2
    run(engine, prompt_of(3), GREEDY)
    assert engine.get_session(quick).cached_tokens == 0
    assert engine.get_session(slow).cached_tokens == 84


def test_a_long_prompt_costs_a_running_session_no_step(make_engine: MakeEngine, target: Target) -> None:
    """Between two tokens of a running session there is one forward, whatever is read meanwhile, by however many."""
    sizes: list[int] = []
    gaps: list[int] = []
    forward = target.forward

    def watched(segments: Sequence[Segment]) -> list[SegmentOutput]:
        sizes.append(sum(len(segment.token_ids) for segment in segments))
        return forward(segments)

    engine = make_engine(prefill_chunk_tokens=32, max_draft_tokens=0)
    target.forward = watched  # type: ignore[method-assign]
    running, last = Listener(), [0]

    def note(event: object) -> None:
        if isinstance(event, Tokens):
            gaps.append(len(sizes) - last[0])
            last[0] = len(sizes)
        running(event)  # type: ignore[arg-type]

    session_id = engine.create_session().session_id
    engine.append(session_id, prompt_of(0, 10))
    engine.generate(session_id, SamplingParams(temperature=0.0, max_tokens=150, ignore_eos=True), on_event=note)
    readers = [Listener() for _ in range(3)]
    for seed, reader in enumerate(readers, start=1):
        session_id = engine.create_session().session_id
        engine.append(session_id, prompt_of(seed, 700))
        engine.generate(session_id, SamplingParams(temperature=0.0, max_tokens=1), on_event=reader)
    for listener in (running, *readers):
        listener.wait()
    target.forward = forward  # type: ignore[method-assign]
    assert set(gaps) == {1}
    assert len(gaps) == 150
    # The chunk is shared out, but for the least share of each; the running session's own prompt may be read in the same step.
    assert max(sizes) <= 3 * 16 + 10
    assert sum(size > 16 for size in sizes[:140]) > 40  # they were read while it ran


def test_a_caller_that_never_comes_back_holds_no_k_v_for_ever(make_engine: MakeEngine, target: Target) -> None:
    engine = make_engine(prefix_reuse=False)
    prompt = prompt_of(1)
    left = engine.open_session(prompt).session_id
    listener, _ = run(engine, [], GREEDY, left, append=False)
    reserved = engine.open_session([*prompt, *listener.token_ids, 7])
    assert (reserved.session_id, reserved.state, reserved.cached_tokens) == (left, "reserved", 64)
    engine._stepper.holdings.budget_bytes = 3 * target.cache_bytes(128) // 2
    run(engine, prompt_of(2), GREEDY)
    info = engine.get_session(left)
    assert (info.state, info.history_length, info.cached_tokens) == ("reserved", 65, 0)
    again, _ = run(engine, [], GREEDY, left, append=False)
    assert again.token_ids == greedy_reference(target, [*prompt, *listener.token_ids, 7], 40)

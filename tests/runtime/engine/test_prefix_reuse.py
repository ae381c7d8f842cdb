"""Prefix reuse inside the engine: no token that some session holds is computed again, and outputs are what they were."""

from __future__ import annotations

import random
import threading
import time

import pytest
import torch

from runtime.backends.base import Segment, SegmentOutput, Target
from runtime.drafters.base import Drafter
from runtime.drafters.none import NoDrafter
from runtime.engine.holdings import MIN_SHARED_TOKENS
from runtime.types import CachePolicy, SamplingParams, SessionOptions

from .conftest import GREEDY, KeepingTap, Listener, MakeEngine, assert_greedy, greedy_reference, prompt_of, random_drafter, run

SHORT = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)


@pytest.mark.parametrize("drafter", [NoDrafter, random_drafter])
def test_cached_tokens_are_the_same_with_and_without_speculation(
    make_engine: MakeEngine, target: Target, drafter: type[Drafter]
) -> None:
    engine = make_engine(drafter())
    shared = prompt_of(1, 200)
    first, _ = run(engine, [*shared, *prompt_of(2)], GREEDY)
    second, done = run(engine, [*shared, *prompt_of(3)], GREEDY)
    assert done.usage.cached_tokens == 200
    assert second.token_ids == greedy_reference(target, [*shared, *prompt_of(3)], 40)
    whole = [*shared, *prompt_of(2), *first.token_ids, *prompt_of(4)]  # the first conversation, grown
    third, done = run(engine, whole, GREEDY)
    assert done.usage.cached_tokens == 264
    assert third.token_ids == greedy_reference(target, whole, 40)
    _, done = run(engine, shared, GREEDY)
    assert done.usage.cached_tokens == 199  # one is left to compute, for its logits
    assert engine.stats().cached_prompt_tokens == 200 + 264 + 199


def test_a_longer_beginning_elsewhere_replaces_a_shorter_one_of_its_own(make_engine: MakeEngine, target: Target) -> None:
    engine = make_engine()
    history = prompt_of(1, 300)
    run(engine, history, SHORT)
    session_id = engine.create_session().session_id
    run(engine, prompt_of(9, 60), SamplingParams(temperature=0.0, max_tokens=1, logit_bias={5: 100.0}), session_id)
    other = [*prompt_of(9, 60), 5, *prompt_of(2, 200)]
    run(engine, other, SHORT)
    listener, done = run(engine, [*prompt_of(2, 200), 7], GREEDY, session_id)
    assert done.usage.cached_tokens == len(other)
    assert listener.token_ids == greedy_reference(target, [*other, 7], 40)


def test_a_short_beginning_is_computed(make_engine: MakeEngine) -> None:
    engine = make_engine()
    run(engine, prompt_of(1, 100), SHORT)
    _, done = run(engine, [*prompt_of(1, MIN_SHARED_TOKENS - 1), 9, 9], SHORT)
    assert done.usage.cached_tokens == 0


def test_it_can_be_switched_off(make_engine: MakeEngine, target: Target) -> None:
    engine = make_engine(prefix_reuse=False)
    run(engine, prompt_of(1, 100), SHORT)
    listener, done = run(engine, prompt_of(1, 100), GREEDY)
    assert done.usage.cached_tokens == 0
    assert listener.token_ids == greedy_reference(target, prompt_of(1, 100), 40)


def test_waiting_for_one_that_reads_the_same_prompt(make_engine: MakeEngine, target: Target) -> None:
    """Several answers to one prompt: it is read once, though all come at the same time."""
    rows: list[int] = []
    forward = target.forward

    def counted(segments: list[Segment]) -> list[SegmentOutput]:
        rows.append(sum(len(segment.token_ids) for segment in segments))
        return forward(segments)

    engine = make_engine(random_drafter(), prefill_chunk_tokens=64, max_draft_tokens=0)
    target.forward = counted  # type: ignore[method-assign,assignment]
    prompt = prompt_of(1, 400)
    listeners = [Listener() for _ in range(5)]
    with engine._lock:  # so that they come together
        for seed, listener in enumerate(listeners):
            session_id = engine.create_session().session_id
            engine.append(session_id, [*prompt, *prompt_of(seed, 3)])
            engine.generate(session_id, GREEDY, on_event=listener)
    cached = [listener.wait().usage.cached_tokens for listener in listeners]
    assert cached[0] == 0
    assert min(cached[1:]) > 400 - MIN_SHARED_TOKENS  # the rest is not worth another step of waiting
    assert sum(rows) <= 400 + 4 * MIN_SHARED_TOKENS + 5 * (3 + 40)
    target.forward = forward  # type: ignore[method-assign]
    for seed, listener in enumerate(listeners):
        assert listener.token_ids == greedy_reference(target, [*prompt, *prompt_of(seed, 3)], 40)


def test_whoever_waits_goes_on_when_the_reader_is_gone(make_engine: MakeEngine, target: Target) -> None:
    engine = make_engine(prefill_chunk_tokens=16)
    prompt = prompt_of(1, 1500)
    sessions = [engine.create_session().session_id for _ in range(2)]
    listeners = [Listener(), Listener()]
    for session_id in sessions:
        engine.append(session_id, prompt)
    reader = engine.generate(sessions[0], GREEDY, on_event=listeners[0])
    engine.generate(sessions[1], GREEDY, on_event=listeners[1])
    listeners[0].next()  # it has started to read
    reader.cancel()
    assert listeners[0].wait().finish_reason == "cancelled"
    engine.close_session(sessions[0])
    listeners[1].wait()
    assert listeners[1].token_ids == greedy_reference(target, prompt, 40)


def test_those_behind_a_waiting_one_pass_it(make_engine: MakeEngine) -> None:
    engine = make_engine(prefill_chunk_tokens=16)
    order: list[str] = []
    listeners = {name: Listener() for name in ("reader", "same", "other")}
    with engine._lock:
        for name, prompt in (("reader", prompt_of(1, 600)), ("same", prompt_of(1, 600)), ("other", prompt_of(2, 20))):
            session_id = engine.create_session().session_id
            engine.append(session_id, prompt)

            def note(event: object, name: str = name) -> None:
                order.append(name)
                listeners[name](event)  # type: ignore[arg-type]

            engine.generate(session_id, SHORT, on_event=note)
    for listener in listeners.values():
        listener.wait()
    assert order.index("other") < order.index("same")


def test_rows_of_a_shared_beginning_have_no_holes(make_engine: MakeEngine, target: Target) -> None:
    tap = KeepingTap()
    engine = make_engine(random_drafter(), tap=tap)
    run(engine, [*prompt_of(1, 200), *prompt_of(2)], GREEDY)
    run(engine, [*prompt_of(1, 200), *prompt_of(3)], GREEDY)
    turn = tap.turns[1]
    cache = target.new_cache()
    [output] = target.forward([Segment(cache, turn.token_ids)])
    target.drop(cache)
    aux, last = torch.cat([part.aux for part in turn.hidden]), torch.cat([part.last for part in turn.hidden])
    assert (turn.first_position, len(aux)) == (0, 264)
    assert torch.allclose(aux, output.hidden.aux, atol=1e-4)
    assert torch.allclose(last, output.hidden.last, atol=1e-4)
    first = {part.aux.data_ptr() for part in tap.turns[0].hidden}
    assert turn.hidden[0].aux.data_ptr() in first, "kept states are shared, not copied"


def test_a_session_that_dropped_tokens_is_shared_as_a_whole_only(make_engine: MakeEngine) -> None:
    engine = make_engine(NoDrafter())
    options = SessionOptions(cache_policy=CachePolicy(4, 40))
    prompt = prompt_of(1, 300)
    first, _ = run(engine, prompt, SHORT, engine.create_session(options).session_id)
    whole = [*prompt, *first.token_ids, 7]
    second, done = run(engine, whole, GREEDY, engine.create_session(options).session_id)
    assert done.usage.cached_tokens == 304
    third, done = run(engine, [*prompt[:200], 7], GREEDY, engine.create_session(options).session_id)
    assert done.usage.cached_tokens == 0
    _, done = run(engine, prompt, SHORT)
    assert done.usage.cached_tokens == 0  # another policy
    alone = make_engine(NoDrafter(), prefix_reuse=False)
    for history, listener in ((whole, second), ([*prompt[:200], 7], third)):
        reference, _ = run(alone, history, GREEDY, alone.create_session(options).session_id)
        assert reference.token_ids == listener.token_ids


def test_whatever_is_shared_the_output_is_the_targets_own(make_engine: MakeEngine, target: Target) -> None:
    """Conversations made of a few recurring pieces, side by side and one after the other, some of them with little room."""
    engine = make_engine(random_drafter(), prefill_chunk_tokens=16, max_batch_sessions=4)
    engine._stepper.holdings.budget_bytes = 12 * target.cache_bytes(256)
    pieces = [prompt_of(seed, length) for seed, length in enumerate((33, 64, 70, 5))]
    seen: list[tuple[list[int], list[int], CachePolicy]] = []
    num_cached: list[int] = []

    def client(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(12):
            prompt = [token for piece in rng.choices(pieces, k=rng.randrange(1, 5)) for token in piece]
            policy = rng.choice([CachePolicy(), CachePolicy(), CachePolicy(4, 40)])
            session_id = engine.open_session(prompt, SessionOptions(cache_policy=policy)).session_id
            params = SamplingParams(temperature=0.0, max_tokens=rng.randrange(1, 12), ignore_eos=True)
            listener, done = run(engine, [], params, session_id, append=False)
            seen.append((prompt, listener.token_ids, policy))
            num_cached.append(done.usage.cached_tokens)

    threads = [threading.Thread(target=client, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert len(seen) == 72
    assert sum(count > 0 for count in num_cached) >= 20
    for prompt, token_ids, policy in seen:
        assert_greedy(target, prompt, token_ids, policy)


def test_looking_for_a_beginning_costs_a_step_next_to_nothing(make_engine: MakeEngine) -> None:
    engine = make_engine(max_sessions=300)
    shared = prompt_of(1, 1000)
    for seed in range(60):
        run(engine, [*shared, *prompt_of(seed, 8)], SamplingParams(temperature=0.0, max_tokens=1))
    holdings = engine._stepper.holdings
    session = engine._store.get(engine.open_session([*shared, 3, 3, 3]).session_id)

    def look() -> float:
        started = time.perf_counter()
        assert holdings._prefixes.find(session, 1002) is not None
        return time.perf_counter() - started

    assert min(engine._loop.call(look) for _ in range(5)) < 0.01

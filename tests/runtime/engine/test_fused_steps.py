"""The host's side of fused steps: who is in a step, what is taken of it, what becomes of a step that nobody wants any more.

The device is simulated; the real one is tested in `test_fused.py`.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from runtime.backends import load_target
from runtime.backends.base import FULL, Segment, Target
from runtime.config import BackendConfig, ModelConfig, SessionsConfig, SpeculationConfig, SpeculationMode, TreeShape
from runtime.drafters.base import DraftRequest
from runtime.drafters.none import NoDrafter
from runtime.engine import flights
from runtime.engine.flights import MOST_UNLEARNED, UNLEARNED, Lessons
from runtime.engine.fused import FusedSteps
from runtime.engine.local import LocalEngine
from runtime.errors import EngineUnavailable
from runtime.features.tap import Tap
from runtime.hidden_states import HiddenStates
from runtime.models import ResolvedModel, Tokenizer
from runtime.speculation.costs import StepCosts
from runtime.speculation.depth import Pacer
from runtime.types import CachePolicy, DrafterPolicy, SamplingParams, SessionOptions, Started, Switch

from .conftest import KeepingTap, Listener, audit, greedy_reference, prompt_of, random_eagle3
from .simulated_device import CAPACITY_BYTES, SlowDecoder, make_fusing

GREEDY = SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True)


@dataclass
class Fused:
    engine: LocalEngine
    decoder: SlowDecoder

    @property
    def target(self) -> Target:
        return cast(Target, self.decoder.target)

    def begin(
        self,
        prompt: list[int],
        params: SamplingParams = GREEDY,
        options: SessionOptions | None = None,
        session_id: str | None = None,
    ) -> Listener:
        session_id = session_id or self.engine.create_session(options).session_id
        self.engine.append(session_id, prompt)
        listener = Listener()
        self.engine.generate(session_id, params, on_event=listener)
        return listener


@pytest.fixture
def oracle(tiny: ResolvedModel) -> Target:
    """The same model on a target that the engine's thread does not touch."""
    return load_target(BackendConfig(num_threads=1), ModelConfig(name="tiny", device="cpu"), tiny)


@pytest.fixture(params=SpeculationMode, ids=lambda mode: mode.value)
def fused(request: pytest.FixtureRequest, target: Target, tokenizer: Tokenizer) -> Iterator[Fused]:
    [decoder], engine = make_engine(target, tokenizer, SpeculationConfig(mode=request.param, max_draft_tokens=3))
    yield Fused(engine, decoder)
    engine.stop()
    assert target.cache_bytes() == 0


def make_engine(
    target: Target, tokenizer: Tokenizer, speculation: SpeculationConfig, tap: Tap | None = None
) -> tuple[list[SlowDecoder], LocalEngine]:
    """Started."""
    decoders = make_fusing(target)
    engine = LocalEngine(target, random_eagle3(target), tokenizer, speculation, SessionsConfig(max_batch_sessions=8), tap)
    engine.start()
    return decoders, engine


def test_every_session_gets_its_own_tokens(fused: Fused, oracle: Target):
    """More sessions than a step takes, joining while others run: those that find no place wait."""
    prompts = [prompt_of(seed, 5 + 3 * seed) for seed in range(8)]
    listeners = [fused.begin(prompt) for prompt in prompts]
    for prompt, listener in zip(prompts, listeners, strict=True):
        done = listener.wait()
        assert listener.token_ids == greedy_reference(oracle, prompt, 30)
        assert sum(listener.drafted) == done.speculation.num_accepted
    assert max(fused.decoder.depths) == 3
    assert fused.decoder.num_ahead > len(fused.decoder.depths) // 2, "the device does not wait for the host"
    assert fused.engine.stats().kv_budget_bytes == CAPACITY_BYTES


def test_the_last_tokens_of_turns_need_no_forward_of_their_own(fused: Fused, oracle: Target):
    """Prompts alone go the general way: what has no K/V when its turn ends gets it in the next step, beside those that go on."""
    prompts = [prompt_of(seed, 8) for seed in range(4)]
    texts = [greedy_reference(oracle, prompt, 30) for prompt in prompts]
    limits = [replace(GREEDY, max_tokens=5 + 6 * number) for number in range(4)]
    limits[3] = replace(GREEDY, stop_token_ids=(texts[3][20],))
    ends = [5, 11, 17, texts[3].index(texts[3][20]) + 1]
    before = fused.engine.stats()
    off = SessionOptions(drafter_policy=DrafterPolicy("off"))
    listeners = [fused.begin(prompt, limit, off) for prompt, limit in zip(prompts, limits, strict=True)]
    for listener, text, end in zip(listeners, texts, ends, strict=True):
        listener.wait()
        assert listener.token_ids == text[:end]
    fused.begin(prompt_of(9, 4), replace(GREEDY, max_tokens=1)).wait()  # nothing is under way any more
    num_general = fused.engine.stats().num_target_forwards - before.num_target_forwards - sum(fused.decoder.rows_of_steps)
    assert num_general <= len(prompts) + 2
    for session in fused.engine._store:
        assert session.cached == len(session.history)


def test_steps_with_drafts_come_in_a_row_where_sessions_are_many(fused: Fused, oracle: Target, monkeypatch: pytest.MonkeyPatch):
    """Answers of any length, that ends at a limit, a token or a text, as if each step had been looked at."""
    monkeypatch.setattr("runtime.engine.fused.SOME_SESSIONS", 2)
    prompts = [prompt_of(seed, 8) for seed in range(8)]
    texts = [greedy_reference(oracle, prompt, 30) for prompt in prompts]
    limits = [replace(GREEDY, max_tokens=30 - 3 * number) for number in range(8)]
    limits[2] = replace(GREEDY, stop_token_ids=(texts[2][19],))
    limits[3] = replace(GREEDY, temperature=1.0, seed=5)
    ends = [limit.max_tokens for limit in limits]
    ends[2] = texts[2].index(texts[2][19]) + 1
    listeners = [fused.begin(prompt, limit) for prompt, limit in zip(prompts, limits, strict=True)]
    for number, listener in enumerate(listeners):
        done = listener.wait()
        assert len(listener.token_ids) == ends[number]
        assert number == 3 or listener.token_ids == texts[number][: ends[number]]
        stats = done.speculation
        assert sum(listener.drafted) == stats.num_accepted == sum(stats.accepted_per_position)
        assert stats.num_steps >= ends[number] - stats.num_accepted, "each step brings at most one token that was not drafted"
    rows = zip(fused.decoder.depths, fused.decoder.rows_of_steps, strict=True)
    assert any(depth and num_steps == 2 for depth, num_steps in rows)
    fused.begin(prompt_of(9, 4), replace(GREEDY, max_tokens=1)).wait()
    audit(fused.engine, fused.target)


def test_what_was_read_before_a_step_is_not_taken_off_its_time(target: Target, tokenizer: Tokenizer):
    """Where nothing is under way, the step that a prompt's last token begins starts after the prompt was read."""
    _, engine = make_engine(target, tokenizer, SpeculationConfig(max_draft_tokens=3))
    session_id = engine.create_session().session_id
    for seed in range(3):
        engine.append(session_id, prompt_of(seed, 600))
        listener = Listener()
        engine.generate(session_id, replace(GREEDY, max_tokens=1), on_event=listener)
        listener.wait()
    assert engine._stepper._fused is not None
    costs = engine._stepper._fused._lessons.costs[False]
    assert min(value for recent in costs._host.values() for value in recent._values) > 0.0
    engine.stop()


def test_what_every_landing_took_is_learned_and_no_drafts_are_held_for_that_where_all_have_ended(
    target: Target, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
):
    landed, learned = [], []
    land, record_host = FusedSteps._land, StepCosts.record_host
    monkeypatch.setattr(FusedSteps, "_land", lambda *args: landed.append(land(*args)) or landed[-1])
    monkeypatch.setattr(StepCosts, "record_host", lambda *args: learned.append(args[1]) or record_host(*args))
    [decoder], engine = make_engine(target, tokenizer, SpeculationConfig(max_draft_tokens=3))
    listeners = [Fused(engine, decoder).begin(prompt_of(seed, 9), replace(GREEDY, max_tokens=12 + 7 * seed)) for seed in range(4)]
    for listener in listeners:
        listener.wait()
    engine.stop()
    fused = engine._stepper._fused
    assert fused is not None
    assert not fused._lessons._drafted
    assert learned == [len(part.flight.works) for part in landed]
    assert len(learned) > UNLEARNED
    [acceptance] = fused._pacer._acceptance.values()
    assert acceptance._levels or fused._pacer._fates, "what became of the chains too"


@pytest.mark.parametrize(("waited_s", "most"), [(10.0, UNLEARNED), (1e-9, MOST_UNLEARNED), (0.0, MOST_UNLEARNED)])
def test_the_pacer_learns_while_the_host_has_time_and_now_and_then_where_it_has_too_little(
    waited_s: float, most: int, target: Target, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
):
    numbers = []
    learn = Lessons.learn
    monkeypatch.setattr(Lessons, "learn", lambda self, drafter: numbers.append(self._num_landed) or learn(self, drafter))
    [decoder], engine = make_engine(target, tokenizer, SpeculationConfig(max_draft_tokens=3))
    decoder.waited_s = waited_s
    Fused(engine, decoder).begin(prompt_of(1, 9), replace(GREEDY, max_tokens=200)).wait()
    engine.stop()
    assert max(numbers) == most


def test_of_many_drafts_the_last_are_enough_and_of_what_steps_took_all_counts(
    target: Target, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(flights, "ENOUGH_CHAINS", 3)
    num_chains, num_landed, before = [], [], []
    record_chains, record_host, learn = Pacer.record_chains, StepCosts.record_host, Lessons.learn
    monkeypatch.setattr(Pacer, "record_chains", lambda *args: num_chains.append(len(args[3])) or record_chains(*args))
    monkeypatch.setattr(StepCosts, "record_host", lambda *args: num_landed.append(args[1]) or record_host(*args))
    monkeypatch.setattr(Lessons, "learn", lambda self, drafter: before.append(len(self._drafted)) or learn(self, drafter))
    [decoder], engine = make_engine(target, tokenizer, SpeculationConfig(max_draft_tokens=3))
    Fused(engine, decoder).begin(prompt_of(1, 9), replace(GREEDY, max_tokens=200)).wait()
    engine.stop()
    assert max(before) == 3
    assert sum(before) == sum(num_chains) < len(num_landed)


@pytest.mark.parametrize("num_tokens", [1, 2, 5])
def test_turns_end_where_they_must_and_sessions_go_on(num_tokens: int, fused: Fused, oracle: Target):
    session_id = fused.engine.create_session().session_id
    history = prompt_of(3, 12)
    fused.engine.append(session_id, history)
    for _ in range(3):
        listener = Listener()
        params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
        fused.engine.generate(session_id, params, on_event=listener)
        listener.wait()
        assert listener.token_ids == greedy_reference(oracle, history, num_tokens)
        history = [*history, *listener.token_ids, 9]
        info = fused.engine.get_session(session_id)
        assert info.cached_tokens == info.history_length == len(history) - 1
        fused.engine.append(session_id, [9])


def test_a_stop_ends_the_turn_and_the_step_under_way_is_forgotten(fused: Fused, oracle: Target):
    for seed in range(40):  # until an answer has a token that comes up late for the first time
        prompt = prompt_of(seed, 10)
        expected = greedy_reference(oracle, prompt, 30)
        late = [token for token in expected if expected.index(token) >= 3]
        if late:
            break
    stop = late[0]
    params = SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True, stop_token_ids=(stop,))
    listener = fused.begin(prompt, params)
    assert listener.wait().finish_reason == "stop"
    assert listener.token_ids == expected[: expected.index(stop) + 1]
    fused.begin(prompt_of(5, 4)).wait()  # a step that was under way would have been collected by now
    assert not fused.decoder.num_discarded, "that such a token ends the turn is known before the next step begins"


def test_a_stop_in_the_text_is_found_while_the_next_step_is_under_way(fused: Fused, oracle: Target):
    for seed in range(40):  # until an answer has a character that comes up late for the first time
        prompt = prompt_of(seed, 10)
        text = fused.engine.tokenizer.decode(greedy_reference(oracle, prompt, 30))
        late = [character for character in text[:-3] if character.isascii() and text.index(character) >= 3]
        if late:
            break
    listener = fused.begin(prompt, SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True, stop=(late[0],)))
    assert listener.wait().finish_reason == "stop"
    assert listener.text == text[: text.index(late[0])]
    fused.begin(prompt_of(5, 4), replace(GREEDY, max_tokens=1)).wait()  # the step that was under way has been collected by now
    num_general = fused.engine.stats().num_target_forwards - sum(fused.decoder.rows_of_steps)
    assert fused.decoder.num_discarded or num_general <= 3, "either nothing of that step was needed, or the last token's K/V"
    assert all(session.cached == len(session.history) for session in fused.engine._store)


def test_what_the_host_must_see_goes_the_general_way(fused: Fused, oracle: Target):
    prompt = prompt_of(6, 10)
    expected = greedy_reference(oracle, prompt, 30)
    with_logprobs = fused.begin(prompt, SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True, logprobs=True))
    penalized = fused.begin(prompt, SamplingParams(max_tokens=30, temperature=1.0, presence_penalty=0.5, ignore_eos=True))
    biased = fused.begin(prompt, SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True, logit_bias={97: 100.0}))
    plain = fused.begin(prompt, GREEDY, SessionOptions(drafter_policy=DrafterPolicy("off")))
    assert (with_logprobs.wait().speculation.num_steps, len(with_logprobs.logprobs)) != (0, 0)
    assert with_logprobs.token_ids == expected
    assert plain.wait().speculation.num_drafted == 0
    assert plain.token_ids == expected
    penalized.wait()
    assert len(penalized.token_ids) == 30
    biased.wait()
    assert biased.token_ids == [97] * 30
    assert fused.decoder.num_sampled == 0, "nobody sampled there"


SAMPLED = [
    SamplingParams(max_tokens=30, temperature=0.8, seed=11, ignore_eos=True),
    SamplingParams(max_tokens=30, temperature=1.2, top_p=0.9, seed=12, ignore_eos=True),
    SamplingParams(max_tokens=30, temperature=1.0, top_k=8, min_p=0.01, seed=13, ignore_eos=True),
]


def test_a_seed_says_the_same_here_and_there_beside_greedy_sessions(fused: Fused, oracle: Target):
    """Four at a time join and leave; the general way is that of requests with log-probabilities."""
    prompts = [prompt_of(seed, 9 + seed) for seed in range(len(SAMPLED))]
    greedy = fused.begin(prompts[0], GREEDY)
    here = [fused.begin(prompt, params) for prompt, params in zip(prompts, SAMPLED, strict=True)]
    for listener in here:
        listener.wait()
    assert greedy.wait()
    assert greedy.token_ids == greedy_reference(oracle, prompts[0], 30)
    there = [fused.begin(prompt, replace(params, logprobs=True)) for prompt, params in zip(prompts, SAMPLED, strict=True)]
    for mine, other in zip(here, there, strict=True):
        other.wait()
        assert mine.token_ids == other.token_ids
    turns = fused.begin(prompts[1], replace(SAMPLED[1], max_tokens=7))
    turns.wait()
    assert turns.token_ids == here[1].token_ids[:7]


def test_many_sessions_take_several_plain_steps_in_a_row(fused: Fused, oracle: Target, monkeypatch: pytest.MonkeyPatch):
    """Every session its own tokens, none twice; a stop and a limit in the middle of a row end the turn there."""
    monkeypatch.setattr("runtime.engine.fused.SOME_SESSIONS", 2)
    monkeypatch.setattr("runtime.engine.fused.MANY_SESSIONS", 3)
    off = SessionOptions(drafter_policy=DrafterPolicy("off"))
    prompts = [prompt_of(seed, 6 + seed) for seed in range(5)]
    expected = [greedy_reference(oracle, prompt, 30) for prompt in prompts]
    late = [token for token in expected[2] if expected[2].index(token) >= 8]
    params = [replace(GREEDY, max_tokens=30 - 7 * (seed % 3)) for seed in range(5)]
    params[2] = replace(GREEDY, stop_token_ids=(late[0],))
    params[4] = SAMPLED[0]
    listeners = [fused.begin(prompt, each, off) for prompt, each in zip(prompts, params, strict=True)]
    sessions = [cast("Started", listener.next()).session_id for listener in listeners]
    for seed, listener in enumerate(listeners[:4]):
        done = listener.wait()
        num = expected[2].index(late[0]) + 1 if seed == 2 else params[seed].max_tokens
        assert listener.token_ids == expected[seed][:num]
        assert done.speculation.num_drafted == 0
        assert not any(listener.drafted)
        info = fused.engine.get_session(sessions[seed])
        assert info.cached_tokens == info.history_length == len(prompts[seed]) + num
    assert listeners[4].wait()
    alone = fused.begin(prompts[4], SAMPLED[0], off)
    alone.wait()
    assert alone.token_ids == listeners[4].token_ids
    assert max(fused.decoder.rows_of_steps) == fused.decoder.max_steps


def test_cancelled_closed_and_swapped_midway(fused: Fused, oracle: Target):
    rng = random.Random(1)
    kept: list[tuple[list[int], Listener]] = []
    new = random_eagle3(oracle, seed=9)
    for seed in range(12):
        prompt = prompt_of(seed, rng.randrange(4, 20))
        session_id = fused.engine.create_session().session_id
        fused.engine.append(session_id, prompt)
        listener = Listener()
        generation = fused.engine.generate(session_id, GREEDY, on_event=listener)
        if seed % 4 == 0:
            generation.cancel()
        elif seed % 4 == 1:
            listener.next()
            fused.engine.close_session(session_id)
        else:
            kept.append((prompt, listener))
        if seed == 6:
            fused.engine.swap_drafter(new)
    for prompt, listener in kept:
        listener.wait()
        assert listener.token_ids == greedy_reference(oracle, prompt, 30)
    assert fused.decoder.loaded[-1] is new.model, "the device drafts with its weights from the next step on"


@pytest.mark.parametrize("name", ["launch", "collect"])
def test_a_step_that_raises_ends_its_generations_and_nothing_of_it_is_taken_for_the_next(
    name: str, fused: Fused, oracle: Target, monkeypatch: pytest.MonkeyPatch
):
    prompts = [prompt_of(seed, 20 + seed) for seed in range(3)]
    calls = 0
    real = getattr(fused.decoder, name)

    def failing(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 5:
            raise RuntimeError("the device is gone")
        return real(*args)

    monkeypatch.setattr(fused.decoder, name, failing)
    sessions = [fused.engine.create_session().session_id for _ in prompts]
    listeners = [fused.begin(prompt, session_id=session) for prompt, session in zip(prompts, sessions, strict=True)]
    num_failed = 0
    for listener in listeners:
        try:
            listener.wait()
        except EngineUnavailable:
            num_failed += 1
    assert num_failed
    for prompt, session, listener in zip(prompts, sessions, listeners, strict=True):
        history = prompt + listener.token_ids
        assert listener.token_ids == greedy_reference(oracle, prompt, len(listener.token_ids))
        again = fused.begin([7], session_id=session)
        assert again.wait().finish_reason == "length"
        assert again.token_ids == greedy_reference(oracle, [*history, 7], 30)


def test_a_drafter_of_another_kind_takes_its_sessions_the_general_way(fused: Fused, oracle: Target):
    class Silent:
        version = "silent"

        def new_state(self) -> int:
            return 0

        def propose(self, requests: Sequence[DraftRequest]) -> list[Any]:
            raise RuntimeError("it never drafts")

        def drop_state(self, state: int) -> None: ...

    prompt = prompt_of(7, 10)
    listener = fused.begin(prompt)
    listener.next()
    fused.engine.swap_drafter(Silent())
    listener.wait()
    assert listener.token_ids == greedy_reference(oracle, prompt, 30)


@pytest.mark.parametrize("mode", [SpeculationMode.FIXED, SpeculationMode.ADAPTIVE])
def test_who_drafts_trees_because_they_are_pinned_goes_the_general_way(
    mode: SpeculationMode, target: Target, tokenizer: Tokenizer, oracle: Target
):
    [decoder], engine = make_engine(target, tokenizer, SpeculationConfig(mode=mode, shape=TreeShape.TREE, max_draft_tokens=3))
    trees, plain = Fused(engine, decoder), SessionOptions(drafter_policy=DrafterPolicy("off"))
    prompts = [prompt_of(seed, 10) for seed in range(2)]
    listeners = [trees.begin(prompts[0]), trees.begin(prompts[1], GREEDY, plain)]
    [drafted, undrafted] = [listener.wait().speculation for listener in listeners]
    assert [listener.token_ids for listener in listeners] == [greedy_reference(oracle, prompt, 30) for prompt in prompts]
    num_levels = sum(drafted.drafted_per_position)
    assert drafted.num_drafted > num_levels or (mode is SpeculationMode.ADAPTIVE and not num_levels), "more nodes than levels"
    assert (undrafted.num_drafted, decoder.began) == (0, [10])
    engine.stop()


SPECULATION = SpeculationConfig(mode=SpeculationMode.FIXED, max_draft_tokens=3)


def assert_states(oracle: Target, history: Sequence[int], parts: Sequence[HiddenStates], policy: CachePolicy = FULL) -> None:
    """They are those of the last positions of the history."""
    cache = oracle.new_cache(policy)
    rows = []
    for token_id in history:
        [output] = oracle.forward([Segment(cache, [token_id])])
        oracle.commit(cache, range(1))
        rows.append(output.hidden)
    oracle.drop(cache)
    expected, found = HiddenStates.concat(rows), HiddenStates.concat(parts)
    assert torch.allclose(found.aux, expected.aux[-len(found) :], atol=1e-4)
    assert torch.allclose(found.last, expected.last[-len(found) :], atol=1e-4)


def test_the_tap_gets_the_states_of_every_turn(target: Target, tokenizer: Tokenizer, oracle: Target):
    """Of those that it is offered, and of no others, and only then."""
    tap = KeepingTap()
    [decoder], engine = make_engine(target, tokenizer, SPECULATION, tap)
    fused = Fused(engine, decoder)
    [kept, other] = [engine.create_session(SessionOptions(capture=capture)).session_id for capture in (Switch.ON, Switch.OFF)]
    for seed in range(3):
        one, two = (fused.begin(prompt_of(seed, 9), session_id=session_id) for session_id in (other, kept))
        one.wait()
        two.wait()
    assert len(tap.turns) == target.states.num_reads == 3  # type: ignore[attr-defined]
    for number, turn in enumerate(tap.turns, start=1):
        assert len(turn.token_ids) == number * 39
        assert sum(map(len, turn.hidden)) in (len(turn.token_ids), len(turn.token_ids) - 1)
        assert_states(oracle, turn.token_ids, turn.hidden)
    engine.stop()


@pytest.mark.parametrize("policy", [FULL, CachePolicy(sink=4, window=8)])
def test_who_comes_from_whole_steps_drafts_the_general_way_from_its_own_states(
    policy: CachePolicy, target: Target, tokenizer: Tokenizer, oracle: Target, tmp_path: Path
):
    """Also when forked, at its end or in the middle, or saved in between, which is one read more; for the whole steps alone
    nobody reads any."""
    [decoder], engine = make_engine(target, tokenizer, SPECULATION)
    fused, session_id = Fused(engine, decoder), engine.create_session(SessionOptions(cache_policy=policy)).session_id
    first = fused.begin(prompt_of(1, 9), session_id=session_id)
    first.wait()
    assert target.states.num_reads == 0  # type: ignore[attr-defined]
    fork = engine.fork_session(session_id).session_id
    part = engine.fork_session(session_id, history_length=20).session_id
    assert target.states.num_reads == 0  # type: ignore[attr-defined]
    engine.save_session(fork, tmp_path / "saved")
    general = replace(GREEDY, logprobs=True, max_tokens=12)
    seen = [fused.begin(prompt_of(2, 5), general, session_id=each) for each in (session_id, fork, part)]
    for each in seen:
        assert each.wait().speculation.num_drafted > 0
    assert target.states.num_reads == 4  # type: ignore[attr-defined]
    history = [*prompt_of(1, 9), *first.token_ids, *prompt_of(2, 5), *seen[0].token_ids]
    for session in engine._store:
        assert session.history == history or session.id == part
        assert len(session.history[: session.cached]) - session.first_kept >= (policy.window or session.cached)
        assert_states(oracle, session.history[: session.cached], session.features, policy)
    engine.stop()


def test_states_that_cannot_be_read_for_once_are_read_later(
    target: Target, tokenizer: Tokenizer, oracle: Target, monkeypatch: pytest.MonkeyPatch
):
    """A step goes without drafts; nothing that is kept is of another position."""
    [decoder], engine = make_engine(target, tokenizer, SPECULATION)
    fused, session_id = Fused(engine, decoder), engine.create_session().session_id
    first = fused.begin(prompt_of(1, 9), session_id=session_id)
    first.wait()
    states_of, failures = target.states_of, [True]  # type: ignore[attr-defined]

    def fail_once(*args: int) -> HiddenStates:
        if failures.pop() if failures else False:
            raise RuntimeError("out of memory")
        return cast(HiddenStates, states_of(*args))

    monkeypatch.setattr(target, "states_of", fail_once)
    general = fused.begin(prompt_of(2, 5), replace(GREEDY, logprobs=True, max_tokens=12), session_id=session_id)
    assert general.wait().speculation.num_drafted > 0
    assert not failures
    [session] = engine._store
    assert session.first_kept == 0
    assert_states(oracle, session.history[: session.cached], session.features)
    engine.stop()


def test_rows_that_were_kept_before_a_gap_in_the_states_are_not_kept_behind_it(
    target: Target, tokenizer: Tokenizer, oracle: Target, tmp_path: Path
):
    """The prompt is shorter than the window, and what whole steps left behind is longer."""
    policy = CachePolicy(sink=4, window=12)
    [decoder], engine = make_engine(target, tokenizer, SPECULATION)
    fused, session_id = Fused(engine, decoder), engine.create_session(SessionOptions(cache_policy=policy)).session_id
    fused.begin(prompt_of(1, 9), replace(GREEDY, max_tokens=60), session_id=session_id).wait()
    engine.save_session(session_id, tmp_path / "saved")
    restored = engine._store.get(engine.restore_session(tmp_path / "saved").session_id)
    assert restored.dropped > 0
    assert_states(oracle, restored.history[: restored.cached], restored.features, policy)
    engine.stop()


def test_where_nobody_waits_first_tokens_are_picked_here_too_and_no_states_kept(
    target: Target, tokenizer: Tokenizer, oracle: Target
):
    """More sessions than places, some of which begin alike; what they say is what the general way says."""
    decoders = make_fusing(target)
    speculation = SpeculationConfig(max_draft_tokens=0)
    sessions = SessionsConfig(max_batch_sessions=8, patient=True, prefill_chunk_tokens=64)
    patient = LocalEngine(target, random_eagle3(target), tokenizer, speculation, sessions)
    general = LocalEngine(oracle, NoDrafter(), tokenizer, speculation, SessionsConfig())
    prompts = [[*prompt_of(seed // 2, 40), *prompt_of(seed, 2 + 3 * seed)] for seed in range(9)]
    kinds = [replace(GREEDY, detokenize=False, temperature=seed % 3 / 2, seed=seed) for seed in range(9)]
    answers = []
    for engine in (general, patient):
        engine.start()
        listeners, session_ids = [], []
        for prompt, params in zip(prompts, kinds, strict=True):
            session_ids.append(engine.create_session().session_id)
            engine.append(session_ids[-1], prompt)
            listeners.append(Listener())
            engine.generate(session_ids[-1], params, on_event=listeners[-1])
        done = [listener.wait() for listener in listeners]
        assert [each.speculation.num_steps for each in done] == [29 if engine is general else 30] * len(done)
        engine.append(session_ids[3], [7, 8, 9])
        listeners.append(Listener())
        engine.generate(session_ids[3], kinds[3], on_event=listeners[-1])
        listeners[-1].wait()
        answers.append([listener.token_ids for listener in listeners])
        is_kept = [bool(session.features) or session.num_behind > 0 for session in engine._store]
        assert is_kept == [engine is general] * len(session_ids)
        if engine is patient:
            audit(engine, target)
        engine.stop()
    assert answers[0] == answers[1]
    lengths = [len(prompt) for prompt in prompts]
    assert sorted(decoders[0].began) == sorted([*lengths, lengths[3] + len(answers[0][3]) + 3])


@pytest.mark.parametrize("mode", [SpeculationMode.FIXED, SpeculationMode.ADAPTIVE])
@pytest.mark.parametrize("limits", [(1, None), (2, None, 1, 0)], ids=str)
def test_nobody_drafts_deeper_than_asked_beside_those_who_do(
    mode: SpeculationMode, limits: tuple[int | None, ...], target: Target, tokenizer: Tokenizer, oracle: Target
):
    [decoder], engine = make_engine(target, tokenizer, SpeculationConfig(mode=mode, max_draft_tokens=5))
    fused, prompts = Fused(engine, decoder), [prompt_of(number, 20) for number in range(len(limits))]
    params = [replace(GREEDY, max_tokens=40, max_draft_tokens=limit) for limit in limits]
    for prompt, limit, listener in zip(prompts, limits, list(map(fused.begin, prompts, params)), strict=True):
        drafted = listener.wait().speculation.drafted_per_position
        assert listener.token_ids == greedy_reference(oracle, prompt, 40)
        assert len(drafted) <= 5 if limit is None else len(drafted) <= limit
        assert drafted or limit == 0
    engine.stop()

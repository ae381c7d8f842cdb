"""One step: trees and chains verified, the path committed, the end of a turn settled."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from runtime.backends.base import Segment, SegmentOutput, Target
from runtime.drafters.base import Draft
from runtime.drafters.none import NoDrafter
from runtime.drafters.scripted import ScriptedDrafter
from runtime.engine.request import Request
from runtime.errors import EngineUnavailable
from runtime.types import SamplingParams

from .conftest import Listener, MakeEngine, run
from .test_local import GREEDY, KeepingTap, greedy_reference, prompt_of

SAMPLED = SamplingParams(max_tokens=40, ignore_eos=True, seed=5)
PENALIZED = SamplingParams(
    temperature=0.0, max_tokens=40, ignore_eos=True, frequency_penalty=0.8, presence_penalty=0.3, repetition_penalty=1.2
)


def fan(truth: Sequence[int], length: int, depth: int, num_wrong: int, rng: random.Random) -> Draft:
    """A tree that holds the next `depth` true tokens behind wrong siblings, each of which has a child of its own."""
    token_ids: list[int] = []
    parents: list[int] = []
    parent = -1
    for token in truth[length : length + depth]:
        wrong = [(token + rng.randrange(1, 256)) % 256 for _ in range(num_wrong)]
        first = len(token_ids)
        token_ids += [*wrong, token]
        parents += [parent] * (num_wrong + 1)
        if depth > 1:
            token_ids += [truth[0]] * num_wrong
            parents += range(first, first + num_wrong)
        parent = first + num_wrong
    return Draft(token_ids, None, parents)


def tree_drafter(target: Target, prompt: Sequence[int], num_true: int = 3, num_wrong: int = 2) -> ScriptedDrafter:
    """Right for num_true tokens along one path of the tree, then it ends."""
    truth, rng = [*prompt, *greedy_reference(target, prompt, 80)], random.Random(1)
    return ScriptedDrafter(lambda history, depth: fan(truth, len(history), min(depth, num_true), num_wrong, rng), version="tree")


def random_trees(seed: int = 0) -> ScriptedDrafter:
    """Any shape, any token, now and then too deep or outside the vocabulary."""
    rng = random.Random(seed)

    def script(history: Sequence[int], depth: int) -> Draft:
        size = rng.randrange(0, 12)
        parents = [rng.randrange(-1, node) if node else -1 for node in range(size)]
        return Draft([rng.randrange(-1, 258) if rng.random() < 0.9 else history[-1] for _ in range(size)], None, parents)

    return ScriptedDrafter(script, version="trees")


def test_a_tree_is_verified_and_only_its_path_is_kept(make_engine: MakeEngine, target: Target) -> None:
    prompt = prompt_of(1)
    engine = make_engine(tree_drafter(target, prompt))
    listener, done = run(engine, prompt, GREEDY)
    assert listener.token_ids == greedy_reference(target, prompt, 40)
    stats = done.speculation
    assert stats.mean_acceptance_length > 3.9
    assert stats.accepted_per_position == stats.drafted_per_position[:3]
    assert len(stats.drafted_per_position) == 4, "the depth counts, not the nodes: false siblings have children"
    assert stats.num_drafted > 3 * stats.num_accepted, "siblings are counted"
    assert sum(listener.drafted) == stats.num_accepted


@pytest.mark.parametrize("params", [GREEDY, PENALIZED, SAMPLED])
def test_trees_change_no_token(make_engine: MakeEngine, params: SamplingParams) -> None:
    """Certain drafts: even a sampled request's tokens are those of plain decoding with its seed."""
    plain = make_engine(NoDrafter())
    engine = make_engine(random_trees(), max_batch_sessions=4)
    prompts = [prompt_of(seed, length) for seed, length in enumerate([3, 40, 1, 17, 33])]
    listeners = [Listener() for _ in prompts]
    for prompt, listener in zip(prompts, listeners, strict=True):
        session_id = engine.create_session().session_id
        engine.append(session_id, prompt)
        engine.generate(session_id, params, on_event=listener)
    for prompt, listener in zip(prompts, listeners, strict=True):
        done = listener.wait()
        expected, _ = run(plain, prompt, params)
        assert listener.token_ids == expected.token_ids
        assert done.speculation.num_drafted > 0


@pytest.mark.parametrize(
    "params", [PENALIZED, replace(PENALIZED, temperature=0.8, top_p=0.95, seed=5)], ids=["greedy", "sampled"]
)
@pytest.mark.parametrize("num_wrong", [0, 2], ids=["chain", "tree"])
def test_every_accepted_token_counts(make_engine: MakeEngine, target: Target, params: SamplingParams, num_wrong: int) -> None:
    """Penalties, numbers and logprobs move on by all tokens of an accepted path, not by one a step."""
    prompt, params = prompt_of(1), replace(params, logprobs=True, logit_bias={97: 1.0})
    plain, _ = run(make_engine(NoDrafter()), prompt, params)
    truth, rng = [*prompt, *plain.token_ids], random.Random(1)
    drafter = ScriptedDrafter(lambda history, depth: fan(truth, len(history), depth, num_wrong, rng), version="fan")
    listener, done = run(make_engine(drafter), prompt, params)
    assert listener.token_ids == plain.token_ids != greedy_reference(target, prompt, 40)
    assert done.speculation.mean_acceptance_length > 5
    assert [each.logprob for each in listener.logprobs] == pytest.approx([each.logprob for each in plain.logprobs], abs=1e-3)


def test_greedy_and_sampled_rows_share_a_batch(make_engine: MakeEngine, target: Target) -> None:
    prompt = prompt_of(1)
    alone, _ = run(make_engine(NoDrafter()), prompt, SAMPLED)
    engine = make_engine(tree_drafter(target, prompt), max_batch_sessions=4)
    plans = [GREEDY, SAMPLED, PENALIZED, SAMPLED]
    listeners = [Listener() for _ in plans]
    for params, listener in zip(plans, listeners, strict=True):
        session_id = engine.create_session().session_id
        engine.append(session_id, prompt)
        engine.generate(session_id, params, on_event=listener)
    for listener in listeners:
        listener.wait()
    assert listeners[0].token_ids == greedy_reference(target, prompt, 40)
    assert listeners[1].token_ids == listeners[3].token_ids == alone.token_ids
    assert listeners[2].token_ids != listeners[0].token_ids


def test_logprobs_and_states_are_those_of_the_path(make_engine: MakeEngine, target: Target) -> None:
    prompt, tap = prompt_of(1), KeepingTap()
    engine = make_engine(tree_drafter(target, prompt), tap=tap)
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, logprobs=True, top_logprobs=2)
    listener, _ = run(engine, prompt, params)
    cache = target.new_cache()
    [output] = target.forward([Segment(cache, [*prompt, *listener.token_ids], num_logits=64)])
    target.drop(cache)
    expected = output.logits[23:63].log_softmax(-1)
    for row, (token_id, logprob) in enumerate(zip(listener.token_ids, listener.logprobs, strict=True)):
        assert logprob.token_id == token_id == logprob.top[0][0]
        assert logprob.logprob == pytest.approx(float(expected[row, token_id]), abs=1e-3)
    [turn] = tap.turns
    assert torch.allclose(torch.cat([part.aux for part in turn.hidden]), output.hidden.aux, atol=1e-4)
    assert torch.allclose(torch.cat([part.last for part in turn.hidden]), output.hidden.last, atol=1e-4)


def test_a_stop_inside_an_accepted_path_ends_there(make_engine: MakeEngine, target: Target) -> None:
    prompt = prompt_of(1)
    reference = greedy_reference(target, prompt, 40)
    stop = next(token for index, token in enumerate(reference) if index >= 6 and token not in reference[:index])
    engine = make_engine(tree_drafter(target, prompt, num_true=5))
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, stop_token_ids=(stop,))
    session_id = engine.create_session().session_id
    listener, done = run(engine, prompt, params, session_id)
    assert listener.token_ids == reference[: reference.index(stop) + 1]
    assert (done.finish_reason, done.matched_stop) == ("stop", stop)
    assert engine.get_session(session_id).cached_tokens == done.history_length == 24 + len(listener.token_ids)


# --- the end of a turn ---


class Counting:
    """The target's forwards: how many, and which rows asked for logits."""

    def __init__(self, target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
        self.segments: list[list[Segment]] = []
        self._forward = target.forward
        monkeypatch.setattr(target, "forward", self)

    def __call__(self, segments: Sequence[Segment]) -> list[SegmentOutput]:
        self.segments.append(list(segments))
        return self._forward(segments)


@pytest.mark.parametrize("max_tokens", [1, 2, 7])
def test_a_turn_ends_with_its_whole_history_cached(
    make_engine: MakeEngine, target: Target, monkeypatch: pytest.MonkeyPatch, max_tokens: int
) -> None:
    counting = Counting(target, monkeypatch)
    engine = make_engine(NoDrafter())
    session_id = engine.create_session().session_id
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    listener, done = run(engine, prompt_of(1), params, session_id)
    assert engine.get_session(session_id).cached_tokens == done.history_length == 24 + max_tokens
    assert len(counting.segments) == max_tokens + 1
    [last] = counting.segments[-1]
    assert (list(last.token_ids), last.num_logits) == (listener.token_ids[-1:], 0), "nothing is sampled from it"
    assert done.speculation.num_steps == max_tokens - 1


def test_a_last_token_that_was_drafted_needs_no_forward_of_its_own(
    make_engine: MakeEngine, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = prompt_of(1)
    drafter = tree_drafter(target, prompt, num_true=5, num_wrong=0)
    counting = Counting(target, monkeypatch)
    engine = make_engine(drafter)
    session_id = engine.create_session().session_id
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    _, done = run(engine, prompt, params, session_id)
    assert engine.get_session(session_id).cached_tokens == done.history_length == 36
    assert [[len(segment.token_ids) for segment in segments] for segments in counting.segments] == [[24], [6], [6]]


def test_a_cancelled_turn_costs_at_most_one_forward_more(
    make_engine: MakeEngine, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    counting = Counting(target, monkeypatch)
    engine = make_engine(NoDrafter())
    for num_tokens in range(1, 9):
        session_id = engine.create_session().session_id
        engine.append(session_id, prompt_of(num_tokens))
        listener = Listener()
        generation = engine.generate(session_id, SamplingParams(temperature=0.0, ignore_eos=True), on_event=listener)
        while len(listener.token_ids) < num_tokens:
            listener.next()
        generation.cancel()
        num_before = len(counting.segments)
        done = listener.wait()
        assert done.finish_reason == "cancelled"
        assert len(counting.segments) <= num_before + 2, "the one that ran, and one more"
        assert engine.get_session(session_id).cached_tokens == done.history_length


def test_a_failing_last_forward_takes_nothing_back(
    make_engine: MakeEngine, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = target.forward

    def failing(segments: Sequence[Segment]) -> list[SegmentOutput]:
        if all(segment.num_logits == 0 for segment in segments):
            raise RuntimeError("broken")
        return forward(segments)

    reference = greedy_reference(target, prompt_of(1), 8)
    monkeypatch.setattr(target, "forward", failing)
    engine = make_engine(NoDrafter())
    session_id = engine.create_session().session_id
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    listener, done = run(engine, prompt_of(1), params, session_id)
    assert (done.finish_reason, done.history_length) == ("length", 28)
    again, _ = run(engine, [], params, session_id)
    assert [*listener.token_ids, *again.token_ids] == reference


def test_many_threads_cancel_trees_at_any_time(make_engine: MakeEngine) -> None:
    engine = make_engine(random_trees(3), max_batch_sessions=3)
    errors: list[BaseException] = []

    def client(seed: int) -> None:
        rng = random.Random(seed)
        try:
            for turn in range(6):
                session_id = engine.create_session().session_id
                engine.append(session_id, prompt_of(seed * 10 + turn, rng.randrange(1, 40)))
                listener = Listener()
                params = SamplingParams(max_tokens=rng.randrange(1, 30), seed=seed, temperature=rng.choice([0.0, 1.0]))
                generation = engine.generate(session_id, params, on_event=listener)
                for _ in range(rng.randrange(0, 4)):
                    listener.next()
                    if rng.random() < 0.4:
                        generation.cancel()
                        break
                done = listener.wait()
                if done.usage.completion_tokens:
                    assert engine.get_session(session_id).cached_tokens == done.history_length
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=client, args=(seed,)) for seed in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert errors == []


def test_a_tap_that_raises_costs_no_generation(make_engine: MakeEngine, target: Target, caplog: pytest.LogCaptureFixture) -> None:
    class Broken(KeepingTap):
        def offer(self, turn: object) -> bool:
            raise OSError("no space left")

    engine = make_engine(tap=Broken())
    session_id = engine.create_session().session_id
    history = prompt_of(1)
    for _ in range(2):
        listener, _ = run(engine, history[engine.get_session(session_id).history_length :], GREEDY, session_id)
        expected = greedy_reference(target, history, len(listener.token_ids))
        assert listener.token_ids == expected
        history = [*history, *expected, 7]
    assert caplog.text.count("could not be captured") == 2


def test_what_goes_wrong_at_the_end_of_one_turn_ends_that_one_alone(
    make_engine: MakeEngine, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine()
    finish = Request.finish

    def fail_once(request: Request) -> None:
        if request.request_id == "first":
            raise RuntimeError("a text that cannot be closed")
        finish(request)

    monkeypatch.setattr(Request, "finish", fail_once)
    listeners = []
    for seed, request_id in ((1, "first"), (2, "second")):
        session_id = engine.create_session().session_id
        engine.append(session_id, prompt_of(seed))
        listeners.append(Listener())
        engine.generate(session_id, GREEDY, on_event=listeners[-1], request_id=request_id)
    with pytest.raises(EngineUnavailable, match="a text that cannot be closed"):
        listeners[0].wait()
    listeners[1].wait()
    assert listeners[1].token_ids == greedy_reference(target, prompt_of(2), len(listeners[1].token_ids))


# --- whose prompt is read ---


def test_prompts_take_turns_and_steps_are_full(make_engine: MakeEngine) -> None:
    stepper = make_engine(prefill_chunk_tokens=100)._stepper

    def reader(num_tokens: int) -> Request:
        return cast(Request, SimpleNamespace(session=SimpleNamespace(history=[0] * num_tokens, cached=0), waits_since=0))

    def read(*requests: Request) -> list[int]:
        shares = stepper._read_in_turn(requests)
        for request in requests:
            request.session.cached += shares[id(request)]
        return [shares[id(request)] for request in requests]

    long = [reader(1000) for _ in range(4)]
    waited = [0] * 4
    for _ in range(20):
        shares = read(*long)
        assert sum(shares) == 100
        waited = [0 if share else num + 1 for share, num in zip(shares, waited, strict=True)]
        assert max(waited) <= 2, "nobody waits for longer than a round of all"
    cached = [request.session.cached for request in long]
    assert max(cached) - min(cached) <= 64
    one, *_ = long
    read(one)
    assert read(one, reader(90), reader(5)) == [31, 64, 5], "of those that waited alike, who has little to read comes first"

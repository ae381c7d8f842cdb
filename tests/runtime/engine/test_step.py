"""One step: trees and chains verified, the path committed, the end of a turn settled, each session with its own drafter."""

from __future__ import annotations

import itertools
import random
import threading
from collections import Counter
from collections.abc import Sequence

import pytest
import torch

from runtime.backends.base import Segment, SegmentOutput, Target
from runtime.config import SpeculationConfig, SpeculationMode, TreeShape
from runtime.drafters.base import Draft, SparseProbs
from runtime.drafters.eagle3 import Eagle3Drafter
from runtime.drafters.none import NoDrafter
from runtime.drafters.scripted import ScriptedDrafter
from runtime.eagle3 import DraftVocabulary, Eagle3Config, Eagle3Model
from runtime.engine.drafting import clip
from runtime.engine.local import LocalEngine
from runtime.engine.request import Request
from runtime.speculation import Uniforms
from runtime.speculation.costs import Costs
from runtime.types import DrafterPolicy, SamplingParams, SessionOptions

from .conftest import Listener, MakeEngine, run
from .test_local import GREEDY, KeepingTap, adversarial, greedy_reference, perfect, prompt_of, random_drafter

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
    assert stats.accepted_per_position[:3] == stats.drafted_per_position[:3]
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


# --- whose drafter ---


def test_each_session_speculates_with_its_own_drafter(make_engine: MakeEngine, target: Target) -> None:
    prompt, calls = prompt_of(1), dict.fromkeys(("a", "b"), 0)
    truth = [*prompt, *greedy_reference(target, prompt, 80)]

    def drafter(version: str) -> ScriptedDrafter:
        def script(history: Sequence[int], depth: int) -> list[int]:
            calls[version] += 1
            return truth[len(history) : len(history) + (2 if version == "a" else 1)]

        return ScriptedDrafter(script, version)

    engine = make_engine(drafter("a"), max_batch_sessions=4)
    engine.add_drafter(drafter("b"))
    policies = [DrafterPolicy(), DrafterPolicy("pinned", "b"), DrafterPolicy("off"), DrafterPolicy("pinned", "a")]
    listeners = [Listener() for _ in policies]
    for policy, listener in zip(policies, listeners, strict=True):
        session_id = engine.create_session(SessionOptions(drafter_policy=policy)).session_id
        engine.append(session_id, prompt)
        engine.generate(session_id, GREEDY, on_event=listener)
    dones = [listener.wait() for listener in listeners]
    assert all(listener.token_ids == truth[24:64] for listener in listeners)
    assert [done.drafter_versions for done in dones] == [("a",), ("b",), (), ("a",)]
    lengths = [done.speculation.mean_acceptance_length for done in dones]
    assert lengths == pytest.approx([3.0, 2.0, 1.0, 3.0])
    assert set(engine.stats().speculation) == {"a", "b"}


def test_a_request_may_speculate_less_than_the_server(make_engine: MakeEngine, target: Target) -> None:
    prompt = prompt_of(1)
    engine = make_engine(tree_drafter(target, prompt, num_true=9, num_wrong=0), max_draft_tokens=5)
    for asked, expected in ((None, 6.0), (2, 3.0), (64, 6.0), (0, 1.0)):
        params = SamplingParams(temperature=0.0, max_tokens=37, ignore_eos=True, max_draft_tokens=asked)
        listener, done = run(engine, prompt, params)
        assert listener.token_ids == greedy_reference(target, prompt, 37)
        assert done.speculation.mean_acceptance_length == pytest.approx(expected)


# --- what a draft may be ---


def test_a_draft_is_cut_to_what_can_be_verified() -> None:
    q = SparseProbs(torch.tensor([1]), torch.ones(1))
    assert clip(Draft([1, 2, 300, 4]), 9, 256) == Draft([1, 2])
    assert clip(Draft([1, 2, 3]), 2, 256) == Draft([1, 2])
    assert clip(Draft([1, 2, 3], [q, q]), 9, 256) == Draft([1, 2], [q, q])
    tree = Draft([1, -1, 3, 4, 5, 6], None, [-1, -1, 1, 0, 3, -1])
    assert clip(tree, 9, 256) == Draft([1, 4, 5, 6], None, [-1, 0, 1, -1])
    assert clip(tree, 2, 256) == Draft([1, 4, 6], None, [-1, 0, -1])
    assert clip(tree, 0, 256) == Draft([], None, [])
    for parents in ([-1, 1], [-2, 0], [-1], [0, -1]):
        with pytest.raises(ValueError, match="earlier node"):
            clip(Draft([1, 2], None, parents), 9, 256)


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


# --- adaptive depth ---

ADAPTIVE = SpeculationConfig(shape=TreeShape.AUTO)


def eagle(target: Target, seed: int = 0, ids: Sequence[int] = range(0, 256, 4)) -> Eagle3Drafter:
    """A draft network that has learned nothing."""
    info = target.info
    config = Eagle3Config(
        hidden_size=info.hidden_size,
        intermediate_size=32,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        vocab_size=info.vocab_size,
        draft_vocab_size=len(ids),
        max_position_embeddings=info.max_positions,
    )
    model = Eagle3Model(config, DraftVocabulary(torch.tensor(ids), info.vocab_size), target.embedding)
    model.init_from_target(target.lm_head, None, torch.Generator().manual_seed(seed))
    return Eagle3Drafter(model, f"eagle-{seed}")


@pytest.mark.parametrize("kind", ["perfect", "random", "adversarial", "tree", "eagle"])
def test_adaptive_speculation_changes_no_token(make_engine: MakeEngine, target: Target, kind: str) -> None:
    prompt = prompt_of(1)
    drafter = {
        "perfect": lambda: perfect(target, prompt),
        "random": random_drafter,
        "adversarial": lambda: adversarial(target, prompt),
        "tree": lambda: tree_drafter(target, prompt),
        "eagle": lambda: eagle(target),
    }[kind]()
    engine = make_engine(drafter, speculation=ADAPTIVE, max_batch_sessions=4)
    plain = make_engine(NoDrafter())
    plans = [GREEDY, PENALIZED, SAMPLED, GREEDY, SamplingParams(max_tokens=20), GREEDY]
    listeners = [Listener() for _ in plans]
    for params, listener in zip(plans, listeners, strict=True):
        session_id = engine.create_session().session_id
        engine.append(session_id, prompt)
        engine.generate(session_id, params, on_event=listener)
    for params, listener in zip(plans, listeners, strict=True):
        listener.wait()
        if params.is_greedy or params.seed is not None:
            assert listener.token_ids == run(plain, prompt, params)[0].token_ids


@pytest.fixture
def known_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that nothing disturbs: the choices then depend on acceptance alone."""
    monkeypatch.setattr("runtime.engine.step.measure_forward", lambda target: Costs({1: 0.030, 8: 0.045}))
    monkeypatch.setattr(Costs, "record_forward", lambda *args: None)
    monkeypatch.setattr(Costs, "record_proposal", lambda *args: None)


@pytest.mark.usefixtures("known_costs")
def test_a_useless_drafter_is_hardly_asked_any_more(make_engine: MakeEngine, target: Target) -> None:
    asked: list[int] = []

    def script(history: Sequence[int], depth: int) -> list[int]:
        asked.append(len(history))
        return prompt_of(len(history), depth)

    engine = make_engine(ScriptedDrafter(script, "random"), speculation=ADAPTIVE)
    params = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)
    listener, _ = run(engine, prompt_of(1), params)
    assert listener.token_ids == greedy_reference(target, prompt_of(1), 400)
    assert 0 < sum(length > 224 for length in asked) < 40, "of the last 200 steps"


@pytest.mark.usefixtures("known_costs")
def test_a_good_drafter_is_asked_for_all_that_is_allowed(make_engine: MakeEngine, target: Target) -> None:
    prompt = prompt_of(1)
    truth = [*prompt, *greedy_reference(target, prompt, 400)]
    drafter = ScriptedDrafter(lambda history, depth: truth[len(history) : len(history) + depth], "perfect")
    engine = make_engine(drafter, speculation=ADAPTIVE)
    params = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)
    _, done = run(engine, prompt, params)
    assert done.speculation.mean_acceptance_length > 5


def test_a_seed_gives_the_same_tokens_with_any_drafter_or_none(make_engine: MakeEngine, target: Target) -> None:
    expected, _ = run(make_engine(NoDrafter()), prompt_of(4), SAMPLED)
    for speculation in (
        ADAPTIVE,
        SpeculationConfig(mode=SpeculationMode.FIXED),
        SpeculationConfig(mode=SpeculationMode.FIXED, shape=TreeShape.TREE),
    ):
        for seed in (1, 2):
            listener, done = run(make_engine(eagle(target, seed), speculation=speculation), prompt_of(4), SAMPLED)
            assert listener.token_ids == expected.token_ids
            assert done.speculation.num_drafted > 0


# --- sampled drafts, through the whole engine ---

FEW = (0, 4, 8, 12, 20, 40)


def chi_square_p_value(observed: Counter[tuple[int, int]], expected: dict[tuple[int, int], float]) -> float:
    """Cells that expect less than 5 are pooled."""
    num = observed.total()
    cells = [(observed[cell], share * num) for cell, share in expected.items() if share * num >= 5]
    rest = num - sum(seen for seen, _ in cells), num - sum(want for _, want in cells)
    cells += [rest] if rest[1] >= 1 else []
    statistic = sum((seen - want) ** 2 / want for seen, want in cells)
    return float(torch.special.gammaincc(torch.tensor((len(cells) - 1) / 2), torch.tensor(statistic / 2)))


def sampled_pairs(engine: LocalEngine, params: SamplingParams, num: int) -> Counter[tuple[int, int]]:
    """The second and third token of many requests; the first comes with the prompt, these with drafts."""
    pairs: Counter[tuple[int, int]] = Counter()
    for _ in range(num // 50):
        listeners = [Listener() for _ in range(50)]
        for listener in listeners:
            session_id = engine.create_session().session_id
            engine.append(session_id, prompt_of(1))
            engine.generate(session_id, params, on_event=listener)
        for listener in listeners:
            listener.wait()
            pairs[listener.token_ids[1], listener.token_ids[2]] += 1
    return pairs


def exact_pairs(target: Target, prompt: Sequence[int]) -> dict[tuple[int, int], float]:
    """The same of the model itself, its logits cut down to FEW."""

    def probs(history: Sequence[int]) -> list[float]:
        cache = target.new_cache()
        [output] = target.forward([Segment(cache, history)])
        target.drop(cache)
        return output.logits[0, list(FEW)].softmax(-1).tolist()  # type: ignore[no-any-return]

    pairs: dict[tuple[int, int], float] = dict.fromkeys(itertools.product(FEW, FEW), 0.0)
    for first, p_first in zip(FEW, probs(prompt), strict=True):
        for second, p_second in zip(FEW, probs([*prompt, first]), strict=True):
            for third, p_third in zip(FEW, probs([*prompt, first, second]), strict=True):
                pairs[second, third] += p_first * p_second * p_third
    return pairs


@pytest.mark.parametrize("is_broken", [False, True])
def test_sampled_tokens_follow_the_models_distribution(
    make_engine: MakeEngine, target: Target, monkeypatch: pytest.MonkeyPatch, is_broken: bool
) -> None:
    """Chains sampled by a draft network. Broken: the number that drew a draft judges it too."""
    seeds = itertools.count()  # with a seed of its own a request would draft certain tokens
    monkeypatch.setattr("runtime.engine.request.Uniforms", lambda seed: Uniforms(next(seeds)))
    if is_broken:
        monkeypatch.setattr(Request, "judging", lambda self, num: self.drafting(num))
    bias = {token_id: -100.0 for token_id in range(target.info.vocab_size) if token_id not in FEW}
    params = SamplingParams(max_tokens=3, ignore_eos=True, logit_bias=bias)
    engine = make_engine(eagle(target, ids=FEW), max_draft_tokens=3, max_batch_sessions=16)
    p_value = chi_square_p_value(sampled_pairs(engine, params, 700), exact_pairs(target, prompt_of(1)))
    stats = engine.stats().speculation["eagle-0"]
    assert 0 < stats.num_accepted < stats.num_drafted
    assert (p_value < 1e-3) is is_broken

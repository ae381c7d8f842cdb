"""The draft verb: whose drafter, what a draft may be, how much is drafted; sampled drafts leave the distribution alone."""

from __future__ import annotations

import gc
import itertools
import math
import weakref
from collections import Counter
from collections.abc import Callable, Sequence

import pytest
import torch

from runtime.backends.base import Segment, SegmentOutput, Target
from runtime.config import SessionsConfig, SpeculationConfig, SpeculationMode, TreeShape
from runtime.drafters.base import Draft, DraftRequest, SparseProbs
from runtime.drafters.eagle3 import Eagle3Drafter
from runtime.drafters.none import NoDrafter
from runtime.drafters.scripted import ScriptedDrafter
from runtime.eagle3 import DraftVocabulary, Eagle3Config, Eagle3Model
from runtime.engine.drafting import clip
from runtime.engine.local import LocalEngine
from runtime.engine.request import Request
from runtime.errors import EngineUnavailable
from runtime.models import Tokenizer
from runtime.speculation import Uniforms
from runtime.speculation.costs import Costs
from runtime.types import DrafterPolicy, SamplingParams, SessionOptions

from .conftest import Listener, MakeEngine, run
from .test_local import GREEDY, adversarial, greedy_reference, perfect, prompt_of, random_drafter
from .test_step import PENALIZED, SAMPLED, tree_drafter

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


def test_after_a_forward_that_failed_drafts_come_from_the_last_row_again(
    make_engine: MakeEngine, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter, params = random_drafter(), SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    num_rows: list[int] = []

    def propose(requests: Sequence[DraftRequest]) -> list[Draft]:
        num_rows.extend(len(request.aux) for request in requests if request.depth)
        if len(num_rows) == 2:
            monkeypatch.setattr(target, "forward", fail)
        return [Draft([])] * len(requests)

    def fail(_: object) -> list[SegmentOutput]:
        monkeypatch.setattr(target, "forward", forward)
        raise RuntimeError("out of memory")

    forward = target.forward
    monkeypatch.setattr(drafter, "propose", propose)
    engine = make_engine(drafter)
    session_id = engine.create_session().session_id
    with pytest.raises(EngineUnavailable, match="out of memory"):
        run(engine, [1, 2, 3], params, session_id)
    run(engine, [], params, session_id, append=False)
    assert num_rows == [3, 1, 1, 1, 1, 1]


# --- what a draft may be ---


def test_a_draft_is_cut_to_what_can_be_verified() -> None:
    q = SparseProbs(torch.tensor([1]), torch.ones(1))
    assert clip(Draft([1, 2, 300, 4]), 9, 256) == Draft([1, 2])
    assert clip(Draft([1, 2, 3]), 2, 256) == Draft([1, 2])
    assert clip(Draft([1, 2, 3], [q, q]), 9, 256) == Draft([1, 2], [q, q])
    assert clip(Draft([1, 2, 1], [q, SparseProbs(torch.tensor([2, 256]), torch.ones(2)), q]), 9, 256) == Draft([1], [q])
    tree = Draft([1, -1, 3, 4, 5, 6], None, [-1, -1, 1, 0, 3, -1])
    assert clip(tree, 9, 256) == Draft([1, 4, 5, 6], None, [-1, 0, 1, -1])
    assert clip(tree, 2, 256) == Draft([1, 4, 6], None, [-1, 0, -1])
    assert clip(tree, 0, 256) == Draft([], None, [])
    assert clip(tree, 9, 256, 2) == Draft([1, 4], None, [-1, 0])
    assert len(clip(Draft([1] * 100, None, [-1] * 100), 9, 256).token_ids) == 63
    for parents in ([-1, 1], [-2, 0], [-1], [0, -1]):
        with pytest.raises(ValueError, match="earlier node"):
            clip(Draft([1, 2], None, parents), 9, 256)


def q(*probs: float, token_ids: Sequence[int] = (1, 2)) -> SparseProbs:
    return SparseProbs(torch.tensor(list(token_ids)), torch.tensor(probs))


BROKEN: dict[str, Callable[[int], Draft]] = {
    "no mass": lambda depth: Draft([1] * depth, [q(0.0, 1.0)] * depth),
    "nothing at all": lambda depth: Draft([1] * depth, [q(0.0, 0.0)] * depth),
    "no numbers": lambda depth: Draft([1] * depth, [q(math.nan, 1.0)] * depth),
    "too few probabilities": lambda depth: Draft([1] * depth, [q(1.0)] * depth),
    "confidence is no number": lambda depth: Draft([1] * depth, confidences=[math.nan] * depth),
    "confidence below 0": lambda depth: Draft([1] * depth, confidences=[-1.0] * depth),
    "too few confidences": lambda depth: Draft([1] * depth, confidences=[0.5] * (depth - 1)),
    "ids are no ints": lambda depth: Draft([1.0] * depth),  # type: ignore[list-item]
    "ids are a tensor": lambda depth: Draft(torch.ones(depth, dtype=torch.int64)),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_draft_that_contradicts_itself_costs_speed_only(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr("runtime.engine.request.Uniforms", lambda seed: Uniforms(5))  # with a seed `probs` would not matter
    params = SamplingParams(max_tokens=40, ignore_eos=True, logit_bias={1: -100.0})  # these drafts are never accepted
    expected, _ = run(make_engine(NoDrafter()), prompt_of(4), params)
    drafter = ScriptedDrafter(lambda history, depth: BROKEN[kind](depth), "broken")
    engine = make_engine(drafter, speculation=ADAPTIVE)
    engine._stepper._pacer.costs = Costs({1: 1.0, 32: 1.01})  # drafts are worth it
    listener, _ = run(engine, prompt_of(4), params)
    assert listener.token_ids == expected.token_ids
    assert engine.stats().num_drafter_failures > 0


def test_what_was_decided_before_a_draft_contradicts_itself_stays(make_engine: MakeEngine) -> None:
    chain = ScriptedDrafter(lambda history, depth: Draft([1, 2, 1], [q(1.0, token_ids=(1,)), q(1.0, 0.0), q(0.5, 0.5)]), "broken")
    engine = make_engine(chain, max_draft_tokens=3)
    listener, done = run(engine, prompt_of(4), SamplingParams(max_tokens=11, ignore_eos=True, logit_bias={1: 100.0}))
    assert listener.token_ids == [1] * 11
    assert done.speculation.accepted_per_position == [5]
    assert engine.stats().num_drafter_failures == 5


def test_a_seeds_tokens_depend_on_no_probabilities_that_a_drafter_claims(make_engine: MakeEngine) -> None:
    expected, _ = run(make_engine(NoDrafter()), prompt_of(4), SAMPLED)
    false = ScriptedDrafter(lambda history, depth: Draft([1] * depth, [q(1e-6, 1.0)] * depth), "false")
    listener, done = run(make_engine(false), prompt_of(4), SAMPLED)
    assert listener.token_ids == expected.token_ids
    assert done.speculation.num_drafted > 0


@pytest.mark.parametrize("method", ["new_state", "drop_state"])
def test_a_drafter_that_fails_to_begin_or_to_end_costs_speed_only(
    make_engine: MakeEngine, target: Target, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = random_drafter()

    def broken(*_: int) -> int:
        raise RuntimeError("out of memory")

    engine = make_engine(drafter)
    with monkeypatch.context() as patch:
        patch.setattr(drafter, method, broken)
        listener, _ = run(engine, prompt_of(4), GREEDY)
        engine.swap_drafter(NoDrafter())
    again, _ = run(engine, prompt_of(4), GREEDY)
    assert listener.token_ids == again.token_ids == greedy_reference(target, prompt_of(4), 40)


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


def test_a_drafter_goes_with_its_last_user_and_waits_for_no_garbage_collector(target: Target, tokenizer: Tokenizer) -> None:
    """The program keeps what it began with out of the collector's sight, its first drafter too."""
    engine = LocalEngine(target, drafter := eagle(target), tokenizer, SpeculationConfig(), SessionsConfig())
    weights = weakref.ref(next(drafter.model.parameters()))
    del drafter
    engine.start()
    gc.collect()
    gc.disable()
    try:
        session_id = engine.create_session().session_id
        run(engine, prompt_of(1), GREEDY, session_id)
        engine.swap_drafter(NoDrafter())
        run(engine, prompt_of(2), GREEDY, session_id)  # a step of its own: what the last one of the old drafter held is gone
        assert weights() is None
    finally:
        gc.enable()
        engine.close_session(session_id)
        engine.stop()


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
    monkeypatch.setattr(Costs, "record_proposal", lambda *args, **more: None)


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


Q = torch.tensor([[0.0, 0.0, 1.0, 2.0, 1.0, 6.0], [0.0, 0.0, 6.0, 2.0, 1.0, 1.0]])  # over FEW, by the last token


def sampled_tree(is_broken: bool) -> ScriptedDrafter:
    """Two children of the last token and two of the first of these, drawn without replacement from four tokens.

    Broken: what is drawn often claims to be rare, so that it is accepted whatever the model thinks of it.
    """
    generator = torch.Generator().manual_seed(5)

    def script(history: Sequence[int], depth: int) -> Draft:
        token_ids: list[int] = []
        probs: list[SparseProbs] = []
        parents = [-1, -1, 0, 0] if depth > 1 else [-1, -1]
        for node, parent in enumerate(parents):
            last = history[-1] if parent < 0 else token_ids[parent]
            weights = Q[last // 4 % 2].clone()
            drawn = [FEW.index(token_ids[other]) for other in range(node) if parents[other] == parent]
            weights[drawn] = 0.0
            token_ids.append(FEW[int(torch.multinomial(weights, 1, generator=generator))])
            claimed = torch.where(weights > 0, 1.0 / weights, 0.0) if is_broken else weights
            support = claimed.nonzero().squeeze(-1)
            ids = torch.tensor(FEW)[support]
            probs.append(SparseProbs(ids, claimed[support] / claimed.sum()))
        return Draft(token_ids, probs, parents)

    return ScriptedDrafter(script, "tree")


@pytest.mark.parametrize("is_broken", [False, True])
def test_trees_sampled_from_few_tokens_leave_the_distribution_alone(
    make_engine: MakeEngine, target: Target, monkeypatch: pytest.MonkeyPatch, is_broken: bool
) -> None:
    seeds = itertools.count(10**6)
    monkeypatch.setattr("runtime.engine.request.Uniforms", lambda seed: Uniforms(next(seeds)))
    bias = {token_id: -100.0 for token_id in range(target.info.vocab_size) if token_id not in FEW}
    params = SamplingParams(max_tokens=3, ignore_eos=True, logit_bias=bias)
    speculation = SpeculationConfig(mode=SpeculationMode.FIXED, shape=TreeShape.TREE, max_draft_tokens=2)
    engine = make_engine(sampled_tree(is_broken), speculation=speculation, max_batch_sessions=16)
    p_value = chi_square_p_value(sampled_pairs(engine, params, 2100), exact_pairs(target, prompt_of(1)))
    stats = engine.stats().speculation["tree"]
    assert 0 < stats.num_accepted < stats.num_drafted
    assert (p_value < 1e-3) is is_broken

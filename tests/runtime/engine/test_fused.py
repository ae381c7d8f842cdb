"""Steps that run on the device as a whole, behind the real engine: what they emit, who may join, and what they leave behind."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from runtime.backends import load_target
from runtime.backends.base import Target
from runtime.config import BackendConfig, Dtype, ModelConfig, SessionsConfig, SpeculationConfig, SpeculationMode
from runtime.engine.local import LocalEngine
from runtime.models import ResolvedModel, Tokenizer
from runtime.types import CachePolicy, Done, DrafterPolicy, SamplingParams, SessionOptions

from .conftest import Listener, random_eagle3

pytestmark = pytest.mark.cuda
NEAR_TIE = 1e-3
GREEDY = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def on_device(tiny: ResolvedModel) -> Target:
    model = ModelConfig(name="tiny", device="cuda", dtype=Dtype.FLOAT32)
    return load_target(BackendConfig(kv_pool_mib=256), model, tiny)


@pytest.fixture(scope="module")
def gaps(tiny: ResolvedModel) -> Callable[[list[int], list[int]], float]:
    """By how much the emitted tokens of a continuation fall short of the plain model's best, at most."""
    plain = AutoModelForCausalLM.from_pretrained(tiny.path, dtype=torch.float32).cuda().eval()

    @torch.no_grad()
    def gap(prompt: list[int], answer: list[int]) -> float:
        logits = plain(torch.tensor([prompt + answer], device="cuda")).logits[0, len(prompt) - 1 : -1]
        chosen = logits.gather(-1, torch.tensor(answer, device="cuda")[:, None])[:, 0]
        return float((logits.max(dim=-1).values - chosen).max())

    return gap


MakeEngine = Callable[..., LocalEngine]


@pytest.fixture
def make_engine(on_device: Target, tiny: ResolvedModel) -> Iterator[MakeEngine]:
    engines: list[LocalEngine] = []

    def make(
        mode: SpeculationMode = SpeculationMode.FIXED, num_sessions: int = 16, depth: int = 3, patient: bool = False
    ) -> LocalEngine:
        speculation = SpeculationConfig(mode=mode, max_draft_tokens=depth)
        sessions = SessionsConfig(max_batch_sessions=num_sessions, prefix_reuse=False, patient=patient)
        engine = LocalEngine(on_device, random_eagle3(on_device, 0), Tokenizer.load(tiny.path), speculation, sessions)
        engines.append(engine)
        engine.start()
        return engine

    yield make
    for engine in engines:
        engine.stop()
    assert on_device.cache_bytes() == 0, "every block comes back"


def begin(
    engine: LocalEngine, prompt: list[int], params: SamplingParams = GREEDY, options: SessionOptions | None = None
) -> Listener:
    session_id = engine.create_session(options).session_id
    engine.append(session_id, prompt)
    listener = Listener()
    engine.generate(session_id, params, on_event=listener)
    return listener


def prompt_of(seed: int, size: int) -> list[int]:
    return random.Random(seed).choices(range(256), k=size)


@pytest.fixture(params=[False, True], ids=["single", "in-a-row"])
def in_a_row(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether two sessions are many: then their steps with drafts come in a row."""
    if request.param:
        monkeypatch.setattr("runtime.engine.fused.SOME_SESSIONS", 2)
    return request.param


@pytest.mark.parametrize("mode", SpeculationMode)
@pytest.mark.usefixtures("in_a_row")
def test_every_token_is_the_models_own(mode, make_engine: MakeEngine, gaps):
    engine = make_engine(mode)
    prompts = [prompt_of(seed, 5 + 11 * seed) for seed in range(9)]
    listeners = [begin(engine, prompt) for prompt in prompts]
    for prompt, listener in zip(prompts, listeners, strict=True):
        listener.wait()
        assert len(listener.token_ids) == 40
        assert gaps(prompt, listener.token_ids) < NEAR_TIE
    assert engine.stats().num_target_forwards < 9 * 40


def test_drafts_are_accepted_and_a_swap_takes_effect(make_engine: MakeEngine, on_device: Target, gaps):
    engine = make_engine()
    graphs = len(engine._stepper._fused._decoder._graphs)  # type: ignore[union-attr]
    prompt = prompt_of(1, 30)
    first = begin(engine, prompt)
    first.wait()
    running = begin(engine, prompt, SamplingParams(max_tokens=400, temperature=0.0, ignore_eos=True))
    running.next()
    engine.swap_drafter(random_eagle3(on_device, 1))
    done = running.wait()
    assert done.drafter_versions[-1] == "random-1"
    assert gaps(prompt, running.token_ids) < NEAR_TIE
    assert running.token_ids[:40] == first.token_ids
    assert done.speculation.num_drafted > 0
    assert sum(running.drafted) == done.speculation.num_accepted
    assert len(engine._stepper._fused._decoder._graphs) == graphs  # type: ignore[union-attr]


@pytest.mark.parametrize("num_tokens", [1, 2, 3, 7])
def test_a_turn_ends_where_it_must_and_goes_on(num_tokens: int, make_engine: MakeEngine, gaps):
    engine = make_engine()
    session_id = engine.create_session().session_id
    history = prompt_of(2, 20)
    engine.append(session_id, history)
    for _ in range(4):
        listener = Listener()
        params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
        engine.generate(session_id, params, on_event=listener)
        listener.wait()
        assert len(listener.token_ids) == num_tokens
        assert gaps(history, listener.token_ids) < NEAR_TIE
        history += listener.token_ids
        info = engine.get_session(session_id)
        assert info.cached_tokens == info.history_length == len(history)
        history += [7, 8]
        engine.append(session_id, [7, 8])


def test_general_and_fused_sessions_share_a_batch(make_engine: MakeEngine, gaps):
    engine = make_engine()
    prompts = [prompt_of(seed, 25) for seed in range(6)]
    kinds = [
        (GREEDY, None),
        (SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True, logprobs=True), None),
        (SamplingParams(max_tokens=40, temperature=1.0, seed=5, ignore_eos=True), None),
        (GREEDY, SessionOptions(drafter_policy=DrafterPolicy("off"))),
        (GREEDY, SessionOptions(cache_policy=CachePolicy(sink=4, window=2000))),
        (SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True, presence_penalty=0.5), None),
    ]
    listeners = [begin(engine, prompt, *kind) for prompt, kind in zip(prompts, kinds, strict=True)]
    for listener in listeners:
        listener.wait()
    for index in (0, 1, 3, 4):
        assert gaps(prompts[index], listeners[index].token_ids) < NEAR_TIE
    assert len(listeners[1].logprobs) == 40


@pytest.mark.usefixtures("in_a_row")
def test_a_seed_says_the_same_alone_in_a_batch_and_the_general_way(make_engine: MakeEngine):
    """In float32 the shapes of forwards move a distribution by less than any of these draws is from its edge."""
    engine = make_engine()
    kinds = [
        SamplingParams(max_tokens=40, temperature=0.9, seed=5, ignore_eos=True),
        SamplingParams(max_tokens=40, temperature=0.7, top_p=0.9, seed=6, ignore_eos=True),
        SamplingParams(max_tokens=40, temperature=1.0, top_k=20, min_p=0.01, seed=7, ignore_eos=True),
    ]
    alone = []
    for kind in kinds:
        alone.append(begin(engine, prompt_of(5, 20), kind))
        alone[-1].wait()
    together = [begin(engine, prompt_of(5, 20), kind) for kind in [GREEDY, *kinds]]
    general = [begin(engine, prompt_of(5, 20), replace(kind, logprobs=True)) for kind in kinds]
    for listener in [*together, *general]:
        listener.wait()
    for one, two, three in zip(alone, together[1:], general, strict=True):
        assert one.token_ids == two.token_ids == three.token_ids


@pytest.mark.usefixtures("in_a_row")
def test_unseeded_drafts_are_accepted_and_differ(make_engine: MakeEngine):
    engine = make_engine()
    params = SamplingParams(max_tokens=100, temperature=1.0, ignore_eos=True)
    listeners = [begin(engine, prompt_of(3, 20), params) for _ in range(4)]
    done = [listener.wait() for listener in listeners]
    assert len({tuple(listener.token_ids) for listener in listeners}) == 4
    assert sum(each.speculation.num_accepted for each in done) > 0


@pytest.mark.parametrize("patient", [False, True])
def test_many_sessions_take_several_steps_at_once(patient: bool, make_engine: MakeEngine, gaps):
    """Half as many again wait: their prompts are read between rows of steps, or, where nobody minds, beside them."""
    engine = make_engine(num_sessions=100, patient=patient)
    options = SessionOptions(drafter_policy=DrafterPolicy("off"))
    prompts = [prompt_of(seed, 5 + seed % 30) for seed in range(150)]
    lengths = [20 + seed % 40 for seed in range(150)]
    listeners = [
        begin(engine, prompt, replace(GREEDY, max_tokens=length), options)
        for prompt, length in zip(prompts, lengths, strict=True)
    ]
    for prompt, length, listener in zip(prompts, lengths, listeners, strict=True):
        listener.wait()
        assert len(listener.token_ids) == length
        assert gaps(prompt, listener.token_ids) < NEAR_TIE


def test_sessions_come_and_go_at_random(make_engine: MakeEngine, gaps):
    """More than fit a batch, of all lengths; some are cancelled or closed midway, some fork."""
    engine, rng = make_engine(num_sessions=12), random.Random(4)
    checks: list[tuple[list[int], Listener]] = []
    for number in range(120):
        prompt = prompt_of(number % 40, rng.randrange(3, 60))
        session_id = engine.create_session().session_id
        engine.append(session_id, prompt)
        listener = Listener()
        params = SamplingParams(max_tokens=rng.randrange(1, 60), temperature=0.0, ignore_eos=rng.random() < 0.7)
        generation = engine.generate(session_id, params, on_event=listener)
        match rng.randrange(8):
            case 0:
                generation.cancel()
            case 1:
                engine.close_session(session_id)
            case _:
                checks.append((prompt, listener))
    for prompt, listener in checks:
        assert isinstance(listener.wait(), Done)
        assert gaps(prompt, listener.token_ids) < NEAR_TIE


def test_a_window_slides_over_a_long_answer(make_engine: MakeEngine):
    """The same tokens whether the device or the general way makes them, far past the window."""
    engine = make_engine()
    options = SessionOptions(cache_policy=CachePolicy(sink=4, window=60))
    params = SamplingParams(max_tokens=300, temperature=0.0, ignore_eos=True)
    general = SamplingParams(max_tokens=300, temperature=0.0, ignore_eos=True, logprobs=True, top_logprobs=2)
    answers = []
    for each in (params, general):
        listener = begin(engine, prompt_of(9, 100), each, options)
        listener.wait()
        answers.append(listener.token_ids)
    parted = next((at for at, (a, b) in enumerate(zip(*answers, strict=True)) if a != b), None)
    if parted is not None:  # only where the two best are as good as equal
        best = sorted((logprob for _, logprob in listener.logprobs[parted].top), reverse=True) or [0.0]
        assert len(best) < 2 or best[0] - best[1] < NEAR_TIE, f"the answers part at token {parted}"

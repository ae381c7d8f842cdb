"""SmolLM2-135M with its embedded drafter through the real engine: lossless, and worth its work."""

from __future__ import annotations

import queue
from collections.abc import Iterator, Sequence

import pytest

from runtime.backends import load_target
from runtime.config import (
    BackendConfig,
    DrafterConfig,
    ModelConfig,
    SessionsConfig,
    SpeculationConfig,
    SpeculationMode,
    TreeShape,
)
from runtime.drafters.embedded import path_for
from runtime.drafters.loading import load_drafter
from runtime.engine.local import LocalEngine
from runtime.models import Tokenizer, resolve
from runtime.types import Done, Event, Failed, SamplingParams, SpeculationStats, TokenLogprob, Tokens

pytestmark = pytest.mark.real_model

NEAR_TIE = 1e-3  # float32 forwards of different shapes differ by some 5e-5 in the logits
PROMPTS = [
    "A farmer has 17 sheep and buys 3 times as many. Then he sells 12. How many sheep does he have? Think step by step.",
    "Write a Python function that returns the n-th Fibonacci number.",
    "What are the three states of matter? Answer in one paragraph.",
    "Translate to French: The weather is nice today and we are going to the market.",
    "List five animals that live in the sea.",
    "Explain photosynthesis to a child of ten years.",
]


@pytest.fixture(scope="module", params=[TreeShape.CHAIN, TreeShape.TREE])
def engine(request: pytest.FixtureRequest) -> Iterator[LocalEngine]:
    speculation = SpeculationConfig(mode=SpeculationMode.FIXED, shape=request.param)
    resolved = resolve(ModelConfig().name)
    target = load_target(BackendConfig(), ModelConfig(), resolved)
    drafter = load_drafter(DrafterConfig(), target)
    engine = LocalEngine(target, drafter, Tokenizer.load(resolved.path), speculation, SessionsConfig())
    engine.start()
    yield engine
    engine.stop()


def generate(engine: LocalEngine, prompt: str, params: SamplingParams) -> tuple[list[Tokens], Done]:
    session = engine.create_session()
    engine.append(session.session_id, engine.tokenizer.encode_chat([{"role": "user", "content": prompt}]))
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    engine.generate(session.session_id, params, on_event=events.put)
    tokens: list[Tokens] = []
    while True:
        event = events.get(timeout=120)
        if isinstance(event, Failed):
            raise event.error
        if isinstance(event, Done):
            engine.close_session(session.session_id)
            return tokens, event
        if isinstance(event, Tokens):
            tokens.append(event)


def assert_same_but_for_near_ties(prompt: str, fast: Sequence[TokenLogprob], plain: Sequence[TokenLogprob]) -> None:
    for a, b in zip(fast, plain, strict=False):
        if a.token_id != b.token_id:
            gap = b.top[0][1] - b.top[1][1]
            assert gap <= NEAR_TIE, f"{prompt!r}: outputs part where the best two logits lie {gap} apart"
            return
    assert len(fast) == len(plain)


def test_speculation_is_lossless_and_accepts_real_drafts(engine: LocalEngine) -> None:
    totals = SpeculationStats()
    for prompt in PROMPTS:
        arms = []
        for speculate in (True, False):
            params = SamplingParams(temperature=0.0, max_tokens=64, speculate=speculate, logprobs=True, top_logprobs=2)
            tokens, done = generate(engine, prompt, params)
            arms.append([logprob for event in tokens for logprob in event.logprobs])
            if speculate:
                totals.num_steps += done.speculation.num_steps
                totals.num_accepted += done.speculation.num_accepted
        fast, plain = arms
        assert_same_but_for_near_ties(prompt, fast, plain)
    assert engine.drafter_version == path_version(engine)
    assert totals.mean_acceptance_length > 2.2


def path_version(engine: LocalEngine) -> str:
    from runtime.eagle3.checkpoint import version_id

    path = path_for("smollm2-135m")
    assert path is not None
    return version_id(path)


def test_sampled_output_with_a_seed_is_reproducible(engine: LocalEngine) -> None:
    """With and without speculation: a seed's tokens do not depend on what was drafted."""
    texts = set()
    for speculate in (True, False, True):
        params = SamplingParams(temperature=0.8, top_p=0.95, seed=11, max_tokens=48, speculate=speculate)
        texts.add("".join(event.text for event in generate(engine, PROMPTS[5], params)[0]))
    assert len(texts) == 1

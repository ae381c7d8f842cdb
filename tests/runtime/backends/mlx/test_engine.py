"""The same engine on MLX and on transformers: the same tokens, speculated or not, up to near-ties."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch

from runtime.backends import load_target
from runtime.backends.base import Target
from runtime.config import (
    BackendConfig,
    DrafterConfig,
    ModelConfig,
    SessionsConfig,
    SpeculationConfig,
    SpeculationMode,
    TreeShape,
)
from runtime.drafters.base import Drafter
from runtime.drafters.eagle3 import Eagle3Drafter
from runtime.drafters.loading import load_drafter
from runtime.eagle3 import DraftVocabulary, Eagle3Config, Eagle3Model
from runtime.engine.local import LocalEngine
from runtime.models import ResolvedModel, Tokenizer, resolve
from runtime.types import Done, Event, Failed, SamplingParams, TokenLogprob, Tokens

MakeDrafter = Callable[[Target], Drafter]

NEAR_TIE = 1e-3
PROMPTS = [
    "Write a Python function that returns the n-th Fibonacci number.",
    "A farmer has 17 sheep and buys 3 times as many. How many sheep does he have?",
    "List five animals that live in the sea.",
]


@contextmanager
def running(backend: str, resolved: ResolvedModel, make_drafter: MakeDrafter) -> Iterator[LocalEngine]:
    target = load_target(BackendConfig(name=backend), ModelConfig(resolved.name, device="cpu"), resolved)
    speculation = SpeculationConfig(mode=SpeculationMode.FIXED, shape=TreeShape.CHAIN)
    engine = LocalEngine(target, make_drafter(target), Tokenizer.load(resolved.path), speculation, SessionsConfig())
    engine.start()
    try:
        yield engine
    finally:
        engine.stop()
        assert target.cache_bytes() == 0


def answers(engine: LocalEngine, prompts: list[list[int]], params: SamplingParams) -> tuple[list[list[TokenLogprob]], int]:
    """Of all prompts at once: the tokens of each, and how many drafts were accepted."""
    events: queue.SimpleQueue[tuple[int, Event]] = queue.SimpleQueue()
    for index, prompt in enumerate(prompts):
        session = engine.create_session().session_id
        engine.append(session, prompt)
        engine.generate(session, params, on_event=lambda event, index=index: events.put((index, event)))
    found: list[list[TokenLogprob]] = [[] for _ in prompts]
    num_running, num_accepted = len(prompts), 0
    while num_running:
        index, event = events.get(timeout=120)
        if isinstance(event, Failed):
            raise event.error
        if isinstance(event, Tokens):
            found[index].extend(event.logprobs)
        if isinstance(event, Done):
            num_running -= 1
            num_accepted += event.speculation.num_accepted
    return found, num_accepted


def assert_same(ours: list[TokenLogprob], theirs: list[TokenLogprob]) -> None:
    """Up to the first near-tie, after which both are right."""
    for a, b in zip(ours, theirs, strict=False):
        if a.token_id != b.token_id:
            gap = b.top[0][1] - b.top[1][1]
            assert gap <= NEAR_TIE, f"outputs part where the best two logits lie {gap} apart"
            return
        assert abs(a.logprob - b.logprob) < 5e-3
    assert len(ours) == len(theirs)


def random_drafter(target: Target) -> Drafter:
    vocab_size, size = target.embedding.shape
    config = Eagle3Config(
        hidden_size=size,
        intermediate_size=2 * size,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=size // 4,
        vocab_size=vocab_size,
        draft_vocab_size=vocab_size,
        max_position_embeddings=2048,
    )
    generator = torch.Generator().manual_seed(0)
    model = Eagle3Model(config, DraftVocabulary(torch.arange(vocab_size), vocab_size), target.embedding)
    model.init_from_target(target.lm_head, torch.ones(size), generator)
    return Eagle3Drafter(model.requires_grad_(False), "random")


def compare(resolved: ResolvedModel, make_drafter: MakeDrafter, prompts: list[list[int]], num_tokens: int) -> int:
    """Greedy answers of both backends, and of MLX without speculation; how many drafts MLX accepted."""
    with ExitStack() as stack:
        mlx, transformers = (stack.enter_context(running(backend, resolved, make_drafter)) for backend in ("mlx", "transformers"))
        fields: dict[str, Any] = {
            "temperature": 0.0,
            "max_tokens": num_tokens,
            "logprobs": True,
            "top_logprobs": 2,
            "ignore_eos": True,
        }
        theirs, _ = answers(transformers, prompts, SamplingParams(**fields))
        ours, num_accepted = answers(mlx, prompts, SamplingParams(**fields))
        plain, _ = answers(mlx, prompts, SamplingParams(speculate=False, **fields))
    for one, other, third in zip(ours, theirs, plain, strict=True):
        assert len(one) == num_tokens
        assert_same(one, other)
        assert_same(one, third)
    return num_accepted


def test_the_tiny_model_says_the_same_on_both_backends() -> None:
    resolved = resolve("tiny")
    tokenizer = Tokenizer.load(resolved.path)
    prompts = [tokenizer.encode_chat([{"role": "user", "content": prompt}]) for prompt in PROMPTS]
    compare(resolved, random_drafter, prompts, num_tokens=40)


@pytest.mark.real_model
def test_the_real_model_says_the_same_on_both_backends_and_its_drafts_are_accepted() -> None:
    resolved = resolve("smollm2-135m")
    tokenizer = Tokenizer.load(resolved.path)
    prompts = [tokenizer.encode_chat([{"role": "user", "content": prompt}]) for prompt in PROMPTS[:2]]
    num_accepted = compare(resolved, lambda target: load_drafter(DrafterConfig(), target), prompts, num_tokens=24)
    assert num_accepted > 16  # of 2 * 24 tokens

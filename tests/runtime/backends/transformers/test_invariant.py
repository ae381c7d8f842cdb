"""numerics=invariant: bit for bit, a token alone is a token among others."""

from __future__ import annotations

import queue
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from runtime.backends import load_target
from runtime.backends.base import Segment, SegmentOutput, Target
from runtime.backends.transformers.invariant import RowwiseActivation
from runtime.config import BackendConfig, DrafterConfig, Dtype, ModelConfig, Numerics, SessionsConfig, SpeculationConfig
from runtime.drafters.loading import load_drafter
from runtime.engine.local import LocalEngine
from runtime.errors import ConfigError
from runtime.models import ResolvedModel, Tokenizer, resolve
from runtime.types import CachePolicy, Done, Event, Failed, SamplingParams, Tokens

MODELS: dict[str, dict[str, Any]] = {
    "llama": {"intermediate_size": 1100, "hidden_size": 72, "head_dim": 18},  # a wide layer, widths that fill no vector
    "qwen2": {"num_attention_heads": 6},  # biases, three heads share a key
    "qwen3": {},
    "gemma3_text": {"sliding_window": 6},
    "gemma2": {"sliding_window": 6},  # soft caps
    "mistral": {"sliding_window": 6},
}
POLICIES = [CachePolicy(), CachePolicy(window=9), CachePolicy(sink=4, window=9)]


@pytest.fixture
def set_threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


class Growing:
    """One history that grows by chunks and by trees, at random, checked bit by bit against the same one by one."""

    def __init__(self, target: Target, policy: CachePolicy, rng: random.Random, text: Sequence[int]) -> None:
        self._target, self._rng, self._text = target, rng, text
        self.history: list[int] = []
        self.cache, self.shadow = target.new_cache(policy), target.new_cache(policy)

    def one_by_one(self, cache: int, token_ids: Sequence[int]) -> SegmentOutput:
        """Append to the cache, nothing beside it; what the target says of the last token."""
        for token_id in token_ids:
            [output] = self._target.forward([Segment(cache, [token_id])])
            self._target.commit(cache, [0])
        return output

    def next_segment(self) -> Segment:
        """A chunk of the text, or a tree on whose way down lies the text."""
        rest = self._text[len(self.history) :]
        if self._rng.random() < 0.5:
            self._tree = None
            chunk = rest[: self._rng.choice([1, 1, 2, 5, 16, 40])]
            return Segment(self.cache, chunk, num_logits=len(chunk))
        depth = self._rng.randint(1, min(4, len(rest)))
        tokens, parents, path = [], [], []
        for level in range(depth):
            parent = path[-1] if path else -1
            path.append(len(tokens))
            tokens.append(rest[level])
            parents.append(parent)
            for _ in range(self._rng.randint(0, 2)):
                tokens.append((rest[level] + len(tokens)) % 320)
                parents.append(self._rng.choice([parent, *path]))
                if parents[-1] == path[-1] and self._rng.random() < 0.5:  # a grandchild of its own
                    tokens.append((rest[level] + len(tokens)) % 320)
                    parents.append(len(tokens) - 2)
        self._tree, self._path = parents, path
        return Segment(self.cache, tokens, parents, num_logits=len(tokens))

    def check_and_commit(self, segment: Segment, output: SegmentOutput) -> None:
        parents = range(-1, len(segment.token_ids) - 1) if self._tree is None else self._tree
        known: list[int] = []  # of each node, a cache that ends with it
        for node, parent in enumerate(parents):
            known.append(self._target.fork(known[parent] if parent >= 0 else self.shadow))
            expected = self.one_by_one(known[node], [segment.token_ids[node]])
            assert torch.equal(output.logits[node], expected.logits[0])
            assert torch.equal(output.hidden.aux[node], expected.hidden.aux[0])
            assert torch.equal(output.hidden.last[node], expected.hidden.last[0])
        rows = range(len(segment.token_ids)) if self._tree is None else self._path
        self._target.commit(self.cache, rows)
        self.history.extend(segment.token_ids[row] for row in rows)
        self.shadow, end = known[rows[-1]], self.shadow
        for cache in {*known, end} - {self.shadow}:
            self._target.drop(cache)

    @property
    def is_done(self) -> bool:
        return len(self.history) == len(self._text)


def assert_invariant(target: Target, policy: CachePolicy, seed: int, size: int) -> None:
    """Three sequences, one of them the same text as another, come and go in random company."""
    rng = random.Random(seed)
    texts = [[rng.randrange(320) for _ in range(size)] for _ in range(2)]
    sequences = [Growing(target, policy, rng, text) for text in (*texts, texts[0])]
    while any(not sequence.is_done for sequence in sequences):
        company = [each for each in sequences if not each.is_done and rng.random() < 0.7]
        segments = [sequence.next_segment() for sequence in company]
        for sequence, segment, output in zip(company, segments, target.forward(segments), strict=True):
            sequence.check_and_commit(segment, output)
    for sequence in sequences:
        target.drop(sequence.cache)
        target.drop(sequence.shadow)
    assert target.cache_bytes() == 0


@pytest.mark.parametrize("architecture", MODELS)
def test_a_token_does_not_depend_on_its_company(
    random_model: Callable[..., Any], set_threads: Callable[[int], None], architecture: str
) -> None:
    set_threads(1)
    model = random_model(architecture, num_hidden_layers=4, **MODELS[architecture])
    target = model.target(numerics=Numerics.INVARIANT)
    for seed, policy in enumerate(POLICIES):
        assert_invariant(target, policy, seed, size=30 if policy.window else 20)


def test_nor_on_how_threads_share_it(random_model: Callable[..., Any], set_threads: Callable[[int], None]) -> None:
    set_threads(2)
    target = random_model("llama", num_hidden_layers=2, **MODELS["llama"]).target(numerics=Numerics.INVARIANT)
    assert_invariant(target, CachePolicy(), seed=0, size=12)


def test_it_is_the_same_model(random_model: Callable[..., Any]) -> None:
    model = random_model("llama")
    target = model.target(numerics=Numerics.INVARIANT)
    text = list(range(40))
    [output] = target.forward([Segment(target.new_cache(), text, num_logits=40)])
    torch.testing.assert_close(output.logits, model.logits(text), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("features", [1, 31, 100, 1536, 40000])
def test_an_activation_does_not_depend_on_the_row(features: int) -> None:
    x = torch.randn(1, 45, features, generator=torch.Generator().manual_seed(0))
    activation = RowwiseActivation(nn.SiLU())
    rows = torch.cat([activation(x[:, row : row + 1]) for row in range(45)], dim=1)
    assert torch.equal(activation(x), rows)
    torch.testing.assert_close(rows, nn.SiLU()(x))


def test_what_cannot_be_invariant_is_refused(random_model: Callable[..., Any], tiny: ResolvedModel) -> None:
    moe = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    with pytest.raises(ConfigError, match="token 0 of a trial text depends on what is computed beside it"):
        random_model("qwen3_moe", **moe).target(numerics=Numerics.INVARIANT)
    with pytest.raises(ConfigError, match=r"which torch\.bfloat16 on cpu cannot be: it needs float32 on a CPU"):
        load_target(BackendConfig(numerics=Numerics.INVARIANT), ModelConfig(device="cpu", dtype=Dtype.BFLOAT16), tiny)


@pytest.mark.real_model
def test_the_real_model_is_invariant(set_threads: Callable[[int], None]) -> None:
    set_threads(2)
    target = load_target(BackendConfig(numerics=Numerics.INVARIANT), ModelConfig(device="cpu"), resolve("smollm2-135m"))
    assert_invariant(target, CachePolicy(), seed=0, size=24)


PROMPTS = ["What is 17 times 3?", "Write a haiku about the sea.", "List five animals.", "Who wrote Faust, and when?"]


@pytest.mark.real_model
def test_speculation_in_company_changes_no_token() -> None:
    """Without exception: near-ties are none where every bit is the same."""
    backend, settings = BackendConfig(numerics=Numerics.INVARIANT), SessionsConfig(prefill_chunk_tokens=16)
    resolved = resolve("smollm2-135m")
    target, tokenizer = load_target(backend, ModelConfig(device="cpu"), resolved), Tokenizer.load(resolved.path)
    engine = LocalEngine(target, load_drafter(DrafterConfig(), target), tokenizer, SpeculationConfig(), settings)

    def start(prompt: str, speculate: bool) -> queue.SimpleQueue[Event]:
        session = engine.create_session()
        engine.append(session.session_id, engine.tokenizer.encode_chat([{"role": "user", "content": prompt}]))
        events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        params = SamplingParams(temperature=0.0, max_tokens=24, speculate=speculate)
        engine.generate(session.session_id, params, on_event=events.put)
        return events

    def finish(events: queue.SimpleQueue[Event]) -> list[int]:
        token_ids: list[int] = []
        while not isinstance(event := events.get(timeout=300), Done):
            assert not isinstance(event, Failed), event
            token_ids.extend(event.token_ids if isinstance(event, Tokens) else ())
        return token_ids

    engine.start()
    try:
        alone = [finish(start(prompt, speculate=False)) for prompt in PROMPTS]
        together = [start(prompt, speculate=True) for prompt in PROMPTS]
        assert [finish(events) for events in together] == alone
    finally:
        engine.stop()

"""The host's side of fused steps: who is in a step, what is taken of it, what becomes of a step that nobody wants any more.

The decoder here is honest but slow: real forwards of the real target on a CPU, made when a step is launched and told when it
is collected, as a device would. The device's own is tested in `test_fused.py`.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from runtime.backends import load_target
from runtime.backends.base import Segment, Target
from runtime.config import BackendConfig, ModelConfig, SessionsConfig, SpeculationConfig, SpeculationMode
from runtime.drafters.base import DraftRequest
from runtime.eagle3 import Eagle3Model
from runtime.engine.local import LocalEngine
from runtime.hidden_states import HiddenStates
from runtime.models import ResolvedModel, Tokenizer
from runtime.types import DrafterPolicy, SamplingParams, SessionOptions

from .conftest import Listener, greedy_reference, prompt_of, random_eagle3

CAPACITY_BYTES = 2**30  # less than the budget of the settings
GREEDY = SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True)


@dataclass
class _Step:
    caches: list[int]
    tokens: list[list[int]]
    hidden: HiddenStates


@dataclass
class SlowDecoder:
    """A chain of guesses, of which every third place is wrong, verified by a forward of the target."""

    target: Any
    max_depth: int
    max_sequences: int = 5
    pending: dict[int, list[int]] = field(default_factory=dict)  # the whole history of each cache that it knows
    depths: list[int] = field(default_factory=list)
    num_discarded: int = 0
    step: _Step | None = None

    def load_drafter(self, _model: Eagle3Model) -> bool:
        return True

    def leave(self, cache: int) -> None:
        self.pending.pop(cache, None)

    def warm_up(self, num_sequences: int) -> dict[tuple[int, int], float]:
        return {(num, depth): 1e-3 + 1e-4 * depth for num in (1, num_sequences) for depth in range(self.max_depth + 1)}

    def can_continue(self, cache: int, depth: int) -> bool:
        return cache in self.pending

    def launch(self, caches: Sequence[int], histories: Sequence[Sequence[int]], depth: int) -> bool:
        assert self.step is None, "one step at a time"
        assert len(caches) <= self.max_sequences
        self.depths.append(depth)
        steps = []
        for cache, history in zip(caches, histories, strict=True):
            known = self.pending.setdefault(cache, list(history))
            assert len(known) == self.target.length(cache) + 1
            steps.append(self._one(cache, known, depth))
        hidden = HiddenStates(torch.stack([each.aux for _, each in steps]), torch.stack([each.last for _, each in steps]))
        self.step = _Step(list(caches), [tokens for tokens, _ in steps], hidden)
        return True

    def _one(self, cache: int, history: list[int], depth: int) -> tuple[list[int], HiddenStates]:
        guesses: list[int] = []
        for place in range(depth):
            [output] = self.target.forward([Segment(cache, [history[-1], *guesses])])
            best = int(output.logits[-1].argmax())
            guesses.append(best if (len(history) + place) % 3 else (best + 1) % self.target.info.vocab_size)
        [output] = self.target.forward([Segment(cache, [history[-1], *guesses], num_logits=depth + 1)])
        picked = output.logits.argmax(dim=-1).tolist()
        num = next((place for place, (guess, best) in enumerate(zip(guesses, picked, strict=False)) if guess != best), depth)
        return picked[: num + 1], HiddenStates(output.hidden.aux.clone(), output.hidden.last.clone())

    def collect(self, still_wanted: Sequence[bool]) -> tuple[list[list[int]], HiddenStates]:
        assert self.step is not None
        step, self.step = self.step, None
        for cache, tokens, is_wanted in zip(step.caches, step.tokens, still_wanted, strict=True):
            if not is_wanted:
                self.num_discarded += 1
                self.pending.pop(cache, None)
                continue
            history = self.pending[cache]
            self.target.forward([Segment(cache, [history[-1], *tokens[:-1]])])  # others may have been there meanwhile
            self.target.commit(cache, range(len(tokens)))
            history += tokens
        return step.tokens, step.hidden


@dataclass
class Fused:
    engine: LocalEngine
    decoder: SlowDecoder

    def begin(self, prompt: list[int], params: SamplingParams = GREEDY, options: SessionOptions | None = None) -> Listener:
        session_id = self.engine.create_session(options).session_id
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
    decoders: list[SlowDecoder] = []

    def new_decoder(max_depth: int) -> SlowDecoder:
        decoders.append(SlowDecoder(target, max_depth))
        return decoders[-1]

    target.new_decoder = new_decoder  # type: ignore[attr-defined]
    target.capacity_bytes = CAPACITY_BYTES  # type: ignore[attr-defined]
    speculation = SpeculationConfig(mode=request.param, max_draft_tokens=3)
    engine = LocalEngine(target, random_eagle3(target), tokenizer, speculation, SessionsConfig(max_batch_sessions=8))
    engine.start()
    yield Fused(engine, decoders[0])
    engine.stop()
    assert target.cache_bytes() == 0


def test_every_session_gets_its_own_tokens(fused: Fused, oracle: Target):
    """More sessions than a step takes, joining while others run: those that find no place go the general way meanwhile."""
    prompts = [prompt_of(seed, 5 + 3 * seed) for seed in range(8)]
    listeners = [fused.begin(prompt) for prompt in prompts]
    for prompt, listener in zip(prompts, listeners, strict=True):
        done = listener.wait()
        assert listener.token_ids == greedy_reference(oracle, prompt, 30)
        assert sum(listener.drafted) == done.speculation.num_accepted
    assert max(fused.decoder.depths) == 3
    assert fused.engine.stats().kv_budget_bytes == CAPACITY_BYTES


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
    fused.begin(prompt_of(5, 4)).wait()  # the step that was under way has been collected by now
    assert fused.decoder.num_discarded


def test_what_the_host_must_see_goes_the_general_way(fused: Fused, oracle: Target):
    prompt = prompt_of(6, 10)
    expected = greedy_reference(oracle, prompt, 30)
    with_logprobs = fused.begin(prompt, SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True, logprobs=True))
    sampled = fused.begin(prompt, SamplingParams(max_tokens=30, temperature=1.0, ignore_eos=True))
    plain = fused.begin(prompt, GREEDY, SessionOptions(drafter_policy=DrafterPolicy("off")))
    assert (with_logprobs.wait().speculation.num_steps, len(with_logprobs.logprobs)) != (0, 0)
    assert with_logprobs.token_ids == expected
    assert plain.wait().speculation.num_drafted == 0
    assert plain.token_ids == expected
    sampled.wait()
    assert len(sampled.token_ids) == 30


def test_cancelled_closed_and_swapped_midway(fused: Fused, oracle: Target):
    rng = random.Random(1)
    kept: list[tuple[list[int], Listener]] = []
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
            fused.engine.swap_drafter(random_eagle3(oracle, seed=9))
    for prompt, listener in kept:
        listener.wait()
        assert listener.token_ids == greedy_reference(oracle, prompt, 30)


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

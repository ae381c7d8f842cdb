"""A tiny random Llama behind a real LocalEngine, and a listener that keeps the events of one generation."""

from __future__ import annotations

import queue
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from runtime.backends import load_target
from runtime.backends.base import FULL, Segment, Target
from runtime.config import BackendConfig, ModelConfig, SessionsConfig, SpeculationConfig, SpeculationMode
from runtime.drafters.base import Drafter
from runtime.drafters.eagle3 import Eagle3Drafter
from runtime.drafters.none import NoDrafter
from runtime.drafters.scripted import ScriptedDrafter
from runtime.eagle3 import DraftVocabulary, Eagle3Config, Eagle3Model
from runtime.engine.local import LocalEngine
from runtime.engine.request import Request
from runtime.features.tap import CapturedTurn, Tap
from runtime.models import ResolvedModel, Tokenizer, fingerprint, make_tiny
from runtime.types import CachePolicy, Done, Event, Failed, SamplingParams, TokenLogprob, Tokens


@dataclass
class Listener:
    """Collects events; `wait` blocks until the last one."""

    events: queue.SimpleQueue[Event] = field(default_factory=queue.SimpleQueue)
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    drafted: list[bool] = field(default_factory=list)

    def __call__(self, event: Event) -> None:
        self.events.put(event)

    def next(self) -> Event:
        event = self.events.get(timeout=60)
        if isinstance(event, Tokens):
            self.token_ids.extend(event.token_ids)
            self.text += event.text
            self.logprobs.extend(event.logprobs)
            self.drafted.extend(event.drafted)
        return event

    def wait(self) -> Done:
        while True:
            event = self.next()
            if isinstance(event, Failed):
                raise event.error
            if isinstance(event, Done):
                return event


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> ResolvedModel:
    path = make_tiny(tmp_path_factory.mktemp("models") / "tiny")
    return ResolvedModel(name="tiny", path=Path(path), fingerprint=fingerprint(path))


@pytest.fixture(scope="session")
def tokenizer(tiny: ResolvedModel) -> Tokenizer:
    return Tokenizer.load(tiny.path)


def track(owner: Any, makers: Sequence[str], breaker: str) -> set[int]:
    """The handles that the owner's methods `makers` have given out and `breaker` has not taken back."""
    if not hasattr(owner, "live_handles"):
        live: set[int] = set()
        owner.live_handles = live

        def make(method: Callable[..., int]) -> Callable[..., int]:
            def made(*args: Any, **kwargs: Any) -> int:
                handle = method(*args, **kwargs)
                live.add(handle)
                return handle

            return made

        drop = getattr(owner, breaker)

        def take_back(handle: int) -> None:
            drop(handle)
            live.remove(handle)

        for name in makers:
            setattr(owner, name, make(getattr(owner, name)))
        setattr(owner, breaker, take_back)
    return owner.live_handles  # type: ignore[no-any-return]


def live_caches(target: Target) -> set[int]:
    return track(target, ("new_cache", "fork", "restore"), "drop")


def live_states(drafter: Drafter) -> set[int]:
    return track(drafter, ("new_state",), "drop_state")


@pytest.fixture
def target(tiny: ResolvedModel) -> Target:
    target = load_target(BackendConfig(num_threads=1), ModelConfig(name="tiny", device="cpu"), tiny)
    live_caches(target)
    return target


def audit(engine: LocalEngine, target: Target) -> None:
    """What must hold between any two steps: nothing is held but for a session, and as much as the session says."""
    engine._loop.call(lambda: _audit(engine, target))


def _audit(engine: LocalEngine, target: Target) -> None:
    loop, stepper = engine._loop, engine._stepper
    with engine._lock:
        busy = [*loop._running, *(request.session for request in loop._waiting)]
        sessions = {*engine._store, *busy}
        assert all(session.is_generating or session.is_closed for session in busy)
        assert {session for session in engine._store if session.is_generating} <= set(busy)
    holding = {session for session in sessions if session.cache is not None}
    assert live_caches(target) == {session.cache for session in holding}
    assert set(stepper.holdings._prefixes._chains) == (holding if stepper.holdings._shares_prefixes else set())
    for session in sessions:
        assert session.cached <= len(session.history)
        if session.cache is None:
            assert (session.cached, session.dropped, session.features) == (0, 0, [])
            continue
        assert (session.cached, session.dropped) == (target.length(session.cache), target.dropped(session.cache))
        window = session.options.cache_policy.window
        if session.dropped and window is not None:
            assert session.cached - session.first_kept >= (window if stepper.holdings.keeps_features else 0)
            assert sum(map(len, session.features)) <= 2 * window + stepper._prefill_chunk_tokens
        else:
            assert session.first_kept == (0 if stepper.holdings.keeps_features else session.cached)
    drafts = [session.draft for session in sessions if session.draft is not None]
    for drafter in stepper.drafting.loaded.values():
        assert live_states(drafter) == {draft.handle for draft in drafts if draft.drafter is drafter}
    assert {draft.drafter.version for draft in drafts} <= set(stepper.drafting.loaded)
    if not sessions:
        assert target.cache_bytes() == len(stepper.holdings._prefixes) == 0


def tracked(method: Callable[[Drafter], Any]) -> Callable[[Drafter], Any]:
    def call(drafter: Drafter) -> Any:
        live_states(drafter)
        return method(drafter)

    return call


MakeEngine = Callable[..., LocalEngine]


@pytest.fixture
def make_engine(target: Target, tokenizer: Tokenizer) -> Iterator[MakeEngine]:
    engines: list[LocalEngine] = []

    def make(
        drafter: Drafter | None = None,
        *,
        max_draft_tokens: int = 5,
        speculation: SpeculationConfig | None = None,
        tap: Tap | None = None,
        **sessions: float,
    ) -> LocalEngine:
        speculation = speculation or SpeculationConfig(mode=SpeculationMode.FIXED, max_draft_tokens=max_draft_tokens)
        config = SessionsConfig(**sessions)  # type: ignore[arg-type]
        drafter = drafter or NoDrafter()
        live_states(drafter)
        engine = LocalEngine(target, drafter, tokenizer, speculation, config, tap)
        for name in ("swap_drafter", "add_drafter"):
            setattr(engine, name, tracked(getattr(engine, name)))
        engine.start()
        engines.append(engine)
        return engine

    yield make
    # Several engines of one test share the target, so whose caches are whose is only known of one.
    for engine in engines:
        if len(engines) == 1 and engine.is_running:
            audit(engine, target)
    for engine in engines:
        engine.stop()
        assert all(not live_states(drafter) for drafter in engine._stepper.drafting.loaded.values()), "draft state left behind"
    assert not live_caches(target), "K/V left behind"
    assert target.cache_bytes() == 0


def run(
    engine: LocalEngine, prompt: list[int], params: SamplingParams, session_id: str | None = None, *, append: bool = True
) -> tuple[Listener, Done]:
    """One generation on a new session, or on this one."""
    if session_id is None:
        session_id = engine.create_session().session_id
    if append:
        engine.append(session_id, prompt)
    listener = Listener()
    engine.generate(session_id, params, on_event=listener)
    return listener, listener.wait()


# --- what tests are made of ---

NEAR_TIE = 1e-3  # between two logits: forwards of other shapes may pick either

GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)


def greedy_reference(target: Target, prompt: Sequence[int], num_tokens: int) -> list[int]:
    """The target's own greedy continuation, one token and one forward at a time."""
    cache = target.new_cache()
    history, new = list(prompt), list(prompt)
    for _ in range(num_tokens):
        [output] = target.forward([Segment(cache, new)])
        target.commit(cache, range(len(new)))
        new = [int(output.logits[-1].argmax())]
        history += new
    target.drop(cache)
    return history[len(prompt) :]


def assert_greedy(target: Target, prompt: Sequence[int], token_ids: Sequence[int], policy: CachePolicy = FULL) -> None:
    """Each token is the most likely one behind those before it, or within the noise of the arithmetic as likely."""
    cache = target.new_cache(policy)
    history = [*prompt, *token_ids]
    [output] = target.forward([Segment(cache, history[:-1], num_logits=len(token_ids))])
    target.drop(cache)
    taken = output.logits.gather(1, torch.tensor(token_ids)[:, None])[:, 0]
    gaps = output.logits.max(dim=1).values - taken
    assert float(gaps.max()) < NEAR_TIE, f"token {int(gaps.argmax())} of {len(token_ids)} is not the most likely one"


def prompt_of(seed: int, length: int = 24) -> list[int]:
    return [random.Random(seed).randrange(256) for _ in range(length)]


def perfect(target: Target, prompt: Sequence[int]) -> ScriptedDrafter:
    full = [*prompt, *greedy_reference(target, prompt, 80)]
    return ScriptedDrafter(lambda history, depth: full[len(history) : len(history) + depth], version="perfect")


def random_drafter() -> ScriptedDrafter:
    return ScriptedDrafter(lambda history, depth: prompt_of(len(history), depth), version="random")


def random_eagle3(target: Target, seed: int = 0) -> Eagle3Drafter:
    """A network of random weights that ends in the target's own head: now and then it is right."""
    info = target.info
    config = Eagle3Config(
        hidden_size=info.hidden_size,
        intermediate_size=2 * info.hidden_size,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=info.vocab_size,
        draft_vocab_size=info.vocab_size,
        max_position_embeddings=info.max_positions,
        aux_layer_ids=info.aux_layer_ids,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
    )
    generator = torch.Generator().manual_seed(seed)
    vocabulary = DraftVocabulary.from_token_counts(torch.ones(info.vocab_size), info.vocab_size)
    model = Eagle3Model(config, vocabulary, target.embedding.cpu())
    model.init_from_target(target.lm_head.cpu(), None, generator)
    model.embedding = target.embedding
    return Eagle3Drafter(model.to(info.device), f"random-{seed}")


def adversarial(target: Target, prompt: Sequence[int]) -> ScriptedDrafter:
    """Right once, then wrong; and now and then something outside the vocabulary, or too long."""
    full = [*prompt, *greedy_reference(target, prompt, 80)]

    def script(history: Sequence[int], depth: int) -> list[int]:
        right = full[len(history) : len(history) + 1]
        return [*right, *[(token + 1) % 256 for token in full[len(history) + 1 : len(history) + depth]], 10**6, -1, 0, 0, 0]

    return ScriptedDrafter(script, version="adversarial")


class KeepingTap:
    def __init__(self) -> None:
        self.turns: list[CapturedTurn] = []

    def offer(self, turn: CapturedTurn) -> bool:
        self.turns.append(turn)
        return True

    def close(self) -> None:
        self.turns.clear()


def endless(engine: LocalEngine, seed: int = 0) -> tuple[str, Listener, Request]:
    session = engine.create_session()
    engine.append(session.session_id, prompt_of(seed))
    listener = Listener()
    params = SamplingParams(temperature=0.0, max_tokens=1900, ignore_eos=True)
    generation = engine.generate(session.session_id, params, on_event=listener)
    while not isinstance(listener.next(), Tokens):
        pass
    return session.session_id, listener, generation

"""A tiny random Llama behind a real LocalEngine, and a listener that keeps the events of one generation."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from runtime.backends import load_target
from runtime.backends.base import Target
from runtime.config import BackendConfig, ModelConfig, SessionsConfig, SpeculationConfig
from runtime.drafters.base import Drafter
from runtime.drafters.none import NoDrafter
from runtime.engine.local import LocalEngine
from runtime.features.tap import Tap
from runtime.models import ResolvedModel, Tokenizer, fingerprint, make_tiny
from runtime.types import Done, Event, Failed, SamplingParams, TokenLogprob, Tokens


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


@pytest.fixture
def target(tiny: ResolvedModel) -> Target:
    return load_target(BackendConfig(num_threads=1), ModelConfig(name="tiny", device="cpu"), tiny)


MakeEngine = Callable[..., LocalEngine]


@pytest.fixture
def make_engine(target: Target, tokenizer: Tokenizer) -> Iterator[MakeEngine]:
    engines: list[LocalEngine] = []

    def make(
        drafter: Drafter | None = None, *, max_draft_tokens: int = 5, tap: Tap | None = None, **sessions: float
    ) -> LocalEngine:
        speculation = SpeculationConfig(max_draft_tokens=max_draft_tokens)
        config = SessionsConfig(**sessions)  # type: ignore[arg-type]
        engine = LocalEngine(target, drafter or NoDrafter(), tokenizer, speculation, config, tap)
        engine.start()
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        engine.stop()
    assert target.cache_bytes() == 0, "K/V left behind"


def run(engine: LocalEngine, prompt: list[int], params: SamplingParams, session_id: str | None = None) -> tuple[Listener, Done]:
    """One generation on a new session, or on this one."""
    if session_id is None:
        session_id = engine.create_session().session_id
    engine.append(session_id, prompt)
    listener = Listener()
    engine.generate(session_id, params, on_event=listener)
    return listener, listener.wait()

"""An engine kept busy: never with more than it is to have, and with nothing once nobody takes answers any more."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import closing

import pytest

from runtime.backends import load_target
from runtime.config import BackendConfig, ModelConfig, SessionsConfig, SpeculationConfig
from runtime.drafters.ngram import NgramDrafter
from runtime.engine.base import Generation, OnEvent
from runtime.engine.local import LocalEngine
from runtime.errors import EngineUnavailable
from runtime.models import Tokenizer
from runtime.types import SamplingParams
from training.asking import answers

NEVER = bool  # `bool()` is False


class Asker:
    """Asks for so many tokens, and counts what runs."""

    def __init__(self, engine: LocalEngine) -> None:
        self.engine = engine
        self.most = 0

    def __call__(self, num_tokens: int, on_event: OnEvent) -> tuple[str, Generation]:
        session_id = self.engine.create_session().session_id
        self.engine.append(session_id, [1, 2, 3, 1, 2, 3, 1])
        generation = self.engine.generate(
            session_id, SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True), on_event=on_event
        )
        self.most = max(self.most, len(self.engine.list_sessions()))
        return session_id, generation


@pytest.fixture
def asker(tiny) -> Iterator[Asker]:
    target = load_target(BackendConfig(num_threads=1), ModelConfig(name=str(tiny.path), device="cpu"), tiny)
    sessions = SessionsConfig(max_sessions=3)
    engine = LocalEngine(target, NgramDrafter(), Tokenizer.load(tiny.path), SpeculationConfig(), sessions)
    engine.start()
    yield Asker(engine)
    engine.stop()


def test_all_are_answered_so_many_at_a_time_and_what_follows_is_asked_too(asker: Asker) -> None:
    waiting = deque([9, 5, 7, 3, 8])
    lengths = []
    for answer in answers(asker.engine, waiting, 3, asker, NEVER):
        asker.engine.close_session(answer.session_id)
        assert len(answer.token_ids) == len(answer.drafted) == answer.asked == answer.done.usage.completion_tokens
        assert answer.seconds > 0
        lengths.append(answer.asked)
        if answer.asked == 3:
            waiting.append(4)
    assert sorted(lengths) == [3, 4, 5, 7, 8, 9]
    assert asker.most == 3
    assert asker.engine.list_sessions() == []


def test_what_runs_is_given_up_when_it_is_to_stop_or_nobody_takes_more(asker: Asker) -> None:
    assert list(answers(asker.engine, deque([1500, 1500]), 2, asker, lambda: asker.engine.stats().num_running == 2)) == []
    assert asker.engine.list_sessions() == []
    with closing(answers(asker.engine, deque([1500, 2]), 2, asker, NEVER)) as ended:
        assert next(ended).asked == 2
    assert len(asker.engine.list_sessions()) == 1  # that of the answer which was taken


def test_what_an_answer_failed_with_is_raised(asker: Asker) -> None:
    with closing(answers(asker.engine, deque([1500, 2]), 2, asker, NEVER)) as ended:
        next(ended)
        asker.engine.stop()
        with pytest.raises(EngineUnavailable):
            next(ended)

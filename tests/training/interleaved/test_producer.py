"""The producing half: answers become rows in order of their ends, a stop ends it at once, the newest drafter takes over."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import pytest
import torch

from runtime.backends import load_target
from runtime.config import BackendConfig, ModelConfig, SessionsConfig, SpeculationConfig
from runtime.drafters.ngram import NgramDrafter
from runtime.engine.local import LocalEngine
from runtime.errors import ProducerFailed
from runtime.features.channel import RefChannel
from runtime.features.flow import Quantum, Watermarks
from runtime.features.ledger import Ledger
from runtime.features.memory import MemoryStore
from runtime.features.tap import CapturedTurn
from runtime.hidden_states import HiddenStates
from runtime.models import Tokenizer
from runtime.types import Done, SamplingParams, SessionOptions, Switch
from training.data.prompts import Prompt
from training.dialogues import Dialogues
from training.interleaved import producer as producer_module
from training.interleaved.config import ProducerConfig
from training.interleaved.producer import HELDOUT, ROW, Handover, PromptProducer, Round, TurnBox, row_of
from training.learning.start import from_scratch

from ..numerals import Numerals

SOON_S = 20.0
NEVER = bool  # `bool()` is False


@dataclass
class Stage:
    """A real engine with the tiny model, a store, a ledger and a channel."""

    engine: LocalEngine
    turns: TurnBox
    tokenizer: Tokenizer | Numerals
    ledger: Ledger
    store: MemoryStore
    channel: RefChannel
    handover: Handover = field(default_factory=Handover)
    rounds: list[Round] = field(default_factory=list)
    shown: list[dict[str, str]] = field(default_factory=list)

    def producer(
        self, num_prompts: int, max_trained_rows: int = 1000, later: tuple[str, ...] = (), **settings: Any
    ) -> PromptProducer:
        """later: questions behind the first answer to each prompt."""
        prompts = [self.prompt(n, later) for n in range(num_prompts)]
        config = ProducerConfig(**({"max_tokens": 12, "concurrency": 3, "heldout_fraction": 0.0} | settings))
        dialogues = Dialogues(
            self.engine,
            self.tokenizer,
            seed=0,
            concurrency=config.concurrency,
            max_answer_tokens=config.max_tokens,
            max_tokens=2000,
            capture=Switch.ON,
        )
        return PromptProducer(
            self.engine,
            dialogues,
            self.turns,
            prompts,
            self.store,
            self.ledger,
            self.channel.producer,
            config,
            run_id="run",
            max_heldout_rows=4,
            max_trained_rows=max_trained_rows,
            handover=self.handover,
            show=lambda figures: self.shown.append(dict(figures)),
            tell=self.rounds.append,
        )

    def prompt(self, number: int, later: tuple[str, ...]) -> Prompt:
        messages = ({"role": "user", "content": f"{number} 20 21"},)
        return Prompt(f"p{number}", tuple(self.tokenizer.encode_chat(messages)), f"slice {number % 2}", messages, later=later)

    def taken(self) -> list[str]:
        return [ref.source for ref in self.channel.consumer.get(1000, 0)]


@pytest.fixture
def stage(tiny, tmp_path) -> Iterator[Stage]:
    target = load_target(BackendConfig(num_threads=1), ModelConfig(name=str(tiny.path), device="cpu"), tiny)
    tokenizer, turns = Tokenizer.load(tiny.path), TurnBox()
    engine = LocalEngine(target, NgramDrafter(), tokenizer, SpeculationConfig(), SessionsConfig(max_sessions=8), turns)
    store = MemoryStore(1 << 24)
    channel = RefChannel(Watermarks(100, 50, 1 << 24, 1 << 24), Quantum(1, 0))
    ledger = Ledger(tmp_path / "ledger.sqlite", exists=store.exists)
    engine.start()
    yield Stage(engine, turns, tokenizer, ledger, store, channel)
    engine.stop()
    ledger.close()


def test_every_prompt_becomes_a_row_in_every_round(stage: Stage) -> None:
    assert stage.producer(7, max_rounds=2).drive(NEVER) is True
    assert sorted(stage.taken()) == sorted(2 * [f"prompt/p{n}" for n in range(7)])
    assert stage.channel.consumer.is_over
    assert stage.ledger.status()["pending"] == 14
    assert [(made.number, made.num_answers, made.kept[ROW]) for made in stage.rounds] == [(1, 7, 7), (2, 7, 7)]
    assert stage.rounds[0].num_tokens == 7 * 12
    assert stage.engine.list_sessions() == []
    assert stage.shown[-1]["answers"] == "7 of 7"


def test_rows_hold_what_the_target_said_and_saw(stage: Stage) -> None:
    stage.producer(1, temperature=0.0).drive(NEVER)
    [ref] = stage.channel.consumer.get(9, 0)
    row, _ = stage.store.get(ref)
    prompt = list(stage.prompt(0, ()).token_ids)
    assert row.token_ids[: len(prompt)].tolist() == prompt
    assert row.generated.tolist() == [False] * len(prompt) + [True] * 12
    assert row.hidden.last.shape[0] == len(prompt) + 11
    assert ref.target_fingerprint == stage.engine.info.fingerprint
    assert ref.slice == "slice 0"


def test_later_questions_are_asked_and_are_rows_of_their_own_where_the_template_does_not_go_on(stage: Stage) -> None:
    stage.producer(5, later=("And then?",), heldout_fraction=0.2, max_rounds=2).drive(NEVER)
    refs = stage.channel.consumer.get(1000, 0)
    assert sorted(Counter(ref.source for ref in refs).values()) == [4, 4, 4, 4]  # two rows in each of two rounds
    assert len(stage.ledger.heldout()) == 2  # of one prompt
    assert [(made.num_answers, made.num_asked, made.kept[ROW], made.kept[HELDOUT]) for made in stage.rounds] == [
        (10, 10, 8, 2),
        (8, 8, 8, 0),
    ]
    rows = [stage.store.get(ref)[0] for ref in refs]
    first = min(rows, key=lambda row: row.num_tokens)
    [second, *_] = [row for row in rows if row.num_tokens > first.num_tokens]
    assert second.generated.tolist() == sorted(second.generated.tolist())  # of the last answer alone
    assert bool(second.generated[-1])
    assert second.hidden.last.shape[0] == second.num_tokens - 1
    assert stage.engine.list_sessions() == []
    assert not stage.turns._turns


def test_a_dialogue_that_the_template_goes_on_with_is_one_row_of_all_answers_and_states(stage: Stage) -> None:
    stage.tokenizer = Numerals()
    stage.producer(1, later=("30", "40"), temperature=0.0).drive(NEVER)
    [ref] = stage.channel.consumer.get(9, 0)
    row, _ = stage.store.get(ref)
    edges = torch.diff(row.generated.int(), prepend=torch.zeros(1, dtype=torch.int32))
    assert (edges == 1).sum() == 3  # spans
    [made] = stage.rounds
    assert int(row.generated.sum()) == made.num_tokens
    session = stage.engine.create_session(SessionOptions(capture=Switch.ON)).session_id
    stage.engine.append(session, row.token_ids[:-1].tolist())
    ended = threading.Event()
    stage.engine.generate(session, SamplingParams(max_tokens=1), on_event=lambda event: isinstance(event, Done) and ended.set())
    assert ended.wait(SOON_S)
    again = stage.turns.fetch(session)
    assert again is not None
    states = torch.cat([part.last for part in again.hidden])[: row.num_tokens - 1]
    torch.testing.assert_close(row.hidden.last, states.to(row.hidden.last.dtype), atol=0.05, rtol=0.02)


def test_a_dialogue_of_several_rows_is_made_again_unless_all_of_them_are_durable(stage: Stage) -> None:
    stage.producer(3, later=("And then?",)).drive(NEVER)
    leased = [ref.sample_id for ref in stage.ledger.lease("run", 5, 60.0)]
    stage.ledger.record_checkpoint("run", "one", 1, leased)
    stage.channel = RefChannel(Watermarks(100, 50, 1 << 24, 1 << 24), Quantum(1, 0))
    stage.producer(3, later=("And then?",)).drive(NEVER)
    assert stage.rounds[-1].num_answers == 2
    assert stage.rounds[-1].kept[ROW] == 1


def test_questions_that_find_no_place_are_counted(stage: Stage) -> None:
    stage.producer(2, later=("word " * 2000, "And then?")).drive(NEVER)
    [made] = stage.rounds
    assert (made.num_answers, made.num_not_asked, made.kept[ROW]) == (2, 4, 2)
    assert made.figures["not_asked"] == 4


def test_what_is_held_out_is_not_published_and_asked_once(stage: Stage) -> None:
    stage.producer(8, heldout_fraction=0.25, max_rounds=2).drive(NEVER)
    held = {ref.source for ref in stage.ledger.heldout()}
    assert len(held) == 2
    assert held.isdisjoint(stage.taken())
    assert [(made.kept[ROW], made.kept[HELDOUT]) for made in stage.rounds] == [(6, 2), (6, 0)]


def test_held_out_prompts_are_the_same_in_every_process_and_bounded(stage: Stage) -> None:
    sets = [stage.producer(100, heldout_fraction=0.5)._heldout for _ in range(2)]
    assert sets[0] == sets[1]
    assert len(sets[0]) == 4


def test_rows_that_are_durable_are_not_made_again(stage: Stage) -> None:
    stage.producer(4).drive(NEVER)
    leased = [ref.sample_id for ref in stage.ledger.lease("run", 3, 60.0)]
    stage.ledger.record_checkpoint("run", "one", 1, leased)
    stage.channel = RefChannel(Watermarks(100, 50, 1 << 24, 1 << 24), Quantum(1, 0))
    stage.producer(4).drive(NEVER)
    assert stage.rounds[-1].num_answers == 1


def test_trained_rows_beyond_those_to_replay_give_up_their_memory(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(producer_module, "KEEP_HOUSE_EVERY", 4)
    stage.producer(8).drive(NEVER)
    leased = [ref.sample_id for ref in stage.ledger.lease("run", 8, 60.0)]
    stage.ledger.record_checkpoint("run", "one", 1, leased)
    stage.channel = RefChannel(Watermarks(100, 50, 1 << 24, 1 << 24), Quantum(1, 0))
    stage.producer(12, max_trained_rows=3).drive(NEVER)
    assert stage.rounds[-1].num_answers == 4
    assert stage.store.health().num_rows == 4 + 3


def test_a_stop_in_the_middle_of_answers_ends_them_and_closes(stage: Stage) -> None:
    asked = threading.Event()

    def should_stop() -> bool:
        if stage.engine.stats().num_running:
            asked.set()
        return asked.is_set()

    assert stage.producer(50, max_tokens=1500).drive(should_stop) is False
    assert stage.channel.consumer.is_over
    assert stage.engine.list_sessions() == []


def test_it_waits_for_the_trainer_at_the_watermark_and_goes_when_that_leaves(stage: Stage) -> None:
    stage.channel = RefChannel(Watermarks(2, 2, 1 << 24, 1 << 24), Quantum(1, 0))
    stop = threading.Event()
    thread = threading.Thread(target=stage.producer(50).drive, args=(stop.is_set,), daemon=True)
    thread.start()
    wait_until(lambda: not stage.channel.consumer.figures().is_open)
    assert stage.ledger.status()["pending"] <= 3
    stop.set()
    stage.channel.consumer.leave()
    thread.join(SOON_S)
    assert not thread.is_alive()
    assert stage.engine.list_sessions() == []


def test_an_error_on_the_way_fails_the_channel_and_is_raised(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any) -> None:
        raise OSError("no space")

    monkeypatch.setattr(stage.store, "put", full)
    with pytest.raises(OSError, match="no space"):
        stage.producer(4).drive(NEVER)
    with pytest.raises(ProducerFailed, match="OSError: no space"):
        stage.channel.consumer.get(1, 0)
    assert stage.engine.list_sessions() == []


def test_the_newest_drafter_of_the_trainer_speculates(stage: Stage, state, target) -> None:
    learner = from_scratch(target, state.config().trainer, state.rows(range(4)))
    producer = stage.producer(3, swap_every_s=0.0)
    producer._ask_for_drafter()
    learner.step(state.rows(range(4)))
    stage.handover.after_step(learner)
    producer.drive(NEVER)
    assert stage.engine.drafter_version == "run@1"
    assert stage.rounds[-1].drafter_version == "run@1"


def test_a_drafter_is_copied_only_when_asked_for_and_handed_over_once(state, target) -> None:
    learner = from_scratch(target, state.config().trainer, state.rows(range(4)))
    handover = Handover()
    handover.after_step(learner)
    assert handover.fetch() is None
    handover.ask()
    handover.after_step(learner)
    handover.after_step(learner)
    found = handover.fetch()
    assert found is not None
    model, step = found
    assert step == 0
    assert handover.fetch() is None
    before = model.fc.weight.clone()
    learner.step(state.rows(range(4)))
    assert torch.equal(model.fc.weight, before), "training on changes nothing of what was handed over"


def turn(pattern: str, nan_at: int | None = None) -> CapturedTurn:
    n = len(pattern)
    aux, last = torch.randn(n, 24), torch.randn(n, 8)
    if nan_at is not None:
        aux[nan_at] = float("nan")
    parts = (HiddenStates(aux[:3], last[:3]), HiddenStates(aux[3:], last[3:]))
    return CapturedTurn("s", tuple(range(n)), tuple(letter == "g" for letter in pattern), parts, MappingProxyType({"a": "b"}))


@pytest.mark.parametrize(("pattern", "length"), [("ppppgggg", 8), ("ppppggpp", 6), ("gggggg", 6)])
def test_a_turn_is_one_row_up_to_its_last_generated_token(pattern: str, length: int) -> None:
    made = turn(pattern)
    row = row_of(made)
    assert row is not None
    assert row.token_ids.tolist() == list(range(length))
    assert torch.equal(row.hidden.aux, torch.cat([part.aux for part in made.hidden])[: length - 1])
    assert row.labels == {"a": "b"}


@pytest.mark.parametrize("unusable", [turn("pppppppp"), turn("pppppppg"), turn("ppppgggg", nan_at=2)])
def test_a_turn_that_teaches_nothing_is_no_row(unusable: CapturedTurn) -> None:
    assert row_of(unusable) is None


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SOON_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)

"""`python -m training mode=interleaved` as a user runs it: to its end, killed and started again, in little memory."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import training.interleaved.loop
from runtime.errors import ConfigError, EngineUnavailable, ProducerFailed
from runtime.features.ledger import Ledger
from training.app import run
from training.config import Mode
from training.interleaved.config import ProducerConfig
from training.reporting.progress import METRICS_FILE

SETTINGS = [
    "mode=interleaved",
    "trainer=scratch",
    "trainer.vocabulary_tokens=200",
    "trainer.num_threads=1",
    "trainer.niceness=0",  # other tests run beside it
    "trainer.gate.min_heldout_rows=3",
    "data.batch_rows=4",
    "data.passes=2",
    "data.fill_wait_s=0.2",
    "producer.max_tokens=24",
    "producer.low_rows=4",
    "producer.high_rows=8",
    "producer.swap_every_s=0.1",
    "producer.heldout_fraction=0.2",
]
NUM_PROMPTS = 20


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    asked = [{"role": "user", "content": "How many fishes are in the sea, and who counts them?"}]
    path.write_text("".join(json.dumps({"id": f"p{n}", "conversations": asked}) + "\n" for n in range(NUM_PROMPTS)))
    return path


def command(state, prompts: Path, *settings: str) -> list[str]:
    places = [f"model.name={state.model.path}", f"state_dir={state.root}", f"data.prompts={prompts}"]
    return [sys.executable, "-m", "training", *places, *SETTINGS, *settings]


def events(state, kind: str) -> list[dict]:
    path = state.root / "training" / "default" / METRICS_FILE
    return state.events(kind) if path.exists() else []


def ledger(state) -> Ledger:
    return Ledger(state.root / "training" / "default" / "ledger.sqlite")


def test_it_answers_learns_swaps_judges_saves_and_draws(state, prompts: Path) -> None:
    result = subprocess.run(command(state, prompts, "producer.max_rounds=3"), capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    rounds = events(state, "round")
    assert [made["round"] for made in rounds] == [1, 2, 3]
    assert [made["heldout_rows"] for made in rounds] == [4, 0, 0], "what is held out is held out in all rounds"
    assert [made["rows"] for made in rounds] == [16, 16, 16]
    assert rounds[0]["acceptance_length"] >= 1.0
    assert set(ledger(state).consumption("default").values()) == {1}
    assert len(ledger(state).consumption("default")) == 48
    assert sum(step["num_rows"] for step in events(state, "step")) == 96, "two passes of each"
    assert events(state, "judged")
    assert events(state, "all_rounds_made")[0]["rounds"] == 3
    assert "producer.max_rounds is 3" in result.stderr
    assert "20 prompts" in result.stderr
    assert rounds[-1]["drafter"].startswith("default@"), "the trainer's own weights speculate"
    assert (state.root / "training" / "default" / "progress.png").is_file()
    latest = ledger(state).latest_checkpoint("default")
    assert latest.step == events(state, "step")[-1]["step"]


def test_killed_and_started_again_it_makes_only_what_is_not_durable(state, prompts: Path) -> None:
    settings = ["producer.max_rounds=2", "trainer.checkpoint_every_steps=2", "producer.concurrency=2"]
    with subprocess.Popen(command(state, prompts, *settings), stderr=subprocess.DEVNULL) as process:
        deadline = time.monotonic() + 120
        while len(events(state, "saved")) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
    before = ledger(state).consumption("default")
    assert 0 < len(before) < 32
    result = subprocess.run(command(state, prompts, *settings), capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert "resumed at step" in result.stderr
    after = ledger(state).consumption("default")
    assert before.items() <= after.items()
    assert len(after) == 32
    assert set(after.values()) == {1}
    counts = ledger(state).status()
    assert (counts["pending"], counts["leased"], counts["failed"], counts["heldout"]) == (0, 0, 0, 4)


def test_a_producer_out_of_room_waits_for_rows_to_become_durable(state, prompts: Path) -> None:
    """All rows together are several times the budget; only what was saved may go. A trainer that would like to see more of
    them before it begins, here for its vocabulary, does not wait for what cannot come."""
    room = ["features.budget_mib=1", "producer.high_mib=1", "producer.low_mib=1", "producer.max_tokens=200"]
    settings = [*room, "trainer.checkpoint_every_steps=1000", "producer.max_rounds=3", "data.passes=1"]
    patient = ["producer.high_rows=64", "trainer.vocabulary_tokens=100000"]
    result = subprocess.run(
        command(state, prompts, *settings, *patient), capture_output=True, text=True, check=False, timeout=300
    )
    assert result.returncode == 0, result.stderr
    assert len(ledger(state).consumption("default")) == 48
    assert len(events(state, "saved")) > 1, "the trainer saved in its pauses"


def test_later_questions_are_asked_and_learned_from(state, tmp_path: Path) -> None:
    path = tmp_path / "turns.jsonl"
    path.write_text("\n".join(json.dumps({"id": f"p{n}", "turns": [f"What is {n}?", "And then?"]}) for n in range(6)))
    producer = ProducerConfig(max_tokens=24, low_rows=4, high_rows=8, concurrency=2, heldout_fraction=0.2)
    assert run(state.config(data__prompts=str(path), mode=Mode.INTERLEAVED, producer=producer)) == 0
    [made] = events(state, "round")
    assert (made["answers"], made["not_asked"], made["rows"], made["heldout_rows"]) == (12, 0, 10, 2)
    assert len(ledger(state).consumption("default")) == 10


def test_a_signal_stops_both_sides(state, prompts: Path) -> None:
    with subprocess.Popen(
        command(state, prompts, "producer.max_rounds=null"), stderr=subprocess.PIPE, text=True, env=os.environ
    ) as process:
        deadline = time.monotonic() + 120
        while len(events(state, "step")) < 3:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=30)
    assert process.returncode == 0, said
    assert "LEAK" not in said
    assert ledger(state).latest_checkpoint("default").step == events(state, "step")[-1]["step"]
    assert ledger(state).status()["leased"] == 0


def test_a_target_that_fails_ends_the_run_with_its_error(state, prompts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole way: engine, producer, channel, trainer, caller."""
    real = training.interleaved.loop.load_target

    def broken(*args: Any) -> Any:
        target = real(*args)
        forward, num_left = target.forward, iter(range(60))

        def fail_later(segments: Any) -> Any:
            if next(num_left, None) is None:
                raise RuntimeError("the device is gone")
            return forward(segments)

        monkeypatch.setattr(target, "forward", fail_later)
        return target

    monkeypatch.setattr(training.interleaved.loop, "load_target", broken)
    producer = ProducerConfig(max_tokens=24, low_rows=4, high_rows=8, concurrency=2)
    config = state.config(
        data__prompts=str(prompts), mode=Mode.INTERLEAVED, producer=producer, trainer__checkpoint_every_steps=1000
    )
    with pytest.raises(EngineUnavailable, match="the device is gone") as raised:
        run(config)
    causes = []
    error: BaseException | None = raised.value
    while error is not None:
        causes.append(type(error))
        error = error.__cause__
    assert causes[-1] is ProducerFailed, "what the trainer heard stands behind what happened"
    assert ledger(state).latest_checkpoint("default") is None


# --- refusals ---


def test_watermarks_below_one_step_are_refused_at_start(state, prompts: Path) -> None:
    def config(**producer: int):
        return state.config(data__prompts=str(prompts), mode=Mode.INTERLEAVED, producer=ProducerConfig(**producer))

    with pytest.raises(ConfigError, match="the low watermark of rows is 2; it must be at least 4, the rows of one step"):
        run(config(low_rows=2))
    with pytest.raises(ConfigError, match=r"producer\.high_mib is 9999; it must be at most features\.budget_mib"):
        run(config(high_mib=9999))


def test_prompts_and_the_mode_belong_together(prompts: Path) -> None:
    for setting in (["mode=interleaved"], [f"data.prompts={prompts}"]):
        result = subprocess.run([sys.executable, "-m", "training", *setting], capture_output=True, text=True, check=False)
        assert result.returncode == 2
        assert "data.prompts is" in result.stderr
        assert "with mode=interleaved or mode=capture, and null in other modes" in result.stderr

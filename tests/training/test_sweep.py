"""A sweep of training runs: an id for each, one comparison at the end, and one signal for all of it."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console

from runtime.configuration import Job
from training.config import Mode, TrainerConfig, TrainingConfig
from training.reporting.comparison import Outcome, best, compare
from training.reporting.history import History
from training.sweep import MAX_ID, with_ids

SETTINGS = [
    "mode=offline",
    "trainer=scratch",
    "trainer.draft_vocab_size=128",
    "trainer.vocabulary_tokens=40",
    "trainer.num_threads=1",
    "trainer.evaluate_every_steps=1000",
    "trainer.gate.min_heldout_rows=4",
    "data.batch_rows=4",
    "tracker=none",
]


def jobs(*overrides: tuple[str, ...], run_ids: tuple[str, ...] = ()) -> list[Job[TrainingConfig]]:
    ids = run_ids or ("default",) * len(overrides)
    return [Job(TrainingConfig(trainer=TrainerConfig(run_id=name)), each) for name, each in zip(ids, overrides, strict=True)]


def test_runs_get_ids_from_what_they_differ_in() -> None:
    named = with_ids(
        jobs(
            ("model=tiny", "trainer.learning_rate=1e-3", "data.passes=2"),
            ("model=tiny", "trainer.learning_rate=5e-4", "data.passes=2"),
        )
    )
    assert [(config.trainer.run_id, changed) for config, changed in named] == [
        ("default-learning_rate_1e-3", "trainer.learning_rate=1e-3"),
        ("default-learning_rate_5e-4", "trainer.learning_rate=5e-4"),
    ]
    awkward = with_ids(jobs(*((f"data.corpus=/somewhere/{'x' * 80}/{n}.jsonl",) for n in "ab")))
    ids = [config.trainer.run_id for config, _ in awkward]
    assert len(set(ids)) == 2
    assert max(map(len, ids)) <= MAX_ID
    assert ids == [
        config.trainer.run_id for config, _ in with_ids(jobs(*((f"data.corpus=/somewhere/{'x' * 80}/{n}.jsonl",) for n in "ab")))
    ]


def test_ids_that_differ_are_kept() -> None:
    named = with_ids(jobs(("trainer.run_id=a",), ("trainer.run_id=b",), run_ids=("a", "b")))
    assert [config.trainer.run_id for config, _ in named] == ["a", "b"]
    exports = [
        dataclasses.replace(job, config=TrainingConfig(mode=Mode.ONLINE, state_dir=place))
        for job, place in zip(jobs(("x=1",), ("x=2",)), "ab", strict=True)
    ]
    assert {config.trainer.run_id for config, _ in with_ids(exports)} == {"default"}, "each has a state directory of its own"


def test_the_best_is_judged_on_held_out_rows_where_any_was() -> None:
    def outcome(run: str, trained: float | None, judged: float | None) -> Outcome:
        return dataclasses.replace(
            Outcome.of(run, History(), "", "finished", None), training_acceptance=trained, heldout_acceptance=judged
        )

    assert best([outcome("a", None, None)]) is None
    assert best([outcome("a", 2.0, None), outcome("b", 3.0, None)]) == outcome("b", 3.0, None)
    assert best([outcome("a", 2.0, 1.5), outcome("b", 3.0, None), outcome("c", 1.0, 1.6)]) == outcome("c", 1.0, 1.6)


def test_a_narrow_terminal_gets_the_columns_that_it_has_room_for(tmp_path: Path) -> None:
    changed = "trainer.learning_rate=0.001"
    runs = [(Outcome.of("default-learning_rate_0.001", History(), changed, "finished", None), History())]
    for width, has_all in ((80, False), (200, True)):
        screen = io.StringIO()
        compare(runs, tmp_path, Console(file=screen, width=width))
        assert changed in screen.getvalue(), "in one piece"
        assert "steps" in screen.getvalue()
        assert ("began with" in screen.getvalue()) == has_all
    assert "began with" in (tmp_path / "sweep.md").read_text()


def command(state, *settings: str) -> list[str]:
    places = [f"model.name={state.model.path}", f"state_dir={state.root}"]
    return [sys.executable, "-m", "training", "--multirun", *places, *SETTINGS, *settings]


def test_a_sweep_ends_in_one_comparison(state) -> None:
    state.add(range(12))
    state.add(range(100, 106), "heldout")
    asked = command(state, "trainer.learning_rate=1e-3,1e-2", "trainer.max_steps=6")
    result = subprocess.run(asked, capture_output=True, text=True, check=False, env=os.environ | {"COLUMNS": "200"})
    assert result.returncode == 0, result.stderr
    names = ["default-learning_rate_0.001", "default-learning_rate_0.01"]
    for name in names:
        assert len(state.events("step", name)) == 6
        assert (state.root / "training" / name / "progress.png").is_file()
    assert not (state.root / "training" / "default").exists()
    [directory] = (state.root / "sweeps").iterdir()
    assert str(directory) in result.stderr
    record = json.loads((directory / "sweep.json").read_text())
    assert [(each["run"], each["changed"], each["steps"], each["ended"], each["start"]) for each in record["runs"]] == [
        (names[0], "trainer.learning_rate=0.001", 6, "finished", "scratch"),
        (names[1], "trainer.learning_rate=0.01", 6, "finished", "scratch"),
    ]
    held_out = {each["run"]: each["heldout_acceptance"] for each in record["runs"]}
    assert record["best"] == max(names, key=lambda name: held_out[name])
    assert f"Best: {record['best']}" in (directory / "sweep.md").read_text()
    assert f"Best: {record['best']}" in result.stderr
    assert (directory / "sweep.png").read_bytes().startswith(b"\x89PNG")


def test_a_signal_ends_the_sweep_and_what_there_is_is_compared(state) -> None:
    state.add(range(12))
    asked = command(state, "trainer.learning_rate=1e-3,1e-2,1e-4", "data.passes=100000")
    second = state.root / "training" / "default-learning_rate_0.01" / "metrics.jsonl"
    with subprocess.Popen(asked, stderr=subprocess.PIPE, text=True) as process:
        first = state.root / "training" / "default-learning_rate_0.001" / "metrics.jsonl"
        deadline = time.monotonic() + 120
        while not (first.exists() and '"step": 2,' in first.read_text()):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=120)
    assert process.returncode == 0, said
    assert not second.exists()
    assert "picture of the run" in said


@pytest.mark.parametrize("settings", [["trainer.learning_rate=1e-3,7.0"]])
def test_nothing_runs_if_one_of_the_settings_cannot_be(state, settings: list[str]) -> None:
    result = subprocess.run(command(state, *settings), capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert "trainer.learning_rate is 7.0" in result.stderr
    assert not (state.root / "training").exists()

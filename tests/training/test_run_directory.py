"""A start that is refused leaves a run's directory as it was, whatever it had done there by then."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from runtime.errors import ConfigError
from training import run_directory
from training.app import run
from training.config import Mode
from training.run_directory import only_one


def held(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    "refused",
    [
        {"trainer__draft_vocab_size": 100_000},
        {"trainer__init": "nobody"},
        {"model__device": "cuda:99"},
        {"mode": Mode.OFFLINE, "data__corpus": "nothing.jsonl"},  # refused when rows are wanted
        {"mode": Mode.OFFLINE, "data__corpus": "short.jsonl"},
        {"mode": Mode.INTERLEAVED, "data__prompts": "short.jsonl", "data__max_tokens": 8},
        {"mode": Mode.ONLINE, "data__batch_rows": 8, "trainer__accumulation": 4096, "data__replay_rows": 1 << 20},
    ],
    ids=lambda refused: next(reversed(refused)),
)
def test_a_refused_run_leaves_nothing_and_its_name_is_free(
    state, refused: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "short.jsonl").write_text('{"turns": ["Why?"]}\n')
    state.add(range(8))
    config = state.config(**refused)
    config.features.budget_mib = 1
    with pytest.raises(ConfigError):
        run(config)
    assert not (state.root / "training").exists()
    assert run(state.config(mode=Mode.OFFLINE, trainer__max_steps=2)) == 0
    assert [began["step"] for began in state.events("began")] == [0]


@pytest.mark.parametrize(
    "refused", [{"trainer__draft_vocab_size": 64}, {"mode": Mode.ONLINE}, {"mode": Mode.OFFLINE, "data__corpus": "chats.jsonl"}]
)
def test_a_refused_resumption_changes_nothing_of_the_run(
    state, refused: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    messages = '[{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "Because it is so."}]'
    (tmp_path / "chats.jsonl").write_text(f'{{"conversations": {messages}}}\n')
    state.add(range(8))
    settings = {"mode": Mode.OFFLINE, "trainer__max_steps": 2}
    assert run(state.config(**settings)) == 0
    run_dir = state.root / "training" / "default"
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write('{"event": "st')  # as a killed process leaves it
    before = held(run_dir)
    with pytest.raises(ConfigError, match="keep that, or begin another"):
        run(state.config(**(settings | refused)))
    after = held(run_dir)
    assert before["metrics.jsonl"] == after["metrics.jsonl"] + b'{"event": "st'
    for files in (before, after):
        del files["metrics.jsonl"], files["progress.png"]  # drawn again
    assert after == before
    assert run(state.config(**(settings | {"trainer__max_steps": 4}))) == 0
    assert [step["step"] for step in state.events("step")] == [1, 2, 3, 4]


def test_a_run_that_breaks_off_in_training_keeps_everything(state, monkeypatch: pytest.MonkeyPatch) -> None:
    state.add(range(8))
    monkeypatch.setattr("training.trainer.Trainer._loop", lambda self, learner: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run(state.config(mode=Mode.OFFLINE))
    assert len(state.events("began")) == 1
    assert (state.root / "training" / "default" / "config.yaml").is_file()


def test_a_directory_that_a_refused_start_removes_meanwhile_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir, hold = tmp_path / "training" / "default", run_directory.hold

    def overtaken(path: Path) -> object:
        monkeypatch.undo()
        file = hold(path)
        shutil.rmtree(run_dir)
        return file

    monkeypatch.setattr(run_directory, "hold", overtaken)
    with only_one(run_dir, "default"):
        with pytest.raises(ConfigError, match="another process is training that run"), only_one(run_dir, "default"):
            pass
        assert (run_dir / ".lock").exists()


def break_off(run_dir: Path) -> None:
    with only_one(run_dir, "default"):
        (run_dir / "start").mkdir()
        (run_dir / "ledger.sqlite").touch()
        raise ZeroDivisionError


def test_what_was_there_already_stays(tmp_path: Path) -> None:
    run_dir = tmp_path / "training" / "default"
    (run_dir.parent / "other").mkdir(parents=True)
    with pytest.raises(ZeroDivisionError):
        break_off(run_dir)
    assert [path.name for path in run_dir.parent.iterdir()] == ["other"]
    run_dir.mkdir()
    (run_dir / "notes.txt").write_text("mine")
    with pytest.raises(ZeroDivisionError):
        break_off(run_dir)
    assert sorted(path.name for path in run_dir.iterdir()) == [".lock", "notes.txt"]

"""How the shipped drafter is made: its long prompts, and that each command it prints is one that the trainer takes."""

from __future__ import annotations

import json
import shlex
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import shipped_drafter

from runtime import configuration
from training.config import Mode, TrainingConfig
from training.data import conversations

NUM_LONG = 40
PASSAGE = "Rivers rise in hills number {}. They run to the sea through fields and towns. " + "So it goes on and on. " * 14
NOT_RUNNING = "1. one\n" * 100  # long enough, but a list

Run = Callable[..., list[TrainingConfig]]
"""(more of the script's arguments) -> the settings of the commands that it ran."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "train prompts"
    folder.mkdir()
    passages = [{"id": f"p{n}", "turns": [f"Read.\n\n{PASSAGE.format(n)}\n\n{NOT_RUNNING}", "Why?"]} for n in range(120)]
    asked = [f"What is the number {n} good for?" for n in range(120)]
    questions = [{"id": f"q{n}", "conversations": [{"role": "user", "content": text}]} for n, text in enumerate(asked)]
    for name, records in (("stories", passages), ("chat", questions)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


@pytest.fixture
def run(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """The script with a program in the trainer's place that writes down what it is told. What was told is composed by hydra."""
    told, trainer = tmp_path / "told", tmp_path / "trainer"
    trainer.write_text(f'#!/bin/sh\nfor each; do printf "%s\\0" "$each"; done >> {told}\nprintf "\\n" >> {told}\n')
    trainer.chmod(0o755)

    def run(*more: str) -> list[TrainingConfig]:
        told.unlink(missing_ok=True)
        with monkeypatch.context() as patch:
            patch.setattr(sys, "executable", str(trainer))
            patch.setattr(sys, "argv", ["shipped_drafter.py", str(folder), "--work", str(tmp_path / "made"), *more])
            shipped_drafter.main()
        printed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("python -m training")]
        commands = [line.split("\0")[:-1] for line in told.read_text().splitlines()]
        assert [shlex.split(line)[1:] for line in printed] == commands, "what is printed can be given to a shell"
        return [composed(command[2:], monkeypatch) for command in commands]

    return run


def composed(overrides: list[str], monkeypatch: pytest.MonkeyPatch) -> TrainingConfig:
    seen: list[TrainingConfig] = []

    def take(config: TrainingConfig) -> int:
        seen.append(config)
        return 0

    with monkeypatch.context() as patch:
        patch.setattr(sys, "argv", ["training", *overrides])
        with pytest.raises(SystemExit):
            configuration.main("training", TrainingConfig, take)
    assert seen, overrides
    return seen[0]


def test_long_prompts_are_passages_with_something_asked_about_them(folder: Path) -> None:
    made = list(shipped_drafter.long_prompts(folder, NUM_LONG, seed=0))
    assert [row["id"] for row in made] == [f"long-{n}" for n in range(NUM_LONG)]
    assert {row["category"] for row in made} == {"summary", "answer_from_text"}
    passages = {PASSAGE.format(n).strip() for n in range(120)}
    longest = max(map(len, passages))
    for row in made:
        asked = shipped_drafter.question_of(row)
        held = [passage for passage in passages if passage in asked]
        low, high = shipped_drafter.LONG_CHARS
        assert low - longest <= sum(map(len, held)) <= high + longest, "a passage that was drawn twice stands there once"
        assert "1. one" not in asked
        assert row["category"] == "summary" or "good for?" in asked
    assert made == list(shipped_drafter.long_prompts(folder, NUM_LONG, seed=0))
    assert made != list(shipped_drafter.long_prompts(folder, NUM_LONG, seed=1))


def test_too_few_passages_or_questions_are_refused(folder: Path) -> None:
    (folder / "chat.jsonl").unlink()
    with pytest.raises(SystemExit, match="holds 120 passages and 0 questions; at least 100 of each are needed"):
        next(shipped_drafter.long_prompts(folder, NUM_LONG, seed=0))


def test_every_step_is_a_command_that_the_trainer_takes(run: Run, folder: Path, tmp_path: Path) -> None:
    made = tmp_path / "made"
    *answers, train, evaluate, export = run(
        "--evaluate",
        str(folder / "chat.jsonl"),
        str(folder / "stories.jsonl"),
        "--shapes",
        "chain-3",
        "tree-5-16-4",
        "--num-long",
        str(NUM_LONG),
    )
    assert [config.mode for config in answers] == [Mode.CAPTURE] * 3
    assert {config.data.prompts: config.answers.temperatures for config in answers} == {
        str(folder / "chat.jsonl"): [0, 0.7, 0.7, 0.9],
        str(folder / "stories.jsonl"): [0, 0.7, 0.7, 0.9],
        str(made / "prompts" / "long.jsonl"): [0, 0.7, 0.9],
    }
    [long] = conversations.files_of("data.prompts", str(made / "prompts"))
    assert len(list(conversations.read("data.prompts", [long], left_out := Counter()))) == NUM_LONG
    assert not left_out
    assert {Path(config.answers.directory or "").parent for config in answers} == {made / "tokens"}
    assert (train.mode, train.data.corpus, train.trainer.init) == (Mode.OFFLINE, str(made / "tokens"), "scratch")
    assert train.trainer.schedule.time_s == train.trainer.max_time_s == 540
    assert evaluate.evaluate.prompts == [str(folder / "chat.jsonl"), str(folder / "stories.jsonl")]
    assert (evaluate.evaluate.drafter, evaluate.evaluate.shapes) == ("shipped", ["chain-3", "tree-5-16-4"])
    assert (export.mode, export.export.drafter, export.export.evaluation) == (Mode.EXPORT, "shipped", None)
    assert {config.state_dir for config in (*answers, train, evaluate, export)} == {str(made)}


def test_a_step_and_a_file_alone(run: Run, tmp_path: Path) -> None:
    [config] = run("--steps", "answers", "--only", "chat", "--model", "tiny", "--overrides", "answers.max_tokens=8")
    assert (config.model.name, config.answers.max_tokens) == ("tiny", 8)
    assert config.answers.directory == str(tmp_path / "made" / "tokens" / "chat")
    figures = tmp_path / "made" / "evaluated" / "shipped" / "acceptance.json"
    figures.parent.mkdir(parents=True)
    figures.write_text("{}")
    [config] = run("--steps", "export")
    assert config.export.evaluation == str(figures)


def test_a_second_round_has_answers_of_its_own_and_goes_on_from_the_first(run: Run, tmp_path: Path) -> None:
    *answers, train = run("--steps", "answers", "train", "--seed", "3", "--init", str(tmp_path / "first"))
    assert {config.trainer.seed for config in answers} == {3}
    assert (train.trainer.init, train.trainer.draft_vocab_size) == (str(tmp_path / "first"), None)
    assert (train.trainer.learning_rate, train.trainer.warmup_steps) == (2e-3, 100)


def test_a_step_that_fails_ends_the_others(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = tmp_path / "trainer"
    trainer.write_text(f"#!/bin/sh\necho asked >> {tmp_path}/asked\nexit 3\n")
    trainer.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(trainer))
    monkeypatch.setattr(
        sys, "argv", ["shipped_drafter.py", str(folder), "--work", str(tmp_path / "made"), "--steps", "train", "export"]
    )
    with pytest.raises(SystemExit) as ended:
        shipped_drafter.main()
    assert ended.value.code == 3
    assert (tmp_path / "asked").read_text() == "asked\n"


def test_the_files_to_evaluate_are_asked_for_before_anything_runs(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["shipped_drafter.py", str(folder), "--work", str(tmp_path / "made")])
    with pytest.raises(SystemExit) as ended:
        shipped_drafter.main()
    assert ended.value.code == 2
    assert "--evaluate FILE.jsonl ... is needed" in capsys.readouterr().err
    assert not (tmp_path / "made").exists()

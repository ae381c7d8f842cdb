"""mode=evaluate from its settings to its files: what is counted, that it can be repeated, and that it goes on after a kill."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from rich.console import Console

from runtime.config import ModelConfig
from runtime.eagle3 import version_id
from runtime.errors import ConfigError, DrafterRejected
from training.config import EvaluateConfig, Mode, TrainingConfig
from training.judging.bootstrap import length, lengths
from training.judging.evaluation import NOT_LOSSLESS, evaluate_drafter
from training.learning.start import from_scratch

LINES = [
    {"id": "a", "category": "talk", "turns": ["Why is the sky blue?", "And at night?"]},
    {"id": "b", "category": "talk", "turns": ["Tell me a story."]},
    {"id": "c", "category": "sums", "conversations": [{"role": "user", "content": "One and one?"}]},
    {"id": "d", "category": "sums", "conversations": [{"role": "user", "content": "Two and two?"}]},
    {"id": "e", "text": "as it stands", "spans": [[0, 2]]},
]


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "questions.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in LINES))
    return path


@pytest.fixture
def drafter(state, tmp_path: Path) -> Path:
    learner = from_scratch(state.target, state.config().trainer, state.rows(range(8)))
    learner.export(tmp_path / "drafter")
    return tmp_path / "drafter"


def settings(state, prompts: Path, **changes: object) -> TrainingConfig:
    values = {"prompts": [str(prompts)], "drafter": "ngram", "shapes": ["chain-3"], "lengths": [6, 20], "resamples": 200}
    return TrainingConfig(
        model=ModelConfig(name=str(state.model.path)),
        evaluate=EvaluateConfig(**(values | changes)),
        mode=Mode.EVALUATE,
        state_dir=str(state.root),
    )


def run(config: TrainingConfig, state, stop: threading.Event | None = None) -> int:
    return evaluate_drafter(config, state.root, Console(quiet=True), stop or threading.Event())


def result_in(directory: Path) -> dict:
    return json.loads((directory / "acceptance.json").read_text(), parse_constant=pytest.fail)


def test_everything_that_is_asked_is_told(state, prompts: Path, drafter: Path, tmp_path: Path) -> None:
    config = settings(
        state,
        prompts,
        drafter=str(drafter),
        against="ngram",
        shapes=["chain-3", "tree-3-8-2"],
        temperatures=[0.0, 1.0],
        out=str(tmp_path / "out"),
    )
    assert run(config, state) == 0
    result = result_in(tmp_path / "out")
    version = version_id(drafter)
    assert result["drafters"] == {version: str(drafter), "ngram": "ngram"}
    [file] = result["prompts"]
    assert (file["name"], file["num_prompts"], file["left_out"]) == ("questions", 4, {"no_conversation": 1})
    figures = result["figures"]
    assert len(figures) == 2 * 2 * 2 * 2 * 3  # drafters, shapes, temperatures, lengths; all, talk, sums
    for row in figures:
        assert row["num_prompts"] == (4 if row["category"] == "all" else 2)
        assert row["acceptance_length"] == pytest.approx(1 + row["num_accepted"] / row["num_steps"])
        assert row["low"] <= row["acceptance_length"] <= row["high"]
        assert (row["covered"] is None) == (row["drafter"] == "ngram")
    depths = {(row["drafter"], row["shape"], row["temperature"]): row for row in result["depths"]}
    assert len(depths) == 8
    assert len(depths[version, "chain-3", 0.0]["accepted"]) == 3
    differences = result["differences"]
    assert len(differences) == 2 * 2 * 2 * 3
    assert {(row["drafter"], row["against"]) for row in differences} == {(version, "ngram")}
    ours, theirs = (
        next(row for row in figures if row["drafter"] == who and row["category"] == "all" and row["length"] == 20)
        for who in (version, "ngram")
    )
    told = next(row for row in differences if row["category"] == "all" and row["length"] == 20)
    assert told["difference"] == pytest.approx(ours["acceptance_length"] - theirs["acceptance_length"])
    assert result["lossless"] == {"num_compared": 16, "deviations": []}
    card = (tmp_path / "out" / "acceptance.md").read_text()
    assert f"**questions: drafter {version}, tree-3-8-2, temperature 1**" in card
    assert "| talk | 2 |" in card
    assert "16 of 16 greedy answers equal" in card
    assert (tmp_path / "out" / "acceptance.png").read_bytes().startswith(b"\x89PNG")


def test_it_can_be_repeated_and_makes_nothing_twice(state, prompts: Path, tmp_path: Path) -> None:
    found = []
    for name in ("one", "other"):
        config = settings(state, prompts, temperatures=[0.0, 1.0], out=str(tmp_path / name), concurrency=3)
        assert run(config, state) == 0
        found.append(result_in(tmp_path / name))
        assert found[-1]["made_now"]["answers"] == 12  # 4 prompts twice, and 4 without a drafter
    assert found[0]["figures"] == found[1]["figures"]
    assert run(settings(state, prompts, temperatures=[0.0, 1.0], out=str(tmp_path / "one")), state) == 0
    again = result_in(tmp_path / "one")
    assert (again["figures"], again["made_now"]["answers"]) == (found[0]["figures"], 0)
    more = settings(state, prompts, shapes=["chain-3", "chain-2"], lengths=[20], out=str(tmp_path / "one"))
    assert run(more, state) == 0
    assert result_in(tmp_path / "one")["made_now"]["answers"] == 4  # those of the new shape


def test_answers_to_something_else_are_not_mixed_in(state, prompts: Path, tmp_path: Path) -> None:
    run(settings(state, prompts, out=str(tmp_path / "out")), state)
    before = (tmp_path / "out" / "answers.jsonl").read_bytes()
    for changes, said in (({"seed": 1}, "seed 0, and now it is 1"), ({"lengths": [30]}, "max_tokens 20")):
        with pytest.raises(ConfigError, match=said):
            run(settings(state, prompts, out=str(tmp_path / "out"), **changes), state)
    prompts.write_text(prompts.read_text() + json.dumps(LINES[0] | {"id": "new"}) + "\n")
    with pytest.raises(ConfigError, match="answers with prompts"):
        run(settings(state, prompts, out=str(tmp_path / "out")), state)
    assert (tmp_path / "out" / "answers.jsonl").read_bytes() == before


def test_a_drafter_is_not_compared_with_itself(state, prompts: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"evaluate\.against is 'ngram'; it must be another drafter"):
        run(settings(state, prompts, against="ngram", out=str(tmp_path / "out")), state)
    assert not (tmp_path / "out").exists()


def test_a_place_that_cannot_be_made_is_named(state, prompts: Path) -> None:
    with pytest.raises(ConfigError, match=r"evaluate\.out is .*which cannot be made"):
        run(settings(state, prompts, out=str(prompts)), state)


@pytest.mark.parametrize("text", ["{", "[]", "[" * 100_000], ids=range(3))
def test_a_directory_whose_settings_are_damaged_is_refused(state, prompts: Path, tmp_path: Path, text: str) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "settings.json").write_text(text)
    with pytest.raises(ConfigError, match=r"settings\.json .*give another evaluate\.out"):
        run(settings(state, prompts, out=str(tmp_path / "out")), state)
    assert (tmp_path / "out" / "settings.json").read_text() == text


def test_an_answer_that_is_not_the_targets_own_is_told_and_fails(
    state, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = settings(state, prompts, out=str(tmp_path / "out"))
    run(config, state)
    log = tmp_path / "out" / "answers.jsonl"
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    wrong = next(line for line in lines if line["shape"] == "chain-3" and line["question"] == "b")
    right = wrong["token_ids"][5]
    wrong["token_ids"][5] = (right + 1) % state.target.vocab_size
    log.write_text("".join(json.dumps(line) + "\n" for line in lines))
    capsys.readouterr()
    assert run(config, state) == NOT_LOSSLESS
    [deviation] = result_in(tmp_path / "out")["lossless"]["deviations"]
    assert (deviation["question"], deviation["place"], deviation["plain"]) == ("b", 5, right)
    assert not deviation["is_near_tie"]
    assert deviation["gap"] is None or deviation["gap"] > 1e-3
    assert "3 of 4 greedy answers equal" in capsys.readouterr().out


def test_a_killed_evaluation_goes_on(state, prompts: Path, tmp_path: Path) -> None:
    """kill -9 in the middle: answers that ended are there, and the next process makes the others alone."""
    prompts.write_text("".join(json.dumps({"id": n, "turns": [f"Question {n}?"]}) + "\n" for n in range(16)))
    out = tmp_path / "out"
    given = ["mode=evaluate", f"evaluate.prompts=[{prompts}]", "evaluate.drafter=ngram", "evaluate.lengths=[200]"]
    given += [f"model.name={state.model.path}", f"state_dir={state.root}", f"evaluate.out={out}", "evaluate.concurrency=2"]
    process = subprocess.Popen([sys.executable, "-m", "training", *given, "trainer.num_threads=1"], stderr=subprocess.DEVNULL)
    log = out / "answers.jsonl"
    deadline = time.monotonic() + 90
    while not (log.exists() and log.read_bytes().count(b"\n") >= 3):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    kept = log.read_bytes().count(b"\n")
    assert 3 <= kept < 24
    config = settings(state, prompts, shapes=["chain-5"], lengths=[200], out=str(out))
    assert run(config, state) == 0
    assert result_in(out)["made_now"]["answers"] == 24 - kept  # 16, and 8 without a drafter
    names = [(line["shape"], line["question"]) for line in map(json.loads, log.read_text().splitlines())]
    assert len(names) == len(set(names)) == 24


def test_a_stopped_evaluation_writes_no_figures(state, prompts: Path, tmp_path: Path) -> None:
    stop = threading.Event()
    stop.set()
    assert run(settings(state, prompts, out=str(tmp_path / "out")), state, stop) == 0
    assert not (tmp_path / "out" / "acceptance.json").exists()


def test_drafters_that_are_not_there_or_do_not_fit(state, prompts: Path, drafter: Path) -> None:
    with pytest.raises(ConfigError, match=r"evaluate\.drafter is 'nobody'; it must be"):
        run(settings(state, prompts, drafter="nobody"), state)
    with pytest.raises(ConfigError, match=r"evaluate\.drafter is 'active', and no version"):
        run(settings(state, prompts, drafter="active"), state)
    values = json.loads((drafter / "config.json").read_text())
    values["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}
    (drafter / "config.json").write_text(json.dumps(values))
    with pytest.raises(DrafterRejected, match="layers"):
        run(settings(state, prompts, drafter=str(drafter)), state)


def test_without_a_word_the_drafter_is_the_one_that_would_serve(state, prompts: Path, tmp_path: Path) -> None:
    run(settings(state, prompts, drafter="auto", out=str(tmp_path / "out")), state)
    assert result_in(tmp_path / "out")["drafters"] == {"ngram": "ngram"}  # nothing active, nothing embedded for this model


def test_intervals_cover_what_they_should() -> None:
    """Of prompts whose counts are drawn at random, nine of ten 90 % intervals hold the true length."""
    import torch

    dice = torch.Generator().manual_seed(0)
    hits = 0
    for trial in range(200):
        steps = torch.randint(5, 60, (60,), generator=dice)
        rates = 0.5 + torch.rand(60, generator=dice)  # of accepted drafts a step: 1.0 in the mean
        counted = list(zip((rates * steps).tolist(), steps.tolist(), strict=True))
        draws = torch.tensor(lengths(counted, resamples=300, seed=trial))
        low, high = draws.quantile(0.05), draws.quantile(0.95)
        hits += bool(low <= 2.0 <= high)
        assert abs(length(counted) - float(draws.mean())) < 0.02
    assert 165 <= hits <= 194


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"shapes": []}, "evaluate.shapes is []"),
        ({"shapes": ["chain"]}, "evaluate.shapes is 'chain'"),
        ({"shapes": ["tree-5-4-4"]}, "evaluate.shapes is 'tree-5-4-4'"),
        ({"shapes": ["chain-0"]}, "evaluate.shapes is 'chain-0'"),
        ({"temperatures": [3.0]}, "evaluate.temperatures is [3.0]"),
        ({"temperatures": [0.5, 0.5]}, "evaluate.temperatures is [0.5, 0.5]"),
        ({"shapes": ["chain-3", "chain-3"]}, "evaluate.shapes is ['chain-3', 'chain-3']"),
        ({"lengths": [1]}, "evaluate.lengths is [1]"),
        ({"drafter": " "}, "evaluate.drafter is ' '"),
        ({"against": ""}, "evaluate.against is ''"),
        ({"per_category": 0}, "evaluate.per_category is 0"),
        ({"concurrency": 0}, "evaluate.concurrency is 0"),
        ({"confidence": 1.0}, "evaluate.confidence is 1.0"),
        ({"resamples": 1}, "evaluate.resamples is 1"),
        ({"lossless_prompts": -1}, "evaluate.lossless_prompts is -1"),
        ({"out": " "}, "evaluate.out is ' '"),
        ({"seed": -1}, "evaluate.seed is -1"),
    ],
)
def test_settings_out_of_range_are_refused_by_name(change: dict, said: str) -> None:
    with pytest.raises(ConfigError, match="must be") as refused:
        EvaluateConfig(**change)
    assert str(refused.value).startswith(said)


def test_prompts_belong_to_this_mode_alone() -> None:
    with pytest.raises(ConfigError, match=r"evaluate\.prompts is \[\]"):
        TrainingConfig(mode=Mode.EVALUATE)
    with pytest.raises(ConfigError, match=r"evaluate\.prompts is \['file'\]"):
        TrainingConfig(evaluate=EvaluateConfig(prompts=["file"]))

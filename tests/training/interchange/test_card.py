"""The card of a drafter that a run here made: from what, from which drafter, with which settings, and nothing of the machine."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from runtime.registry import Registry
from training.app import run
from training.capture.config import AnswersConfig, Output
from training.config import Mode, Objective
from training.interchange.config import ExportConfig
from training.learning.start import from_scratch
from training.reporting.config import TrackerKind
from training.reporting.origins import start_of


def card_of(state: Any, drafter: str, out: Path) -> str:
    assert run(state.config(mode=Mode.EXPORT, export=ExportConfig(drafter=drafter, out=str(out)))) == 0
    return (out / "README.md").read_text()


@pytest.fixture
def captures(state: Any, tmp_path: Path) -> Path:
    """Two directories of answers, and one of conversations as they stood."""
    spoken = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "Because it is so, and not otherwise."}]
    for name, more in (
        ("first", {"temperatures": [0.0, 0.7], "max_tokens": 12}),
        ("second", {"max_tokens": 9}),
        ("read", {"generate": False}),
    ):
        prompts = tmp_path / "asked" / f"{name}|1.jsonl"
        prompts.parent.mkdir(exist_ok=True)
        lines = [{"id": f"{name}{n}", "turns": [f"What is {n}?"]} for n in range(4)]
        prompts.write_text("\n".join(map(json.dumps, [{"id": name, "conversations": spoken}] if name == "read" else lines)))
        answers = AnswersConfig(output=Output.TOKENS, directory=str(tmp_path / "captures" / name), concurrency=4, **more)
        assert run(state.config(mode=Mode.CAPTURE, data__prompts=str(prompts), answers=answers)) == 0
    return tmp_path / "captures"


def test_a_card_tells_the_captures_and_the_recipe_and_no_place(state: Any, captures: Path, tmp_path: Path) -> None:
    settings = {
        "mode": Mode.OFFLINE,
        "data__corpus": str(captures),
        "data__max_batch_tokens": 400,
        "trainer__max_steps": 3,
        "trainer__objective": Objective.LK_ALPHA,
        "trainer__learning_rate": 1e-3,
        "trainer__gate__min_heldout_rows": 2,
        "tracker__kind": TrackerKind.NONE,
    }
    assert run(state.config(**settings)) == 0
    card = card_of(state, "default", tmp_path / "out")
    [rows] = [corpus["rows"] for corpus in state.events("corpus")]
    found = dict(re.findall(r"^\| (first|second|read) \| (.*) \|$", card, re.MULTILINE))
    cells = {name: [cell.strip() for cell in re.split(r"(?<!\\)\|", text)] for name, text in found.items()}
    model = f"{state.model.path.parent.name}/{state.model.path.name} ({state.model.fingerprint})"
    assert cells["first"][0] == "first\\|1.jsonl"
    assert cells["first"][3:] == ["0, 0.7", "12", "0", model]
    assert cells["second"][3:] == ["0", "9", "0", model]
    assert cells["read"][3:] == ["-", "-", "-", "nobody: as they stood"]
    assert sum(int(each[1]) for each in cells.values()) == rows
    assert f"| token rows | {rows} of " in card
    assert "| the run began from | nothing: trained from scratch |" in card
    recipe = card[card.index("## Recipe") :]
    assert "| trainer.objective | lk_alpha | cross_entropy |" in recipe
    assert f"| data.corpus | {captures.parent.name}/captures | null |" in recipe
    assert "| mode | offline | online |" in recipe
    assert re.search(
        r"The other settings that shape a drafter are the defaults: .*trainer\.clip_norm=0\.5, .*data\.max_tokens=2048", recipe
    )
    for word in (
        str(tmp_path),
        str(state.model.path),
        "None",
        "OFFLINE",
        "LK_ALPHA",
        "keep_checkpoints",
        "rank_timeout_s",
        "producer",
    ):
        assert word not in card, word


def test_a_card_tells_from_which_drafter_its_run_began_also_when_it_went_on(state: Any, tmp_path: Path) -> None:
    state.add(range(8))
    registry = Registry(state.root / "registry")
    versions = []
    for seed in range(2):
        made = from_scratch(state.target, state.config(trainer__seed=seed).trainer, state.rows(range(8)))
        made.export(tmp_path / f"drafter{seed}")
        whose = {"target_fingerprint": state.target.fingerprint, "metrics": {}}
        versions.append(registry.publish(tmp_path / f"drafter{seed}", parent=None, step=1, **whose))
    registry.activate(versions[0])
    settings = {
        "mode": Mode.OFFLINE,
        "trainer__init": "auto",
        "trainer__draft_vocab_size": None,
        "tracker__kind": TrackerKind.NONE,
    }
    assert run(state.config(**settings, trainer__max_steps=1)) == 0
    registry.activate(versions[1])  # meanwhile
    assert run(state.config(**settings, trainer__max_steps=2)) == 0
    assert start_of(state.root / "training" / "default") == versions[0]
    card = card_of(state, "default", tmp_path / "out")
    assert f"| the run began from | drafter {versions[0]} |" in card
    assert "| step | 2 |" in card
    assert "trainer.scratch" not in card


def test_a_card_tells_the_first_of_many_files(state: Any, tmp_path: Path) -> None:
    spoken = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "Because it is so, and not otherwise."}]
    (tmp_path / "chats").mkdir()
    for n in range(40):
        (tmp_path / "chats" / f"{n:02}.jsonl").write_text(json.dumps({"conversations": spoken}))
    settings = {"mode": Mode.OFFLINE, "data__corpus": str(tmp_path / "chats"), "trainer__max_steps": 1}
    assert run(state.config(**settings, tracker__kind=TrackerKind.NONE)) == 0
    card = card_of(state, "default", tmp_path / "out")
    assert "| chats/31.jsonl | " in card
    assert "chats/32.jsonl" not in card
    assert "| and 8 more | - |" in card


@pytest.mark.parametrize("text", ["", "[1]", "{", "trainer: 3"])
def test_a_run_whose_settings_cannot_be_read_has_a_card_without_them(state: Any, tmp_path: Path, text: str) -> None:
    state.add(range(8))
    assert run(state.config(mode=Mode.OFFLINE, trainer__max_steps=1, tracker__kind=TrackerKind.NONE)) == 0
    (state.root / "training" / "default" / "config.yaml").write_text(text)
    card = card_of(state, "default", tmp_path / "out")
    assert "| steps | 1 |" in card
    assert "| stored rows with features | 8, sha256 " in card
    assert "trainer." not in card
    assert "Recipe" not in card

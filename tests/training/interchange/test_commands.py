"""Export and import through the state directory: out in every format and in again as the same version, or refused whole."""

from __future__ import annotations

import io
import json
import os
import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from runtime.config import ModelConfig
from runtime.eagle3 import DraftVocabulary, Eagle3Config, Eagle3Model, save, version_id
from runtime.eagle3.interchange import Dialect, dialect_of
from runtime.errors import ConfigError, DrafterRejected
from runtime.models import ResolvedModel
from runtime.registry import Manifest, Registry, VersionState
from training.app import run
from training.config import Mode, TrainingConfig
from training.drafters import find_drafter
from training.interchange.commands import export_drafter, import_drafter
from training.interchange.config import ExportConfig, Format, InterchangeConfig
from training.learning.target_weights import TargetWeights
from training.reporting.config import TrackerKind


@pytest.fixture
def checkpoint(target: TargetWeights, tmp_path: Path) -> Path:
    """A random drafter for the tiny target."""
    config = Eagle3Config.for_target(target.config, 64, aux_layer_ids=target.aux_layer_ids)
    counts = torch.rand(target.vocab_size, generator=torch.Generator().manual_seed(1))
    model = Eagle3Model(config, DraftVocabulary.from_token_counts(counts, 64), target.embedding.float())
    model.init_from_target(target.lm_head.float(), target.final_norm.float(), torch.Generator().manual_seed(2))
    save(model, tmp_path / "checkpoint")
    return tmp_path / "checkpoint"


class Desk:
    """Commands on one state directory."""

    def __init__(self, root: Path, model: ResolvedModel) -> None:
        self.state_dir = root / "state"
        self.model = model
        self.said = ""

    @property
    def registry(self) -> Registry:
        return Registry(self.state_dir / "registry")

    def _run(self, command: Callable[..., int], **settings: Any) -> None:
        config = TrainingConfig(model=ModelConfig(name=str(self.model.path)), **settings)
        screen = io.StringIO()
        assert command(config, self.state_dir, Console(file=screen), threading.Event()) == 0
        self.said = screen.getvalue()

    def export(self, drafter: str, out: Path, form: Format = Format.SLIPSTREAM, **more: Any) -> None:
        export = ExportConfig(drafter=drafter, out=str(out), format=form, **more)
        self._run(export_drafter, mode=Mode.EXPORT, export=export)

    def bring_in(self, path: Path, **more: Any) -> None:
        self._run(import_drafter, mode=Mode.IMPORT, interchange=InterchangeConfig(path=str(path), **more))


@pytest.fixture
def desk(tmp_path: Path, tiny: ResolvedModel, monkeypatch: pytest.MonkeyPatch) -> Desk:
    monkeypatch.setenv("SLIPSTREAM_HOME", str(tiny.path.parent / "home"))
    return Desk(tmp_path, tiny)


@pytest.fixture
def version(desk: Desk, checkpoint: Path, target: TargetWeights) -> str:
    metrics = {"acceptance_length": 2.5}
    return desk.registry.publish(
        checkpoint, parent="feedfeedfeedfeed", step=7, target_fingerprint=target.fingerprint, metrics=metrics
    )


@pytest.mark.parametrize("form", Format)
def test_out_and_in_again_is_the_same_version(desk: Desk, version: str, tmp_path: Path, form: Format) -> None:
    desk.export(version, tmp_path / "out", form)
    assert dialect_of(json.loads((tmp_path / "out" / "config.json").read_text())) is Dialect(form.value)
    other = Desk(tmp_path / "elsewhere", desk.model)
    other.bring_in(tmp_path / "out")
    [record] = other.registry.versions()
    assert record.version == version
    assert record.state is VersionState.STAGED
    assert record.manifest is not None
    assert record.manifest.notes == f"imported from out ({form.value})"
    ours = form is Format.SLIPSTREAM  # whose manifest goes along
    assert (record.manifest.step, record.manifest.parent) == ((7, "feedfeedfeedfeed") if ours else (0, None))
    assert dict(record.manifest.metrics) == ({"acceptance_length": 2.5} if ours else {})


def test_the_active_version_is_meant_if_none_is_named(desk: Desk, version: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no version of .* is active"):
        desk.export("active", tmp_path / "out")
    with pytest.raises(ConfigError, match=r"is 'actve'; it must be active, .*, or a checkpoint directory"):
        desk.export("actve", tmp_path / "out")
    desk.registry.activate(version)
    desk.export("active", tmp_path / "out")
    assert Manifest.read(tmp_path / "out").version == version
    assert str(tmp_path / "out") in desk.said


def test_a_directory_can_be_exported(desk: Desk, checkpoint: Path, tmp_path: Path) -> None:
    desk.export(str(checkpoint), tmp_path / "out", Format.VLLM)
    desk.bring_in(tmp_path / "out", notes="a trial")
    [record] = desk.registry.versions()
    assert record.manifest is not None
    assert record.manifest.notes.endswith("(vllm): a trial")


@pytest.mark.parametrize("more", [{}, {"trainer__ema_decay": 0.9}, {"trainer__hedge": [0.5, 1.0]}])
def test_a_run_is_exported_as_it_would_publish(state: Any, tmp_path: Path, more: dict[str, Any]) -> None:
    state.add(range(8))
    state.add(range(100, 106), "heldout")
    changes = {"mode": Mode.OFFLINE, "trainer__max_steps": 40, "data__passes": 20, "tracker__kind": TrackerKind.NONE} | more
    assert run(state.config(**changes)) == 0
    desk = Desk(tmp_path, state.model)
    desk.export("default", tmp_path / "out", Format.SPECULATORS)
    card = (tmp_path / "out" / "README.md").read_text()
    assert "| step | 40 |" in card
    [published] = state.events("published")
    assert published["step"] == 40, "so it published these very weights"
    desk.bring_in(tmp_path / "out")
    assert [record.version for record in desk.registry.versions()] == [published["version"]]


def test_what_a_killed_export_left_goes_with_the_next_one(desk: Desk, version: str, tmp_path: Path) -> None:
    (tmp_path / ".tmp-export-dead").mkdir()
    (tmp_path / ".tmp-export-dead" / "model.safetensors").write_bytes(b"half")
    (tmp_path / ".tmp-other").mkdir()
    before = {entry.name for entry in tmp_path.iterdir()}
    desk.export(version, tmp_path / "out")
    assert {entry.name for entry in tmp_path.iterdir()} == (before | {"out"}) - {".tmp-export-dead"}


def test_a_trainer_that_starts_again_leaves_the_drafter_of_its_run_to_whoever_looks_at_it(state: Any) -> None:
    """An evaluation may take hours."""
    state.add(range(8))
    settings = {"mode": Mode.OFFLINE, "data__passes": 20, "tracker__kind": TrackerKind.NONE}
    assert run(state.config(**settings, trainer__max_steps=2)) == 0
    registry, runs = Registry(state.root / "registry"), state.root / "training"
    with find_drafter("default", "export.drafter", registry, runs, state.target) as found:
        before = version_id(found.path)
        assert run(state.config(**settings, trainer__max_steps=4)) == 0
        assert version_id(found.path) == before
    assert not found.path.exists()


def test_nothing_is_registered_if_that_is_not_wanted(desk: Desk, checkpoint: Path) -> None:
    desk.bring_in(checkpoint, register=False)
    assert "nothing was registered" in desk.said
    assert not desk.state_dir.exists()


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda d: (d / "model.safetensors").write_bytes(pickle.dumps({})), "PICKLE"),
        (lambda d: (d / "config.json").write_text("{}"), "CONFIG"),
        (lambda d: edit(d, max_position_embeddings=16), "MAX_POSITIONS"),
        (lambda d: edit(d, eagle_config=None, eagle_aux_hidden_state_layer_ids=[1, 2, 3]), "LAYER_IDS"),
        (lambda d: edit(d, vocab_size=1000), "VOCABULARY"),
        (lambda d: edit(d, speculators_config={"verifier": {"architectures": 5}}), "TARGET_FINGERPRINT"),
        (lambda d: edit(d, num_hidden_layers=10**9), "CONFIG"),
        (lambda d: edit(d, rms_norm_eps=float("nan")), "CONFIG"),
        (lambda d: edit(d, intermediate_size=10**40), "CONFIG"),
        (lambda d: (d / "config.json").write_text('{"a":' * 100_000), "UNREADABLE"),
        (lambda d: os.mkfifo(d / "manifest.json"), "UNREADABLE"),
        (lambda d: (d / "manifest.json").symlink_to("/dev/zero"), "OUTSIDE"),
    ],
)
def test_what_is_refused_leaves_no_trace(desk: Desk, checkpoint: Path, damage: Callable[[Path], object], reason: str) -> None:
    damage(checkpoint)
    with pytest.raises(DrafterRejected) as caught:
        desk.bring_in(checkpoint)
    assert caught.value.reason == reason
    assert not desk.state_dir.exists()


def edit(directory: Path, **changes: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_a_version_whose_files_were_changed_neither_leaves_nor_enters(desk: Desk, version: str, tmp_path: Path) -> None:
    desk.export(version, tmp_path / "out")
    edit(tmp_path / "out", pad_token_id=3)
    with pytest.raises(DrafterRejected) as caught:
        Desk(tmp_path / "elsewhere", desk.model).bring_in(tmp_path / "out")
    assert caught.value.reason == "HASH"
    edit(desk.registry.path(version), pad_token_id=3)
    with pytest.raises(DrafterRejected) as caught:
        desk.export(version, tmp_path / "again")
    assert caught.value.reason == "HASH"
    assert not (tmp_path / "again").exists()


def test_a_place_that_holds_something_is_left_alone(desk: Desk, version: str, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("mine")
    with pytest.raises(ConfigError, match="empty or not there yet"):
        desk.export(version, tmp_path / "out")
    assert [entry.name for entry in (tmp_path / "out").iterdir()] == ["thesis.txt"]
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"export\.out"):
        desk.export(version, tmp_path / "file" / "out")
    (tmp_path / "empty").mkdir()
    desk.export(version, tmp_path / "empty")
    assert (tmp_path / "empty" / "manifest.json").exists()


@pytest.mark.parametrize(
    ("word", "said"), [("embedded", "none ships"), ("nowhere", "a run of"), ("0123456789abcdef", "no version")]
)
def test_a_drafter_that_is_not_there_is_named(desk: Desk, tmp_path: Path, word: str, said: str) -> None:
    with pytest.raises((ConfigError, DrafterRejected), match=said):
        desk.export(word, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_card_has_the_figures_of_files(desk: Desk, version: str, tmp_path: Path) -> None:
    run_dir = desk.state_dir / "training" / "night"
    run_dir.mkdir(parents=True)
    step = {"event": "step", "loss": 1.0, "acceptance": [0.5], "num_tokens": 100, "num_rows": 4, "num_supervised": 60}
    events = [step | {"step": 1}, {"event": "published", "step": 1, "version": version}, step | {"step": 2}]
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    (run_dir / "config.yaml").write_text("mode: offline\ntrainer: {ttt_steps: 5}\nstate_dir: /secret\n")
    (tmp_path / "evaluation.json").write_text(json.dumps(evaluation_of(version, desk.model.fingerprint)))
    desk.export(version, tmp_path / "out", Format.SGLANG, evaluation=str(tmp_path / "evaluation.json"))
    card = (tmp_path / "out" / "README.md").read_text()
    for line in (
        f"| version | {version} |",
        "| optimiser steps | 7 |",
        "| run | night |",
        "| acceptance_length | 2.5 |",
        "| all | 9 | 2.750 (2.50 to 3.00) | 0.940 | - | 576 |",
        "| rows trained on, repetitions included | 4 |",
        "| tokens, repetitions included | 100 |",
        "| trainer.ttt_steps | 5 |",
        "| form | sglang |",
    ):
        assert line in card
    assert "secret" not in card, "only what shapes a drafter"


def evaluation_of(version: str, fingerprint: str) -> dict[str, Any]:
    """As mode=evaluate writes it."""
    of_pass = {"drafter": version, "shape": "chain-5", "temperature": 0.0, "suite": "questions"}
    figures = {"category": "all", "length": 64, "num_prompts": 9, "num_tokens": 576, "repeated_8grams": None, "covered": 0.94}
    return {
        "model": {"name": "tiny", "fingerprint": fingerprint, "dtype": "float32"},
        "prompts": [],
        "drafters": {version: "active"},
        "lengths": [64],
        "confidence": 0.95,
        "figures": [of_pass | figures | {"acceptance_length": 2.75, "low": 2.5, "high": 3.0}],
        "depths": [of_pass | {"accepted": [0.7], "accepted_if_reached": [0.7]}],
        "differences": [],
        "lossless": {"num_compared": 0, "deviations": []},
        "machine": {},
    }


@pytest.mark.parametrize(
    "content",
    [
        "[",
        "[]",
        "{}",
        json.dumps(evaluation_of("feedfeedfeedfeed", "another")),
    ],
)
def test_an_evaluation_that_is_none_of_this_drafter_is_named(desk: Desk, version: str, tmp_path: Path, content: str) -> None:
    (tmp_path / "evaluation.json").write_text(content)
    with pytest.raises(ConfigError, match=r"export\.evaluation is"):
        desk.export(version, tmp_path / "out", evaluation=str(tmp_path / "evaluation.json"))
    assert not (tmp_path / "out").exists()

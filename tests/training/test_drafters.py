"""Which drafter a word means: what is no drafter's directory is told as such, however much it looks like one."""

from __future__ import annotations

from pathlib import Path

import pytest

from runtime.errors import ConfigError
from runtime.registry import Registry
from training.app import run
from training.config import Mode
from training.drafters import find_drafter
from training.learning import checkpoint
from training.reporting.config import TrackerKind


def test_a_run_goes_by_its_name_and_not_by_its_path(state) -> None:
    state.add(range(8))
    assert run(state.config(mode=Mode.OFFLINE, trainer__max_steps=1, tracker__kind=TrackerKind.NONE)) == 0
    registry, runs = Registry(state.root / "registry"), state.root / "training"
    with find_drafter("default", "trainer.init", registry, runs, state.target) as found:
        assert found.origin == (runs / "default", 1)
        drafter = found.path
        assert {path.name for path in drafter.iterdir()} >= {"config.json", "model.safetensors"}
    assert not drafter.exists()
    [made] = checkpoint.finished(runs / "default" / "checkpoints")
    for path in (runs / "default", made):
        with (
            pytest.raises(ConfigError, match=r"a directory without config\.json, .*; give one that .* or the name of a run of"),
            find_drafter(str(path), "trainer.init", registry, runs, state.target),
        ):
            pass


def test_of_an_empty_directory(state, tmp_path: Path) -> None:
    with (
        pytest.raises(ConfigError, match=r"export\.drafter is '.*', a directory without config\.json"),
        find_drafter(str(tmp_path), "export.drafter", Registry(state.root / "registry"), state.root / "training", state.target),
    ):
        pass

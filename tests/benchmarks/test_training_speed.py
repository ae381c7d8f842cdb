"""The comparison of trainers, run small: every round counts, and what cannot run is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import training_speed
from training_arms import SHAPES


@pytest.mark.parametrize("lengths", ["full", "real"])
def test_a_small_comparison_says_what_it_measured(tmp_path: Path, lengths: str) -> None:
    out = tmp_path / "speed.json"
    settings = ["--rows=2", "--length=48", "--rounds=3", "--warmup=1", f"--lengths={lengths}", f"--out={out}", "--depths=2"]
    training_speed.main(["--device=cpu", "--shape=tiny", "--arms=slipstream", *settings])
    result = json.loads(out.read_text())
    arm = result["arms"]["slipstream"]
    assert len(arm["tokens_per_s_rounds"]) == 3
    assert arm["tokens_per_s"] == sorted(arm["tokens_per_s_rounds"])[1] > 0
    assert arm["peak_mib"] >= 0
    assert result["shape"]["depths"] == 2
    assert result["shape"]["vocab"] == SHAPES["tiny"].vocab
    assert result["tokens_a_step"] == 96 if lengths == "full" else result["tokens_a_step"] >= 96
    assert "CPU" in result["machine"]


def test_a_trainer_that_is_not_there_is_left_out_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("training_arms.importlib.util.find_spec", lambda name: None)
    settings = ["--device=cpu", "--shape=tiny", "--rows=1", "--length=32", "--rounds=1", "--warmup=1"]
    result = training_speed.main([*settings, "--arms=slipstream,speculators"])
    assert list(result["arms"]) == ["slipstream"]
    assert result["absent"] == {"speculators": "speculators is not on the path"}

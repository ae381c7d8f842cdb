"""Linear layers side by side: the whole script on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import linear
import pytest
from transformers import LlamaConfig


def test_shapes_are_those_of_a_forward() -> None:
    config = LlamaConfig(
        hidden_size=16, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, vocab_size=100
    )
    layer = [(32, 16), (16, 16), (96, 16), (16, 48)]
    assert linear.shapes_of(config) == [*layer, *layer, (100, 16)]


def test_each_kind_is_measured_at_each_number_of_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "linear.json"
    assert linear.main(["--model", "tiny", "--rows", "1", "5", "--rounds", "2", "--out", str(out)]) == 0
    found = json.loads(out.read_text())["found"]
    assert [one["rows"] for one in found] == [1, 5]
    assert all(one["ms"].keys() == linear.makers().keys() and min(one["ms"].values()) > 0 for one in found)
    assert "| rows | plain: ms |" in capsys.readouterr().out


def test_a_model_that_is_not_there_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert linear.main(["--model", "nowhere/at/all"]) == 1
    assert "linear: " in capsys.readouterr().err

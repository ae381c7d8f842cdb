"""The load benchmark: its arithmetic, and one small run of it against a server that it starts itself."""

from __future__ import annotations

import json
from pathlib import Path

import load
import pytest
from load import Answer


def test_times_are_those_of_one_stream() -> None:
    answer = Answer(True, asked_at=1.0, token_times=[1.5, 1.6, 2.5], num_tokens=11)
    assert answer.ttft_s == pytest.approx(0.5)
    assert answer.tpot_s == pytest.approx(0.1)
    assert answer.gaps_s == pytest.approx([0.1, 0.9])


def test_spread_is_in_milliseconds() -> None:
    assert load.spread([0.001 * number for number in range(1, 101)]) == pytest.approx({"mean": 50.5, "p50": 50.5, "p99": 100.0})


def test_a_failed_answer_counts_as_failed_alone() -> None:
    good = Answer(True, 0.0, [0.1, 0.2], 0.2, 5, 3)
    bad = Answer(True, 0.0, [0.1], 0.2, 5, 1, error="gone")
    found = load.summary([good, bad], duration_s=2.0)
    assert (found["successful"], found["failed"], found["output_tokens"]) == (1, 1, 3)
    assert found["output_tokens_per_s"] == pytest.approx(1.5)


def test_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("SLIPSTREAM_HOME", str(tmp_path / "home"))
    small = ["--server", "model=tiny", "--server", "backend.num_threads=1", "--requests", "8", "--concurrency", "4"]
    assert load.main([*small, "--max-tokens", "6", "--compare", "--json", str(tmp_path / "out.json")]) == 0
    result = json.loads((tmp_path / "out.json").read_text())
    assert {name: arm["successful"] for name, arm in result["arms"].items()} == {"all": 8, "speculative": 4, "plain": 4}
    assert result["arms"]["all"]["failed"] == 0
    assert result["livez_ms"]["max"] >= result["livez_ms"]["p50"] > 0
    assert "Median TTFT (ms):" in capsys.readouterr().out

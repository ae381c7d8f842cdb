"""The benchmark of the tap: its arithmetic, and one small run of each kind with the tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import capture
import pytest
from capture import Pair, Round

SMALL = ["--model", "tiny", "--threads", "1", "--concurrency", "4", "--max-tokens", "8"]


def test_the_ratio_is_taken_within_each_pair() -> None:
    """A machine that halves its speed between pairs changes the speeds, not the ratios."""
    pairs = [
        Pair(Round(99, 1.0, 2.0), Round(100, 1.0, 1.0)),
        Pair(Round(49, 1.0, 2.0), Round(100, 2.0, 2.0)),
        Pair(Round(48, 1.0, 1.0), Round(50, 1.0, 1.0)),
    ]
    found = capture.summary(pairs, seed=0)
    assert found["ratio"] == pytest.approx(0.98)
    assert (found["ratio_low"], found["ratio_high"]) == pytest.approx((0.96, 0.99))
    assert found["cpu_ratio"] == pytest.approx(0.495)
    assert (found["tokens_per_s_with"], found["tokens_per_s_without"]) == (49.0, 50.0)


def test_growth_is_that_of_a_warm_process() -> None:
    filling = [(100, 50.0), (200, 90.0)]
    assert capture.growth_mib([*filling, *((n, 100.0) for n in range(300, 900, 100))]) == 0.0
    assert capture.growth_mib([*filling, *((n, 100.0 + n) for n in range(300, 900, 100))]) == 300.0


def test_a_run_of_pairs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("SLIPSTREAM_HOME", str(tmp_path / "home"))
    out = tmp_path / "out.json"
    assert capture.main([*SMALL, "--pairs", "2", "--round-requests", "4", "--json", str(out)]) == 0
    result = json.loads(out.read_text())
    assert len(result["pairs"]) == 2
    assert result["outcomes"] == {"offered": 12, "captured": 12}  # the warm round too, and nothing of the other arm
    assert result["ratio_low"] <= result["ratio"] <= result["ratio_high"]
    assert "ratio of throughput: " in capsys.readouterr().out


def test_a_ratio_below_what_is_required_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIPSTREAM_HOME", str(tmp_path / "home"))
    assert capture.main([*SMALL, "--pairs", "1", "--round-requests", "2", "--require", "1000"]) == 1


def test_a_run_over_many_requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The store is full long before the end: what does not fit is shed, and answers go on."""
    monkeypatch.setenv("SLIPSTREAM_HOME", str(tmp_path / "home"))
    out = tmp_path / "out.json"
    capture.main([*SMALL, "--requests", "60", "--budget-mib", "1", "--json", str(out)])
    result = json.loads(out.read_text())
    assert [answered for answered, _ in result["samples"]] == list(range(3, 61, 3))
    counts = result["outcomes"]
    num_shed = sum(count for name, count in counts.items() if name in ("shed_backlog", "shed_budget"))  # whichever is met first
    assert counts["offered"] == 60 == counts["captured"] + num_shed
    assert num_shed > 0
    capture.main([*SMALL, "--requests", "8", "--without-tap", "--json", str(out)])
    assert json.loads(out.read_text())["outcomes"] == {}

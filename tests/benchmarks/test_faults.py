"""A few deaths of each kind, as the full script deals them out by the hundred."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "faults.py"


@pytest.mark.parametrize(("source", "trainers", "count"), [("grpc", 2, 6), ("directory", 1, 3)])
def test_no_death_costs_a_row_or_counts_one_twice(tmp_path: Path, source: str, trainers: int, count: int) -> None:
    """How soon each resumes is the full script's to judge, on a machine that does nothing else."""
    command = [
        sys.executable,
        str(SCRIPT),
        "--count",
        str(count),
        "--source",
        source,
        "--trainers",
        str(trainers),
        "--seed",
        "3",
        "--out",
        str(tmp_path / "out"),
    ]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    told = tmp_path / "out" / "faults.json"
    assert told.exists(), run.stdout + run.stderr
    result = json.loads(told.read_text())
    assert all(kills >= 1 for kills in result["kills"].values())
    assert len(result["kills"]) == trainers + 2
    assert result["resume_s"]["trainer" if trainers == 1 else "trainer0"]["count"] >= 1, "started as users start it"
    assert result["rows"]["durable"] >= count
    assert (result["rows_lost"], result["rows_twice"]) == (0, 0)
    assert result["held"]["none counts twice"], result
    assert result["requests_failed_otherwise"] == []
    assert result["requests"] >= count, "clients were served meanwhile"

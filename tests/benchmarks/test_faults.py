"""A few deaths of each kind, as the full script deals them out by the hundred."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "faults.py"


@pytest.mark.parametrize(("source", "count"), [("grpc", 6), ("directory", 3)])
def test_no_death_costs_a_row_or_counts_one_twice(tmp_path: Path, source: str, count: int) -> None:
    """How soon each resumes is the full script's to judge, on a machine that does nothing else."""
    command = [
        sys.executable,
        str(SCRIPT),
        "--count",
        str(count),
        "--source",
        source,
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
    assert result["rows"]["durable"] >= count
    assert (result["rows_lost"], result["rows_twice"]) == (0, 0)
    assert result["held"]["none counts twice"], result
    assert result["requests_failed_otherwise"] == []
    assert result["requests"] >= count, "clients were served meanwhile"

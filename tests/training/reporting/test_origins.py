"""What a run was made from stands in its provenance, by content."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from training.app import run
from training.config import Mode
from training.reporting import origins
from training.reporting.config import TrackerKind


def test_rows_are_told_by_content_in_any_order(state: Any) -> None:
    state.add(range(4))
    refs = list(state.ledger.trainable())
    told = origins.of_rows(refs)
    assert told["rows"] == 4
    assert origins.of_rows(reversed(refs)) == told
    assert origins.of_rows(refs[:3])["sha256"] != told["sha256"]


def test_files_are_told_by_content(tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text("{}")
    told = origins.of_files([tmp_path / "prompts.jsonl", tmp_path / "nowhere"])
    assert told == {str(tmp_path / "prompts.jsonl"): {"sha256": hashlib.sha256(b"{}").hexdigest(), "bytes": 2}}


def test_a_run_notes_target_start_and_data(state: Any) -> None:
    state.add(range(4))
    config = state.config(mode=Mode.OFFLINE, trainer__max_steps=1, tracker__kind=TrackerKind.NONE)
    assert run(config) == 0
    assert run(config) == 0
    record = json.loads((state.root / "training" / "default" / "provenance.json").read_text())
    assert record["target"]["fingerprint"] == state.target.fingerprint
    assert record["start"] == "scratch"
    assert record["data"]["features"] == origins.of_rows(state.ledger.trainable())
    [before] = record["earlier"]
    assert before["data"] == record["data"]

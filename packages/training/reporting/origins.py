"""What a run was made from, noted in its provenance.json: target, start, and digests of the data.

Equal digests mean equal data. Rows that come from a live server are in no digest: they are counted in metrics.jsonl.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from runtime.features.refs import SampleRef
from runtime.files import dump_json, sha256_of, write_atomic

PROVENANCE_FILE = "provenance.json"
SCRATCH = "scratch"


def note(run_dir: Path, **values: Any) -> None:
    """Add to what `runtime.configuration.provenance` wrote when the run began."""
    write_atomic(run_dir / PROVENANCE_FILE, dump_json(noted(run_dir) | values))


def noted(run_dir: Path) -> dict[str, Any]:
    """The record; empty if there is none."""
    path = run_dir / PROVENANCE_FILE
    record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return record


def start_of(run_dir: Path) -> str | None:
    """The drafter that the run began with, or SCRATCH; None if it never came so far."""
    start = noted(run_dir).get("start")
    return None if start is None else str(start)


def of_files(files: Sequence[Path]) -> dict[str, Any]:
    """By name; a file that cannot be read is told by whoever reads it."""
    return {str(path): {"sha256": sha256_of(path), "bytes": path.stat().st_size} for path in files if path.is_file()}


def of_rows(refs: Iterable[SampleRef]) -> dict[str, Any]:
    """Of stored rows, in whatever order."""
    lines = sorted(f"{ref.sample_id} {ref.generation} {ref.num_tokens} {ref.num_bytes}" for ref in refs)
    return {"rows": len(lines), "sha256": hashlib.sha256("\n".join(lines).encode()).hexdigest()}

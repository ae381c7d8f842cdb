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


def note(run_dir: Path, **values: Any) -> None:
    """Add to what `runtime.configuration.provenance` wrote when the run began."""
    path = run_dir / PROVENANCE_FILE
    record = json.loads(path.read_text(encoding="utf-8"))
    write_atomic(path, dump_json(record | values))


def start_of(run_dir: Path) -> str | None:
    """The drafter that the run began with; None if it never came so far."""
    path = run_dir / PROVENANCE_FILE
    start = json.loads(path.read_text(encoding="utf-8")).get("start") if path.exists() else None
    return None if start is None else str(start)


def of_files(files: Sequence[Path]) -> dict[str, Any]:
    """By name; a file that cannot be read is told by whoever reads it."""
    return {str(path): {"sha256": sha256_of(path), "bytes": path.stat().st_size} for path in files if path.is_file()}


def of_rows(refs: Iterable[SampleRef]) -> dict[str, Any]:
    """Of stored rows, in whatever order."""
    lines = sorted(f"{ref.sample_id} {ref.generation} {ref.num_tokens} {ref.num_bytes}" for ref in refs)
    return {"rows": len(lines), "sha256": hashlib.sha256("\n".join(lines).encode()).hexdigest()}

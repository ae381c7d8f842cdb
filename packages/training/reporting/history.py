"""What metrics.jsonl says of a run: its steps, verdicts and publications, as one continuous record.

A run that was killed goes on from its latest checkpoint, so some steps were made twice, and the first time does not count:
where a run resumed at step N, what was written before about steps beyond N is dropped. Reads that file alone.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

METRICS_FILE = "metrics.jsonl"
BEGAN = '"event": "began"'  # in a line that says so

Entry = Mapping[str, Any]


@dataclass(frozen=True)
class History:
    """Entries by step, in the order of steps."""

    steps: dict[int, Entry] = field(default_factory=dict)
    judged: dict[int, Entry] = field(default_factory=dict)
    published: dict[int, Entry] = field(default_factory=dict)
    began: tuple[Entry, ...] = ()  # each beginning of the run, resumptions included

    @staticmethod
    def read(run_dir: Path) -> History:
        """Empty if the run has no file; a last line cut short by a crash is left out."""
        path = run_dir / METRICS_FILE
        kinds: dict[str, dict[int, Entry]] = {"step": {}, "judged": {}, "published": {}}
        began: list[Entry] = []
        for line in path.read_text(encoding="utf-8").split("\n")[:-1] if path.exists() else ():
            entry = json.loads(line)
            if entry["event"] == "began":
                began.append(entry)
                for name, known in kinds.items():
                    kinds[name] = {step: each for step, each in known.items() if step <= entry["step"]}
            elif entry["event"] in kinds:
                kinds[entry["event"]][entry["step"]] = entry
        steps, judged, published = (dict(sorted(known.items())) for known in kinds.values())
        return History(steps, judged, published, tuple(began))

    def total(self, name: str, up_to: int | None = None) -> int:
        """The sum of a count over the steps (num_tokens, num_rows, num_supervised)."""
        return sum(entry.get(name) or 0 for step, entry in self.steps.items() if up_to is None or step <= up_to)

    def last(self, name: str, share: float = 0.1) -> float | None:
        """The mean of a figure over the last share of the steps; None where it never was a number."""
        entries = list(self.steps.values())
        known = [entry[name] for entry in entries[-max(round(len(entries) * share), 1) :] if entry.get(name) is not None]
        return sum(known) / len(known) if known else None

"""`Manifest`: what a drafter version says about itself. Written once, beside its weights, and never changed.

Strict in both directions: a manifest that is read has every key, no other, and values of the right kinds.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any

from runtime.eagle3.reasons import RejectReason, rejected
from runtime.files import dump_json

MANIFEST_FILE = "manifest.json"


@dataclass(frozen=True)
class Manifest:
    version: str  # content hash of the checkpoint
    parent: str | None  # the version that training continued from
    step: int  # optimiser steps behind it
    target_fingerprint: str
    vocabulary_hash: str
    aux_layer_ids: tuple[int, int, int]
    dtype: str
    metrics: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))  # held-out, as the trainer's gate saw them
    created_at: float = 0.0  # Unix seconds
    notes: str = ""

    def to_json(self) -> bytes:
        return dump_json(asdict(self) | {"metrics": dict(self.metrics)})

    @staticmethod
    def from_json(text: str | bytes) -> Manifest:
        """DrafterRejected(MANIFEST) with what is wrong."""
        try:
            raw = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise _bad(f"it is not JSON ({error})") from error
        if not isinstance(raw, dict):
            raise _bad(f"it holds {type(raw).__name__}, not an object")
        names = {item.name for item in fields(Manifest)}
        if raw.keys() != names:
            raise _bad(f"it lacks {sorted(names - raw.keys())} and has unknown {sorted(raw.keys() - names)}")
        for name, is_right in _CHECKS.items():
            if not is_right(raw[name]):
                raise _bad(f"its {name} is {raw[name]!r}")
        low, mid, high = raw["aux_layer_ids"]
        return Manifest(**(raw | {"aux_layer_ids": (low, mid, high), "metrics": MappingProxyType(raw["metrics"])}))

    @staticmethod
    def read(directory: Path) -> Manifest:
        try:
            return Manifest.from_json((directory / MANIFEST_FILE).read_bytes())
        except OSError as error:
            raise _bad(f"it cannot be read ({error.strerror})") from error


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_number(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and -sys.float_info.max <= value <= sys.float_info.max  # JSON's whole numbers know no limit


_CHECKS = {
    "version": _is_text,
    "parent": lambda value: value is None or _is_text(value),
    "step": _is_count,
    "target_fingerprint": _is_text,
    "vocabulary_hash": _is_text,
    "aux_layer_ids": lambda value: isinstance(value, list) and len(value) == 3 and all(map(_is_count, value)),
    "dtype": _is_text,
    "metrics": lambda value: isinstance(value, dict) and all(map(_is_number, value.values())),
    "created_at": _is_number,
    "notes": _is_text,
}


def _bad(what: str) -> Exception:
    return rejected(RejectReason.MANIFEST, f"The version's {MANIFEST_FILE} is not usable: {what}. Publish the version again.")

"""The model card: README.md beside an exported drafter. Every figure is read from a file that a program wrote (manifest,
metrics.jsonl, config.yaml, the JSON of mode=evaluate); what is not known is left out.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from runtime.eagle3 import DraftVocabulary
from runtime.eagle3.interchange import Dialect, Offered
from runtime.errors import ConfigError
from runtime.models import absolute
from training.drafters import Found
from training.judging.sheet import markdown
from training.learning.target_weights import TargetWeights
from training.reporting.history import History

CARD_FILE = "README.md"
RECIPE = ("mode", "trainer", "data", "producer")  # groups of a run's settings that shape a drafter
MAX_CELL = 120


def read_evaluation(path: str, version: str, target_fingerprint: str) -> Mapping[str, Any]:
    """What mode=evaluate wrote about this drafter; ConfigError if it cannot be read, or is about another one."""
    file = absolute("export.evaluation", path)
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"export.evaluation is {path!r}, which cannot be read as JSON ({error}); give mode=evaluate's."
        ) from error
    if not isinstance(value, dict):
        raise ConfigError(f"export.evaluation is {path!r}, which holds {type(value).__name__}; give the object of mode=evaluate.")
    try:
        made_for, drafters = value["model"]["fingerprint"], sorted(value["drafters"])
        markdown(value)
    except (KeyError, TypeError) as error:
        raise ConfigError(
            f"export.evaluation is {path!r}, which lacks what mode=evaluate writes ({error}); give its file."
        ) from error
    if made_for != target_fingerprint or version not in drafters:
        raise ConfigError(
            f"export.evaluation is {path!r}, of drafters {', '.join(drafters)} on target {made_for}; the one to export is "
            f"{version} for {target_fingerprint}."
        )
    return value


def write_card(
    path: Path, drafter: Offered, dialect: Dialect, target: TargetWeights, found: Found, evaluation: Mapping[str, Any] | None
) -> None:
    name = Path(target.name).name
    sections = [
        f"---\ntags: [eagle3, speculative-decoding]\nbase_model: {name}\n---\n\n# EAGLE3 drafter for {name}",
        _table("What it is", _shape(drafter, dialect, target)),
        _table("Where it comes from", _origin(found)),
        *_run_sections(found),
    ]
    if found.manifest is not None and found.manifest.metrics:
        sections.append(_table("Held-out rows, as the trainer's gate judged it", sorted(found.manifest.metrics.items())))
    if evaluation is not None:
        sections.append(f"## Evaluation\n\n{markdown(evaluation).strip()}")
    path.write_text("\n\n".join(section for section in sections if section) + "\n", encoding="utf-8")


def _shape(drafter: Offered, dialect: Dialect, target: TargetWeights) -> list[tuple[str, Any]]:
    config = drafter.config
    vocabulary = DraftVocabulary.from_tensors(drafter.tensors["d2t"], drafter.tensors["t2d"])
    num_parameters = sum(tensor.numel() for tensor in drafter.tensors.values() if tensor.is_floating_point())
    return [
        ("target", f"{target.name}, fingerprint {target.fingerprint}"),
        ("form", dialect.value),
        ("weights", f"{num_parameters:,} parameters, {config.dtype}"),
        ("draft vocabulary", f"{len(vocabulary):,} of {vocabulary.vocab_size:,} tokens, hash {vocabulary.hash}"),
        ("reads the output of layers", ", ".join(map(str, config.aux_layer_ids or ()))),
        ("positions", config.max_position_embeddings),
    ]


def _origin(found: Found) -> list[tuple[str, Any]]:
    manifest, origin = found.manifest, found.origin
    if manifest is None:
        return [] if origin is None else [("run", origin[0].name), ("step", origin[1])]
    made = datetime.datetime.fromtimestamp(manifest.created_at, datetime.UTC).isoformat(timespec="seconds")
    return [
        ("version", manifest.version),
        ("continued from", manifest.parent or "nothing: trained from scratch, or not known"),
        ("optimiser steps", manifest.step),
        ("published", made),
        *([("run", origin[0].name)] if origin is not None else []),
        *([("notes", manifest.notes)] if manifest.notes else []),
    ]


def _run_sections(found: Found) -> Iterator[str]:
    if found.origin is None:
        return
    run_dir, last_step = found.origin
    history = History.read(run_dir)
    counts = [(label, f"{history.total(name, last_step):,}") for label, name in _COUNTS]
    yield _table("Data", [("steps", f"{sum(step <= last_step for step in history.steps):,}"), *counts])
    try:
        settings = yaml.safe_load((run_dir / "config.yaml").read_text(encoding="utf-8"))
    except OSError:
        return
    yield _table("Recipe", list(_flat({name: settings[name] for name in RECIPE if name in settings})))


_COUNTS = (
    ("rows trained on, repetitions included", "num_rows"),
    ("tokens, repetitions included", "num_tokens"),
    ("supervised positions", "num_supervised"),
)


def _flat(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Nested objects as dotted names; of lists only those of plain values."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _flat(item, f"{prefix}.{key}" if prefix else str(key))
    elif not isinstance(value, list) or not any(isinstance(item, list | dict) for item in value):
        yield prefix, value


def _table(title: str, rows: Sequence[tuple[str, Any]]) -> str:
    if not rows:
        return ""
    lines = [f"| {name} | {_cell(value)} |" for name, value in rows]
    return "\n".join([f"## {title}", "", "| | |", "|---|---|", *lines])


def _cell(value: Any) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    text = " ".join(text.split()).replace("|", "\\|")
    return text if len(text) <= MAX_CELL else f"{text[: MAX_CELL - 3]}..."

"""The model card: README.md beside an exported drafter. Every figure is read from a file that a program wrote (manifest,
metrics.jsonl, config.yaml, provenance.json, the JSON of mode=evaluate); what is not known is left out, and so are places on the
machine that made it.
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
from training.interchange.recipe import Setting, recipe, shortened
from training.judging.sheet import markdown
from training.learning.target_weights import TargetWeights
from training.reporting import origins
from training.reporting.history import History

CARD_FILE = "README.md"
MAX_CELL = 120
MAX_NAMES = 4  # of files in a cell,
MAX_FILES = 32  # and in a table


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
        model = {**evaluation["model"], "name": shortened(evaluation["model"]["name"])}
        sections.append(f"## Evaluation\n\n{markdown({**evaluation, 'model': model}).strip()}")
    path.write_text("\n\n".join(section for section in sections if section) + "\n", encoding="utf-8")


def _shape(drafter: Offered, dialect: Dialect, target: TargetWeights) -> list[tuple[str, Any]]:
    config = drafter.config
    vocabulary = DraftVocabulary.from_tensors(drafter.tensors["d2t"], drafter.tensors["t2d"])
    num_parameters = sum(tensor.numel() for tensor in drafter.tensors.values() if tensor.is_floating_point())
    return [
        ("target", f"{shortened(target.name)}, fingerprint {target.fingerprint}"),
        ("form", dialect.value),
        ("weights", f"{num_parameters:,} parameters, {config.dtype}"),
        ("draft vocabulary", f"{len(vocabulary):,} of {vocabulary.vocab_size:,} tokens, hash {vocabulary.hash}"),
        ("reads the output of layers", ", ".join(map(str, config.aux_layer_ids or ()))),
        ("positions", config.max_position_embeddings),
    ]


def _origin(found: Found) -> list[tuple[str, Any]]:
    manifest, origin = found.manifest, found.origin
    began = [] if origin is None else list(_beginning(origin[0]))
    if manifest is None:
        return [] if origin is None else [("run", origin[0].name), ("step", origin[1]), *began]
    made = datetime.datetime.fromtimestamp(manifest.created_at, datetime.UTC).isoformat(timespec="seconds")
    return [
        ("version", manifest.version),
        ("continued from", manifest.parent or "nothing: trained from scratch, or not known"),
        ("optimiser steps", manifest.step),
        ("published", made),
        *([("run", origin[0].name), *began] if origin is not None else []),
        *([("notes", manifest.notes)] if manifest.notes else []),
    ]


def _beginning(run_dir: Path) -> Iterator[tuple[str, Any]]:
    start = origins.start_of(run_dir)
    if start is not None:
        yield "the run began from", "nothing: trained from scratch" if start == origins.SCRATCH else f"drafter {start}"


def _run_sections(found: Found) -> Iterator[str]:
    if found.origin is None:
        return
    run_dir, last_step = found.origin
    noted = origins.noted(run_dir)
    history = History.read(run_dir)
    counts = [(label, f"{history.total(name, last_step):,}") for label, name in _COUNTS]
    rates = [entry.get("learning_rate") or 0.0 for step, entry in history.steps.items() if step <= last_step]
    figures = [("steps", f"{len(rates):,}"), *counts, *([("learning rate, at most", max(rates))] if any(rates) else [])]
    yield _table("Data", [*figures, *_data(noted.get("data", {}))])
    yield _sources(noted.get("data", {}))
    try:
        config = yaml.safe_load((run_dir / "config.yaml").read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError):
        return
    if isinstance(config, Mapping):
        yield _recipe(recipe(config, is_from_scratch=noted.get("start", origins.SCRATCH) == origins.SCRATCH))


_COUNTS = (
    ("rows trained on, repetitions included", "num_rows"),
    ("tokens, repetitions included", "num_tokens"),
    ("supervised positions", "num_supervised"),
)


def _data(data: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """What the run noted of its rows as a whole."""
    for name, label in (("corpus", "token rows"), ("features", "stored rows with features")):
        if name in data:
            rows, digest = data[name]["rows"], data[name]["sha256"]
            tokens = f" of {data[name]['tokens']:,} tokens" if "tokens" in data[name] else ""
            yield label, f"{rows:,}{tokens}, sha256 {digest[:12]}"
    if "heldout_fraction" in data:
        yield "share held out for the gate", data["heldout_fraction"]
    if "live_rows_of" in data:
        yield "rows", "a server's live traffic"


def _sources(data: Mapping[str, Any]) -> str:
    """A line for each capture, or for each file that was read as it is."""
    if "captures" in data:
        header = ["capture", "prompts", "rows", "generated tokens", "temperatures", "max_tokens", "seed", "answers of"]
        return _columns("Sources", header, [_capture(each) for each in data["captures"]])
    files = data.get("files") or data.get("prompts") or {}
    rows = [[shortened(path), each["sha256"][:12]] for path, each in sorted(files.items())]
    more = [[f"and {len(rows) - MAX_FILES} more", "-"]] if len(rows) > MAX_FILES else []
    return _columns("Sources", ["file", "sha256"], rows[:MAX_FILES] + more)


def _capture(each: Mapping[str, Any]) -> list[Any]:
    answers = each["answers"] if isinstance(each["answers"], Mapping) else {}
    files = [shortened(name) for name in each["files"] or ()]
    more = [f"and {len(files) - MAX_NAMES} more"] if len(files) > MAX_NAMES else []
    temperatures = ", ".join(f"{value:g}" for value in answers.get("temperatures", ()))
    who = f"{shortened(str(each['model']))} ({each['target_fingerprint']})" if answers else "nobody: as they stood"
    cells = [
        Path(each["directory"]).name,
        ", ".join(files[:MAX_NAMES] + more),
        f"{each['rows']:,}",
        f"{each['generated_tokens']:,}",
    ]
    return [*cells, temperatures or "-", answers.get("max_tokens", "-"), answers.get("seed", "-"), who]


def _recipe(settings: Sequence[Setting]) -> str:
    """What differs from the defaults as a table, and the defaults in one sentence."""
    changed = [[each.name, each.value or "null", each.default or "null"] for each in settings if not each.is_default]
    usual = [f"{each.name}={each.value}" for each in settings if each.is_default and each.value is not None]
    others = "The other settings" if changed else "All settings"
    said = f"{others} that shape a drafter are the defaults: {', '.join(usual)}." if usual else ""
    table = _columns("Recipe", ["setting", "value", "default"], changed)
    title = "## Recipe" if said and not changed else ""
    return "\n\n".join(part for part in (title, table, said) if part)


def _table(title: str, rows: Sequence[tuple[str, Any]]) -> str:
    return _columns(title, ["", ""], rows)


def _columns(title: str, header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    if not rows:
        return ""
    lines = ["| " + " | ".join(map(_cell, row)) + " |" for row in rows]
    return "\n".join([f"## {title}", "", f"| {' | '.join(header)} |", "|---" * len(header) + "|", *lines])


def _cell(value: Any) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    text = " ".join(text.split()).replace("|", "\\|")
    return text if len(text) <= MAX_CELL else f"{text[: MAX_CELL - 3]}..."

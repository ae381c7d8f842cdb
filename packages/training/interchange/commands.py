"""mode=export and mode=import. Both are strict: what leaves was validated and read back, what comes in is registered whole or
refused with one reason, and nothing that exists is changed by a refusal.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from rich.console import Console
from safetensors import SafetensorError

from runtime.backends.base import TargetInfo
from runtime.config import require
from runtime.eagle3.checkpoint import CONFIG_FILE, WEIGHTS_FILE, version_id
from runtime.eagle3.interchange import Dialect, Offered, Verifier, check_files, read_offered, same, write_as
from runtime.eagle3.reasons import RejectReason, rejected
from runtime.errors import ConfigError
from runtime.files import move_directory, remove_leftovers, temporary_directory
from runtime.models import absolute, resolve
from runtime.registry import Manifest, Registry, validate
from runtime.registry.manifest import MANIFEST_FILE
from training.config import TrainingConfig
from training.drafters import Found, find_drafter
from training.interchange.card import CARD_FILE, read_evaluation, write_card
from training.learning.target_weights import TargetWeights, load_target_weights

UNFINISHED = "export-"  # label of what is being written
PLAIN: Any = {"highlight": False, "markup": False, "soft_wrap": True}  # paths as they are, to be copied


@dataclass(frozen=True)
class _Target:
    """The target that a drafter is for, as much of it as exchange needs."""

    weights: TargetWeights
    verifier: Verifier

    @property
    def info(self) -> TargetInfo:
        weights, config = self.weights, self.weights.config
        return TargetInfo(
            name=weights.name,
            fingerprint=weights.fingerprint,
            vocab_size=weights.vocab_size,
            hidden_size=weights.hidden_size,
            num_layers=self.verifier.num_layers,
            max_positions=int(config["max_position_embeddings"]),
            aux_layer_ids=weights.aux_layer_ids,
            eos_token_ids=(),
            dtype=str(weights.embedding.dtype).removeprefix("torch."),
            device=str(weights.device),
        )

    def read(self, directory: Path) -> Offered:
        return read_offered(directory, self.weights.embedding, self.verifier)


def export_drafter(config: TrainingConfig, state_dir: Path, console: Console, stop: threading.Event) -> int:
    """Write export.drafter to export.out in export.format, with a model card, and read it back."""
    assert config.export.out is not None  # of mode=export, by its settings
    out = absolute("export.out", config.export.out)
    is_free = not out.exists() or (out.is_dir() and not any(out.iterdir()))
    require(is_free, "export.out", str(out), "a directory that is empty or not there yet")
    target = _target(config)
    dialect = Dialect(config.export.format.value)
    registry, runs = _registry(config, state_dir), state_dir / "training"
    with find_drafter(config.export.drafter, "export.drafter", registry, runs, target.weights) as found:
        validate(found.version, target.info, target.weights.embedding)
        drafter = target.read(found.path)
        evaluation = None
        if config.export.evaluation is not None:
            evaluation = read_evaluation(config.export.evaluation, version_id(found.path), target.weights.fingerprint)
        try:
            with _alone_in(out.parent), temporary_directory(out.parent, UNFINISHED) as unfinished:
                _write(unfinished, drafter, dialect, target, found)
                write_card(unfinished / CARD_FILE, drafter, dialect, target.weights, found, evaluation)
                if out.exists():
                    out.rmdir()
                move_directory(unfinished, out)
        except (OSError, SafetensorError) as error:
            raise ConfigError(
                f"export.out is {str(out)!r}, which cannot be written ({error}); give another directory."
            ) from error
    console.print(f"{config.export.drafter} is in {out}, as {dialect} spells it; {CARD_FILE} says what it is", **PLAIN)
    return 0


@contextmanager
def _alone_in(parent: Path) -> Iterator[None]:
    """Of all exports into this directory, one at a time; what a killed one left there goes. No lock file stays behind."""
    parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(parent, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        remove_leftovers(parent, UNFINISHED)
        yield
    finally:
        os.close(descriptor)


def _write(directory: Path, drafter: Offered, dialect: Dialect, target: _Target, found: Found) -> None:
    """Write the drafter, and hold what was written against it. A version of ours keeps its bytes, and its manifest."""
    if dialect is Dialect.SLIPSTREAM and found.manifest is not None:
        for name in (CONFIG_FILE, WEIGHTS_FILE, MANIFEST_FILE):
            shutil.copyfile(found.path / name, directory / name)
    else:
        write_as(directory, drafter, dialect, target.verifier)
    if not same(target.read(directory), drafter):
        raise rejected(RejectReason.HASH, f"What was written to {directory} is not what was read from {found.path}.")


def import_drafter(config: TrainingConfig, state_dir: Path, console: Console, stop: threading.Event) -> int:
    """Read interchange.path, whatever engine it was written for, and stage it as a version."""
    assert config.interchange.path is not None  # of mode=import, by its settings
    path = absolute("interchange.path", config.interchange.path)
    target = _target(config)
    drafter = target.read(path)
    manifest = _manifest_of(path, target)
    with TemporaryDirectory(prefix="slipstream-import-") as scratch:  # a refusal must leave no trace in the state directory
        ours = Path(scratch)
        write_as(ours, drafter, Dialect.SLIPSTREAM, target.verifier)
        validate(ours, target.info, target.weights.embedding)
        if not config.interchange.register:
            console.print(f"{path} ({drafter.dialect}) is a drafter for {target.weights.name}; nothing was registered", **PLAIN)
            return 0
        said = f"imported from {path.name} ({drafter.dialect})"
        registry = _registry(config, state_dir)
        version = registry.publish(
            ours if manifest is None else path,  # a version of ours keeps its bytes, and so its id
            parent=None if manifest is None else manifest.parent,
            step=0 if manifest is None else manifest.step,
            target_fingerprint=target.weights.fingerprint,
            metrics={} if manifest is None else manifest.metrics,
            notes=f"{said}: {config.interchange.notes}" if config.interchange.notes else said,
        )
    console.print(f"{path} is staged as version {version} in {registry.root}, {said}; a server there takes it up", **PLAIN)
    return 0


def _target(config: TrainingConfig) -> _Target:
    resolved = resolve(config.model.name)
    weights = load_target_weights(resolved, torch.device("cpu"))
    architectures = tuple(weights.config.get("architectures") or ())
    num_layers = int(weights.config["num_hidden_layers"])
    verifier = Verifier(
        config.export.target or resolved.name, resolved.fingerprint, architectures, num_layers, config.export.draft_tokens
    )
    return _Target(weights, verifier)


def _registry(config: TrainingConfig, state_dir: Path) -> Registry:
    root = config.registry.root
    return Registry(state_dir / "registry" if root is None else absolute("registry.root", root))


def _manifest_of(path: Path, target: _Target) -> Manifest | None:
    """What a version of ours says about itself, once its files are the ones it speaks of."""
    check_files(path, MANIFEST_FILE)
    if not (path / MANIFEST_FILE).exists():
        return None
    validate(path, target.info, target.weights.embedding)
    return Manifest.read(path)

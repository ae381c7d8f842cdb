"""Which drafter is meant by a word: the active one, the embedded one, a version, a run, or a directory.

A run's is that of its newest checkpoint, as the run would publish it. What is found is a checkpoint directory and what is
known of its making; whether it is whole is asked later.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from runtime.drafters import embedded
from runtime.eagle3 import save
from runtime.errors import ConfigError
from runtime.models import absolute
from runtime.registry import Manifest, Registry, VersionRecord
from runtime.registry.manifest import MANIFEST_FILE
from training.config import TrainerConfig
from training.learning import checkpoint
from training.learning.hedge import restore
from training.learning.optim import AVERAGE
from training.learning.target_weights import TargetWeights
from training.reporting.history import METRICS_FILE, History

ACTIVE, EMBEDDED = "active", "embedded"
ANY_DECAY = 0.999  # no step is made here
_VERSION_ID = re.compile(r"[0-9a-f]{16}")


@dataclass(frozen=True)
class Found:
    """A drafter on disk. version: the registry's record, or the directory when it is in none."""

    version: VersionRecord | Path
    manifest: Manifest | None
    run_dir: Path | None  # of the run that made it, as far as it is known here
    step: int | None  # of that run

    @property
    def path(self) -> Path:
        return self.version.path if isinstance(self.version, VersionRecord) else self.version


@contextmanager
def find_drafter(
    word: str, registry: Registry, runs: Path, target: TargetWeights, trainer: TrainerConfig, setting: str = "export.drafter"
) -> Iterator[Found]:
    """The drafter; of a run it is there while this is open. ConfigError or DrafterRejected in one sentence if there is none.

    setting: where the word was given.
    """
    run_dir = runs / word
    if word == EMBEDDED:
        path = embedded.path_for(target.name)
        if path is None:
            raise ConfigError(f"{setting} is {word!r}, and none ships for {target.name}; give a version or a directory.")
        yield Found(path, None, None, None)
    elif word == ACTIVE or _VERSION_ID.fullmatch(word):
        yield _version(word, registry, runs, setting)
    elif "/" not in word and (run_dir / "checkpoints").is_dir():
        with TemporaryDirectory(prefix="slipstream-drafter-") as place:  # in the run's own, its trainer sweeps, which may start
            candidate = Path(place)
            step = _export_run(run_dir, candidate, target, trainer, setting)
            yield Found(candidate, None, run_dir, step)
    else:
        directory = absolute(setting, word)
        if not directory.is_dir():
            raise ConfigError(
                f"{setting} is {word!r}; it must be active, embedded, a version of {registry.root}, a run of {runs} with a "
                "checkpoint, a checkpoint directory, or, with mode=evaluate, auto, ngram or none."
            )
        manifest = Manifest.read(directory) if (directory / MANIFEST_FILE).is_file() else None
        yield Found(directory, manifest, *((None, None) if manifest is None else _made_by(manifest.version, runs)))


def _version(word: str, registry: Registry, runs: Path, setting: str) -> Found:
    version = registry.active() if word == ACTIVE else word
    if version is None:
        raise ConfigError(f"{setting} is {word!r}, and no version of {registry.root} is active; name one, or a directory.")
    record = registry.get(version)
    run_dir, step = _made_by(version, runs)
    return Found(record, record.manifest, run_dir, step)


def _made_by(version: str, runs: Path) -> tuple[Path | None, int | None]:
    """The run here that published the version, and at which step."""
    for path in sorted(runs.glob(f"*/{METRICS_FILE}")):
        if version not in path.read_text(encoding="utf-8"):
            continue
        for step, entry in History.read(path.parent).published.items():
            if entry["version"] == version:
                return path.parent, step
    return None, None


def _export_run(run_dir: Path, directory: Path, target: TargetWeights, trainer: TrainerConfig, setting: str) -> int:
    finished = checkpoint.finished(run_dir / "checkpoints")
    if not finished:
        raise ConfigError(f"{setting} is {run_dir.name!r}, and that run has made no checkpoint yet; give another drafter.")
    tensors, state = checkpoint.load(finished[-1])
    made_for = state["structure"]["model fingerprint"]
    if made_for != target.fingerprint:
        raise ConfigError(
            f"{setting} is {run_dir.name!r}, a run for target {made_for}; {target.name} is {target.fingerprint}. Give the "
            "run's own model."
        )
    if any(name.endswith(f".{AVERAGE}") for name in tensors):  # what the run would publish is its average
        trainer = dataclasses.replace(trainer, ema_decay=trainer.ema_decay or ANY_DECAY)
    learner = restore(tensors, state["learner"], target, trainer)
    save(learner.served(), directory)
    return learner.num_steps

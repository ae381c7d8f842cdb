"""Which drafter is meant by a word: the active one, the embedded one, a version, a run, or a directory.

A run's is that of its newest checkpoint, as the run would publish it. What is found is a checkpoint directory and what is
known of its making; whether it is whole is asked later. One resolver for all settings that name a drafter: trainer.init,
evaluate.drafter, export.drafter.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory

from runtime.drafters import embedded
from runtime.eagle3 import save
from runtime.eagle3.checkpoint import CONFIG_FILE
from runtime.errors import ConfigError
from runtime.models import absolute
from runtime.registry import Manifest, VersionRecord
from runtime.registry.manifest import MANIFEST_FILE
from training.config import TrainerConfig
from training.judging.gate import Versions
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
    runs: Path
    exported: tuple[Path, int] | None = None  # of this run, at this step, for as long as the search is open

    @property
    def path(self) -> Path:
        return self.version.path if isinstance(self.version, VersionRecord) else self.version

    @cached_property
    def origin(self) -> tuple[Path, int] | None:
        """The run that made it, as far as it is known here, and at which step."""
        if self.exported is not None or self.manifest is None:
            return self.exported
        return _made_by(self.manifest.version, self.runs)


@contextmanager
def find_drafter(
    word: str, setting: str, registry: Versions, runs: Path, target: TargetWeights, also: str = ""
) -> Iterator[Found]:
    """The drafter; of a run it is there while this is open. ConfigError or DrafterRejected in one sentence if there is none.

    setting: where the word was given; also: what else can be given there.
    """
    run_dir = runs / word
    if word == EMBEDDED:
        path = embedded.path_for(target.name)
        if path is None:
            raise ConfigError(f"{setting} is {word!r}, and none ships for {target.name}; give a version or a directory.")
        yield Found(path, None, runs)
    elif word == ACTIVE or _VERSION_ID.fullmatch(word):
        version = registry.active() if word == ACTIVE else word
        if version is None:
            raise ConfigError(f"{setting} is {word!r}, and no version of {registry.where} is active; name one, or a directory.")
        record = registry.get(version)
        yield Found(record, record.manifest, runs)
    elif "/" not in word and (run_dir / "checkpoints").is_dir():
        with TemporaryDirectory(prefix="slipstream-drafter-") as place:  # in the run's own, its trainer sweeps, which may start
            candidate = Path(place)
            step = _export_run(run_dir, candidate, target, setting)
            yield Found(candidate, None, runs, (run_dir, step))
    else:
        directory = absolute(setting, word)
        if not directory.is_dir():
            raise ConfigError(
                f"{setting} is {word!r}; it must be {also}active, embedded, a version of {registry.where}, a run of {runs} with "
                "a checkpoint, or a checkpoint directory."
            )
        if not (directory / CONFIG_FILE).is_file():  # a run's, or one of its checkpoints, which hold more than a drafter
            raise ConfigError(
                f"{setting} is {word!r}, a directory without {CONFIG_FILE}, so it is no drafter's; give one that mode=export "
                f"wrote, or the name of a run of {runs}, without its path."
            )
        manifest = Manifest.read(directory) if (directory / MANIFEST_FILE).is_file() else None
        yield Found(directory, manifest, runs)


def _made_by(version: str, runs: Path) -> tuple[Path, int] | None:
    """The run here that published the version, and at which step."""
    for path in sorted(runs.glob(f"*/{METRICS_FILE}")):
        if version not in path.read_text(encoding="utf-8"):
            continue
        for step, entry in History.read(path.parent).published.items():
            if entry["version"] == version:
                return path.parent, step
    return None


def _export_run(run_dir: Path, directory: Path, target: TargetWeights, setting: str) -> int:
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
    has_average = any(name.endswith(f".{AVERAGE}") for name in tensors)  # which is what the run would publish
    trainer = TrainerConfig(ema_decay=ANY_DECAY if has_average else None)
    learner = restore(tensors, state["learner"], target, trainer)
    save(learner.served(), directory)
    return learner.num_steps

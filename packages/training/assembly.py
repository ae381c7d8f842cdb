"""From settings to a run's parts: target weights, registry, starting point, gate, trainer. Where rows come from is decided
by whoever puts these together: a directory, a server, or a producer in this process. Knows no signal and no terminal.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from runtime.config import require
from runtime.errors import ConfigError
from runtime.features.leases import Leases, Rows
from runtime.models import ResolvedModel, absolute, resolve
from runtime.registry import Registry
from training.config import Mode, TrainingConfig
from training.data.source import Source
from training.data.stream import Check
from training.judging.gate import Baseline, Gate, Versions
from training.learning.learner import Learner
from training.learning.start import row_check, starting_drafter
from training.learning.target_weights import TargetWeights, load_target_weights
from training.reporting.progress import Progress
from training.trainer import Trainer


@dataclass(frozen=True)
class Workshop:
    """What a run has, wherever its rows come from."""

    config: TrainingConfig
    state_dir: Path
    run_dir: Path
    resolved: ResolvedModel
    target: TargetWeights
    registry: Versions
    source: Source | None  # a server; None: everything is here
    start: Baseline
    check: Check
    progress: Progress
    stop: threading.Event


def prepare(config: TrainingConfig, state_dir: Path, run_dir: Path, progress: Progress, stop: threading.Event) -> Workshop:
    """Everything but the rows. ModelError or ConfigError, with one sentence, if the settings do not go together."""
    resolved = resolve(config.model.name)
    target = load_target_weights(resolved, _device(config.model.device))
    size = config.trainer.draft_vocab_size
    is_there = size is None or size <= target.vocab_size
    require(is_there, "trainer.draft_vocab_size", size, f"at most {target.vocab_size}, the vocabulary of {target.name}, or null")
    root = config.registry.root
    registry = Registry(state_dir / "registry" if root is None else absolute("registry.root", root))
    source = None if config.source is None else Source(config.source, config.remote, target, registry)
    versions = registry if source is None else source.versions
    start = starting_drafter(config.trainer.init, versions, target)
    return Workshop(config, state_dir, run_dir, resolved, target, versions, source, start, row_check(target), progress, stop)


def make_trainer(
    shop: Workshop, store: Rows, ledger: Leases, after_step: Callable[[Learner], None] = lambda learner: None
) -> Trainer:
    """The trainer and its gate. store, ledger: where the rows of its stream and the held-out rows lie."""
    config = shop.config
    gate = Gate(
        config.trainer.gate,
        store,
        ledger,
        shop.registry,
        check=shop.check,
        embedding=shop.target.embedding,
        lm_head=shop.target.lm_head,
        target_fingerprint=shop.target.fingerprint,
        start=shop.start,
        seed=config.trainer.seed,
    )
    has_server = config.mode is not Mode.INTERLEAVED  # one that decides on what was published
    return Trainer(
        config.trainer if has_server else dataclasses.replace(config.trainer, settle_s=0.0),
        config.data,
        run_dir=shop.run_dir,
        structure={
            "mode": config.mode.value,
            "model fingerprint": shop.target.fingerprint,
            "trainer.init": config.trainer.init,
            "trainer.draft_vocab_size": config.trainer.draft_vocab_size,
        },
        target=shop.target,
        ledger=ledger,
        gate=gate,
        start=shop.start,
        progress=shop.progress,
        stop=shop.stop,
        registry_poll_s=config.registry.poll_s,
        after_step=after_step,
    )


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"model.device is {name!r}; it must be auto, cpu, cuda, or cuda:<number>.") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"model.device is {name!r}, but no CUDA device is here; use model.device=cpu.")
    return device

"""From settings to a run's parts: target weights, registry, starting point, gate, trainer. Where rows come from is decided
by whoever puts these together: a directory, a server, or a producer in this process. Knows no signal and no terminal.
"""

from __future__ import annotations

import dataclasses
import threading
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from runtime.config import require
from runtime.devices import choose_device
from runtime.errors import ConfigError
from runtime.features.flow import Quantum, Watermarks
from runtime.features.leases import Leases, Rows
from runtime.models import ResolvedModel, absolute, resolve
from runtime.registry import Registry
from training.config import DataConfig, Mode, TrainingConfig
from training.data.source import Source
from training.data.stream import Check
from training.judging.gate import Baseline, Gate, Versions
from training.learning.distributed import ALONE, World
from training.learning.hedge import Learning
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
    world: World  # the processes that train this run together

    @property
    def data_of_step(self) -> DataConfig:
        """What the stream of one rank hands out for a step: all that is accumulated, and its part of the replay."""
        data, num_batches = self.config.data, self.config.trainer.accumulation
        num_rows = data.batch_rows * num_batches
        return dataclasses.replace(
            data,
            batch_rows=num_rows,
            max_batch_tokens=data.max_batch_tokens * num_batches,
            replay_rows=max(data.replay_rows // self.world.size, num_rows),
        )

    def check_budget(self, budget_bytes: int) -> None:
        """ConfigError if the rows of one step of several processes, or of several batches, find no room in this budget of a
        store: no step would ever be full."""
        data, num_batches = self.config.data, self.config.trainer.accumulation
        token_bytes = 4 * self.target.hidden_size * torch.bfloat16.itemsize
        row_bytes = data.max_batch_tokens * token_bytes // data.batch_rows
        needed = Quantum.of_step(self.world.size, data.batch_rows, num_batches, row_bytes).num_bytes
        if self.world.size * num_batches > 1 and needed > budget_bytes:
            raise ConfigError(
                f"A step of {self.world.size} processes, {num_batches} batches each (trainer.accumulation) of up to "
                f"{data.max_batch_tokens} tokens (data.max_batch_tokens), takes {needed >> 20} MiB of rows, and their store has "
                f"{budget_bytes >> 20} MiB; raise features.budget_mib, or lower one of these."
            )

    def check_watermarks(self, marks: Watermarks | None) -> None:
        """ConfigError if the tap of a server lets fewer rows wait than one step takes: no step would ever be full."""
        num_rows = Quantum.of_step(self.world.size, self.config.data.batch_rows, self.config.trainer.accumulation, 0).num_rows
        if marks is not None and marks.low_rows < num_rows:
            raise ConfigError(
                f"A step takes {num_rows} rows ({self.world.size} processes times data.batch_rows times trainer.accumulation), "
                f"and the server lets {marks.low_rows} wait before it captures more; start it with capture.low_rows={num_rows} "
                "or more, or lower one of these."
            )


def prepare(
    config: TrainingConfig,
    state_dir: Path,
    run_dir: Path,
    progress: Progress,
    stop: threading.Event,
    world: World = ALONE,
) -> Workshop:
    """Everything but the rows. ModelError or ConfigError, with one sentence, if the settings do not go together."""
    is_spread = world.size > 1 and config.mode is Mode.INTERLEAVED
    alone = "online or offline where torchrun starts several processes: a producer and its trainer share one"
    require(not is_spread, "mode", config.mode.value, alone)
    resolved = resolve(config.model.name)
    target = load_target_weights(resolved, _device(config.model.device, world))
    size = config.trainer.draft_vocab_size
    is_there = size is None or size <= target.vocab_size
    require(is_there, "trainer.draft_vocab_size", size, f"at most {target.vocab_size}, the vocabulary of {target.name}, or null")
    root = config.registry.root
    holder = world.share(uuid.uuid4().hex)
    with world.first_in_turn():
        registry = Registry(state_dir / "registry" if root is None else absolute("registry.root", root))
        source = None if config.source is None else Source(config.source, config.remote, target, registry, holder)
        versions = registry if source is None else source.versions
        runs = state_dir / "training"
        start = starting_drafter(config.trainer.init, versions, target, runs, run_dir, is_first=world.is_first)
    check = row_check(target)
    return Workshop(config, state_dir, run_dir, resolved, target, versions, source, start, check, progress, stop, world)


def make_trainer(
    shop: Workshop, store: Rows, ledger: Leases, after_step: Callable[[Learning], None] = lambda learner: None
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
            "the kind of rows": "token rows of data.corpus" if config.data.corpus is not None else "rows with features",
            "model fingerprint": shop.target.fingerprint,
            "trainer.init": config.trainer.init,
            "trainer.draft_vocab_size": config.trainer.draft_vocab_size,
            "trainer.hedge": config.trainer.hedge,
        },
        target=shop.target,
        ledger=ledger,
        gate=gate,
        start=shop.start,
        progress=shop.progress,
        stop=shop.stop,
        registry_poll_s=config.registry.poll_s,
        after_step=after_step,
        world=shop.world,
    )


def _device(name: str, world: World) -> torch.device:
    """Of this process: where several train on CUDA, each has one of its own."""
    device = choose_device(name)
    if device.type != "cuda" or world.size == 1:
        return device
    is_own = device == torch.device("cuda") and world.local_rank < torch.cuda.device_count()
    there = f"cuda, one device for each of the {world.local_size} processes here; there are {torch.cuda.device_count()}"
    require(is_own, "model.device", name, there)
    return torch.device("cuda", world.local_rank)

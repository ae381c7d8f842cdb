"""Where a run begins: a drafter that exists, or a new one whose draft vocabulary comes from the traffic.

`auto` takes the registry's active version, else the drafter embedded for the model, else starts from scratch; `drafters` knows
the other words. What another run has learned is kept in this run's directory, as that run goes on. Continuing keeps the
vocabulary; from scratch it is the tokens generated most often in the first rows, the output head is the target's own rows for
them, and the rest is random. Knows no ledger and no loop.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch

from runtime.drafters import embedded
from runtime.eagle3 import DraftVocabulary, Eagle3Config, Eagle3Model, load, version_id
from runtime.errors import ConfigError, DrafterRejected
from runtime.features.refs import SampleRef
from runtime.files import move_directory, temporary_directory
from runtime.registry import VersionRecord
from training.config import FirstHead, FirstNorm, TrainerConfig
from training.data.batches import TrainingRow
from training.data.stream import Check
from training.drafters import EMBEDDED, find_drafter
from training.judging.gate import NGRAM, Baseline, Versions
from training.learning import checkpoint
from training.learning.distributed import ALONE, World
from training.learning.hedge import Learning, begin
from training.learning.learner import conditioning
from training.learning.target_weights import TargetWeights

AUTO, SCRATCH = "auto", "scratch"
KEPT = "start"  # in the directory of a run that continues from what another run has learned
CONTINUE_RATE, SCRATCH_RATE = 5e-4, 2e-3
DEFAULT_VOCABULARY_SIZE = 8192


def starting_drafter(
    init: str, registry: Versions, target: TargetWeights, runs: Path, run_dir: Path, *, is_first: bool = True
) -> Baseline:
    """The drafter that the run in run_dir continues from; its directory is None when there is none, and training starts from
    scratch. ConfigError or DrafterRejected in one sentence if there is none of this word, or it is another target's.

    is_first: of the run's processes; the others come behind it.
    """
    kept = run_dir / KEPT
    if is_first and not checkpoint.finished(run_dir / "checkpoints"):
        shutil.rmtree(kept, ignore_errors=True)  # of a beginning that came to nothing
    if init == AUTO:
        init = registry.active() or (SCRATCH if embedded.path_for(target.name) is None else EMBEDDED)
    if init == SCRATCH:
        return Baseline(NGRAM, None)
    if kept.is_dir():
        return Baseline(version_id(kept), kept)
    with find_drafter(init, "trainer.init", registry, runs, target, also="auto, scratch, ") as found:
        if isinstance(found.version, VersionRecord):
            _check_target(found.version, target)
        directory = found.path
        if found.exported is not None:
            with temporary_directory(run_dir) as unfinished:
                shutil.copytree(directory, unfinished, dirs_exist_ok=True)
                move_directory(unfinished, kept)
            directory = kept
        return Baseline(version_id(directory), directory)


def _check_target(record: VersionRecord, target: TargetWeights) -> None:
    if record.manifest is None:
        code, _, sentence = record.reason.partition(": ")
        raise DrafterRejected(code, sentence)
    made_for = record.manifest.target_fingerprint
    if made_for != target.fingerprint:
        raise ConfigError(
            f"Version {record.version} was trained for target {made_for}, and {target.name} is {target.fingerprint}. Use another "
            f"state_dir, or trainer.init=scratch; trainer.init={record.path} continues from it all the same."
        )


def continue_from(
    directory: Path, target: TargetWeights, config: TrainerConfig, rows: Sequence[TrainingRow], world: World = ALONE
) -> Learning:
    """A learner on the drafter in this directory. rows: the first of this rank's traffic, for the conditioning."""
    model = load(directory, target.embedding, dtype=torch.float32, device=target.device)
    layers = model.config.aux_layer_ids
    if layers is not None and layers != target.aux_layer_ids:
        raise ConfigError(
            f"The drafter in {directory} reads layers {list(layers)} of its target; {target.name} captures "
            f"{list(target.aux_layer_ids)}. Start from another one, or with trainer.init=scratch."
        )
    return begin(model, conditioning(model, rows, world), target, config, config.learning_rate or CONTINUE_RATE, world)


def from_scratch(
    target: TargetWeights,
    config: TrainerConfig,
    rows: Sequence[TrainingRow],
    world: World = ALONE,
    counts: torch.Tensor | None = None,
) -> Learning:
    """A learner on a new drafter. rows: the first of this rank's traffic, for the conditioning; and for the draft vocabulary,
    unless counts, int64 [V] of all generated tokens, are known."""
    size = min(config.draft_vocab_size or DEFAULT_VOCABULARY_SIZE, target.vocab_size)
    if counts is None:
        counts = generated_counts(rows, target.vocab_size)
        world.add_up(counts)
    vocabulary = DraftVocabulary.from_token_counts(counts, size)
    scratch = config.scratch
    shape = Eagle3Config.for_target(target.config, size, aux_layer_ids=target.aux_layer_ids)
    shape = dataclasses.replace(shape, fc_norm=scratch.fc_norm, norm_output=scratch.norm_output)
    model = Eagle3Model(shape, vocabulary, target.embedding)
    generator = torch.Generator().manual_seed(config.seed)
    norm = target.final_norm.float() if scratch.norm is FirstNorm.TARGET else None
    model.init_from_target(target.lm_head.float(), norm, generator)
    if scratch.head is FirstHead.RANDOM:
        noise = torch.randn(model.lm_head.weight.shape, generator=generator)
        model.lm_head.weight.data.copy_(noise / model.config.hidden_size**0.5)
    scale = conditioning(model, rows, world)
    if not scratch.conditioning:
        scale = torch.ones_like(scale)
    with torch.no_grad():
        model.fc.weight.mul_(scale)  # the random start is random where training sees it: behind the conditioning
    return begin(model.to(target.device), scale, target, config, config.learning_rate or SCRATCH_RATE, world)


def generated_counts(rows: Sequence[TrainingRow], vocab_size: int) -> torch.Tensor:
    """int64 [V]: how often each token was generated in these rows."""
    ids = [row.features.token_ids[row.features.generated] for row in rows]
    return torch.bincount(torch.cat(ids) if ids else torch.empty(0, dtype=torch.int64), minlength=vocab_size)


def row_check(target: TargetWeights) -> Check:
    """Why a row cannot be trained on or judged by, for this target."""
    width = target.hidden_size

    def check(ref: SampleRef) -> str | None:
        if ref.target_fingerprint != target.fingerprint:
            return f"it was captured from target {ref.target_fingerprint}, and this one is {target.fingerprint}"
        if ref.aux_layer_ids != target.aux_layer_ids:
            return f"it holds layers {list(ref.aux_layer_ids)}, and this drafter reads {list(target.aux_layer_ids)}"
        if ref.features["aux"].shape[1:] != (3 * width,):
            return f"its states have shape {list(ref.features['aux'].shape)}, and this target is {width} wide"
        return None

    return check

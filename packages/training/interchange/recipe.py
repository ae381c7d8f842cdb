"""The settings of a run that its model card tells: those that shape a drafter, written as a user writes them.

A run's config.yaml holds every setting, those of its machine too, and names enums as Python does. Here is which of them matter to
a reader, in which runs, and which are the defaults. Knows no file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import reduce
from typing import Any

from training.config import Mode, Objective, TrainingConfig
from training.learning.schedule import ScheduleKind

Settings = Mapping[str, Any]
"""By dotted name, as `spelled`; None: null."""

PATHS = ("trainer.init", "data.corpus", "data.prompts")  # which may name places of the run's machine


def _always(given: Settings) -> bool:
    return True


def _is_online(given: Settings) -> bool:
    return given.get("mode") != Mode.OFFLINE.value


def _is_interleaved(given: Settings) -> bool:
    return given.get("mode") == Mode.INTERLEAVED.value


def _reads_text(given: Settings) -> bool:
    return given.get("data.corpus") is not None or _is_interleaved(given)


def _is_cosine(given: Settings) -> bool:
    return given.get("trainer.schedule.kind") == ScheduleKind.COSINE.value


def _blends(given: Settings) -> bool:
    return given.get("trainer.objective") == Objective.LK_BLEND.value


def _decays(given: Settings) -> bool:
    return given.get("trainer.depth_weights") is None


SHAPING: Mapping[str, Callable[[Settings], bool]] = {  # in which runs it does
    "mode": _always,
    "trainer.init": _always,
    "trainer.seed": _always,
    "trainer.ttt_steps": _always,
    "trainer.objective": _always,
    "trainer.lk_eta": _blends,
    "trainer.depth_decay": _decays,
    "trainer.depth_weights": _always,
    "trainer.learning_rate": _always,
    "trainer.warmup_steps": _always,
    "trainer.schedule.kind": _always,
    "trainer.schedule.steps": _is_cosine,
    "trainer.schedule.time_s": _is_cosine,
    "trainer.schedule.warmup": _is_cosine,
    "trainer.schedule.final": _is_cosine,
    "trainer.clip_norm": _always,
    "trainer.accumulation": _always,
    "trainer.ema_decay": _always,
    "trainer.hedge": _always,
    "trainer.draft_vocab_size": _always,
    "trainer.vocabulary_tokens": lambda given: given.get("data.corpus") is None,  # of a corpus all are counted
    "trainer.max_steps": _always,
    "trainer.max_time_s": _always,
    "trainer.scratch.fc_norm": _always,
    "trainer.scratch.norm_output": _always,
    "trainer.scratch.head": _always,
    "trainer.scratch.norm": _always,
    "trainer.scratch.conditioning": _always,
    "data.batch_rows": lambda given: given.get("data.corpus") is None,  # whose batches tokens bound
    "data.max_batch_tokens": _always,
    "data.passes": _always,
    "data.replay_rows": _is_online,
    "data.replay_share": _is_online,
    "data.recency": _is_online,
    "data.slice_balance": _is_online,
    "data.prompts": _is_interleaved,
    "data.corpus": lambda given: not _is_online(given),
    "data.max_tokens": _reads_text,
    "data.heldout_fraction": lambda given: given.get("data.corpus") is not None,
    "producer.max_rounds": _is_interleaved,
    "producer.max_tokens": _is_interleaved,
    "producer.temperature": _is_interleaved,
    "producer.heldout_fraction": _is_interleaved,
}
FROM_SCRATCH = ("trainer.draft_vocab_size", "trainer.vocabulary_tokens", "trainer.scratch.")  # of no interest to other runs


@dataclass(frozen=True)
class Setting:
    name: str
    value: str | None  # None: null
    default: str | None

    @property
    def is_default(self) -> bool:
        return self.value == self.default


def recipe(config: Mapping[str, Any], *, is_from_scratch: bool) -> list[Setting]:
    """What shaped the drafter of a run, from its config.yaml; settings that the run did not know yet are left out."""
    defaults = TrainingConfig()
    every = {name: Setting(name, *pair) for name in SHAPING for pair in _values(name, config, defaults)}
    given = {setting.name: setting.value for setting in every.values()}
    return [
        setting
        for name, setting in every.items()
        if SHAPING[name](given) and (is_from_scratch or not name.startswith(FROM_SCRATCH))
    ]


def _values(name: str, config: Mapping[str, Any], defaults: TrainingConfig) -> Iterator[tuple[str | None, str | None]]:
    """(value, default), if the run has this setting."""
    value: Any = config
    for part in name.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return
        value = value[part]
    default = reduce(getattr, name.split("."), defaults)
    if isinstance(default, Enum):
        value = next((each for each in type(default) if value in (each.name, each.value)), value)
    if name in PATHS and isinstance(value, str):
        value = shortened(value)
    yield _spelled(value), _spelled(default)


def _spelled(value: Any) -> str | None:
    match value:
        case None:
            return None
        case Enum():
            return str(value.value)
        case bool():
            return str(value).lower()
        case float():
            return f"{value:.6g}"
        case list():
            return f"[{', '.join(_spelled(each) or 'null' for each in value)}]"
    return str(value)


def shortened(path: str) -> str:
    """The last two parts: what a name says, and not where it lies on somebody's machine. A hub id is as it was."""
    return "/".join([part for part in path.split("/") if part][-2:])

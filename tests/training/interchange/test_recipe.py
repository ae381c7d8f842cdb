"""Which settings a model card tells, and how they are written."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any

import pytest
from omegaconf import OmegaConf

from runtime.config import ModelConfig
from training.config import DataConfig, Mode, Objective, TrainerConfig, TrainingConfig
from training.interchange.recipe import SHAPING, recipe, shortened
from training.interleaved.config import ProducerConfig
from training.learning.schedule import ScheduleConfig, ScheduleKind

OF_NO_MATTER = {  # to a reader: where and when a run did what it did, and which of its drafters it published
    "trainer": "run_id worker num_threads niceness parallel rank_timeout_s checkpoint_every_s checkpoint_every_steps "
    "keep_checkpoints evaluate_every_s evaluate_every_steps idle_timeout_s settle_s metrics_port gate.enabled gate.confidence "
    "gate.min_heldout_rows gate.max_heldout_rows gate.draft_tokens gate.resamples gate.max_slice_loss",
    "data": "fill_wait_s lease_timeout_s poll_s",
    "producer": "concurrency swap_every_s high_rows low_rows high_mib low_mib join_timeout_s",
}


def leaves(config: Any, prefix: str) -> set[str]:
    found: set[str] = set()
    for field in fields(config):
        value, name = getattr(config, field.name), f"{prefix}.{field.name}"
        found |= leaves(value, name) if is_dataclass(value) else {name}
    return found


def test_each_setting_either_shapes_a_drafter_or_does_not() -> None:
    config = TrainingConfig()
    every = set().union(*(leaves(getattr(config, group), group) for group in OF_NO_MATTER))
    others = {f"{group}.{name}" for group, names in OF_NO_MATTER.items() for name in names.split()}
    assert others.isdisjoint(SHAPING)
    assert every | {"mode"} == others | set(SHAPING)


def told(config: TrainingConfig, *, is_from_scratch: bool = True) -> tuple[dict[str, str | None], dict[str, str | None]]:
    """(what differs from the defaults, the defaults), as config.yaml gives it."""
    as_written = OmegaConf.to_container(OmegaConf.create(OmegaConf.to_yaml(OmegaConf.structured(config))))
    settings = recipe(as_written, is_from_scratch=is_from_scratch)  # type: ignore[arg-type]
    return {each.name: each.value for each in settings if not each.is_default}, {
        each.name: each.value for each in settings if each.is_default
    }


def test_what_differs_is_written_as_a_user_writes_it() -> None:
    trainer = TrainerConfig(
        init="/srv/ann/drafters/eagle-7",
        objective=Objective.LK_BLEND,
        depth_weights=[1.0, 0.5, 0.25],
        learning_rate=3e-4,
        keep_checkpoints=9,
        schedule=ScheduleConfig(ScheduleKind.COSINE, steps=100),
    )
    data = DataConfig(corpus="/srv/ann/captures/machine-*", passes=2)
    changed, usual = told(TrainingConfig(trainer=trainer, data=data, mode=Mode.OFFLINE), is_from_scratch=False)
    assert changed == {
        "mode": "offline",
        "trainer.init": "drafters/eagle-7",
        "trainer.objective": "lk_blend",
        "trainer.depth_weights": "[1, 0.5, 0.25]",
        "trainer.learning_rate": "0.0003",
        "trainer.schedule.kind": "cosine",
        "trainer.schedule.steps": "100",
        "data.corpus": "captures/machine-*",
        "data.passes": "2",
    }
    assert usual["trainer.lk_eta"] == "3"
    assert usual["trainer.schedule.final"] == "0.02"
    assert not {"trainer.depth_decay", "trainer.scratch.head", "trainer.vocabulary_tokens", "data.replay_rows"} & usual.keys()


@pytest.mark.parametrize(
    ("config", "there", "absent"),
    [
        (TrainingConfig(), "data.replay_share", "producer.temperature"),
        (TrainingConfig(), "trainer.scratch.head", "data.max_tokens"),
        (
            TrainingConfig(mode=Mode.INTERLEAVED, data=DataConfig(prompts="a.jsonl"), producer=ProducerConfig(max_tokens=9)),
            "producer.temperature",
            "data.corpus",
        ),
        (TrainingConfig(mode=Mode.OFFLINE), "data.batch_rows", "data.recency"),
    ],
)
def test_settings_are_told_where_they_matter(config: TrainingConfig, there: str, absent: str) -> None:
    changed, usual = told(config)
    assert there in changed | usual
    assert absent not in changed | usual


def test_a_run_of_before_lacks_what_it_did_not_know() -> None:
    settings = recipe({"mode": "OFFLINE", "trainer": {"ttt_steps": 5, "schedule": None}}, is_from_scratch=True)
    assert [(each.name, each.value, each.default) for each in settings] == [
        ("mode", "offline", "online"),
        ("trainer.ttt_steps", "5", "3"),
    ]


@pytest.mark.parametrize(
    ("path", "short"),
    [("/a/b/c", "b/c"), ("/a", "a"), ("org/name", "org/name"), ("tiny", "tiny"), ("a/b/c/", "b/c"), ("/", ""), ("", "")],
)
def test_of_a_path_two_parts_are_left(path: str, short: str) -> None:
    assert shortened(path) == short


def test_a_model_s_settings_are_none_of_the_recipe() -> None:
    changed, _ = told(TrainingConfig(model=ModelConfig(name="/secret/model")))
    assert changed == {}

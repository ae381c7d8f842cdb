"""The learning rate of a schedule, by steps and by time, in a learner that is stopped in between too."""

from __future__ import annotations

import itertools

import pytest

from runtime.errors import ConfigError
from training.learning.learner import Learner
from training.learning.schedule import ScheduleConfig, ScheduleKind
from training.learning.start import from_scratch

COSINE = ScheduleKind.COSINE


def test_constant_warms_up_and_stays() -> None:
    schedule = ScheduleConfig()
    assert [schedule.factor(step, 1e9, 4) for step in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert schedule.factor(0, 0.0, 0) == 1.0


def test_cosine_by_steps_ends_where_it_was_told() -> None:
    schedule = ScheduleConfig(COSINE, steps=100, warmup=0.1, final=0.1)
    factors = [schedule.factor(step, 0.0, 1000) for step in range(150)]
    assert factors[0] == pytest.approx(0.1, rel=0.01)
    assert factors[:10] == sorted(factors[:10])
    assert factors[9:101] == sorted(factors[9:101], reverse=True)
    assert factors[50] == pytest.approx(0.55)
    assert factors[100:] == pytest.approx([0.1] * 50)


def test_cosine_by_time_asks_for_no_step() -> None:
    schedule = ScheduleConfig(COSINE, time_s=60.0, final=0.0)
    assert schedule.factor(10_000, 30.0, 60) == pytest.approx(0.5)
    assert schedule.factor(29, 0.0, 60) == pytest.approx(0.5)  # trainer.warmup_steps
    assert schedule.factor(10_000, 61.0, 60) == pytest.approx(0.0, abs=1e-12)
    by_share = ScheduleConfig(COSINE, time_s=60.0, warmup=0.5)
    assert by_share.factor(10_000, 15.0, 60) == pytest.approx(0.5 * (0.02 + 0.98 * 0.853553), rel=1e-5)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"kind": COSINE}, "trainer.schedule.kind is 'cosine'"),
        ({"kind": COSINE, "steps": 5, "time_s": 1.0}, "trainer.schedule.kind is 'cosine'"),
        ({"steps": 5}, "trainer.schedule.kind is 'constant'"),
        ({"kind": COSINE, "steps": 0}, "trainer.schedule.steps is 0"),
        ({"kind": COSINE, "time_s": float("inf")}, "trainer.schedule.time_s is inf"),
        ({"warmup": 1.0}, "trainer.schedule.warmup is 1.0"),
        ({"final": -0.1}, "trainer.schedule.final is -0.1"),
    ],
)
def test_a_schedule_that_says_too_much_or_too_little_is_refused(settings: dict, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        ScheduleConfig(**settings)


def test_steps_follow_the_schedule(state) -> None:
    schedule = ScheduleConfig(COSINE, steps=4, final=0.0)
    config = state.config(trainer__schedule=schedule, trainer__learning_rate=1e-3, trainer__warmup_steps=0).trainer
    rows = state.rows(range(2))
    learner = from_scratch(state.target, config, rows)
    rates = [learner.step(rows).learning_rate for _ in range(5)]
    assert rates == pytest.approx([1e-3, 0.853553e-3, 0.5e-3, 0.146447e-3, 0.0], rel=1e-4, abs=1e-12)


def test_time_goes_on_where_a_resumed_run_left_off(state, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not counted: the time between the last step that a checkpoint knows and the first after a resume."""
    seconds = itertools.count(1000.0, 10.0)  # the clock is read where a step begins and where it ends
    monkeypatch.setattr("training.learning.learner.time.perf_counter", lambda: next(seconds))
    schedule = ScheduleConfig(COSINE, time_s=80.0, final=0.0)
    config = state.config(trainer__schedule=schedule, trainer__learning_rate=1e-3, trainer__warmup_steps=0).trainer
    rows = state.rows(range(2))
    learner = from_scratch(state.target, config, rows)
    rates = [learner.step(rows).learning_rate for _ in range(3)]
    assert rates == pytest.approx([1e-3, 0.853553e-3, 0.5e-3], rel=1e-4)
    again = Learner.restore(learner.tensors(), learner.state(), state.target, config)
    next(seconds)
    assert [again.step(rows).learning_rate for _ in range(2)] == pytest.approx([0.5e-3, 0.146447e-3], rel=1e-4)

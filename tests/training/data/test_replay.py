"""The replay buffer: who is drawn, who leaves, and that a slice that no longer comes is not forgotten."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from runtime.features.refs import SLICE_LABEL, SampleRef
from training.config import DataConfig
from training.data.batches import TrainingRow
from training.data.replay import ReplayBuffer
from training.data.stream import OnlineStream
from training.judging.simulation import TargetView, evaluate, total
from training.learning.start import from_scratch, row_check


@pytest.fixture
def ref(state: Any) -> Callable[[str, str], SampleRef]:
    def make(name: str, of_slice: str) -> SampleRef:
        return dataclasses.replace(state.store.put(state.meta(name), state.row(0)), labels={SLICE_LABEL: of_slice})

    return make


def drawn(buffer: ReplayBuffer, num_draws: int, **kind: bool) -> Counter[str]:
    """Which row comes first, in so many draws."""
    generator = torch.Generator().manual_seed(0)
    return Counter(buffer.order(generator, with_used_up=kind.get("with_used_up", False))[0] for _ in range(num_draws))


def test_rows_are_drawn_alike_unless_told_otherwise(ref: Callable[[str, str], SampleRef]) -> None:
    buffer = ReplayBuffer(DataConfig())
    for n in range(8):
        buffer.trained(ref(f"r{n}", "a"))
    counts = drawn(buffer, 4000)
    assert set(counts) == {f"r{n}" for n in range(8)}
    assert max(counts.values()) < 1.3 * min(counts.values())


def test_recency_favours_the_newest(ref: Callable[[str, str], SampleRef]) -> None:
    buffer = ReplayBuffer(DataConfig(recency=2.0))
    for n in range(5):
        buffer.trained(ref(f"r{n}", "a"))
    counts = drawn(buffer, 8000)
    assert 3.4 < counts["r4"] / counts["r0"] < 4.7, "4 times as often"
    assert counts["r0"] < counts["r2"] < counts["r4"]


def test_slices_are_drawn_alike(ref: Callable[[str, str], SampleRef]) -> None:
    buffer = ReplayBuffer(DataConfig(slice_balance=1.0))
    for n in range(18):
        buffer.trained(ref(f"much{n}", "much"))
    for n in range(2):
        buffer.trained(ref(f"rare{n}", "rare"))
    rare = sum(count for name, count in drawn(buffer, 4000).items() if name.startswith("rare"))
    assert 0.46 < rare / 4000 < 0.54


def test_a_full_buffer_keeps_the_rare_slice(ref: Callable[[str, str], SampleRef]) -> None:
    for balance, kept in ((0.0, 0), (1.0, 3)):
        buffer = ReplayBuffer(DataConfig(slice_balance=balance, replay_rows=8))
        for n in range(3):
            buffer.trained(ref(f"old{n}", "old"))
        for n in range(20):
            buffer.trained(ref(f"new{n}", "new"))
        names = [name for name, _ in buffer.passes()]
        assert len(buffer) == 8
        assert sum(name.startswith("old") for name in names) == kept
        assert names[-1] == "new19"


def test_passes_are_counted_and_used_up(ref: Callable[[str, str], SampleRef]) -> None:
    buffer = ReplayBuffer(DataConfig(passes=2))
    row = ref("r", "a")
    buffer.trained(row)
    assert buffer.num_left == 1
    buffer.trained(row)
    assert buffer.passes() == [("r", 2)]
    assert buffer.num_left == 0
    generator = torch.Generator()
    assert buffer.order(generator, with_used_up=False) == []
    assert buffer.order(generator, with_used_up=True) == ["r"]


# --- in a stream ---


@pytest.fixture
def stream(state: Any) -> Callable[..., OnlineStream]:
    def make(**settings: object) -> OnlineStream:
        config = DataConfig(**({"batch_rows": 4, "passes": 1, "fill_wait_s": 0.0} | settings))  # type: ignore[arg-type]
        return OnlineStream(state.store, state.ledger, "run", config, row_check(state.target), 0)

    return make


def add(state: Any, seeds: range, of_slice: str, salt: int) -> None:
    for seed in seeds:
        stored = state.store.put(state.meta(f"{of_slice}-{seed}"), state.row(seed, salt=salt))
        state.ledger.commit(dataclasses.replace(stored, labels={SLICE_LABEL: of_slice}), "train")


def batches(stream: OnlineStream) -> Iterator[list[TrainingRow]]:
    while rows := stream.next_batch():
        yield rows
        stream.trained(rows)


def test_a_share_of_each_batch_is_old_while_fresh_rows_come(state: Any, stream: Callable[..., OnlineStream]) -> None:
    add(state, range(4), "old", 0)
    running = stream(replay_share=0.25, slice_balance=1.0)
    assert [len(rows) for rows in batches(running)] == [4], "a row is not trained beyond its passes without fresh ones"
    add(state, range(9), "new", 1)
    made = [[row.sample_id for row in rows] for rows in batches(running)]
    assert [len(names) for names in made] == [4, 4, 4], "nine fresh rows, three a batch"
    assert [name.split("-")[0] for name in made[0]] == ["new", "new", "new", "old"]
    assert Counter(name for names in made for name in names[:3]) == Counter(f"new-{n}" for n in range(9))
    assert running.figures()["lag_s"] >= 0
    again = stream(replay_share=0.25, slice_balance=1.0)
    again.restore([running.state()])
    assert again.state()["generator"] == running.state()["generator"]


@pytest.mark.parametrize(("settings", "most"), [({"replay_share": 0.5, "recency": 1.0, "slice_balance": 1.0}, 0.03), ({}, None)])
def test_a_slice_that_no_longer_comes_is_not_forgotten(
    state: Any, stream: Callable[..., OnlineStream], settings: dict[str, float], most: float | None
) -> None:
    """At most 3 % of its acceptance length is lost, where plain training on what comes loses more."""
    running = stream(replay_rows=64, **settings)
    heldout = [TrainingRow(f"h{seed}", state.row(seed)) for seed in range(500, 516)]
    add(state, range(160), "old", 0)
    config = state.config(trainer__learning_rate=3e-3).trainer
    learner = from_scratch(state.target, config, running.preview(64, 1000))

    def learned() -> float:
        for rows in batches(running):
            learner.step(rows)
        return total(evaluate(learner.served(), heldout, 5, TargetView(state.target.lm_head))).mean_acceptance_length

    before = learned()
    assert before > 3.0
    add(state, range(1000, 1240), "new", 1)
    lost = 1 - learned() / before
    assert lost <= most if most is not None else lost > 0.1

"""The interleaved loop: whoever ends first ends the other, the root cause is raised, a leak is told, nothing is lost."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from rich.console import Console

from runtime.errors import FeatureError, ProducerFailed, ProducerLeaked
from runtime.features.channel import RefChannel
from runtime.features.flow import Quantum, Watermarks
from runtime.features.ledger import Ledger
from runtime.features.memory import MemoryStore
from runtime.features.row import FeatureRow
from training.assembly import make_trainer, prepare
from training.data.arrivals import ChannelArrivals
from training.data.batches import TrainingRow
from training.data.stream import OnlineStream
from training.interleaved.loop import DriveProducer, run_online_interleaved
from training.learning import checkpoint
from training.learning.learner import Learner
from training.learning.start import from_scratch
from training.reporting.progress import Progress
from training.trainer import Trainer

SOON_S = 20.0


@dataclass
class Loop:
    """A real trainer, store, ledger and channel; what produces is the test's own."""

    state: object
    trainer: Trainer
    loader: OnlineStream
    channel: RefChannel
    store: MemoryStore
    ledger: Ledger
    names: list[str] = field(default_factory=list)

    def publish(self, seed: int) -> bool:
        name = f"row-{seed}"
        ref = self.store.put(self.state.meta(name), self.state.row(seed))  # type: ignore[attr-defined]
        self.ledger.commit(ref, "train")
        self.names.append(name)
        return self.channel.producer.publish(ref)

    def drive(self, num_rows: int, error: BaseException | None = None) -> DriveProducer:
        """A producer of num_rows rows that then ends, in good order or with an error, closing in `finally` as it should."""

        def drive(should_stop: Callable[[], bool]) -> None:
            try:
                for seed in range(num_rows):
                    if should_stop() or not self.publish(seed):
                        return
                if error is not None:
                    raise error
            except BaseException as raised:
                self.channel.producer.fail(str(raised))
                raise
            finally:
                self.channel.producer.close()

        return drive

    def run(self, drive: DriveProducer, join_timeout_s: float = SOON_S) -> None:
        run_online_interleaved(self.trainer, self.loader, drive, self.channel, join_timeout_s)
        assert not producers(), "the producer is gone when this returns"

    def consumption(self) -> dict[str, int]:
        return self.ledger.consumption("default")


def producers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "interleaved-producer"]


@pytest.fixture
def make_loop(state) -> Iterator[Callable[..., Loop]]:
    progresses: list[Progress] = []

    def make(after_step: Callable[[Learner], None] = lambda learner: None, high: int = 8, low: int = 4, **settings) -> Loop:
        config = state.config(**{"data__passes": 1, "data__batch_rows": 4, "trainer__checkpoint_every_steps": 1000} | settings)
        run_dir = state.root / "training" / "default"
        run_dir.mkdir(parents=True, exist_ok=True)
        progresses.append(Progress(run_dir, Console(stderr=True)))
        shop = prepare(config, state.root, run_dir, progresses[-1], threading.Event())
        store = MemoryStore(1 << 24)
        ledger = Ledger(run_dir / "ledger.sqlite", exists=store.exists)
        channel = RefChannel(Watermarks(high, low, 1 << 24, 1 << 24), Quantum(4, 0))
        arrivals = ChannelArrivals(channel.consumer, ledger, "default", config.data.lease_timeout_s)
        loader = OnlineStream(store, ledger, "default", config.data, shop.check, 0, arrivals)
        return Loop(state, make_trainer(shop, store, ledger, after_step), loader, channel, store, ledger)

    yield make
    for progress in progresses:
        progress.__exit__(None, None, None)


# --- the four ways in which it ends ---


def test_the_producer_ends_first_and_the_tail_is_trained(state, make_loop) -> None:
    loop = make_loop()
    loop.run(loop.drive(10))
    assert [step["num_rows"] for step in state.events("step")] == [4, 4, 2]
    assert loop.consumption() == dict.fromkeys(loop.names, 1)
    assert len(loop.names) == 10
    assert loop.ledger.latest_checkpoint("default").step == 3


def test_the_trainer_ends_first_and_a_producer_at_the_watermark_wakes_at_once(state, make_loop) -> None:
    loop = make_loop(trainer__max_steps=2)
    ended = threading.Event()

    def drive(should_stop: Callable[[], bool]) -> None:
        try:
            loop.drive(10_000)(should_stop)
        finally:
            ended.set()

    loop.run(drive)
    assert ended.is_set()
    assert len(loop.names) < 30, "it ran ahead no further than the watermark lets it"
    assert [step["step"] for step in state.events("step")] == [1, 2]
    assert loop.ledger.latest_checkpoint("default").step == 2
    assert len(loop.consumption()) == 8
    assert loop.ledger.status()["leased"] == 0


def test_the_producers_error_is_raised_with_the_trainers_behind_it_and_nothing_counts_as_finished(state, make_loop) -> None:
    loop = make_loop()
    error = OSError("the prompts are gone")
    with pytest.raises(OSError, match="the prompts are gone") as raised:
        loop.run(loop.drive(6, error))
    assert raised.value is error
    assert isinstance(raised.value.__cause__, ProducerFailed)
    assert not producers()
    assert [step["num_rows"] for step in state.events("step")] == [4, 2], "what was published is trained"
    assert loop.ledger.latest_checkpoint("default") is None, "no checkpoint of a run that takes itself for finished"
    assert loop.consumption() == {}
    assert loop.ledger.status()["pending"] == 6


def test_an_error_of_a_producer_that_only_closes_is_a_failure_too(make_loop) -> None:
    """One that has its own `finally: close()` and no `fail`: the channel must not look finished."""
    loop = make_loop()

    def drive(should_stop: Callable[[], bool]) -> None:
        loop.publish(0)
        raise KeyError("prompt")

    with pytest.raises(KeyError):
        loop.run(drive)
    assert loop.ledger.latest_checkpoint("default") is None


def test_a_root_cause_keeps_the_causes_it_has(make_loop) -> None:
    loop = make_loop()
    disk = OSError("no space")
    error = FeatureError("The row cannot be written.")
    error.__cause__ = disk
    with pytest.raises(FeatureError) as raised:
        loop.run(loop.drive(1, error))
    assert raised.value is error
    assert raised.value.__cause__ is disk
    assert isinstance(disk.__cause__, ProducerFailed)


def test_the_trainers_error_is_raised_and_the_producer_is_stopped(state, make_loop) -> None:
    def fail(learner: Learner) -> None:
        if learner.num_steps == 2:
            raise ArithmeticError("the loss is a fish")

    loop = make_loop(after_step=fail)
    with pytest.raises(ArithmeticError, match="fish") as raised:
        loop.run(loop.drive(10_000))
    assert raised.value.__cause__ is None
    assert not producers()
    assert loop.ledger.latest_checkpoint("default") is None
    assert loop.ledger.status()["leased"] == 0


def test_of_two_errors_the_trainers_is_the_root_when_it_came_first(make_loop) -> None:
    def fail(learner: Learner) -> None:
        raise ArithmeticError("first")

    loop = make_loop(after_step=fail)

    def drive(should_stop: Callable[[], bool]) -> None:
        for seed in range(10_000):
            if not loop.publish(seed):
                raise RuntimeError("second, of being stopped")

    with pytest.raises(ArithmeticError, match="first") as raised:
        loop.run(drive)
    assert isinstance(raised.value.__cause__, RuntimeError)


# --- a thread that does not end ---


def test_a_producer_that_does_not_stop_is_reported_as_a_leak(make_loop, caplog: pytest.LogCaptureFixture) -> None:
    loop = make_loop(trainer__max_steps=1)
    release = threading.Event()

    def deaf(should_stop: Callable[[], bool]) -> None:
        for seed in range(4):
            loop.publish(seed)
        release.wait(SOON_S)

    with caplog.at_level(logging.ERROR), pytest.raises(ProducerLeaked, match=r"still running 0\.2 s after"):
        loop.run(deaf, join_timeout_s=0.2)
    assert "LEAK: thread interleaved-producer" in caplog.text
    assert loop.ledger.latest_checkpoint("default").step == 1, "what was trained is safe"
    [thread] = producers()
    release.set()
    thread.join(SOON_S)


def test_a_leak_beside_an_error_is_noted_on_it(make_loop) -> None:
    def fail(learner: Learner) -> None:
        raise ArithmeticError("root")

    loop = make_loop(after_step=fail)
    release = threading.Event()

    def deaf(should_stop: Callable[[], bool]) -> None:
        for seed in range(4):
            loop.publish(seed)
        release.wait(SOON_S)

    with pytest.raises(ArithmeticError) as raised:
        loop.run(deaf, join_timeout_s=0.2)
    assert any("still running" in note for note in raised.value.__notes__)
    [thread] = producers()
    release.set()
    thread.join(SOON_S)


@pytest.mark.parametrize("error", [None, OSError("the prompts are gone")])
def test_rows_that_come_and_end_right_after_a_look_for_the_first_ones_are_trained(make_loop, monkeypatch, error) -> None:
    loop = make_loop()
    looked, ended = threading.Event(), threading.Event()
    preview, drive = loop.loader.preview, loop.drive(3, error)

    def look(num_rows: int, num_tokens: int) -> list[TrainingRow]:
        rows = preview(num_rows, num_tokens)
        looked.set()
        ended.wait()
        return rows

    def drive_once_looked(should_stop: Callable[[], bool]) -> None:
        looked.wait()
        try:
            drive(should_stop)
        finally:
            ended.set()

    monkeypatch.setattr(loop.loader, "preview", look)
    with contextlib.nullcontext() if error is None else pytest.raises(OSError, match="gone"):
        loop.run(drive_once_looked)
    assert [step["num_rows"] for step in loop.state.events("step")] == [3]


# --- the rows ---


def test_a_leftover_is_trained_with_the_loss_of_its_own_rows(state, make_loop, target) -> None:
    """Two rows behind a batch of four make a step of their own, as strong as if these rows had come twice to fill the batch."""
    loop = make_loop()
    for seed in range(6):
        loop.publish(seed)
    loop.run(lambda should_stop: loop.channel.producer.close())
    whole, leftover = state.events("step")
    assert (whole["num_rows"], leftover["num_rows"]) == (4, 2)

    rows = [TrainingRow(f"row-{seed}", bfloat16(state.row(seed))) for seed in range(6)]
    learner = from_scratch(target, state.config().trainer, rows)
    assert learner.step(rows[:4]).loss == whole["loss"]
    again = [TrainingRow(f"{row.sample_id}-again", row.features) for row in rows[4:]]
    assert learner.step(rows[4:] + again).loss == pytest.approx(leftover["loss"], rel=1e-5)
    tensors, _ = checkpoint.load(Path(loop.ledger.latest_checkpoint("default").path))
    for name, tensor in learner.tensors().items():
        if name.startswith("model."):
            torch.testing.assert_close(tensors[name], tensor, rtol=1e-4, atol=1e-6)


def bfloat16(row: FeatureRow) -> FeatureRow:
    """As a store gives it back."""
    return FeatureRow.from_tensors(row.tensors(torch.bfloat16), row.labels)


def test_rows_whose_features_are_gone_do_not_hold_the_gate_closed(make_loop) -> None:
    loop = make_loop(high=4, low=4)

    def drive(should_stop: Callable[[], bool]) -> None:
        for seed in range(12):
            loop.publish(seed)
            if seed % 2:
                loop.store.abort(f"row-{seed}")

    loop.run(drive)
    assert set(loop.consumption()) == {f"row-{seed}" for seed in range(0, 12, 2)}
    assert loop.channel.consumer.figures().num_outstanding == 0


def test_a_preview_larger_than_the_watermark_does_not_wait_for_ever(state, make_loop) -> None:
    """The draft vocabulary wants more rows than the producer may publish before one is trained."""
    loop = make_loop(high=4, low=4, trainer__vocabulary_tokens=100_000)
    loop.run(loop.drive(8))
    assert len(loop.consumption()) == 8

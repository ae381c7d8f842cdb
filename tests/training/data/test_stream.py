"""Streams: which rows come when, how often, and what is remembered of them."""

from __future__ import annotations

import resource
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from training.config import DataConfig
from training.data.stream import OfflineStream, OnlineStream
from training.learning.start import row_check


@pytest.fixture
def online(state) -> Callable[..., OnlineStream]:
    def make(run_id: str = "run", seed: int = 0, **settings: object) -> OnlineStream:
        config = DataConfig(**({"batch_rows": 4, "passes": 3, "fill_wait_s": 0.0} | settings))
        return OnlineStream(state.store, state.ledger, run_id, config, row_check(state.target), seed)

    return make


def take(stream: OnlineStream | OfflineStream) -> list[str]:
    """Train on the next batch; its names."""
    rows = stream.next_batch()
    if rows:
        stream.trained(rows)
    return [row.sample_id for row in rows]


def damage(state, name: str) -> None:
    next((state.root / "features" / "rows").glob(f"{name}.*")).write_bytes(b"nothing")


def test_fresh_rows_come_first_and_replay_fills_up(state, online: Callable) -> None:
    names = state.add(range(4))
    stream = online()
    assert take(stream) == names
    late = state.add(range(4, 5))
    batch = take(stream)
    assert batch[:1] == late
    assert len(set(batch)) == 4
    assert set(batch[1:]) < set(names)


def test_every_row_gets_its_passes_and_no_more(state, online: Callable) -> None:
    names = state.add(range(10))
    stream = online()
    batches = []
    while batch := take(stream):
        batches.append(batch)
    assert Counter(name for batch in batches for name in batch) == dict.fromkeys(names, 3)
    assert all(len(set(batch)) == len(batch) for batch in batches)
    assert [len(batch) for batch in batches[:-3]] == [4] * (len(batches) - 3)


def test_a_batch_waits_to_be_full_while_rows_arrive(state, online: Callable) -> None:
    state.add(range(3))
    stream = online(fill_wait_s=60.0)
    assert stream.next_batch() == []
    state.add(range(3, 4))
    assert len(stream.next_batch()) == 4


def test_what_did_not_fill_a_batch_is_trained_when_nothing_more_comes(state, online: Callable) -> None:
    names = state.add(range(2))
    assert take(online()) == names


def test_a_batch_holds_its_tokens_and_at_least_one_row(state, online: Callable) -> None:
    names = state.add(range(4))  # of 20 tokens
    stream = online(max_batch_tokens=45)
    assert take(stream) == names[:2]
    assert take(online(run_id="narrow", max_batch_tokens=16)) == []  # the first stream leases them still
    stream.close()
    assert len(take(online(run_id="narrow", max_batch_tokens=16))) == 1


def test_preview_shows_what_will_be_trained_and_takes_nothing(state, online: Callable) -> None:
    names = state.add(range(6))
    stream = online()
    assert [row.sample_id for row in stream.preview(5)] == names[:5]
    assert take(stream) == names[:4]


def test_the_same_choice_after_a_checkpoint(state, online: Callable, tmp_path: Path) -> None:
    state.add(range(8))
    stream = online(passes=5)
    for _ in range(3):
        take(stream)
    remembered = stream.state()
    stream.record(tmp_path, 3, {})
    again = online(passes=5, seed=77)
    again.restore(remembered)
    for _ in range(4):
        batch = take(stream)
        assert batch == take(again)
        assert batch


def test_replay_goes_on_without_rows_that_were_shed(state, online: Callable, tmp_path: Path) -> None:
    names = state.add(range(8))
    stream = online(passes=50)
    while set(dict(stream.state()["passes"])) != set(names):
        take(stream)
    stream.record(tmp_path, 1, {})
    state.store.delete(state.ledger.shed_durable(1))
    for _ in range(8):
        assert names[0] not in take(stream)
    again = online(passes=50)
    again.restore(stream.state())
    assert names[0] not in dict(again.state()["passes"])


def test_replay_goes_on_without_rows_that_were_damaged(state, online: Callable, tmp_path: Path) -> None:
    """Before the checkpoint that holds them and after it; what was trained stays trained."""
    names = state.add(range(8))
    stream = online(passes=50)
    while set(dict(stream.state()["passes"])) != set(names):
        take(stream)
    for name in names[:2]:
        damage(state, name)
    for _ in range(8):
        assert not set(names[:2]) & set(take(stream))
    stream.record(tmp_path, 1, {})
    damage(state, names[2])
    for _ in range(8):
        assert names[2] not in take(stream)
    assert state.ledger.consumption("run") == dict.fromkeys(names, 1)


def test_a_store_that_does_not_answer_costs_no_row(state, online: Callable, caplog: pytest.LogCaptureFixture) -> None:
    """Here for want of file descriptors; a pool whose master is started again is the same."""
    names = state.add(range(8))
    stream = online(passes=2)
    assert take(stream) == names[:4]
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, before[1]))
    try:
        batches = [stream.next_batch() for _ in range(3)]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert batches == [[], [], []]
    assert len([record for record in caplog.records if "cannot be read" in record.getMessage()]) == 1, "said once"
    assert state.ledger.status()["failed"] == 0
    assert take(stream) == names[4:]
    assert set(take(stream) + take(stream)) == set(names), "nor a pass of those in replay"


def test_rows_that_are_not_finite_fail_with_a_reason(state, online: Callable) -> None:
    row = state.row(1)
    row.hidden.aux[2, 3] = float("nan")
    state.ledger.commit(state.store.put(state.meta("nan"), row), "train")
    names = state.add(range(4))
    assert take(online()) == names
    assert state.ledger.failures() == {"nan": "it holds states that are not finite"}


def test_replay_is_bounded_to_the_newest_rows(state, online: Callable) -> None:
    names = state.add(range(12))
    stream = online(passes=50, replay_rows=4)
    for _ in range(3):
        take(stream)
    assert set(dict(stream.state()["passes"])) == set(names[-4:])
    assert set(take(stream)) == set(names[-4:])


def test_rows_whose_lease_ran_out_are_not_taken_twice(state, online: Callable, tmp_path: Path) -> None:
    """A laptop that slept: the leases expire, the queue gives the rows to the same run again, and it knows them."""
    names = state.add(range(4))
    stream = online()
    take(stream)
    assert state.ledger.recover("run") == 4
    assert len(take(stream)) == 4
    assert dict(stream.state()["passes"]) == dict.fromkeys(names, 2)
    stream.record(tmp_path, 2, {})
    assert state.ledger.consumption("run") == dict.fromkeys(names, 1)


def test_rows_that_left_the_replay_are_not_taken_twice_either(state, online: Callable, tmp_path: Path) -> None:
    """Trained since the last checkpoint, pushed out of the replay by newer rows, and then their leases expired."""
    names = state.add(range(8))
    stream = online(replay_rows=4, passes=1)
    assert take(stream) + take(stream) == names
    assert state.ledger.recover("run") == 8
    assert take(stream) == []
    stream.record(tmp_path, 2, {})
    assert state.ledger.consumption("run") == dict.fromkeys(names, 1)
    assert stream.state()["num_admitted"] == 8


def test_offline_shuffles_each_epoch_and_leaves_out_damaged_rows(state) -> None:
    names = state.add(range(9))
    damage(state, "train-3")
    foreign = state.store.put(state.meta("foreign", target_fingerprint="0" * 16), state.row(1))
    short = state.store.put(state.meta("short"), state.row(1, num_generated=1))
    for ref in (foreign, short):
        state.ledger.commit(ref, "train")
    config = DataConfig(batch_rows=4, passes=2)
    stream = OfflineStream(state.store, state.ledger, "run", config, row_check(state.target), 0)
    batches = []
    while not stream.is_exhausted():
        if batch := take(stream):
            batches.append(batch)
    assert Counter(name for batch in batches for name in batch) == {name: 2 for name in names if name != "train-3"}
    assert batches[0] != batches[len(batches) // 2]
    assert state.ledger.status()["pending"] == 11
    assert (stream.figures()["rows"], stream.figures()["rows_left_out"]) == (8, 3)


@pytest.mark.parametrize("num_damaged", [1, 3, 4])
def test_offline_epochs_go_on_when_the_last_rows_of_one_are_damaged(state, num_damaged: int) -> None:
    names = state.add(range(4))
    stream = OfflineStream(state.store, state.ledger, "run", DataConfig(batch_rows=1, passes=3), row_check(state.target), 0)
    damaged = stream.state()["left"][-num_damaged:]
    for name in damaged:
        damage(state, name)
    trained: Counter[str] = Counter()
    while not stream.is_exhausted():
        trained.update(take(stream))
    assert trained == {name: 3 for name in names if name not in damaged}


def test_offline_more_passes_later_are_more_epochs(state) -> None:
    state.add(range(3))

    def make(passes: int) -> OfflineStream:
        config = DataConfig(batch_rows=4, passes=passes)
        return OfflineStream(state.store, state.ledger, "run", config, row_check(state.target), 0)

    stream = make(2)
    assert [len(take(stream)), len(take(stream)), stream.is_exhausted()] == [3, 3, True]
    again = make(3)
    again.restore(stream.state())
    assert [len(take(again)), again.is_exhausted()] == [3, True]

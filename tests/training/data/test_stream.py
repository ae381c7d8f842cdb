"""Streams: which rows come when, how often, and what is remembered of them."""

from __future__ import annotations

import resource
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from training.config import DataConfig
from training.data.stream import OnlineStream
from training.learning.start import row_check


@pytest.fixture
def online(state) -> Callable[..., OnlineStream]:
    def make(run_id: str = "run", seed: int = 0, rank: int = 0, num_ranks: int = 1, **settings: object) -> OnlineStream:
        config = DataConfig(**({"batch_rows": 4, "passes": 3, "fill_wait_s": 0.0} | settings))
        check = row_check(state.target)
        return OnlineStream(state.store, state.ledger, run_id, config, check, seed, rank=rank, num_ranks=num_ranks)

    return make


def take(stream: OnlineStream) -> list[str]:
    """Train on the next batch; its names."""
    rows = stream.next_batch()
    if rows:
        stream.trained(rows)
    return [row.sample_id for row in rows]


def save(state, stream: OnlineStream, path: Path, step: int) -> None:
    """As a trainer does with a checkpoint."""
    state.ledger.record_checkpoint("run", path, step, stream.unsaved())
    stream.saved()


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
    assert [row.sample_id for row in stream.preview(5, 10**6)] == names[:5]
    assert take(stream) == names[:4]


def test_preview_leaves_to_others_what_it_does_not_need(state, online: Callable) -> None:
    names = state.add(range(12))  # of 14 generated tokens
    first, second = online(run_id="run@a"), online(run_id="run@b")  # batches of four
    assert [row.sample_id for row in first.preview(512, 60)] == names[:8]
    assert [row.sample_id for row in second.preview(512, 50)] == names[8:]


def test_the_same_choice_after_a_checkpoint(state, online: Callable, tmp_path: Path) -> None:
    state.add(range(8))
    stream = online(passes=5)
    for _ in range(3):
        take(stream)
    remembered = stream.state()
    save(state, stream, tmp_path, 3)
    again = online(passes=5, seed=77)
    again.restore([remembered])
    for _ in range(4):
        batch = take(stream)
        assert batch == take(again)
        assert batch


def test_replay_goes_on_without_rows_that_were_shed(state, online: Callable, tmp_path: Path) -> None:
    names = state.add(range(8))
    stream = online(passes=50)
    while set(dict(stream.state()["passes"])) != set(names):
        take(stream)
    save(state, stream, tmp_path, 1)
    state.store.delete(state.ledger.shed_durable(1))
    for _ in range(8):
        assert names[0] not in take(stream)
    again = online(passes=50)
    again.restore([stream.state()])
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
    save(state, stream, tmp_path, 1)
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
    save(state, stream, tmp_path, 2)
    assert state.ledger.consumption("run") == dict.fromkeys(names, 1)


def test_rows_that_left_the_replay_are_not_taken_twice_either(state, online: Callable, tmp_path: Path) -> None:
    """Trained since the last checkpoint, pushed out of the replay by newer rows, and then their leases expired."""
    names = state.add(range(8))
    stream = online(replay_rows=4, passes=1)
    assert take(stream) + take(stream) == names
    assert state.ledger.recover("run") == 8
    assert take(stream) == []
    save(state, stream, tmp_path, 2)
    assert state.ledger.consumption("run") == dict.fromkeys(names, 1)
    assert stream.state()["num_admitted"] == 8


# --- several ranks ---


def test_ranks_share_the_rows_of_a_run_and_one_checkpoint_holds_them_all(state, online: Callable, tmp_path: Path) -> None:
    names = state.add(range(10))
    first, second = online(num_ranks=2), online(rank=1, num_ranks=2)
    shares = [take(first), take(second), take(first), take(second)]
    assert [len(share) for share in shares] == [4, 4, 4, 4]  # the last two in part from their own replay
    assert sorted({name for share in shares for name in share}) == sorted(names)
    assert not (set(shares[0]) | set(shares[2])) & (set(shares[1]) | set(shares[3]))
    state.ledger.record_checkpoint("run", tmp_path, 2, first.unsaved() + second.unsaved())
    assert state.ledger.consumption("run") == dict.fromkeys(names, 1)
    assert state.ledger.status()["leased"] == 0


def test_a_run_that_begins_again_takes_back_what_all_its_ranks_held(state, online: Callable) -> None:
    names = state.add(range(8))
    assert take(online(num_ranks=2)) + take(online(rank=1, num_ranks=2)) == names
    assert take(online()) == names[:4]


@pytest.mark.parametrize("num_after", [1, 2, 3])
def test_another_number_of_ranks_deals_the_replay_out_anew(state, online: Callable, tmp_path: Path, num_after: int) -> None:
    names = state.add(range(8))
    before = [online(rank=rank, num_ranks=2, passes=9) for rank in range(2)]
    for stream in before:
        take(stream)
    state.ledger.record_checkpoint("run", tmp_path, 2, [name for stream in before for name in stream.unsaved()])
    after = [online(rank=rank, num_ranks=num_after, passes=9, seed=5) for rank in range(num_after)]
    for stream in after:
        stream.restore([each.state() for each in before])
    passes = [dict(stream.state()["passes"]) for stream in after]
    assert sorted(name for share in passes for name in share) == sorted(names)
    assert max(len(share) for share in passes) - min(len(share) for share in passes) <= 1
    assert sum(stream.figures()["rows_admitted"] for stream in after) == 8

"""Epochs over a directory: every row in each, in an order of its own; damaged ones left out; shared by ranks in step."""

from __future__ import annotations

from collections import Counter

import pytest

from training.config import DataConfig
from training.data.offline import OfflineStream
from training.learning.start import row_check


def take(stream: OfflineStream) -> list[str]:
    """Train on the next batch; its names."""
    rows = stream.next_batch()
    stream.trained(rows)
    return [row.sample_id for row in rows]


def damage(state, name: str) -> None:
    next((state.root / "features" / "rows").glob(f"{name}.*")).write_bytes(b"nothing")


def test_each_epoch_is_shuffled_and_leaves_out_damaged_rows(state) -> None:
    names = state.add(range(9))
    damage(state, "train-3")
    foreign = state.store.put(state.meta("foreign", target_fingerprint="0" * 16), state.row(1))
    short = state.store.put(state.meta("short"), state.row(1, num_generated=1))
    for ref in (foreign, short):
        state.ledger.commit(ref, "train")
    config = DataConfig(batch_rows=4, passes=2)
    stream = OfflineStream(state.store, state.ledger, config, row_check(state.target), 0)
    batches = []
    while not stream.is_exhausted():
        if batch := take(stream):
            batches.append(batch)
    assert Counter(name for batch in batches for name in batch) == {name: 2 for name in names if name != "train-3"}
    assert batches[0] != batches[len(batches) // 2]
    assert state.ledger.status()["pending"] == 11
    assert (stream.figures()["rows"], stream.figures()["rows_left_out"]) == (11, 3)


@pytest.mark.parametrize("num_damaged", [1, 3, 4])
def test_epochs_go_on_when_the_last_rows_of_one_are_damaged(state, num_damaged: int) -> None:
    names = state.add(range(4))
    stream = OfflineStream(state.store, state.ledger, DataConfig(batch_rows=1, passes=3), row_check(state.target), 0)
    damaged = stream.state()["left"][-num_damaged:]
    for name in damaged:
        damage(state, name)
    trained: Counter[str] = Counter()
    while not stream.is_exhausted():
        trained.update(take(stream))
    assert trained == {name: 3 for name in names if name not in damaged}


def test_more_passes_later_are_more_epochs(state) -> None:
    state.add(range(3))

    def make(passes: int) -> OfflineStream:
        config = DataConfig(batch_rows=4, passes=passes)
        return OfflineStream(state.store, state.ledger, config, row_check(state.target), 0)

    stream = make(2)
    assert [len(take(stream)), len(take(stream)), stream.is_exhausted()] == [3, 3, True]
    again = make(3)
    again.restore([stream.state()])
    assert [len(take(again)), again.is_exhausted()] == [3, True]


def test_ranks_go_through_one_order_in_step(state) -> None:
    """Two ranks of two rows each are one of four; what one of them cannot read, the other knows nothing of."""
    names = state.add(range(11))
    damage(state, "train-3")

    def make(batch_rows: int, rank: int = 0, num_ranks: int = 1) -> OfflineStream:
        config = DataConfig(batch_rows=batch_rows, passes=2)
        check = row_check(state.target)
        return OfflineStream(state.store, state.ledger, config, check, 0, rank=rank, num_ranks=num_ranks)

    alone, pair = make(4), [make(2, rank, 2) for rank in range(2)]
    for _ in range(2):
        assert take(alone) == take(pair[0]) + take(pair[1])
    three = [make(2, rank, 3) for rank in range(3)]
    for stream in three:
        stream.restore([each.state() for each in pair])
    trained: Counter[str] = Counter()
    while not alone.is_exhausted():
        trained.update(take(alone))
    while not three[0].is_exhausted():
        trained.subtract(name for stream in three for name in take(stream))
    assert all(stream.is_exhausted() for stream in three)
    assert set(trained.values()) == {0}
    assert len(trained) == len(names) - 1
    assert sum(stream.figures()["rows_trained"] for stream in three) == 2 * (len(names) - 1)


def test_a_batch_is_cut_at_its_tokens(state) -> None:
    state.add(range(5))  # of 20 tokens
    config = DataConfig(batch_rows=4, max_batch_tokens=45, passes=1)
    stream = OfflineStream(state.store, state.ledger, config, row_check(state.target), 0)
    assert [len(take(stream)) for _ in range(3)] == [2, 2, 1]

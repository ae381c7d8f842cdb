"""Where fresh rows come from: leased before they are handed out, acknowledged when done, a failure behind what came before."""

from __future__ import annotations

import itertools

import pytest

from runtime.config import FeaturesConfig
from runtime.errors import FeatureBudgetExceeded, ProducerFailed
from runtime.features.channel import RefChannel
from runtime.features.flow import Quantum, Watermarks
from runtime.features.plane import open_feature_plane
from training.config import DataConfig
from training.data.arrivals import ChannelArrivals, LedgerArrivals
from training.data.stream import OnlineStream
from training.learning.start import row_check


@pytest.fixture
def channel() -> RefChannel:
    return RefChannel(Watermarks(3, 2, 1 << 24, 1 << 24), Quantum(2, 0))


def publish(state, channel: RefChannel, seed: int) -> str:
    ref = state.store.put(state.meta(f"row-{seed}"), state.row(seed))
    state.ledger.commit(ref, "train")
    assert channel.producer.publish(ref)
    return ref.sample_id


def stream(state, channel: RefChannel, **settings: object) -> OnlineStream:
    arrivals = ChannelArrivals(channel.consumer, state.ledger, "run", 60.0)
    config = DataConfig(**({"batch_rows": 4, "passes": 1, "fill_wait_s": 60.0} | settings))
    return OnlineStream(state.store, state.ledger, "run", config, row_check(state.target), 0, arrivals)


def test_rows_of_a_channel_are_leased_when_they_are_taken(state, channel: RefChannel) -> None:
    state.add(range(100, 103))  # older rows of the ledger, which nobody published
    names = [publish(state, channel, seed) for seed in range(2)]
    arrivals = ChannelArrivals(channel.consumer, state.ledger, "run", 60.0)
    assert [ref.sample_id for ref in arrivals.take(5)] == names
    assert arrivals.take(5) == []
    assert [ref.sample_id for ref in state.ledger.leased("run")] == names
    arrivals.done(names[:1])
    assert channel.consumer.figures().num_outstanding == 1


def test_it_is_live_while_more_may_come_before_anything_is_trained(state, channel: RefChannel) -> None:
    arrivals = ChannelArrivals(channel.consumer, state.ledger, "run", 60.0)
    assert (arrivals.is_live, arrivals.is_over) == (True, False)
    names = [publish(state, channel, seed) for seed in range(3)]
    assert (arrivals.is_live, arrivals.is_over) == (False, False), "the gate is closed"
    arrivals.take(3)
    arrivals.done(names)
    assert arrivals.is_live
    channel.producer.close()
    assert (arrivals.is_live, arrivals.is_over) == (False, True)


def test_a_ledger_is_live_until_its_store_is_full_of_rows_to_be_trained(state) -> None:
    names = state.add(range(3))
    arrivals = LedgerArrivals(state.store, state.ledger, "run", 60.0)
    refs = arrivals.take(2)
    assert [ref.sample_id for ref in refs] == names[:2]
    assert (arrivals.is_live, arrivals.is_over) == (True, False)
    state.ledger.set_watermarks(Watermarks(high_rows=3, low_rows=1, high_bytes=1 << 30, low_bytes=1 << 20))
    for is_shedding in (True, False):
        state.ledger.set_shedding(is_shedding)
        assert arrivals.is_live is not is_shedding
    small = FeaturesConfig(budget_mib=1)
    store, ledger = open_feature_plane(state.root / "small", small)
    arrivals = LedgerArrivals(store, ledger, "run", 60.0)
    for seed in itertools.count():
        try:
            ref = store.put(state.meta(f"row-{seed}"), state.row(seed))
        except FeatureBudgetExceeded:
            break
        ledger.commit(ref, "train")
        assert len(arrivals.take(1)) == 1
    assert not arrivals.is_live
    ledger.record_checkpoint("run", "x", 1, ["row-0"])  # whose room the next row gets
    assert arrivals.is_live
    store.close()
    ledger.close()


def test_what_came_before_a_failure_is_trained_first_and_at_once(state, channel: RefChannel) -> None:
    """Fewer rows than a batch: nobody waits for more that cannot come."""
    names = [publish(state, channel, seed) for seed in range(2)]
    channel.producer.fail("gone")
    rows = stream(state, channel)
    batch = rows.next_batch()
    assert [row.sample_id for row in batch] == names
    rows.trained(batch)
    assert not rows.is_exhausted(), "a run that broke off is not over"
    with pytest.raises(ProducerFailed):
        rows.next_batch()


def test_the_stream_ends_with_the_channel_and_its_passes(state, channel: RefChannel) -> None:
    publish(state, channel, 0)
    channel.producer.close()
    rows = stream(state, channel, passes=2)
    for is_last in (False, True):
        assert not rows.is_exhausted()
        rows.trained(rows.next_batch())
        assert rows.is_exhausted() is is_last


def test_an_unusable_row_is_failed_and_acknowledged(state, channel: RefChannel) -> None:
    name = publish(state, channel, 0)
    next((state.root / "features" / "rows").glob(f"{name}.*")).write_bytes(b"nothing")
    publish(state, channel, 1)
    rows = stream(state, channel, fill_wait_s=0.0)
    assert [row.sample_id for row in rows.next_batch()] == ["row-1"]
    assert channel.consumer.figures().num_outstanding == 1
    assert name in state.ledger.failures()

"""The channel: order, blocking and waking, end against failure, shedding of served traffic, no tensors."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace

import pytest
import torch

from runtime.errors import ConfigError, FeatureError, ProducerFailed
from runtime.features.channel import RefChannel
from runtime.features.flow import Quantum, Watermarks
from runtime.features.refs import SampleRef

MakeRef = Callable[..., SampleRef]
SOON_S = 10.0


def channel(high: int = 4, low: int = 2, quantum: int = 2) -> RefChannel:
    return RefChannel(Watermarks(high, low, 10**6, 10**6), Quantum(quantum, 0))


def ids(refs: list[SampleRef]) -> str:
    return "".join(ref.sample_id for ref in refs)


def in_thread(work: Callable[[], object]) -> Future:
    result: Future = Future()

    def run() -> None:
        try:
            result.set_result(work())
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return result


def test_references_come_in_order_and_the_end_is_no_failure(make_ref: MakeRef) -> None:
    both = channel()
    for name in "abc":
        assert both.producer.publish(make_ref(name))
    both.producer.close()
    assert not both.consumer.is_over, "what was published is still to be taken"
    assert ids(both.consumer.get(2, 0)) == "ab"
    assert ids(both.consumer.get(2, 0)) == "c"
    assert both.consumer.get(2, 60.0) == [], "at the end nobody waits"
    assert both.consumer.is_over


def test_get_waits_for_the_first_row_and_for_no_longer_than_the_time_out(make_ref: MakeRef) -> None:
    both = channel()
    assert both.consumer.get(2, 0.01) == []
    assert not both.consumer.is_over
    waiting = in_thread(lambda: both.consumer.get(2, SOON_S))
    both.producer.publish(make_ref("a"))
    assert ids(waiting.result(SOON_S)) == "a"


def test_after_a_failure_comes_what_was_published_and_then_the_error(make_ref: MakeRef) -> None:
    both = channel()
    both.producer.publish(make_ref("a"))
    both.producer.fail("OSError: the disk is gone.")
    both.producer.close()  # in its `finally`
    assert not both.consumer.is_over
    assert ids(both.consumer.get(5, 0)) == "a"
    assert not both.consumer.is_over, "a stream that broke off never counts as ended"
    for _ in range(2):
        with pytest.raises(ProducerFailed, match=r"OSError: the disk is gone\. What it published"):
            both.consumer.get(5, 60.0)


def test_a_failure_wakes_a_consumer_that_waits() -> None:
    both = channel()
    waiting = in_thread(lambda: both.consumer.get(1, SOON_S))
    both.producer.fail("gone")
    with pytest.raises(ProducerFailed, match="gone"):
        waiting.result(SOON_S)


def test_a_failure_outlasts_a_close_and_the_first_reason_counts() -> None:
    both = channel()
    both.producer.close()
    both.producer.fail("the first")
    both.producer.fail("the second")
    with pytest.raises(ProducerFailed, match="the first"):
        both.consumer.get(1, 0)


def test_a_producer_waits_at_the_gate_until_acknowledgements_open_it(make_ref: MakeRef) -> None:
    both = channel(high=3, low=2)
    for name in "abc":
        both.producer.publish(make_ref(name))
    parked = in_thread(lambda: both.producer.publish(make_ref("d")))
    assert ids(both.consumer.get(3, 0)) == "abc"
    with pytest.raises(TimeoutError):
        parked.result(0.05)  # taking rows opens nothing
    both.consumer.ack(["a"])
    assert parked.result(SOON_S) is True
    figures = both.consumer.figures()
    assert (figures.num_outstanding, figures.num_waiting, figures.num_closings) == (3, 1, 2)


def test_a_producer_at_the_gate_wakes_when_the_consumer_leaves(make_ref: MakeRef) -> None:
    both = channel(high=2, low=2)
    both.producer.publish(make_ref("a"))
    both.producer.publish(make_ref("b"))
    parked = in_thread(lambda: both.producer.publish(make_ref("c")))
    waiting = in_thread(lambda: both.producer.wait(SOON_S))
    both.consumer.leave()
    assert parked.result(SOON_S) is False
    assert waiting.result(SOON_S) is False
    assert both.producer.publish(make_ref("d")) is False


def test_a_producer_out_of_room_says_that_nothing_comes_before_an_acknowledgement(make_ref: MakeRef) -> None:
    both = channel()
    both.producer.publish(make_ref("a"))
    assert both.consumer.is_live
    assert both.producer.wait(0.0)
    assert not both.consumer.is_live, "the gate is open, but the store is full"
    both.producer.publish(make_ref("b"))
    assert both.consumer.is_live


def test_a_tensor_is_refused_wherever_it_hides(make_ref: MakeRef) -> None:
    both = channel()
    smuggler = replace(make_ref("a"), labels={"weights": torch.zeros(2)})
    with pytest.raises(FeatureError, match="tensors never travel on the control plane"):
        both.producer.publish(smuggler)
    assert both.consumer.get(1, 0) == []


def test_watermarks_below_the_quantum_are_refused_at_start() -> None:
    with pytest.raises(ConfigError, match="at least 3, the rows of one step, or producer and trainer wait for each other"):
        channel(high=4, low=2, quantum=3)

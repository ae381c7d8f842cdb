"""The gate: closes at a high watermark of either kind, opens when both are low, and only acknowledgements open it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.errors import ConfigError
from runtime.features.flow import FlowControl, Gate, Quantum, Watermarks
from runtime.features.refs import FeatureSpec, SampleRef

QUANTUM = Quantum(num_rows=2, num_bytes=200)


def make(sample_id: str, num_bytes: int) -> SampleRef:
    return SampleRef(
        sample_id=sample_id,
        run_id="run",
        source="prompt/0",
        target_fingerprint="fp",
        aux_layer_ids=(1, 2, 3),
        uri="",
        generation=1,
        features={"aux": FeatureSpec((3, 24), "bfloat16")},
        num_tokens=4,
        num_bytes=num_bytes,
    )


def test_it_closes_at_the_high_watermark_of_rows_and_opens_at_the_low_one(make_ref: Callable[..., SampleRef]) -> None:
    flow = FlowControl(Watermarks(high_rows=4, low_rows=2, high_bytes=10**6, low_bytes=10**6), QUANTUM)
    for name in "abc":
        flow.let_in(make_ref(name))
        assert flow.is_open
    flow.let_in(make_ref("d"))
    assert not flow.is_open
    flow.acknowledge(["a"])
    assert not flow.is_open, "between the watermarks it stays as it is"
    flow.acknowledge(["b"])
    assert flow.is_open
    flow.let_in(make_ref("e"))
    assert flow.is_open, "between the watermarks it stays as it is"


def test_bytes_close_it_too_and_both_must_be_low_to_open() -> None:
    flow = FlowControl(Watermarks(high_rows=100, low_rows=2, high_bytes=300, low_bytes=200), QUANTUM)
    for name, size in {"a": 250, "b": 10, "c": 50}.items():
        flow.let_in(make(name, size))
    assert not flow.is_open
    flow.acknowledge(["b"])
    assert not flow.is_open, "few rows, but still too many bytes"
    flow.acknowledge(["a"])
    assert flow.is_open
    assert (flow.num_rows, flow.num_bytes, flow.num_closings) == (1, 50, 1)


def test_a_gate_that_is_only_told_how_much_there_is_has_the_same_hysteresis() -> None:
    gate = Gate(Watermarks(high_rows=4, low_rows=2, high_bytes=300, low_bytes=100))
    states = [gate.now(*there) for there in ((3, 0), (4, 0), (3, 0), (2, 101), (2, 100), (3, 299), (0, 300), (0, 101), (0, 0))]
    assert states == [True, False, False, False, True, True, False, False, True]
    assert gate.num_closings == 2
    alike = Gate(Watermarks(high_rows=4, low_rows=4, high_bytes=300, low_bytes=300))
    assert [alike.now(rows, 0) for rows in (3, 4, 4, 3)] == [True, False, False, True]


def test_an_acknowledgement_counts_once_and_a_new_generation_replaces(make_ref: Callable[..., SampleRef]) -> None:
    flow = FlowControl(Watermarks(10, 2, 10**6, 10**6), QUANTUM)
    flow.let_in(make_ref("a", num_bytes=100))
    flow.let_in(make_ref("a", generation=2, num_bytes=70))
    assert (flow.num_rows, flow.num_bytes) == (1, 70)
    flow.acknowledge(["a", "a", "unknown"])
    flow.acknowledge(["a"])
    assert (flow.num_rows, flow.num_bytes) == (0, 0)


@pytest.mark.parametrize(
    ("marks", "said"),
    [
        (Watermarks(10, 1, 1000, 500), "the low watermark of rows is 1; it must be at least 2"),
        (Watermarks(1, 1, 1000, 500), "the low watermark of rows is 1"),
        (Watermarks(3, 4, 1000, 500), "the high watermark of rows is 3; it must be at least the low one, 4"),
        (Watermarks(10, 2, 1000, 199), "the low watermark of bytes is 199; it must be at least 200"),
        (Watermarks(10, 2, 250, 300), "the high watermark of bytes is 250"),
    ],
)
def test_watermarks_below_one_step_are_refused_at_start(marks: Watermarks, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        FlowControl(marks, QUANTUM)


def test_the_quantum_is_ranks_times_batch_times_accumulation() -> None:
    assert Quantum.of_step(num_ranks=2, batch_rows=8, num_accumulated=3, max_row_bytes=10) == Quantum(48, 480)


@given(
    sizes=st.lists(st.integers(1, 100), min_size=1, max_size=60),
    low=st.integers(2, 6),
    above=st.integers(0, 6),
    low_bytes=st.integers(200, 400),
    above_bytes=st.integers(0, 300),
)
def test_a_closed_gate_always_leaves_a_whole_step_to_take(
    sizes: list[int], low: int, above: int, low_bytes: int, above_bytes: int
) -> None:
    """Whatever the rows' sizes: a trainer that takes a quantum whenever one is there, beside a producer that waits at the gate,
    trains them all."""
    flow = FlowControl(Watermarks(low + above, low, low_bytes + above_bytes, low_bytes), QUANTUM)
    rows = [make(f"row{index}", size) for index, size in enumerate(sizes)]
    waiting: list[str] = []
    for row in rows:
        while not flow.is_open:
            assert len(waiting) >= QUANTUM.num_rows, "the trainer has no whole step and the producer may not go on"
            flow.acknowledge(waiting[: QUANTUM.num_rows])
            del waiting[: QUANTUM.num_rows]
        flow.let_in(row)
        waiting.append(row.sample_id)
    assert flow.num_rows == len(waiting)

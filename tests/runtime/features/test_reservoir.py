"""The held-out reservoir of the ledger: uniform over all that was offered, shared by slices, bounded in rows and bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from runtime.features import Ledger, SampleRef
from runtime.features.refs import unit_hash

MakeRef = Callable[..., SampleRef]


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    ledger = Ledger(tmp_path / "ledger.sqlite")
    yield ledger
    ledger.close()


def _ids(refs: list[SampleRef]) -> list[str]:
    return [ref.sample_id for ref in refs]


def test_the_reservoir_is_bounded_and_independent_of_order(tmp_path: Path, make_ref: MakeRef) -> None:
    kept = []
    for order in (range(40), reversed(range(40))):
        ledger = Ledger(tmp_path / f"{len(kept)}.sqlite")
        pushed_out: list[str] = []
        for index in order:
            is_new, out = ledger.hold_out(make_ref(f"s{index}"), 8)
            assert is_new
            assert ledger.status()["heldout"] <= 8
            pushed_out += _ids(out)
        kept.append(set(_ids(ledger.heldout(99))))
        to_train = set(_ids(ledger.lease("r", 99, 60)))
        assert len(kept[-1]) == 8
        assert kept[-1] | set(pushed_out) | to_train == {f"s{index}" for index in range(40)}
        assert not to_train & set(pushed_out)  # what was ever held out is never trained on
        ledger.close()
    assert kept[0] == kept[1]


def test_the_reservoir_is_uniform_over_the_stream(tmp_path: Path, make_ref: MakeRef) -> None:
    """Over many streams, early and late rows are kept equally often: 8 of 32, each quarter 2 on average."""
    counts = np.zeros(4)
    for stream in range(16):
        ledger = Ledger(tmp_path / f"{stream}.sqlite")
        for index in range(32):
            ledger.hold_out(make_ref(f"s{stream}-{index}"), 8)
        for ref in ledger.heldout(8):
            counts[int(ref.sample_id.split("-")[1]) // 8] += 1
        ledger.close()
    assert counts.sum() == 128
    assert np.abs(counts - 32).max() < 16  # over 3 standard deviations


def test_a_row_offered_twice_changes_nothing(ledger: Ledger, make_ref: MakeRef) -> None:
    assert ledger.hold_out(make_ref("a"), 4) == (True, [])
    assert ledger.hold_out(make_ref("a", generation=2), 4) == (False, [])
    assert ledger.needed() == {("a", 2)}


def test_a_smaller_cap_pushes_the_surplus_out(ledger: Ledger, make_ref: MakeRef) -> None:
    for name in "abcdef":
        ledger.hold_out(make_ref(name), 6)
    _, out = ledger.hold_out(make_ref("g"), 2)
    assert ledger.status()["heldout"] == 2
    assert len(out) + ledger.status()["pending"] == 5


def test_the_reservoir_is_bounded_in_bytes_too(ledger: Ledger, make_ref: MakeRef) -> None:
    size = make_ref("a").num_bytes
    for name in "abcdef":
        ledger.hold_out(make_ref(name), 6, max_bytes=3 * size + size // 2)
    assert len(ledger.heldout()) == 3
    assert ledger.hold_out(replace(make_ref("huge"), num_bytes=9 * size), 6, max_bytes=4 * size)[0]
    assert sum(ref.num_bytes for ref in ledger.heldout()) <= 4 * size


def test_a_cap_of_zero_trains_on_everything(ledger: Ledger, make_ref: MakeRef) -> None:
    assert ledger.hold_out(make_ref("a"), 0) == (True, [])
    assert _ids(ledger.lease("r", 9, 60)) == ["a"]


def _sliced(make_ref: MakeRef, name: str, slice_name: str) -> SampleRef:
    return replace(make_ref(name), labels={"slice": slice_name})


def _held(ledger: Ledger) -> Counter[str]:
    return Counter(ref.slice for ref in ledger.heldout())


def test_slices_share_the_reservoir_as_evenly_as_they_can(ledger: Ledger, make_ref: MakeRef) -> None:
    """A loud slice fills what is free and gives way to the others; each keeps its lowest ranks, so a uniform sample."""
    for index in range(40):
        ledger.hold_out(_sliced(make_ref, f"code{index}", "code"), 12)
    assert _held(ledger) == {"code": 12}
    for index in range(2):
        ledger.hold_out(_sliced(make_ref, f"rare{index}", "rare"), 12)
    assert _held(ledger) == {"code": 10, "rare": 2}
    for index in range(40):
        ledger.hold_out(_sliced(make_ref, f"chat{index}", "chat"), 12)
    assert _held(ledger) == {"code": 5, "rare": 2, "chat": 5}
    lowest = sorted((f"code{index}" for index in range(40)), key=lambda name: unit_hash("heldout rank", name))[:5]
    assert {ref.sample_id for ref in ledger.heldout() if ref.slice == "code"} == set(lowest)


def test_the_reservoirs_do_not_depend_on_the_order_of_slices(tmp_path: Path, make_ref: MakeRef) -> None:
    names = [(f"{name}{index}", name) for name in ("a", "b", "c") for index in range(20)]
    kept = []
    for seed in range(4):
        ledger = Ledger(tmp_path / f"{seed}.sqlite")
        for index in np.random.default_rng(seed).permutation(len(names)):
            ledger.hold_out(_sliced(make_ref, *names[index]), 8)
        kept.append(set(_ids(ledger.heldout())))
        ledger.close()
    assert [len(each) for each in kept] == [8] * 4
    assert kept[0] == kept[1] == kept[2] == kept[3]

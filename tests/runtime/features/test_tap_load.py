"""The tap under load: it never makes the engine wait, sheds by watermarks, and every turn is accounted for."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from runtime.backends.base import TargetInfo
from runtime.config import CaptureConfig
from runtime.errors import ConfigError
from runtime.features import (
    FeatureTap,
    Ledger,
    SampleMeta,
)

from .tapping import CONFIG, Gate, MakeTurn, Plane, is_written, nonzero, rows_of, tapping, wait_until


def test_a_flood_never_blocks_and_every_turn_is_accounted_for(plane: Plane, target_info: TargetInfo, make_turn: MakeTurn) -> None:
    """While the writer is stuck: the queue fills, the rest is shed, and no offer takes more than a few milliseconds."""
    gate = Gate()
    turns = [make_turn(f"s{index}", num_tokens=400, num_generated=200) for index in range(300)]
    with tapping(plane, target_info, replace(CONFIG, queue_max_rows=16), redact=gate) as tap:
        tap.offer(turns[0])
        assert gate.entered.wait(10)
        took = []
        for turn in turns[1:]:
            start = time.perf_counter()
            tap.offer(turn)
            took.append(time.perf_counter() - start)
        assert tap.counters()["shed_queue_full"] == 300 - 1 - 16
        assert tap.queue_depth() == 16
        gate.opened.set()
    assert sorted(took)[int(0.95 * len(took))] < 0.003  # the scheduler may take one or the other
    assert nonzero(tap) == {"offered": 300, "captured": 17, "shed_queue_full": 283}
    assert len(rows_of(plane)) == 17


def test_offers_from_many_threads_add_up(plane: Plane, target_info: TargetInfo, make_turn: MakeTurn) -> None:
    turns = [make_turn(f"s{index}") for index in range(200)]
    with tapping(plane, target_info, replace(CONFIG, queue_max_rows=4)) as tap:
        threads = [threading.Thread(target=lambda part=part: [tap.offer(turn) for turn in turns[part::4]]) for part in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    counts = tap.counters()
    assert counts["captured"] + counts["shed_queue_full"] == counts["offered"] == 200
    assert counts["captured"] == plane[1].status()["pending"] == plane[0].health().num_rows


def test_the_queue_is_bounded_in_bytes_too(plane: Plane, target_info: TargetInfo, make_turn: MakeTurn) -> None:
    gate = Gate()
    turn_bytes = 39 * 32 * 4
    with tapping(plane, target_info, redact=gate, queue_max_bytes=2 * turn_bytes) as tap:
        tap.offer(make_turn("a"))
        assert gate.entered.wait(10)
        assert [tap.offer(make_turn(name)) for name in "bcd"] == [True, True, False]
        gate.opened.set()
    assert nonzero(tap) == {"offered": 4, "captured": 3, "shed_queue_full": 1}


@pytest.mark.parametrize("limit", ["rows", "bytes"])
def test_a_full_queue_takes_turns_again_when_half_of_it_is_written(
    plane: Plane, target_info: TargetInfo, make_turn: MakeTurn, limit: str
) -> None:
    """Between the watermarks it stays as it is: a server at its limit does not keep one turn in two, each of them late."""
    turn_bytes = 39 * 32 * 4
    config, most = (replace(CONFIG, queue_max_rows=4), 1 << 30) if limit == "rows" else (CONFIG, 4 * turn_bytes)
    steps = threading.Semaphore(0)

    def redact(token_ids: tuple[int, ...], text: str) -> bool:
        assert steps.acquire(timeout=30)
        return False

    with tapping(plane, target_info, config, redact=redact, queue_max_bytes=most) as tap:
        tap.offer(make_turn("writing"))
        wait_until(lambda: tap.queue_depth() == 0)
        assert [tap.offer(make_turn(f"first{n}")) for n in range(5)] == [True] * 4 + [False]
        taken = []
        for depth in (3, 2):
            steps.release()
            wait_until(lambda depth=depth: tap.queue_depth() == depth)
            taken.append(tap.offer(make_turn(f"later{depth}")))
        assert taken == [False, True]
        steps.release(99)
    assert nonzero(tap) == {"offered": 8, "captured": 6, "shed_queue_full": 2}


def _train_one(ledger: Ledger, step: int) -> None:
    [ref] = ledger.lease("run", 1, 600)
    ledger.record_checkpoint("run", f"c{step}", step, [ref.sample_id])


@pytest.mark.parametrize("limit", ["rows", "bytes"])
def test_while_trainers_are_too_far_behind_turns_are_shed_until_they_caught_up(
    plane: Plane, target_info: TargetInfo, make_turn: MakeTurn, limit: str
) -> None:
    store, ledger = plane
    turns = (make_turn(f"s{index}", num_tokens=4000, num_generated=20) for index in range(99))  # rows of 256 KiB
    config = replace(CONFIG, max_row_tokens=4096)
    marks = {"high_rows": 4, "low_rows": 2} if limit == "rows" else {"high_mib": 1, "low_mib": 1}
    low = 2 if limit == "rows" else 3
    with tapping(plane, target_info, replace(config, **marks)) as tap:
        for _ in range(6):
            tap.offer(next(turns))
        wait_until(lambda: tap.counters()["shed_backlog"] == 2)
        assert ledger.backlog()[0] == 4
        assert ledger.is_shedding(), "so that trainers do not wait for more"
        for step in range(4 - low):
            tap.offer(next(turns))
            wait_until(lambda step=step: tap.counters()["shed_backlog"] == 3 + step)
            _train_one(ledger, step)
        for _ in range(4 - low + 1):
            tap.offer(next(turns))
        wait_until(lambda: tap.counters()["shed_backlog"] == 3 + 4 - low)
    assert ledger.is_shedding()
    assert tap.counters()["captured"] == 4 + 4 - low
    assert store.health().num_rows == 4 + 4 - low


def test_a_backlog_that_an_earlier_server_left_counts(plane: Plane, target_info: TargetInfo, make_turn: MakeTurn) -> None:
    config = replace(CONFIG, high_rows=3, low_rows=1)
    with tapping(plane, target_info, config) as tap:
        for index in range(3):
            tap.offer(make_turn(f"s{index}"))
    with tapping(plane, target_info, config) as tap:
        tap.offer(make_turn("late"))
    assert nonzero(tap) == {"offered": 1, "shed_backlog": 1}


@pytest.mark.parametrize(
    ("marks", "said"),
    [
        ({"high_mib": 17}, "capture.high_mib is 17; it must be at most features.budget_mib, 16"),
        ({"low_mib": 13}, "capture.low_mib is 13; it must be at most the high watermark, 12"),
    ],
)
def test_watermarks_that_the_budget_cannot_hold_are_refused(
    plane: Plane, target_info: TargetInfo, marks: dict[str, int], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        FeatureTap(*plane, replace(CONFIG, **marks), run_id="server", target_info=target_info)


def test_the_budget_sheds_only_when_nothing_trained_is_left(
    tmp_path: Path,
    target_info: TargetInfo,
    make_turn: MakeTurn,
    make_meta: Callable[..., SampleMeta],
    make_plane: Callable[[Path, int], Plane],
) -> None:
    config = replace(CONFIG, max_row_tokens=4096, high_mib=1)
    turns = (make_turn(f"s{index}", num_tokens=4000, num_generated=20) for index in range(99))  # rows of 285 KiB
    store, ledger = plane = make_plane(tmp_path / "features", 1 << 20)
    with tapping(plane, target_info, config) as tap:
        for _ in range(6):
            tap.offer(next(turns))
    assert nonzero(tap) == {"offered": 6, "captured": 3, "shed_budget": 3}
    refs = ledger.lease("run", 2, 600)
    ledger.record_checkpoint("run", "c", 1, [ref.sample_id for ref in refs])
    with tapping(plane, target_info, config) as tap:
        for _ in range(5):
            tap.offer(next(turns))
    assert nonzero(tap) == {"offered": 5, "captured": 2, "shed_budget": 3}
    assert store.used_bytes() <= store.budget_bytes
    assert not store.exists(refs[0])
    assert ledger.status() == {"pending": 3, "leased": 0, "durable": 2, "failed": 0, "heldout": 0}


def test_held_out_rows_leave_room_for_those_to_train_on(
    tmp_path: Path, target_info: TargetInfo, make_turn: MakeTurn, make_plane: Callable[[Path, int], Plane]
) -> None:
    """Rows so large that the reservoir would fill the budget before it had its number of them."""
    with tapping(make_plane(tmp_path / "measure", 1 << 20), target_info) as tap:
        tap.offer(make_turn("m"))
    size = tap._store.used_bytes()
    store, ledger = plane = make_plane(tmp_path / "real", 8 * size + 600)
    with tapping(plane, target_info, CaptureConfig(heldout_fraction=0.5)) as tap:
        for index in range(40):
            tap.offer(make_turn(f"s{index}"))
            wait_until(partial(is_written, tap, index + 1))
            refs = ledger.lease("run", 9, 600)
            ledger.record_checkpoint("run", f"c{index}", index, [ref.sample_id for ref in refs])
    assert nonzero(tap) == {"offered": 40, "captured": 40}
    assert 0 < sum(ref.num_bytes for ref in ledger.heldout()) <= store.budget_bytes / 4
    assert ledger.status()["failed"] == 0


def test_tensors_are_let_go_when_written(plane: Plane, target_info: TargetInfo, make_turn: MakeTurn) -> None:
    turn = make_turn("a", num_parts=1)
    alive = weakref.ref(turn.hidden[0].aux)
    with tapping(plane, target_info) as tap:
        tap.offer(turn)
        del turn
        wait_until(lambda: alive() is None)  # though the tap still runs

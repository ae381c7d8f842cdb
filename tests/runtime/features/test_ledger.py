"""The ledger: one owner per row, checkpoints and their rows in one transaction, bounded attempts."""

from __future__ import annotations

import sqlite3
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch

from runtime.config import LONGEST_LEASE_S
from runtime.errors import FeatureError, LeaseLost
from runtime.features import Ledger, SampleRef
from runtime.features.flow import Watermarks
from runtime.features.ledger import member_of, run_of

MakeRef = Callable[..., SampleRef]


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def ledger(tmp_path: Path, clock: Clock) -> Iterator[Ledger]:
    ledger = Ledger(tmp_path / "ledger.sqlite", max_attempts=3, clock=clock)
    yield ledger
    ledger.close()


def _ids(refs: list[SampleRef]) -> list[str]:
    return [ref.sample_id for ref in refs]


def _commit(ledger: Ledger, make_ref: MakeRef, names: str) -> None:
    for name in names:
        assert ledger.commit(make_ref(name), "train")


# --- commit and lease ---


def test_commit_deduplicates(ledger: Ledger, make_ref: MakeRef) -> None:
    assert ledger.commit(make_ref("a"), "train") is True
    assert ledger.commit(make_ref("a"), "train") is False
    assert ledger.status() == {"pending": 1, "leased": 0, "durable": 0, "failed": 0, "heldout": 0}


def test_a_newer_generation_replaces_the_reference_only(ledger: Ledger, make_ref: MakeRef) -> None:
    _commit(ledger, make_ref, "a")
    assert ledger.commit(make_ref("a", generation=5), "train") is False
    assert ledger.commit(make_ref("a", generation=4), "train") is False
    assert [(ref.sample_id, ref.generation) for ref in ledger.lease("r", 9, 60)] == [("a", 5)]


def test_a_reference_with_a_tensor_is_refused(ledger: Ledger, make_ref: MakeRef) -> None:
    ref = make_ref("a")
    object.__setattr__(ref, "labels", {"kind": torch.zeros(1)})
    with pytest.raises(FeatureError, match=r"value\.labels\['kind'\]"):
        ledger.commit(ref, "train")
    assert ledger.status()["pending"] == 0


def test_leases_are_oldest_first_and_exclusive(ledger: Ledger, make_ref: MakeRef) -> None:
    _commit(ledger, make_ref, "abcd")
    assert _ids(ledger.lease("r", 3, 60)) == ["a", "b", "c"]
    assert _ids(ledger.lease("q", 3, 60)) == ["d"]
    assert ledger.lease("q", 3, 60) == []


def test_held_out_rows_are_never_leased(ledger: Ledger, make_ref: MakeRef) -> None:
    for name in "abc":
        ledger.commit(make_ref(name), "heldout")
    assert ledger.lease("r", 9, 60) == []
    assert _ids(ledger.heldout(2)) == ["c", "b"]


def test_an_expired_lease_goes_back_and_attempts_are_bounded(ledger: Ledger, make_ref: MakeRef, clock: Clock) -> None:
    _commit(ledger, make_ref, "a")
    for run in ("r", "q", "p"):
        assert _ids(ledger.lease(run, 1, 60)) == ["a"]
        clock.now += 60
    assert ledger.lease("o", 1, 60) == []
    assert ledger.status()["failed"] == 1
    assert ledger.failures() == {"a": "its lease expired or failed 3 times"}


def test_heartbeats_keep_leases(ledger: Ledger, make_ref: MakeRef, clock: Clock) -> None:
    _commit(ledger, make_ref, "ab")
    ledger.lease("r", 1, 60)
    for _ in range(5):
        clock.now += 50
        assert ledger.heartbeat("r", 60) == 1
    assert _ids(ledger.lease("q", 9, 60)) == ["b"]
    clock.now += 61
    assert _ids(ledger.lease("p", 9, 60)) == ["a", "b"]
    assert ledger.heartbeat("r", 60) == 0


def test_a_clock_that_is_set_back_keeps_no_row_from_the_living(ledger: Ledger, make_ref: MakeRef, clock: Clock) -> None:
    for name in "ab":
        ledger.commit(make_ref(name), "train")
    clock.now += 4 * LONGEST_LEASE_S  # as a machine starts up whose clock was never set
    assert _ids(ledger.lease("dead", 1, 60)) == ["a"]
    assert _ids(ledger.lease("alive", 1, 60)) == ["b"]
    clock.now -= 4 * LONGEST_LEASE_S
    assert ledger.heartbeat("alive", 60) == 1
    assert _ids(ledger.lease("other", 9, 60)) == ["a"]
    assert ledger.lease("other", 9, 60) == []
    ledger.heartbeat("alive", 9 * LONGEST_LEASE_S)
    assert ledger.lease("other", 9, 60) == [], "a longer lease than the longest is one of that"


def test_rows_without_features_fail_with_a_reason_and_others_take_their_place(tmp_path: Path, make_ref: MakeRef) -> None:
    ledger = Ledger(tmp_path / "ledger.sqlite", exists=lambda ref: ref.sample_id not in "ac")
    _commit(ledger, make_ref, "abcd")
    assert _ids(ledger.lease("r", 2, 60)) == ["b", "d"]
    assert ledger.status() == {"pending": 0, "leased": 2, "durable": 0, "failed": 2, "heldout": 0}
    assert ledger.failures()["a"] == "its features (rows/a) are gone or cut short"
    ledger.close()


def test_an_idle_poll_takes_no_write_lock(ledger: Ledger, tmp_path: Path, make_ref: MakeRef) -> None:
    """With nothing to lease, polling succeeds while another process holds the write lock."""
    _commit(ledger, make_ref, "a")
    ledger.lease("r", 1, 60)
    other = Ledger(tmp_path / "ledger.sqlite")
    with other._database.transaction():
        assert ledger.lease("q", 1, 60) == []
        assert ledger.status()["leased"] == 1
    other.close()


# --- checkpoints ---


def test_a_checkpoint_makes_its_rows_durable(ledger: Ledger, make_ref: MakeRef) -> None:
    _commit(ledger, make_ref, "abc")
    ledger.lease("r", 9, 60)
    assert ledger.latest_checkpoint("r") is None
    recorded = ledger.record_checkpoint("r", Path("c1"), 10, ["a", "b", "a"], metrics={"loss": 0.5})
    assert ledger.latest_checkpoint("r") == recorded
    assert (recorded.path, recorded.step, recorded.metrics) == ("c1", 10, {"loss": 0.5})
    assert ledger.status() == {"pending": 0, "leased": 1, "durable": 2, "failed": 0, "heldout": 0}
    assert ledger.consumption("r") == {"a": 1, "b": 1}
    assert _ids(ledger.durable("r", 9)) == ["b", "a"]
    assert ledger.durable("q", 9) == []
    ledger.record_checkpoint("r", "c2", 11, ["c"])
    latest = ledger.latest_checkpoint("r")
    assert latest is not None
    assert latest.path == "c2"
    assert ledger.latest_checkpoint("q") is None


@pytest.mark.parametrize("other", ["never leased", "leased by another run", "durable already", "unknown", "failed"])
def test_a_lost_lease_records_nothing(ledger: Ledger, make_ref: MakeRef, other: str) -> None:
    _commit(ledger, make_ref, "ab")
    if other == "never leased":
        ledger.lease("r", 1, 60)
    elif other == "leased by another run":
        ledger.lease("r", 1, 60)
        ledger.lease("q", 1, 60)
    elif other == "durable already":
        ledger.lease("r", 2, 60)
        ledger.record_checkpoint("r", "c0", 0, ["b"])
    elif other == "failed":
        ledger.lease("r", 2, 60)
        ledger.fail("r", "b", "damaged", retryable=False)
    else:
        ledger.lease("r", 1, 60)
        ledger.forget(["b"])
    before, latest = ledger.status(), ledger.latest_checkpoint("r")
    with pytest.raises(LeaseLost, match="Nothing was recorded") as raised:
        ledger.record_checkpoint("r", "c1", 1, ["a", "b"])
    assert raised.value.sample_ids == ["b"]
    assert isinstance(raised.value, FeatureError)
    assert (ledger.status(), ledger.latest_checkpoint("r")) == (before, latest)
    ledger.record_checkpoint("r", "c1", 1, ["a"])


def test_a_late_trainer_still_counts_until_its_rows_are_taken(ledger: Ledger, make_ref: MakeRef, clock: Clock) -> None:
    _commit(ledger, make_ref, "ab")
    ledger.lease("r", 2, 60)
    clock.now += 100
    ledger.record_checkpoint("r", "c1", 1, ["a"])  # expired, but nobody else has it
    assert _ids(ledger.lease("q", 2, 60)) == ["b"]
    with pytest.raises(LeaseLost):
        ledger.record_checkpoint("r", "c2", 2, ["b"])


def test_a_checkpoint_of_a_run_holds_what_its_members_leased(ledger: Ledger, make_ref: MakeRef) -> None:
    """Several processes train one run: each leases as a member of it, and what is recorded or recovered for it is for all."""
    _commit(ledger, make_ref, "abcdef")
    one, ten = member_of("r", 1), member_of("r", 10)
    assert [run_of(name) for name in ("r", one, ten)] == ["r"] * 3
    assert [_ids(ledger.lease(name, 1, 60.0)) for name in ("r", one, ten, "r-2")] == [["a"], ["b"], ["c"], ["d"]]
    with pytest.raises(LeaseLost, match=r"\(d\)"):
        ledger.record_checkpoint("r", "step-1", 1, ["a", "b", "d"])
    ledger.record_checkpoint("r", "step-1", 1, ["a", "b"])
    assert ledger.consumption("r") == {"a": 1, "b": 1}
    assert _ids(ledger.durable("r", 9)) == ["b", "a"]
    assert _ids(ledger.lease(one, 1, 60.0)) == ["e"]
    assert ledger.recover(one) == 1
    assert ledger.recover("r") == 1
    assert _ids(ledger.leased("r-2")) == ["d"]
    assert ledger.status() == {"pending": 3, "leased": 1, "durable": 2, "failed": 0, "heldout": 0}


def test_recover_returns_what_no_checkpoint_holds_and_spares_attempts(ledger: Ledger, make_ref: MakeRef, clock: Clock) -> None:
    _commit(ledger, make_ref, "abc")
    for _ in range(10):  # more restarts than attempts
        assert _ids(ledger.lease("r", 9, 60)) == ["a", "b", "c"]
        assert ledger.recover("r") == 3
    ledger.lease("r", 9, 60)
    clock.now += 60
    assert _ids(ledger.lease("r", 1, 60)) == ["a"]
    ledger.lease("q", 1, 60)
    ledger.record_checkpoint("r", "c", 1, ["a"])
    assert ledger.recover("r") == 0
    assert ledger.status() == {"pending": 1, "leased": 1, "durable": 1, "failed": 0, "heldout": 0}


def test_everything_survives_reopening(tmp_path: Path, ledger: Ledger, make_ref: MakeRef) -> None:
    _commit(ledger, make_ref, "ab")
    ledger.lease("r", 9, 60)
    ledger.record_checkpoint("r", "c", 1, ["a"])
    again = Ledger(tmp_path / "ledger.sqlite")
    assert again.status() == ledger.status()
    assert again.latest_checkpoint("r") == ledger.latest_checkpoint("r")
    assert again.recover("r") == 1
    again.close()


def test_trainable_rows_are_all_that_can_be_read_but_held_out_ones(ledger: Ledger, make_ref: MakeRef) -> None:
    _commit(ledger, make_ref, "abcde")
    ledger.commit(make_ref("h"), "heldout")
    ledger.lease("r", 4, 60)
    ledger.record_checkpoint("r", "c", 1, ["a", "b"])
    ledger.shed_durable(100)
    ledger.fail("r", "c", "damaged", retryable=False)
    assert _ids(ledger.trainable()) == ["b", "d", "e"]
    assert ledger.status()["leased"] == 1  # nothing was leased by looking


def test_the_backlog_is_what_no_checkpoint_holds(ledger: Ledger, make_ref: MakeRef) -> None:
    for size, name in enumerate("abcdef", 1):
        ledger.commit(make_ref(name, num_bytes=10**size), "train")
    ledger.commit(make_ref("h"), "heldout")
    assert ledger.backlog() == (6, 1_111_110)
    ledger.lease("r", 3, 60)
    assert ledger.backlog() == (6, 1_111_110), "rows in a trainer's hands may come back"
    ledger.record_checkpoint("r", "c", 1, ["a"])
    ledger.fail("r", "b", "damaged", retryable=False)
    assert ledger.backlog() == (4, 1_111_000)
    ledger.commit(make_ref("d", generation=2, num_bytes=20_000), "train")
    ledger.recover("r")
    ledger.forget(["f"])
    assert ledger.backlog() == (3, 121_000)
    ledger.shed_durable(10**9)
    assert ledger.backlog() == (3, 121_000)


def test_a_ledger_of_an_older_layout_goes_on(tmp_path: Path, make_ref: MakeRef) -> None:
    path = tmp_path / "ledger.sqlite"
    ledger = Ledger(path)
    _commit(ledger, make_ref, "abc")
    ledger.lease("r", 1, 60)
    ledger.record_checkpoint("r", "c", 1, ["a"])
    ledger.close()
    connection = sqlite3.connect(path)  # as version 2 left it
    for trigger in ("samples_in", "samples_out", "samples_moved"):
        connection.execute(f"DROP TRIGGER {trigger}")
    connection.execute("ALTER TABLE counts DROP COLUMN num_bytes")
    for event, sign, row in (("INSERT", "+", "NEW"), ("DELETE", "-", "OLD")):
        name = {"INSERT": "in", "DELETE": "out"}[event]
        connection.execute(
            f"""CREATE TRIGGER samples_{name} AFTER {event} ON samples
            BEGIN UPDATE counts SET num_rows = num_rows {sign} 1 WHERE state = {row}.state; END"""
        )
    connection.execute("CREATE TRIGGER samples_moved AFTER UPDATE OF state ON samples BEGIN SELECT 1; END")
    connection.execute("DROP TABLE watermarks")
    connection.execute("PRAGMA user_version=2")
    connection.close()
    ledger = Ledger(path)
    assert ledger.backlog() == (2, 200)
    _commit(ledger, make_ref, "d")
    assert (ledger.backlog(), ledger.status()["durable"]) == ((3, 300), 1)
    assert ledger.watermarks() is None
    assert not ledger.is_shedding()
    for high in (5, 9):
        ledger.set_watermarks(Watermarks(high, 4, 600, 500))
    assert ledger.watermarks() == Watermarks(9, 4, 600, 500)
    ledger.set_shedding(True)
    assert ledger.is_shedding()
    ledger.set_watermarks(Watermarks(9, 4, 600, 500))
    assert not ledger.is_shedding(), "a new tap has not looked yet"
    ledger.close()


# --- failures ---


def test_a_retryable_failure_returns_the_row_until_attempts_are_used_up(ledger: Ledger, make_ref: MakeRef) -> None:
    _commit(ledger, make_ref, "a")
    for _ in range(2):
        assert _ids(ledger.lease("r", 1, 60)) == ["a"]
        assert ledger.fail("r", "a", "out of memory", retryable=True)
    assert _ids(ledger.lease("r", 1, 60)) == ["a"]
    assert ledger.fail("r", "a", "out of memory", retryable=True)
    assert ledger.lease("r", 1, 60) == []
    assert ledger.failures() == {"a": "out of memory"}
    assert ledger.fail("r", "a", "again", retryable=True) is False
    assert ledger.fail("r", "unknown", "?", retryable=False) is False


def test_a_damaged_row_fails_at_once_and_its_features_are_garbage(ledger: Ledger, make_ref: MakeRef) -> None:
    _commit(ledger, make_ref, "a")
    ledger.commit(make_ref("h"), "heldout")
    ledger.lease("r", 1, 60)
    ledger.fail("r", "a", "damaged", retryable=False)
    assert ledger.status()["failed"] == 1
    assert ledger.needed() == {("h", 1)}


def test_a_run_fails_no_rows_but_its_own(ledger: Ledger, make_ref: MakeRef) -> None:
    _commit(ledger, make_ref, "abcd")
    ledger.commit(make_ref("h"), "heldout")
    ledger.lease("r", 2, 60)
    ledger.record_checkpoint("r", "c", 1, ["a"])
    ledger.lease("other", 1, 60)
    before, needed = ledger.status(), ledger.needed()
    for run, name in (("other", "a"), ("other", "b"), ("r", "c"), ("r", "d"), ("r", "h"), ("", "d")):
        for retryable in (True, False):
            assert ledger.fail(run, name, "not mine", retryable=retryable) is False
    assert (ledger.status(), ledger.needed(), ledger.failures()) == (before, needed, {})


def test_a_durable_row_stays_durable_when_its_features_fail(ledger: Ledger, make_ref: MakeRef) -> None:
    _commit(ledger, make_ref, "a")
    ledger.lease("r", 1, 60)
    ledger.record_checkpoint("r", "c", 1, ["a"])
    assert ledger.fail("r", "a", "gone", retryable=False)
    assert (ledger.status()["durable"], ledger.durable("r", 9), ledger.needed()) == (1, [], set())


# --- making room ---


def test_only_the_oldest_durable_rows_are_shed(ledger: Ledger, make_ref: MakeRef) -> None:
    _commit(ledger, make_ref, "abcdef")
    ledger.commit(make_ref("h"), "heldout")
    ledger.lease("r", 5, 60)
    ledger.record_checkpoint("r", "c", 1, ["a", "b", "c", "d"])
    assert _ids(ledger.shed_durable(150)) == ["a", "b"]
    assert _ids(ledger.durable("r", 9)) == ["d", "c"]
    assert _ids(ledger.shed_durable(10**9)) == ["c", "d"]
    assert ledger.shed_durable(1) == []
    assert {sample_id for sample_id, _ in ledger.needed()} == {"e", "f", "h"}
    assert ledger.status()["durable"] == 4
    assert ledger.consumption("r") == dict.fromkeys("abcd", 1)


def test_forget_spares_leased_rows(ledger: Ledger, make_ref: MakeRef) -> None:
    _commit(ledger, make_ref, "ab")
    ledger.lease("r", 1, 60)
    assert ledger.forget(["a", "b", "c"]) == 1
    assert ledger.status() == {"pending": 0, "leased": 1, "durable": 0, "failed": 0, "heldout": 0}


# --- tombstones, and producers that start again ---


def test_a_row_that_was_pushed_out_stays_dead(ledger: Ledger, make_ref: MakeRef) -> None:
    """The same turn offered again must not become a row to train on: a gate may have judged drafters by it."""
    for name in "abcdef":
        ledger.hold_out(make_ref(name), 6)
    _, out = ledger.hold_out(make_ref("g"), 1)
    before = ledger.status()
    for ref in out:
        assert ledger.commit(replace(ref, generation=9), "train") is False
        assert ledger.hold_out(replace(ref, generation=9), 9) == (False, [])
    assert ledger.status() == before
    assert ledger.known(["a", "b", "c", "d", "e", "f", "g", "h"]) == set("abcdefg")


def test_a_producer_that_starts_again_knows_what_it_need_not_make(tmp_path: Path, make_ref: MakeRef) -> None:
    there = set("abcdefgh")
    ledger = Ledger(tmp_path / "ledger.sqlite", exists=lambda ref: ref.sample_id in there)
    _commit(ledger, make_ref, "abcdef")
    ledger.commit(make_ref("g"), "heldout")
    ledger.commit(make_ref("h"), "heldout")
    ledger.lease("r", 3, 60)
    ledger.record_checkpoint("r", "c", 1, ["a"])
    ledger.fail("r", "b", "damaged", retryable=False)
    names = [*"abcdefgh", "never"]
    assert ledger.known(names) == set("abcdefgh")
    there -= set("acdg")  # durable, leased, pending, held out
    assert ledger.known(names) == set("abcefh")
    ledger.close()


def test_a_row_made_again_takes_its_old_place(tmp_path: Path, make_ref: MakeRef) -> None:
    """Rows whose features went with a process come back when they are made anew; rows that were bad do not."""
    there = set("bx")
    ledger = Ledger(tmp_path / "ledger.sqlite", exists=lambda ref: ref.sample_id in there)
    _commit(ledger, make_ref, "abx")
    ledger.commit(make_ref("h"), "heldout")
    assert _ids(ledger.lease("r", 9, 60)) == ["b", "x"]
    ledger.fail("r", "b", "states that are not finite", retryable=False)
    there.discard("x")
    ledger.fail("r", "x", "its features are gone", retryable=False)
    assert ledger.status()["failed"] == 3
    assert ledger.known("abxh") == {"b"}
    there |= set("ax")
    for name in "abxh":
        assert ledger.commit(make_ref(name, generation=2), "train") is False
    assert [(ref.sample_id, ref.generation) for ref in ledger.lease("r", 9, 60)] == [("a", 2), ("x", 2)]
    assert ledger.failures() == {"b": "states that are not finite"}
    assert _ids(ledger.heldout()) == ["h"]  # what was held out is never trained on
    ledger.close()


# --- retention ---


def test_old_rows_give_up_their_features_whatever_they_are(ledger: Ledger, make_ref: MakeRef) -> None:
    for name in "abcd":
        ledger.commit(replace(make_ref(name), created_at=10.0), "train")
    ledger.commit(replace(make_ref("h"), created_at=10.0), "heldout")
    ledger.commit(replace(make_ref("young"), created_at=20.0), "train")
    ledger.lease("r", 3, 60)
    ledger.record_checkpoint("r", "c", 1, ["a"])
    ledger.fail("r", "b", "damaged", retryable=False)
    assert sorted(_ids(ledger.expire(15.0))) == ["a", "d", "h"]
    assert ledger.needed() == {("c", 1), ("young", 1)}  # c is in a trainer's hands
    assert ledger.status() == {"pending": 1, "leased": 1, "durable": 1, "failed": 2, "heldout": 0}
    assert ledger.failures()["d"].startswith("it grew too old")
    assert ledger.expire(15.0) == []
    ledger.recover("r")
    assert _ids(ledger.expire(15.0)) == ["c"]
    assert ledger.commit(make_ref("h", generation=2), "heldout") is False  # its tombstone stands
    assert ledger.consumption("r") == {"a": 1}


def test_only_the_newest_trained_rows_are_kept(ledger: Ledger, make_ref: MakeRef) -> None:
    _commit(ledger, make_ref, "abcdef")
    ledger.lease("r", 5, 60)
    ledger.record_checkpoint("r", "c", 1, ["a", "b", "c", "d"])
    assert sorted(_ids(ledger.keep_newest_durable(3))) == ["a"]
    assert sorted(_ids(ledger.keep_newest_durable(1))) == ["b", "c"]
    assert ledger.keep_newest_durable(1) == []
    assert {sample_id for sample_id, _ in ledger.needed()} == {"d", "e", "f"}
    assert ledger.status()["durable"] == 4


# --- the cost of asking ---


def _fill(ledger: Ledger, ref: SampleRef, num_rows: int) -> None:
    """Rows of every state, most of them long done with."""
    with ledger._database.transaction() as connection:
        connection.execute(
            """WITH RECURSIVE numbers(i) AS (SELECT 0 UNION ALL SELECT i + 1 FROM numbers WHERE i + 1 < ?)
            INSERT INTO samples(sample_id, generation, num_bytes, ref, slice, created_at, state, has_features, run_id,
                lease_expires_at, heldout_rank)
            SELECT 'old' || i, 1, 100, replace(?, '"a"', '"old' || i || '"'), 's', i,
                CASE WHEN i < 8 THEN 'heldout' WHEN i < 40 THEN 'leased' WHEN i % 10 < 2 THEN 'pending'
                    WHEN i % 10 < 3 THEN 'failed' ELSE 'durable' END,
                i < 40 OR i % 10 < 2 OR i % 10 > 7, iif(i % 2, 'r', 'other'), iif(i BETWEEN 8 AND 39, 1e9, NULL),
                iif(i < 8, i / 1e9, NULL)
            FROM numbers""",
            (num_rows, ref.to_json()),
        )


def _steps(ledger: Ledger, call: Callable[[], Any]) -> int:
    """Instructions of SQLite's virtual machine that the call takes: its cost, without the noise of a clock."""
    count = 0

    def step() -> int:
        nonlocal count
        count += 1
        return 0

    for connection in (ledger._database._connection, ledger._database._reader):
        connection.set_progress_handler(step, 1)
    call()
    for connection in (ledger._database._connection, ledger._database._reader):
        connection.set_progress_handler(None, 0)
    return count


def _costs(ledger: Ledger, make_ref: MakeRef) -> dict[str, int]:
    calls: dict[str, Callable[[], Any]] = {
        "status": ledger.status,
        "backlog": ledger.backlog,
        "heartbeat": lambda: ledger.heartbeat("r", 60),
        "commit": lambda: ledger.commit(make_ref("new"), "train"),
        "hold out": lambda: ledger.hold_out(make_ref("held"), 8),
        "lease": lambda: ledger.lease("run", 4, 60),
        "claim": lambda: ledger.claim("run", ["new", "old41"], 60),
        "checkpoint": lambda: ledger.record_checkpoint("run", "c", 1, ["old41"]),
        "latest checkpoint": lambda: ledger.latest_checkpoint("run"),
        "fail": lambda: ledger.fail("other", "old54", "damaged", retryable=False),
        "known": lambda: ledger.known(["old60", "old61", "never"]),
        "held out": lambda: ledger.heldout(8),
        "replay": lambda: ledger.durable("r", 8),
        "make room": lambda: ledger.shed_durable(300),
        "recover": lambda: ledger.recover("run"),
        "expire": lambda: ledger.expire(0.0),
    }
    costs = {name: _steps(ledger, call) for name, call in calls.items()}
    with ledger._database.transaction() as connection:
        connection.execute("UPDATE samples SET state = 'durable' WHERE state = 'pending'")
    return {**costs, "poll in vain": _steps(ledger, lambda: ledger.lease("run", 4, 60))}


def test_what_is_polled_costs_the_same_with_a_hundred_thousand_rows(tmp_path: Path, make_ref: MakeRef) -> None:
    costs = []
    for num_rows in (500, 100_000):
        ledger = Ledger(tmp_path / f"{num_rows}.sqlite")
        _fill(ledger, make_ref("a"), num_rows)
        assert sum(ledger.status().values()) == num_rows
        costs.append(_costs(ledger, make_ref))
        ledger.close()
    few, many = costs
    assert all(few.values())
    assert {name: (few[name], cost) for name, cost in many.items() if cost > 2 * few[name]} == {}


# --- several at once ---


LEASER = """
import sys, time
from pathlib import Path
from runtime.features import Ledger
ledger = Ledger(Path(sys.argv[1]) / "ledger.sqlite")
with open(Path(sys.argv[1]) / sys.argv[2], "w") as share:
    while refs := ledger.lease(sys.argv[2], 2, 600):
        print(*(ref.sample_id for ref in refs), sep="\\n", file=share)
        time.sleep(0.002)  # as one who trains on them: SQLite is not fair to those who wait
"""


def test_processes_leasing_at_once_never_get_the_same_row(tmp_path: Path, nursery: Any, make_ref: MakeRef) -> None:
    ledger = Ledger(tmp_path / "ledger.sqlite")
    names = [f"s{index}" for index in range(150)]
    for name in names:
        ledger.commit(make_ref(name), "train")
    runs = ["r", "q", "p"]
    nursery.start(LEASER, *([str(tmp_path), run] for run in runs))
    assert nursery.end() == [0, 0, 0]
    shares = [(tmp_path / run).read_text().split() for run in runs]
    assert sorted(chain.from_iterable(shares)) == sorted(names)
    assert sum(len(share) > 0 for share in shares) >= 2, "the processes did not overlap"
    ledger.close()


def test_threads_of_one_ledger_never_get_the_same_row(ledger: Ledger, make_ref: MakeRef) -> None:
    for index in range(60):
        ledger.commit(make_ref(f"s{index}"), "train")
    got: Counter[str] = Counter()

    def take(run: str) -> None:
        while refs := ledger.lease(run, 2, 600):
            got.update(_ids(refs))

    threads = [threading.Thread(target=take, args=(f"r{index}",)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(got) == 60
    assert set(got.values()) == {1}


def test_claim_leases_exactly_the_named_rows(ledger: Ledger, make_ref: Callable[..., SampleRef]) -> None:
    for name in "abcd":
        ledger.commit(make_ref(name), "train")
    assert [ref.sample_id for ref in ledger.lease("other", 1, 60.0)] == ["a"]
    assert [ref.sample_id for ref in ledger.claim("run", ["d", "a", "b", "nobody"], 60.0)] == ["b", "d"]
    assert [ref.sample_id for ref in ledger.leased("run")] == ["b", "d"]
    assert [ref.sample_id for ref in ledger.lease("run", 9, 60.0)] == ["c"]
    assert ledger.claim("run", ["b"], 60.0) == []

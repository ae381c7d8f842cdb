"""Store and ledger together: a trainer killed at any instant loses no row and counts none twice; room and garbage."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from runtime.errors import FeatureNotFound
from runtime.features import (
    FeatureRow,
    Ledger,
    LocalDirectoryStore,
    SampleMeta,
    SampleRef,
    collect_garbage,
    make_room,
)

MakeRow = Callable[..., FeatureRow]
MakeMeta = Callable[..., SampleMeta]
Plane = tuple[LocalDirectoryStore, Ledger]

# A trainer whose weights are the list of rows that they have seen. It stops at the point named by its second argument.
TRAINER = """
import json, os, sys, time
from pathlib import Path
from runtime.config import FeaturesConfig
from runtime.features import open_feature_plane

root, stop_at = Path(sys.argv[1]), sys.argv[2]
store, ledger = open_feature_plane(root / "features", FeaturesConfig())

def reach(point):
    if point == stop_at:
        print("here", flush=True)
        time.sleep(60)

ledger.recover("run")
latest = ledger.latest_checkpoint("run")
weights = json.loads(Path(latest.path).read_text()) if latest else []
step = latest.step if latest else 0
ledger._database._connection.set_trace_callback(
    lambda sql: reach("inside the transaction") if sql.startswith("INSERT INTO consumption") else
    reach("before its commit") if sql == "COMMIT" and step else None
)
while refs := ledger.lease("run", 3, 600):
    reach("after the lease")
    for ref in refs:
        assert store.get(ref)[0].num_tokens == 12
        weights.append(ref.sample_id)
    reach("after training")
    path = root / f"checkpoint-{os.getpid()}-{step + 1}.json"
    path.write_text(json.dumps(weights))
    reach("after saving")
    step += 1
    ledger.record_checkpoint("run", path, step, [ref.sample_id for ref in refs])
    reach("after recording")
"""


def _fill(plane: Plane, make_row: MakeRow, make_meta: MakeMeta, num_rows: int) -> list[SampleRef]:
    store, ledger = plane
    refs = [store.put(make_meta(f"s{index}"), make_row()) for index in range(num_rows)]
    for ref in refs:
        ledger.commit(ref, "train")
    return refs


def _assert_each_row_counts_once(plane: Plane, refs: list[SampleRef]) -> None:
    _, ledger = plane
    latest = ledger.latest_checkpoint("run")
    assert latest is not None
    names = sorted(ref.sample_id for ref in refs)
    assert sorted(json.loads(Path(latest.path).read_text())) == names
    assert ledger.consumption("run") == dict.fromkeys(names, 1)
    assert ledger.status()["durable"] == len(refs)


@pytest.mark.parametrize(
    "point",
    [
        "after the lease",
        "after training",
        "after saving",
        "inside the transaction",
        "before its commit",
        "after recording",
    ],
)
def test_a_trainer_killed_at_any_point_loses_and_repeats_nothing(
    plane: Plane, tmp_path: Path, nursery: Any, make_row: MakeRow, make_meta: MakeMeta, point: str
) -> None:
    refs = _fill(plane, make_row, make_meta, 8)
    [pid] = nursery.start(TRAINER, [str(tmp_path), point])
    assert nursery.line() == "here"
    nursery.kill(pid)
    assert plane[1].status()["durable"] == (3 if point == "after recording" else 0)
    nursery.start(TRAINER, [str(tmp_path), "nowhere"])
    assert nursery.end() == [0]
    _assert_each_row_counts_once(plane, refs)


def test_a_trainer_killed_at_random_again_and_again(
    plane: Plane, tmp_path: Path, nursery: Any, make_row: MakeRow, make_meta: MakeMeta
) -> None:
    refs = _fill(plane, make_row, make_meta, 150)
    chance = random.Random(7)
    num_durable = 0
    for _ in range(8):
        [pid] = nursery.start(TRAINER, [str(tmp_path), "nowhere"])
        while plane[1].status()["durable"] == num_durable:  # let it get somewhere
            time.sleep(0.001)
        time.sleep(chance.uniform(0.0, 0.01))
        nursery.kill(pid)
        num_durable = plane[1].status()["durable"]
    nursery.start(TRAINER, [str(tmp_path), "nowhere"])
    assert nursery.end() == [0]
    _assert_each_row_counts_once(plane, refs)


def test_room_is_made_from_the_oldest_trained_rows_only(
    tmp_path: Path, make_row: MakeRow, make_meta: MakeMeta, make_plane: Callable[[Path, int], Plane]
) -> None:
    measure = LocalDirectoryStore(tmp_path / "measure", 1 << 20)
    size = measure.put(make_meta("s0"), make_row()).num_bytes
    store, ledger = make_plane(tmp_path / "features", 5 * size)
    refs = _fill((store, ledger), make_row, make_meta, 4)
    held_out = store.put(make_meta("h0"), make_row())
    ledger.commit(held_out, "heldout")
    assert make_room(store, ledger, size) == 0  # everything there is unread
    ledger.lease("run", 3, 60)
    assert make_room(store, ledger, size) == 0  # or being read
    ledger.record_checkpoint("run", "c", 1, ["s0", "s1"])
    assert make_room(store, ledger, 6 * size) == 0  # will never fit: nothing is given up for it
    assert make_room(store, ledger, size) == size
    assert make_room(store, ledger, size) == 0  # there is room now
    assert [store.exists(ref) for ref in refs] == [False, True, True, True]
    assert ledger.durable("run", 9) == [refs[1]]
    assert make_room(store, ledger, 4 * size) == size
    assert [store.exists(ref) for ref in [*refs, held_out]] == [False, False, True, True, True]
    with pytest.raises(FeatureNotFound):
        store.get(refs[0])


def test_a_row_that_never_reached_the_ledger_is_garbage(plane: Plane, make_row: MakeRow, make_meta: MakeMeta) -> None:
    store, ledger = plane
    refs = _fill(plane, make_row, make_meta, 3)
    orphan = store.put(make_meta("orphan"), make_row())
    ledger.lease("r", 1, 60)
    ledger.fail("r", "s0", "damaged", retryable=False)
    assert collect_garbage(store, ledger) == 0  # they are young
    assert collect_garbage(store, ledger, max_hold_age_s=-1.0) == 2
    assert [store.exists(ref) for ref in [*refs, orphan]] == [False, True, True, False]


def test_a_row_whose_file_vanished_fails_at_lease_time(plane: Plane, make_row: MakeRow, make_meta: MakeMeta) -> None:
    store, ledger = plane
    refs = _fill(plane, make_row, make_meta, 3)
    (store.root / refs[0].uri).unlink()
    with open(store.root / refs[1].uri, "r+b") as file:
        file.truncate(100)
    assert ledger.lease("run", 9, 60) == [refs[2]]
    assert ledger.failures().keys() == {"s0", "s1"}
    assert "gone or cut short" in ledger.failures()["s1"]


def test_the_layout_on_disk(plane: Plane, tmp_path: Path, make_row: MakeRow, make_meta: MakeMeta) -> None:
    [ref] = _fill(plane, make_row, make_meta, 1)
    root = tmp_path / "features"
    assert (root / "ledger.sqlite").is_file()
    assert (root / "store.sqlite").is_file()
    assert [path.name for path in (root / "rows").iterdir()] == [Path(ref.uri).name]

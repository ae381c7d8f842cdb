"""The local store: whole files or none, an exact budget, generations, and damage that is noticed."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from runtime.errors import FeatureBudgetExceeded, FeatureError, FeatureNotFound
from runtime.features import FeatureRow, FeatureStore, LocalDirectoryStore, SampleMeta
from runtime.features.directory import Files

MakeRow = Callable[..., FeatureRow]
MakeMeta = Callable[..., SampleMeta]


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def store(tmp_path: Path) -> LocalDirectoryStore:
    return LocalDirectoryStore(tmp_path, 1 << 20)


def _files(store: LocalDirectoryStore) -> list[str]:
    return sorted(path.name for path in (store.root / "rows").iterdir())


def _sum_of_files(store: LocalDirectoryStore) -> int:
    """Also while others rename and delete: a file that moves on the way counts once."""
    sizes = {}
    for path in (store.root / "rows").iterdir():
        with suppress(FileNotFoundError):
            status = path.stat()
            sizes[status.st_ino] = status.st_size
    return sum(sizes.values())


def test_it_is_a_feature_store(store: LocalDirectoryStore) -> None:
    protocol: FeatureStore = store
    assert protocol.health().budget_bytes == 1 << 20


def test_put_and_get(store: LocalDirectoryStore, make_row: MakeRow, make_meta: MakeMeta) -> None:
    row = make_row()
    ref = store.put(make_meta("a"), row)
    again, _ = store.get(ref)
    assert torch.equal(again.token_ids, row.token_ids)
    assert torch.equal(again.generated, row.generated)
    assert again.hidden.aux.dtype == torch.bfloat16
    assert torch.equal(again.hidden.aux, row.hidden.aux.bfloat16())
    assert torch.equal(again.hidden.last, row.hidden.last.bfloat16())
    assert again.labels == {"kind": "test"} == ref.labels
    assert (ref.num_tokens, ref.num_bytes) == (12, _sum_of_files(store))
    assert store.exists(ref)
    health = store.health()
    assert (health.used_bytes, health.num_rows) == (ref.num_bytes, 1)
    assert health.free_bytes > 0


def test_float32_rows_come_back_exactly(tmp_path: Path, make_row: MakeRow, make_meta: MakeMeta) -> None:
    store = LocalDirectoryStore(tmp_path, 1 << 20, dtype=torch.float32)
    row = make_row()
    assert torch.equal(store.get(store.put(make_meta(), row))[0].hidden.aux, row.hidden.aux)


def test_a_second_put_makes_a_new_generation(store: LocalDirectoryStore, make_row: MakeRow, make_meta: MakeMeta) -> None:
    old = store.put(make_meta("a"), make_row(seed=1))
    new = store.put(make_meta("a"), make_row(seed=2))
    assert new.generation > old.generation
    with pytest.raises(KeyError):
        store.get(old)
    assert not store.exists(old)
    assert store.release(old) is False  # a stale handle's release is a no-op
    assert torch.equal(store.get(new)[0].hidden.aux, make_row(seed=2).hidden.aux.bfloat16())
    assert store.used_bytes() == new.num_bytes == _sum_of_files(store)


def test_generations_grow_even_after_a_release(store: LocalDirectoryStore, make_row: MakeRow, make_meta: MakeMeta) -> None:
    old = store.put(make_meta("a"), make_row())
    store.release(old)
    assert store.put(make_meta("a"), make_row()).generation > old.generation
    with pytest.raises(FeatureNotFound, match="released, replaced or shed"):
        store.get(old)


def test_release_frees_once(store: LocalDirectoryStore, make_row: MakeRow, make_meta: MakeMeta) -> None:
    ref, other = (store.put(make_meta(name), make_row()) for name in "ab")
    assert store.release(ref) is True
    assert store.release(ref) is False
    with pytest.raises(FeatureNotFound):
        store.get(ref)
    assert store.used_bytes() == other.num_bytes
    assert store.delete([ref, other]) == other.num_bytes
    assert store.used_bytes() == 0
    assert _files(store) == []


def test_abort_removes_the_sample_whatever_its_generation(
    store: LocalDirectoryStore, make_row: MakeRow, make_meta: MakeMeta
) -> None:
    ref = store.put(make_meta("a"), make_row())
    store.abort("a")
    store.abort("a")
    assert store.used_bytes() == 0
    assert not store.exists(ref)


def test_a_reference_cannot_name_a_file_of_its_own(
    store: LocalDirectoryStore, make_row: MakeRow, make_meta: MakeMeta, tmp_path: Path
) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(b"keep")
    ref = store.put(make_meta("a"), make_row())
    forged = replace(ref, sample_id="b", uri="../secret")
    with pytest.raises(FeatureNotFound):
        store.get(forged)
    assert store.release(forged) is False
    assert secret.exists()


# --- the budget ---


def test_the_budget_is_exact(tmp_path: Path, make_row: MakeRow, make_meta: MakeMeta) -> None:
    size = LocalDirectoryStore(tmp_path / "measure", 1 << 20).put(make_meta("m"), make_row()).num_bytes
    store = LocalDirectoryStore(tmp_path / "real", 3 * size)
    refs = [store.put(make_meta(name), make_row()) for name in "abc"]
    assert store.used_bytes() == store.budget_bytes
    with pytest.raises(FeatureBudgetExceeded, match=r"does not fit.*features\.budget_mib") as raised:
        store.put(make_meta("d"), make_row())
    assert raised.value.reason == "FEATURE_BUDGET_EXCEEDED"
    assert len(_files(store)) == 3
    store.release(refs[0])
    store.put(make_meta("d"), make_row())
    assert store.used_bytes() == store.budget_bytes == _sum_of_files(store)


def test_the_budget_counts_the_file_not_only_the_tensors(tmp_path: Path, make_row: MakeRow, make_meta: MakeMeta) -> None:
    size = LocalDirectoryStore(tmp_path / "measure", 1 << 20).put(make_meta("m"), make_row()).num_bytes
    store = LocalDirectoryStore(tmp_path / "real", size - 1)
    with pytest.raises(FeatureBudgetExceeded):
        store.put(make_meta("a"), make_row())
    assert (store.used_bytes(), _files(store)) == (0, [])


FILLER = """
import sys, torch
from pathlib import Path
from runtime.errors import FeatureBudgetExceeded
from runtime.features import FeatureRow, LocalDirectoryStore, SampleMeta
from runtime.hidden_states import HiddenStates
store = LocalDirectoryStore(Path(sys.argv[1]), int(sys.argv[2]))
row = FeatureRow(torch.arange(12), torch.ones(12, dtype=torch.bool), HiddenStates(torch.randn(11, 24), torch.randn(11, 8)))
for index in range(30):
    meta = SampleMeta(sample_id=f"{sys.argv[3]}{index}", run_id="r", source="s", target_fingerprint="f", aux_layer_ids=(1, 2, 3))
    try:
        ref = store.put(meta, row)
    except FeatureBudgetExceeded:
        continue
    if index % 3 == 0:
        store.release(ref)
"""


def test_the_budget_holds_across_processes_and_threads(
    tmp_path: Path, nursery: Any, make_row: MakeRow, make_meta: MakeMeta
) -> None:
    """Two more processes fill the same root while four threads of this one do: never over, and full at the end."""
    size = LocalDirectoryStore(tmp_path / "measure", 1 << 20).put(make_meta("m"), make_row()).num_bytes
    root, budget = tmp_path / "real", 20 * size + size // 2
    children = [[str(root), str(budget), name] for name in ("p", "q")]
    nursery.start(FILLER, *children)
    store = LocalDirectoryStore(root, budget)
    row = make_row()
    most = 0

    def fill(name: str) -> None:
        nonlocal most
        for index in range(30):
            try:
                store.put(make_meta(f"{name}{index}"), row)
            except FeatureBudgetExceeded:
                most = max(most, _sum_of_files(store))

    threads = [threading.Thread(target=fill, args=(name,)) for name in "wxyz"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert nursery.end() == [0, 0]
    assert store.used_bytes() == _sum_of_files(store) == 20 * size
    assert 0 < most <= budget


# --- damage ---


@pytest.mark.parametrize("damage", ["truncate", "flip a tensor's byte", "flip a header's byte", "empty", "other file"])
def test_a_damaged_file_is_named_never_read(
    store: LocalDirectoryStore, make_row: MakeRow, make_meta: MakeMeta, damage: str
) -> None:
    ref = store.put(make_meta("a"), make_row())
    path = store.root / ref.uri
    data = bytearray(path.read_bytes())
    if damage == "truncate":
        data = data[:-10]
    elif damage == "empty":
        data = bytearray()
    elif damage == "other file":
        data = bytearray(os.urandom(len(data)))
    else:
        at = -1 if "tensor" in damage else data.index(b"BF16")
        data[at] ^= 4
    path.write_bytes(data)
    with pytest.raises(FeatureError, match=path.name) as raised:
        store.get(ref)
    assert not isinstance(raised.value, KeyError)
    assert store.exists(ref) == (len(data) == ref.num_bytes)


def test_a_vanished_file_is_a_key_error(store: LocalDirectoryStore, make_row: MakeRow, make_meta: MakeMeta) -> None:
    ref = store.put(make_meta("a"), make_row())
    (store.root / ref.uri).unlink()
    assert not store.exists(ref)
    with pytest.raises(KeyError):
        store.get(ref)
    assert store.gc(0.0) == 1
    assert store.used_bytes() == 0


def test_a_put_that_cannot_write_leaves_nothing(store: LocalDirectoryStore, make_row: MakeRow, make_meta: MakeMeta) -> None:
    shutil.rmtree(store.root / "rows")
    with pytest.raises(FeatureError, match="cannot be written"):
        store.put(make_meta("a"), make_row())
    assert store.used_bytes() == 0
    (store.root / "rows").mkdir()
    assert store.get(store.put(make_meta("a"), make_row()))[0].num_tokens == 12


def test_a_root_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(FeatureError, match=r"rows cannot be made"):
        LocalDirectoryStore(tmp_path / "file", 1)


def test_a_lost_index_is_rebuilt_from_the_directory(tmp_path: Path, make_row: MakeRow, make_meta: MakeMeta) -> None:
    store = LocalDirectoryStore(tmp_path, 1 << 20)
    refs = [store.put(make_meta(name), make_row()) for name in "ab"]
    store.close()
    for path in tmp_path.glob("store.sqlite*"):
        path.unlink()
    again = LocalDirectoryStore(tmp_path, 1 << 20)
    assert again.used_bytes() == _sum_of_files(again) == sum(ref.num_bytes for ref in refs)
    assert again.get(refs[1])[0].num_tokens == 12
    assert again.put(make_meta("c"), make_row()).generation > max(ref.generation for ref in refs)


# --- garbage ---


WRITER_STOPPED_BEFORE = """
import os, sys, time, torch
from pathlib import Path
from runtime.features import FeatureRow, LocalDirectoryStore, SampleMeta
from runtime.hidden_states import HiddenStates
store = LocalDirectoryStore(Path(sys.argv[1]), 1 << 20)
def stop(*arguments):
    print("here", flush=True)
    time.sleep(60)
setattr(os, sys.argv[2], stop)
row = FeatureRow(torch.arange(12), torch.ones(12, dtype=torch.bool), HiddenStates(torch.zeros(11, 24), torch.zeros(11, 8)))
store.put(SampleMeta(sample_id="k", run_id="r", source="s", target_fingerprint="f", aux_layer_ids=(1, 2, 3)), row)
"""


@pytest.mark.parametrize("point", ["fsync", "replace", "open"])  # temporary written; synced; renamed but not published
def test_what_a_killed_writer_left_is_taken_back(
    tmp_path: Path, nursery: Any, make_row: MakeRow, make_meta: MakeMeta, point: str
) -> None:
    [pid] = nursery.start(WRITER_STOPPED_BEFORE, [str(tmp_path), point])
    assert nursery.line() == "here"
    nursery.kill(pid)
    store = LocalDirectoryStore(tmp_path, 1 << 20)
    assert len(_files(store)) == 1
    assert store.used_bytes() > 0
    kept = store.put(make_meta("a"), make_row())
    assert store.gc(3600.0) == 0  # it could be still at work
    assert store.gc(-1.0) == 1
    assert _files(store) == [Path(kept.uri).name]
    assert store.used_bytes() == kept.num_bytes


def test_gc_removes_old_rows_that_nobody_needs(tmp_path: Path, make_row: MakeRow, make_meta: MakeMeta) -> None:
    clock = Clock()
    store = LocalDirectoryStore(tmp_path, 1 << 20, clock=clock)
    orphan, needed = (store.put(make_meta(name), make_row()) for name in ("orphan", "needed"))
    clock.now += 100
    young = store.put(make_meta("young"), make_row())
    assert store.gc(50.0, {(needed.sample_id, needed.generation)}) == 1
    assert [store.exists(ref) for ref in (orphan, needed, young)] == [False, True, True]
    assert store.gc(0.0, None) == 0


def test_gc_removes_strange_files(store: LocalDirectoryStore, make_row: MakeRow, make_meta: MakeMeta) -> None:
    ref = store.put(make_meta("a"), make_row())
    for name in ("b.99.00000000.safetensors", ".c.98.00000000.safetensors.tmp"):
        path = store.root / "rows" / name
        path.write_bytes(b"x")
        os.utime(path, (1.0, 1.0))
    (store.root / "rows" / ".d.97.00000000.safetensors.tmp").write_bytes(b"young")
    assert store.gc(600.0) == 2
    assert _files(store) == [".d.97.00000000.safetensors.tmp", Path(ref.uri).name]


def test_a_put_that_gc_gave_up_says_so(tmp_path: Path, make_row: MakeRow, make_meta: MakeMeta) -> None:
    """A writer that slept through its hold age must not leave a file that nobody counts."""
    store, other = LocalDirectoryStore(tmp_path, 1 << 20), LocalDirectoryStore(tmp_path, 1 << 20)

    class Sleepy(Files):
        def write(self, name: str, data: bytes) -> None:
            super().write(name, data)
            assert other.gc(-1.0) == 1

    store._blobs = Sleepy(tmp_path / "rows")
    with pytest.raises(FeatureError, match="gave it up"):
        store.put(make_meta("a"), make_row())
    assert (_files(store), store.used_bytes()) == ([], 0)

"""The directory store: whole files or none, a budget across processes, and damage that is noticed."""

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

from runtime.errors import FeatureBudgetExceeded, FeatureError, FeatureNotFound
from runtime.features import FeatureRow, LocalDirectoryStore, SampleMeta
from runtime.features.directory import Files

MakeRow = Callable[..., FeatureRow]
MakeMeta = Callable[..., SampleMeta]


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

"""The store in a real Mooncake pool: what several machines share, what its leases delay, and how it fails."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from runtime.config import FeaturesConfig, StoreKind
from runtime.errors import ConfigError, FeatureError, FeatureNotFound, FeatureUnavailable
from runtime.features import FeatureRow, Ledger, SampleMeta, SampleRef, open_store

MakeRow = Callable[..., FeatureRow]
MakeMeta = Callable[..., SampleMeta]


@pytest.fixture
def server(mooncake_pool: Any, tmp_path: Path) -> Any:
    return mooncake_pool.store(tmp_path / "server", 1 << 20)


@pytest.fixture
def trainer(mooncake_pool: Any, tmp_path: Path) -> Any:
    """On another machine: an index of its own, no memory lent."""
    return mooncake_pool.store(tmp_path / "trainer", 1 << 20, segment_mib=0)


@pytest.fixture
def ref(server: Any, make_row: MakeRow, make_meta: MakeMeta) -> SampleRef:
    return server.put(make_meta("a"), make_row())


def test_the_reference_alone_finds_the_row_from_another_machine(server: Any, trainer: Any, ref: SampleRef) -> None:
    carried = SampleRef.from_json(ref.to_json())
    assert carried.uri.startswith("mooncake://")
    assert trainer.exists(carried)
    row, lease = trainer.get(carried)
    assert row.num_tokens == 12
    assert trainer.release(lease) is True
    assert trainer.release(lease) is False
    with pytest.raises(FeatureNotFound):
        trainer.get(carried)


def test_what_another_machine_released_leaves_the_owners_budget(server: Any, trainer: Any, ref: SampleRef) -> None:
    """Already gone counts as removed."""
    assert trainer.release(ref)
    assert not server.exists(ref)
    with pytest.raises(KeyError):
        server.get(ref)
    assert server.used_bytes() == ref.num_bytes
    assert server.gc(3600.0) == 1
    assert server.used_bytes() == 0
    assert server.release(ref) is False


def test_a_row_in_reading_is_removed_when_its_lease_is_over(
    server: Any, ref: SampleRef, make_row: MakeRow, make_meta: Any
) -> None:
    server.get(ref)
    assert server.release(ref) is True  # the pool answers LEASED: nobody finds the row any more, its bytes still count
    assert server.used_bytes() == ref.num_bytes
    assert not server.exists(ref)
    with pytest.raises(FeatureNotFound):
        server.get(ref)
    time.sleep(2 * 0.1)
    other = server.put(make_meta("b"), make_row())
    assert server.used_bytes() == other.num_bytes


def test_a_row_that_two_machines_read_is_removed_by_the_one_that_released_it(server: Any, trainer: Any, ref: SampleRef) -> None:
    _, lease = trainer.get(ref)
    assert trainer.release(lease) is True
    assert not trainer.exists(ref)
    time.sleep(2 * 0.1)
    assert trainer.gc(3600.0) == 1
    assert not server.exists(ref)


def test_a_replaced_generation_is_dead_on_every_machine(
    server: Any, trainer: Any, ref: SampleRef, make_row: MakeRow, make_meta: MakeMeta
) -> None:
    new = server.put(make_meta("a"), make_row(seed=2))
    with pytest.raises(KeyError):
        trainer.get(ref)
    assert trainer.release(ref) is False
    assert trainer.exists(new)


def test_indices_do_not_mistake_each_others_rows(
    server: Any, trainer: Any, ref: SampleRef, mooncake_pool: Any, tmp_path: Path, make_row: MakeRow, make_meta: MakeMeta
) -> None:
    """Two machines that put the same sample id have the same generations, and yet two rows."""
    other = mooncake_pool.store(tmp_path / "other", 1 << 20)
    theirs = other.put(make_meta("a"), make_row(num_tokens=20))
    assert (theirs.sample_id, theirs.generation) == (ref.sample_id, ref.generation)
    assert [store.get(each)[0].num_tokens for store in (server, other, trainer) for each in (ref, theirs)] == [12, 20] * 3
    assert other.release(ref) is True
    assert other.exists(theirs)


def test_a_forged_reference_finds_nothing(server: Any, trainer: Any, ref: SampleRef) -> None:
    for forged in (replace(ref, sample_id="b"), replace(ref, generation=99), replace(ref, uri="mooncake://../x")):
        assert not trainer.exists(forged)
        assert trainer.release(forged) is False
        with pytest.raises(FeatureNotFound):
            trainer.get(forged)
    assert server.exists(ref)


def test_a_pool_without_room_says_what_to_do(mooncake_pool: Any, tmp_path: Path, make_row: MakeRow, make_meta: Any) -> None:
    """Rows are pinned: the pool never evicts an unread one for a new one."""
    from runtime.features.mooncake import MooncakeStore

    pool = type(mooncake_pool)(tmp_path / "master.log")
    store: MooncakeStore = pool.store(tmp_path / "index", 1 << 30, segment_mib=16)
    try:
        row = make_row(num_tokens=10_000)
        refs = [store.put(make_meta(f"s{index}"), row) for index in range(16)]
        with pytest.raises(FeatureError, match="has no room"):
            [store.put(make_meta(f"t{index}"), row) for index in range(30)]
        assert store.used_bytes() % refs[0].num_bytes == 0  # what was refused is not counted
        assert all(store.exists(ref) for ref in refs)
    finally:
        pool.close()


def test_a_pool_out_of_reach_is_no_lost_row(
    start_mooncake: Callable[[], Any], tmp_path: Path, make_row: MakeRow, make_meta: MakeMeta
) -> None:
    """A master that is down is an error to retry, not features that are gone."""
    pool = start_mooncake()
    store = pool.store(tmp_path / "index", 1 << 20)
    ref = store.put(make_meta("a"), make_row())
    pool.kill_master()
    with pytest.raises(FeatureError, match="the pool's master and members run") as raised:
        store.get(ref)
    assert not isinstance(raised.value, KeyError)
    pool.start_master()
    deadline = time.monotonic() + 30
    while store.health().problem:
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize("setting", ["master", "metadata"])
def test_a_master_that_is_not_there_is_named_at_start(mooncake_pool: Any, tmp_path: Path, setting: str) -> None:
    config = mooncake_pool.config()
    setattr(config.mooncake, setting, {"master": "127.0.0.1:9", "metadata": "http://127.0.0.1:9/metadata"}[setting])
    with pytest.raises(ConfigError, match=rf"features\.mooncake\.{setting} is .*Start mooncake_master"):
        open_store(config, tmp_path)


@pytest.fixture
def without_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mooncake.store", None)


def test_without_the_package_the_setting_says_what_to_install(without_package: None, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"features\.store is 'mooncake'.*extra `mooncake`.*libibverbs1"):
        open_store(FeaturesConfig(store=StoreKind.MOONCAKE), tmp_path)


def test_with_a_ledger_a_row_of_a_member_that_died_fails_with_a_reason(
    server: Any, ref: SampleRef, tmp_path: Path, make_row: MakeRow, make_meta: MakeMeta
) -> None:
    ledger = Ledger(tmp_path / "ledger.sqlite", exists=server.exists)
    for each in (ref, other := server.put(make_meta("b"), make_row())):
        ledger.commit(each, "train")
    server._blobs.remove(Path(ref.uri).name)  # its memory went with another process
    assert ledger.lease("run", 9, 60) == [other]
    assert "are gone" in ledger.failures()["a"]


PRODUCER = """
import os, signal, sys, torch
from pathlib import Path
from runtime.config import FeaturesConfig, MooncakeConfig, StoreKind
from runtime.features import FeatureRow, SampleMeta, open_feature_plane
from runtime.hidden_states import HiddenStates
import runtime.features.mooncake
runtime.features.mooncake.LOCAL_BUFFER_BYTES = 16 << 20
pool = MooncakeConfig(master=sys.argv[2], metadata=sys.argv[3])
store, ledger = open_feature_plane(Path(sys.argv[1]), FeaturesConfig(store=StoreKind.MOONCAKE, mooncake=pool))
row = FeatureRow(torch.arange(12), torch.ones(12, dtype=torch.bool), HiddenStates(torch.ones(11, 24), torch.ones(11, 8)))
meta = SampleMeta(sample_id="k", run_id="r", source="s", target_fingerprint="f", aux_layer_ids=(1, 2, 3))
ledger.commit(store.put(meta, row), "train")
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_rows_outlive_their_server_where_another_process_lends_the_memory(
    start_mooncake: Callable[[], Any], tmp_path: Path
) -> None:
    pool = start_mooncake()
    pool.lend(64)
    config = pool.config(segment_mib=0)
    arguments = [str(tmp_path), config.mooncake.master, config.mooncake.metadata]
    ended = subprocess.run([sys.executable, "-c", PRODUCER, *arguments], check=False, stderr=subprocess.PIPE)
    assert ended.returncode == -signal.SIGKILL, ended.stderr.decode()
    store = pool.store(tmp_path, 1 << 20, segment_mib=0)
    [ref] = Ledger(tmp_path / "ledger.sqlite", exists=store.exists).lease("run", 9, 60)
    assert store.get(ref)[0].hidden.aux.sum() == 11 * 24
    assert store.release(ref) is True


def test_a_master_that_dies_takes_no_row_silently(
    start_mooncake: Callable[[], Any], tmp_path: Path, make_row: MakeRow, make_meta: MakeMeta
) -> None:
    """kill -9 of the master, which knows where everything lies: while it is away nothing fails for good; afterwards each row that
    it forgot fails with a reason, its producer hears that it must be made again, and made again it is trained."""
    pool = start_mooncake()
    store = pool.store(tmp_path / "index", 1 << 20)
    ledger = Ledger(tmp_path / "ledger.sqlite", exists=store.exists)
    for name in "ab":
        ledger.commit(store.put(make_meta(name), make_row()), "train")
    used = store.used_bytes()
    pool.kill_master()
    with pytest.raises(FeatureUnavailable):
        store.put(make_meta("c"), make_row())
    with pytest.raises(FeatureUnavailable):
        ledger.lease("run", 9, 60)
    assert ledger.status()["pending"] == 2
    assert store.used_bytes() <= used + used // 2
    pool.start_master()
    deadline = time.monotonic() + 60
    while True:
        try:
            made = store.put(make_meta("c"), make_row())
            break
        except FeatureError:
            assert time.monotonic() < deadline
            time.sleep(0.1)
    ledger.commit(made, "train")
    assert {ref.sample_id for ref in ledger.lease("run", 9, 60)} | ledger.failures().keys() == {"a", "b", "c"}
    assert all("are gone" in reason for reason in ledger.failures().values())
    for name in sorted(set("ab") - ledger.known(["a", "b"])):
        assert ledger.commit(store.put(make_meta(name), make_row()), "train") is False
    ledger.lease("run", 9, 60)
    ledger.record_checkpoint("run", "c1", 1, ["a", "b", "c"])
    assert ledger.consumption("run") == {"a": 1, "b": 1, "c": 1}
    ledger.close()

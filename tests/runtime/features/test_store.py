"""What every kind of store owes: rows come back, generations rule, the budget is hard, and nothing is released twice."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from runtime.config import FeaturesConfig, StoreKind
from runtime.errors import FeatureBudgetExceeded, FeatureError, FeatureNotFound
from runtime.features import (
    FeatureRow,
    FeatureStore,
    Lease,
    LocalDirectoryStore,
    MemoryStore,
    SampleMeta,
    SampleRef,
    open_feature_plane,
    open_store,
)

MakeRow = Callable[..., FeatureRow]
MakeMeta = Callable[..., SampleMeta]
MakeStore = Callable[..., FeatureStore]


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(params=["memory", "directory", "mooncake"])
def make_store(request: pytest.FixtureRequest, tmp_path: Path) -> MakeStore:
    if request.param == "mooncake":
        pool = request.getfixturevalue("mooncake_pool")
        return lambda budget=1 << 20, **options: pool.store(tmp_path / "index", budget, **options)
    if request.param == "memory":
        return lambda budget=1 << 20, **options: MemoryStore(budget, **options)
    return lambda budget=1 << 20, **options: LocalDirectoryStore(tmp_path / "store", budget, **options)


@pytest.fixture
def store(make_store: MakeStore) -> FeatureStore:
    return make_store()


@pytest.fixture
def row_bytes(make_store: MakeStore, make_row: MakeRow, make_meta: MakeMeta) -> int:
    store = make_store()
    ref = store.put(make_meta("measure"), make_row())
    store.abort("measure")
    _wait_for_used(store, 0)
    return ref.num_bytes


def _wait_for_used(store: FeatureStore, num_bytes: int) -> None:
    """A pool removes what was just read a little later; the others at once."""
    deadline = time.monotonic() + 20
    while store.used_bytes() != num_bytes:
        assert type(store).__name__ == "MooncakeStore", f"{store.used_bytes()} bytes are used, not {num_bytes}"
        assert time.monotonic() < deadline
        time.sleep(0.02)
        store.gc(3600.0)


def test_put_and_get(store: FeatureStore, make_row: MakeRow, make_meta: MakeMeta) -> None:
    row = make_row()
    ref = store.put(make_meta("a"), row)
    again, lease = store.get(ref)
    assert torch.equal(again.token_ids, row.token_ids)
    assert torch.equal(again.generated, row.generated)
    assert again.hidden.aux.dtype == torch.bfloat16
    assert torch.equal(again.hidden.aux, row.hidden.aux.bfloat16())
    assert torch.equal(again.hidden.last, row.hidden.last.bfloat16())
    assert again.labels == {"kind": "test"} == ref.labels
    assert lease == Lease("a", ref.generation, ref.uri)
    assert (ref.num_tokens, ref.num_bytes) == (12, store.used_bytes())
    assert {name: spec.shape for name, spec in ref.features.items()} == {
        "token_ids": (12,),
        "generated": (12,),
        "aux": (11, 24),
        "last": (11, 8),
    }
    assert store.exists(ref)
    health = store.health()
    assert (health.used_bytes, health.budget_bytes, health.num_rows) == (ref.num_bytes, 1 << 20, 1)
    assert health.problem == ""


def test_reading_takes_nothing_away(store: FeatureStore, make_row: MakeRow, make_meta: MakeMeta) -> None:
    ref = store.put(make_meta("a"), make_row())
    rows = [store.get(ref)[0] for _ in range(3)]
    assert all(torch.equal(row.hidden.last, rows[0].hidden.last) for row in rows)
    assert store.exists(ref)


def test_a_row_is_a_copy_of_what_was_put(store: FeatureStore, make_row: MakeRow, make_meta: MakeMeta) -> None:
    """The engine's buffers are written again as soon as put returned."""
    row = make_row()
    last = row.hidden.last.bfloat16()
    row = FeatureRow(row.token_ids, row.generated, type(row.hidden)(row.hidden.aux.bfloat16(), last))
    ref, expected = store.put(make_meta("a"), row), last.clone()
    last.zero_()
    row.token_ids.zero_()
    stored, _ = store.get(ref)
    assert torch.equal(stored.hidden.last, expected)
    assert stored.token_ids.tolist() == list(range(12))


def test_float32_rows_come_back_exactly(make_store: MakeStore, make_row: MakeRow, make_meta: MakeMeta) -> None:
    store, row = make_store(dtype=torch.float32), make_row()
    assert torch.equal(store.get(store.put(make_meta(), row))[0].hidden.aux, row.hidden.aux)


def test_a_second_put_makes_a_new_generation(store: FeatureStore, make_row: MakeRow, make_meta: MakeMeta) -> None:
    old = store.put(make_meta("a"), make_row(seed=1))
    _, stale = store.get(old)
    new = store.put(make_meta("a"), make_row(seed=2))
    assert new.generation > old.generation
    with pytest.raises(KeyError):
        store.get(old)
    assert not store.exists(old)
    assert store.release(old) is False  # a stale handle's release is a no-op
    assert store.release(stale) is False
    assert torch.equal(store.get(new)[0].hidden.aux, make_row(seed=2).hidden.aux.bfloat16())
    _wait_for_used(store, new.num_bytes)


def test_generations_grow_even_after_a_release(store: FeatureStore, make_row: MakeRow, make_meta: MakeMeta) -> None:
    old = store.put(make_meta("a"), make_row())
    store.release(old)
    new = store.put(make_meta("a"), make_row())
    assert new.generation > old.generation
    with pytest.raises(FeatureNotFound, match="released, replaced or shed"):
        store.get(old)
    assert store.release(old) is False
    assert store.exists(new)


def test_release_consumes_once(store: FeatureStore, make_row: MakeRow, make_meta: MakeMeta) -> None:
    ref, other = (store.put(make_meta(name), make_row()) for name in "ab")
    _, lease = store.get(ref)
    assert store.release(lease) is True
    assert store.release(lease) is False
    assert store.release(ref) is False
    assert not store.exists(ref)
    with pytest.raises(FeatureNotFound):
        store.get(ref)
    _wait_for_used(store, other.num_bytes)
    assert store.delete([ref, other]) == other.num_bytes
    _wait_for_used(store, 0)
    assert store.health().num_rows == 0


def test_of_many_who_release_one_succeeds(store: FeatureStore, make_row: MakeRow, make_meta: MakeMeta) -> None:
    ref = store.put(make_meta("a"), make_row())
    won: list[bool] = []
    threads = [threading.Thread(target=lambda: won.append(store.release(ref))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(won) == [False] * 7 + [True]


def test_abort_removes_the_sample_whatever_its_generation(store: FeatureStore, make_row: MakeRow, make_meta: MakeMeta) -> None:
    ref = store.put(make_meta("a"), make_row())
    store.abort("a")
    store.abort("a")
    assert not store.exists(ref)
    _wait_for_used(store, 0)


def test_the_budget_is_exact(make_store: MakeStore, row_bytes: int, make_row: MakeRow, make_meta: MakeMeta) -> None:
    store = make_store(3 * row_bytes)
    refs = [store.put(make_meta(name), make_row()) for name in "abc"]
    assert store.used_bytes() == store.budget_bytes
    with pytest.raises(FeatureBudgetExceeded, match=r"does not fit.*features\.budget_mib") as raised:
        store.put(make_meta("d"), make_row())
    assert raised.value.reason == "FEATURE_BUDGET_EXCEEDED"
    store.release(refs[0])
    _wait_for_used(store, 2 * row_bytes)
    store.put(make_meta("d"), make_row())
    assert store.used_bytes() == store.budget_bytes


def test_a_row_larger_than_the_budget_is_refused(
    make_store: MakeStore, row_bytes: int, make_row: MakeRow, make_meta: MakeMeta
) -> None:
    store = make_store(row_bytes - 1)
    with pytest.raises(FeatureBudgetExceeded):
        store.put(make_meta("a"), make_row())
    assert (store.used_bytes(), store.health().num_rows) == (0, 0)


def test_the_budget_holds_while_threads_put_and_release(
    make_store: MakeStore, row_bytes: int, make_row: MakeRow, make_meta: MakeMeta
) -> None:
    store, row = make_store(5 * row_bytes), make_row()
    most: list[int] = []

    def work(name: str) -> None:
        for index in range(12):
            with suppress(FeatureBudgetExceeded):
                ref = store.put(make_meta(f"{name}{index}"), row)
                most.append(store.used_bytes())
                if index % 2:
                    store.release(ref)

    threads = [threading.Thread(target=work, args=(name,)) for name in "wxyz"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert 0 < max(most) <= store.budget_bytes
    health = store.health()
    assert health.used_bytes == health.num_rows * row_bytes


def test_gc_counts_the_age_of_a_hold_from_the_last_put_or_get(
    make_store: MakeStore, make_row: MakeRow, make_meta: MakeMeta
) -> None:
    clock = Clock()
    store = make_store(clock=clock)
    orphan, needed, being_read = (store.put(make_meta(name), make_row()) for name in ("orphan", "needed", "read"))
    clock.now += 100
    young = store.put(make_meta("young"), make_row())
    store.get(being_read)
    kept = {(needed.sample_id, needed.generation)}
    assert store.gc(50.0, kept) == 1
    refs = [orphan, needed, being_read, young]
    assert [store.exists(ref) for ref in refs] == [False, True, True, True]
    assert store.gc(-1.0, None) == 0  # without a list, nothing is unneeded
    clock.now += 100
    store.gc(50.0, kept)
    assert [store.exists(ref) for ref in refs] == [False, True, False, False]


def test_a_closed_store_says_so(store: FeatureStore, make_row: MakeRow, make_meta: MakeMeta) -> None:
    ref = store.put(make_meta("a"), make_row())
    store.close()
    store.close()
    for use in (lambda: store.put(make_meta("b"), make_row()), lambda: store.get(ref), lambda: store.release(ref)):
        with pytest.raises(FeatureError):
            use()


@pytest.mark.parametrize("kind", [StoreKind.MEMORY, StoreKind.DIRECTORY])
def test_the_kind_is_a_setting(kind: StoreKind, tmp_path: Path, make_row: MakeRow, make_meta: MakeMeta) -> None:
    store, ledger = open_feature_plane(tmp_path, FeaturesConfig(store=kind, budget_mib=3))
    assert type(store) is {StoreKind.MEMORY: MemoryStore, StoreKind.DIRECTORY: LocalDirectoryStore}[kind]
    assert store.budget_bytes == 3 << 20
    ledger.commit(store.put(make_meta("a"), make_row()), "train")
    [ref] = ledger.lease("run", 9, 60)
    assert isinstance(ref, SampleRef)
    assert store.get(ref)[0].num_tokens == 12


def test_the_pool_is_a_setting_too(tmp_path: Path, mooncake_pool: Any, make_row: MakeRow, make_meta: MakeMeta) -> None:
    store = open_store(mooncake_pool.config(budget_mib=2), tmp_path)
    assert (type(store).__name__, store.budget_bytes) == ("MooncakeStore", 2 << 20)
    assert store.get(store.put(make_meta("a"), make_row()))[0].num_tokens == 12
    store.close()

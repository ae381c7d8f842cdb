"""The device's block table: up to date for whoever is in a forward, whatever the others hold."""

from __future__ import annotations

import pytest
import torch

from runtime.backends.transformers.cache import KVShape
from runtime.backends.transformers.cuda.blocks import BLOCK_TOKENS, Table
from runtime.backends.transformers.cuda.pool import PagedPool
from runtime.errors import EngineUnavailable
from runtime.types import CachePolicy

HIDDEN, NUM_ROWS = 4, 12


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> PagedPool:
    monkeypatch.setattr("runtime.backends.transformers.cuda.pool.FEWEST_ROWS", NUM_ROWS)
    monkeypatch.setattr("runtime.backends.transformers.cuda.pool.MOST_ROWS", NUM_ROWS)
    shape = KVShape(1, 1, 2, 2, torch.float32, torch.device("cpu"))
    return PagedPool(shape, HIDDEN, max_positions=4096, num_blocks=200)


def new_table(pool: PagedPool) -> Table:
    return pool[pool.add(Table(CachePolicy()))]


def assert_known(pool: PagedPool, table: Table) -> None:
    assert table.row is not None
    assert pool.device_table[table.row, : len(table.blocks)].tolist() == table.blocks


def test_new_blocks_of_many_tables_come_to_the_device(pool: PagedPool) -> None:
    tables = [new_table(pool) for _ in range(5)]
    for size in (1, 40, 7, 300):
        pool.reserve(tables, [size + number for number in range(5)])
        for table, number in zip(tables, range(5), strict=True):
            assert len(table.blocks) * BLOCK_TOKENS >= table.length + size + number
            assert_known(pool, table)
            pool.advance(table, size + number)
    assert len({block for table in tables for block in table.blocks}) == sum(len(table.blocks) for table in tables)


def test_a_fork_gets_a_block_of_its_own_with_what_was_in_it(pool: PagedPool) -> None:
    table = new_table(pool)
    pool.reserve([table], [20])
    pool.advance(table, 20)
    pool.states[:] = torch.arange(len(pool.states))[:, None].float()
    before = pool.states_of(table, 0, 20).clone()
    forks = [pool[pool.add(pool.blocks.fork(table, 20))] for _ in range(3)]
    pool.reserve(forks, [1, 1, 1])
    assert len({each.blocks[1] for each in [table, *forks]}) == 4
    for fork in forks:
        assert fork.blocks[0] == table.blocks[0]
        assert_known(pool, fork)
        assert torch.equal(pool.states_of(fork, 0, 20), before)


def test_those_that_hold_their_rows_keep_them(pool: PagedPool) -> None:
    tables = [new_table(pool) for _ in range(NUM_ROWS - 1)]  # row 0 is nobody's
    pool.reserve(tables, [1] * len(tables))
    oldest, next_oldest = tables[0], tables[1]
    pool.hold_rows([oldest])
    late = new_table(pool)
    pool.reserve([late], [1])
    assert next_oldest.row is None, "the row that nobody used for longest"
    for table in (oldest, late, tables[-1]):
        assert_known(pool, table)


def test_bytes_are_of_all_planes(pool: PagedPool) -> None:
    table = new_table(pool)
    pool.reserve([table], [2 * BLOCK_TOKENS])
    token_bytes = 4 * (2 + 2 + 4 * HIDDEN)  # a key, a value, four states
    assert pool.num_bytes() == 2 * BLOCK_TOKENS * token_bytes
    pool.add_plane(heads=2, width=8)
    assert pool.num_bytes() == 2 * BLOCK_TOKENS * (token_bytes + 4 * 16)


def test_a_refused_reservation_leaves_no_block_to_copy(pool: PagedPool) -> None:
    """The first of two forks gets its copy, for the second there is no room; what it copied is there."""
    table = new_table(pool)
    pool.reserve([table], [20])
    pool.advance(table, 20)
    pool.states[table.blocks[1] * BLOCK_TOKENS + 3] = 7.0
    forks = [pool[pool.add(pool.blocks.fork(table, 20))] for _ in range(2)]
    taken = new_table(pool)
    pool.reserve([taken], [(pool.blocks.num_free - 1) * BLOCK_TOKENS])
    pool.advance(taken, len(taken.blocks) * BLOCK_TOKENS)
    with pytest.raises(EngineUnavailable, match="pool is full"):
        pool.reserve(forks, [5, 5])
    assert not pool.blocks.copies
    assert forks[0].blocks[1] != table.blocks[1] == forks[1].blocks[1]
    assert pool.states[forks[0].blocks[1] * BLOCK_TOKENS + 3].tolist() == [7.0] * 4 * HIDDEN


def test_pages_taken_ahead_are_given_back_to_those_who_lack_them(pool: PagedPool) -> None:
    """But not what steps under way write to, nor the rows of a forward that are to be committed."""
    idle, under_way, tentative = (new_table(pool) for _ in range(3))
    for table in (idle, under_way, tentative):
        pool.reserve([table], [16], takes_ahead=True)
        assert len(table.blocks) == 5
        pool.advance(table, 16, keep_tail=True)
    under_way.num_ahead, tentative.parents = 20, range(-1, 39)
    other = new_table(pool)
    size = pool.blocks.num_free * BLOCK_TOKENS + 1
    pool.reserve([other], [size])
    pool.advance(other, size)
    assert [len(table.blocks) for table in (idle, under_way, tentative)] == [1, 3, 4]
    small = new_table(pool)
    with pytest.raises(EngineUnavailable):
        pool.reserve([small], [10 * BLOCK_TOKENS])
    pool.reserve([small], [16], takes_ahead=True)
    assert len(small.blocks) == 1, "less than half of the pages is free"


def test_nobody_with_steps_under_way_loses_its_row_and_each_seating_differs(pool: PagedPool) -> None:
    tables = [new_table(pool) for _ in range(NUM_ROWS)]
    pool.reserve(tables[:-1], [1] * (NUM_ROWS - 1))
    assert len({table.row for table in tables[:-1]}) == NUM_ROWS - 1
    tables[0].num_ahead, before = 8, tables[1].seating
    pool.reserve(tables[-1:], [1])
    assert tables[0].row is not None
    assert tables[1].row is None
    pool.reserve(tables[1:2], [1])
    assert tables[1].seating > before

"""Blocks, tables and policies: pure bookkeeping, so it is tested everywhere."""

from __future__ import annotations

import random

import pytest

from runtime.backends.transformers.cuda.blocks import BLOCK_TOKENS, DEAD, Blocks, Table, num_blocks_for
from runtime.errors import EngineUnavailable
from runtime.types import CachePolicy

FULL = CachePolicy()


def grow(blocks: Blocks, table: Table, num_tokens: int) -> None:
    blocks.reserve(table, num_tokens)
    table.length += num_tokens
    blocks.trim(table)
    blocks.drop_unseen(table)


def test_blocks_are_counted_exactly_and_come_back():
    blocks, table = Blocks(20), Table(FULL)
    blocks.reserve(table, 40)
    assert blocks.num_used == 3
    table.length = 17  # of 40 tentative rows 17 were accepted
    blocks.trim(table)
    assert blocks.num_used == 2
    blocks.release(table)
    assert blocks.num_used == 0


def test_a_fork_shares_and_whoever_writes_first_gets_a_copy():
    blocks, table = Blocks(20), Table(FULL)
    grow(blocks, table, 20)
    fork = blocks.fork(table, 20)
    assert blocks.num_used == 2
    old = list(table.blocks)
    blocks.reserve(fork, 1)
    assert fork.blocks[0] == old[0]
    assert fork.blocks[1] != old[1]
    assert blocks.copies == [(old[1], fork.blocks[1])]
    blocks.copies.clear()
    blocks.reserve(table, 1)  # nobody shares its last block any more
    assert table.blocks == old
    assert not blocks.copies
    blocks.release(table)
    assert blocks.num_used == 2
    blocks.release(fork)
    assert blocks.num_used == 0


def test_a_fork_at_a_block_boundary_copies_nothing():
    blocks, table = Blocks(20), Table(FULL)
    grow(blocks, table, 32)
    blocks.reserve(blocks.fork(table, 16), 5)
    assert not blocks.copies


def test_a_full_pool_is_refused_before_anything_changes():
    blocks, table = Blocks(4), Table(FULL)
    grow(blocks, table, 16)
    with pytest.raises(EngineUnavailable, match="3 more blocks are needed, 2 of 3 are free"):
        blocks.reserve(table, 40)
    assert blocks.num_used == 1
    assert len(table.blocks) == 1


def test_a_window_drops_whole_blocks_behind_the_sink():
    blocks, table = Blocks(100), Table(CachePolicy(sink=4, window=40))
    grow(blocks, table, 300)
    unseen = 300 - 40 + 1
    assert table.blocks[0] != DEAD
    assert table.dropped == (unseen // BLOCK_TOKENS - 2) * BLOCK_TOKENS
    assert all(block == DEAD for block in table.blocks[1 : unseen // BLOCK_TOKENS - 1])
    assert all(block != DEAD for block in table.blocks[unseen // BLOCK_TOKENS - 1 :])
    assert blocks.num_used == len(table.blocks) - table.dropped // BLOCK_TOKENS


@pytest.mark.parametrize("chunk", [1, 7, 64, 500])
def test_what_is_dropped_depends_on_the_length_alone(chunk):
    blocks, table = Blocks(100), Table(CachePolicy(sink=20, window=33))
    while table.length < 500:
        grow(blocks, table, min(chunk, 500 - table.length))
    assert (table.dropped, blocks.num_used) == ((500 - 33 + 1) // 16 * 16 - 16 - 32, num_blocks_for(500) - table.dropped // 16)


def test_truncating_into_what_was_dropped_is_refused():
    blocks, table = Blocks(100), Table(CachePolicy(sink=4, window=40))
    grow(blocks, table, 300)
    with pytest.raises(ValueError, match="Cannot truncate to 200 tokens; the cache dropped 224 of them behind the first 4"):
        blocks.truncate(table, 200)
    with pytest.raises(ValueError, match="Cannot truncate to 301 tokens; the cache holds 300"):
        blocks.fork(table, 301)
    blocks.truncate(table, 290)
    assert table.length == 290
    blocks.truncate(table, 4)  # wholly in the sink
    assert (table.dropped, blocks.num_used) == (0, 1)


def test_a_random_life_ends_with_every_block_free():
    rng, blocks = random.Random(0), Blocks(400)
    tables = [Table(CachePolicy(sink=rng.choice([0, 5, 16]), window=rng.choice([None, 20, 50]))) for _ in range(6)]
    tables = [table if table.policy.window else Table(FULL) for table in tables]
    for _ in range(500):
        index = rng.randrange(len(tables))
        table = tables[index]
        match rng.randrange(4):
            case 0 | 1 if table.length < 600:
                grow(blocks, table, rng.randrange(1, 40))
            case 2:
                blocks.truncate(table, max(0, table.length - rng.randrange(3)))
            case _:
                blocks.release(tables[index - 1])
                tables[index - 1] = blocks.fork(table, table.length)
        held = {block for table in tables for block in table.blocks if block != DEAD}
        assert blocks.num_used == len(held)
    for table in tables:
        blocks.release(table)
    assert blocks.num_used == 0

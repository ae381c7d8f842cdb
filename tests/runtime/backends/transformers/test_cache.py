from __future__ import annotations

import itertools

import pytest
import torch

from runtime.backends.base import FULL
from runtime.backends.transformers.cache import BLOCK_TOKENS, KVCache, KVShape, capacity_for
from runtime.backends.transformers.pool import KVPool

SHAPE = KVShape(num_layers=3, num_kv_heads=2, key_dim=4, value_dim=6, dtype=torch.float32, device=torch.device("cpu"))


def write(cache: KVCache, values: list[float], parents: list[int] | None = None) -> None:
    """Tentative rows, every number of row i being values[i]; values are negated keys."""
    cache.reserve(len(values))
    rows = slice(cache.length, cache.length + len(values))
    cache.keys[:, :, rows] = torch.tensor(values)[:, None]
    cache.values[:, :, rows] = -torch.tensor(values)[:, None]
    cache.parents = range(-1, len(values) - 1) if parents is None else parents


def committed(cache: KVCache) -> list[float]:
    keys, values = cache.keys[:, :, : cache.length], cache.values[:, :, : cache.length]
    row = keys[0, 0, :, 0]
    assert (keys == row[:, None]).all()
    assert (values == -row[:, None]).all()
    return row.tolist()


def test_growth_keeps_what_was_committed() -> None:
    cache = KVCache(SHAPE)
    write(cache, list(range(BLOCK_TOKENS)))
    cache.commit(range(BLOCK_TOKENS))
    assert cache.capacity == BLOCK_TOKENS
    write(cache, [7.0])
    cache.commit([0])
    assert cache.capacity == 2 * BLOCK_TOKENS
    assert committed(cache) == [*range(BLOCK_TOKENS), 7.0]


def test_capacity_grows_by_whole_chunks_and_geometrically() -> None:
    capacities = sorted({capacity_for(num_tokens) for num_tokens in range(0, 20_000, 7)})
    assert capacities[:3] == [0, BLOCK_TOKENS, 2 * BLOCK_TOKENS]
    assert len(capacities) < 30
    for smaller, larger in itertools.pairwise(capacities[1:]):
        assert larger % BLOCK_TOKENS == 0
        assert larger - smaller <= max(smaller / 4, BLOCK_TOKENS)
    assert all(capacity_for(capacity) == capacity for capacity in capacities)


def test_a_chain_prefix_moves_nothing() -> None:
    cache = KVCache(SHAPE)
    write(cache, [1.0, 2.0, 3.0, 4.0])
    cache.commit([0, 1])
    assert committed(cache) == [1.0, 2.0]
    assert cache.keys[0, 0, 2, 0] == 3.0


def test_a_path_is_moved_together() -> None:
    cache = KVCache(SHAPE)
    write(cache, [1.0])
    cache.commit([0])
    write(cache, [10.0, 11.0, 12.0, 13.0, 14.0, 15.0], parents=[-1, -1, 1, 1, 3, 4])
    cache.commit([1, 3, 4, 5])
    assert committed(cache) == [1.0, 11.0, 13.0, 14.0, 15.0]


def test_bytes_are_those_of_the_tensors() -> None:
    pool = KVPool(SHAPE)
    for num_tokens in (1, BLOCK_TOKENS, BLOCK_TOKENS + 1):
        write(pool[pool.new(FULL)], [0.0] * num_tokens)
    held = sum(tensor.nbytes for handle in range(3) for tensor in (pool[handle].keys, pool[handle].values))
    assert pool.num_bytes() == held == sum(SHAPE.bytes_for(num_tokens) for num_tokens in (1, BLOCK_TOKENS, BLOCK_TOKENS + 1))


def test_pools_are_apart() -> None:
    first, second = KVPool(SHAPE), KVPool(SHAPE)
    handle = first.new(FULL)
    with pytest.raises(ValueError, match="is not here"):
        second.drop(handle)

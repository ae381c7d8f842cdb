"""Masks and attention of one segment against their definition, written out."""

from __future__ import annotations

import itertools

import pytest
import torch

from runtime.backends.segments import ancestry
from runtime.backends.transformers.cache import KVCache, KVShape
from runtime.backends.transformers.contiguous import ContiguousAttention, SegmentPlan

SHAPE = KVShape(num_layers=2, num_kv_heads=2, key_dim=8, value_dim=6, dtype=torch.float32, device=torch.device("cpu"))
NUM_HEADS = 6
TREES = {"one": None, "chain": None, "tree": [-1, 0, 0, 1, 3, -1, 5, 4]}
SIZES = {"one": 1, "chain": 5, "tree": 8}


def reference(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, length: int, sees: torch.Tensor, window: int | None
) -> torch.Tensor:
    """softmax(q k^T / 2) v over what each node may see, one node and head at a time -> [size, heads, value_dim]."""
    size = q.shape[1]
    depths = sees.sum(dim=1) - 1
    out = torch.empty(size, NUM_HEADS, SHAPE.value_dim)
    for node, head in itertools.product(range(size), range(NUM_HEADS)):
        position = length + int(depths[node])
        seen = [row for row in range(length) if window is None or row > position - window]
        for other in range(size):
            if sees[node, other] and (window is None or length + depths[other] > position - window):
                seen.append(length + other)
        kv_head = head // (NUM_HEADS // SHAPE.num_kv_heads)
        weights = torch.softmax(keys[kv_head, seen] @ q[head, node] / 2, dim=0)
        out[node, head] = weights @ values[kv_head, seen]
    return out


@pytest.mark.parametrize("window", [None, 1, 3, 100])
@pytest.mark.parametrize("length", [0, 2, 9])
def test_attention_of_segments_is_its_definition(length: int, window: int | None) -> None:
    torch.manual_seed(length)
    plans, caches, start = [], [], 0
    for name, parents in TREES.items():
        cache = KVCache(SHAPE)
        cache.reserve(length)
        cache.keys.normal_()
        cache.values.normal_()
        cache.length = length
        cache.reserve(SIZES[name])
        plans.append(SegmentPlan(cache, start, parents, SIZES[name]))
        caches.append(cache)
        start += SIZES[name]
    q, k = torch.randn(NUM_HEADS, start, 8), torch.randn(2, start, 8)
    v = torch.randn(2, start, 6)
    out = ContiguousAttention(plans)(1, q, k, v, 0.5, window, None)
    assert out.shape == (1, start, NUM_HEADS, 6)
    for plan, cache, parents in zip(plans, caches, TREES.values(), strict=True):
        columns = slice(plan.start, plan.end)
        keys = torch.cat([cache.keys[1, :, :length], k[:, columns]], dim=1)
        values = torch.cat([cache.values[1, :, :length], v[:, columns]], dim=1)
        expected = reference(q[:, columns], keys, values, length, ancestry(parents, plan.size), window)
        torch.testing.assert_close(out[0, columns], expected, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(cache.keys[1, :, length : length + plan.size], k[:, columns], atol=0, rtol=0)
        torch.testing.assert_close(cache.values[1, :, length : length + plan.size], v[:, columns], atol=0, rtol=0)

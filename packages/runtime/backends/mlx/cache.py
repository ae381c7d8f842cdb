"""K/V of one sequence as MLX arrays, a pair of growable buffers per layer. Which token lies in which row is said in `rows`.

Knows nothing of the model beyond the shape of one token's keys and values. Nothing is computed before a forward asks for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
import torch

from runtime.backends.base import FULL
from runtime.backends.rows import Rows, drop_step
from runtime.backends.segments import ancestry, depths
from runtime.types import CachePolicy

BLOCK_TOKENS = 128  # buffers have room for whole blocks, and blocks are what is counted


@dataclass(frozen=True)
class KVShape:
    """What one token leaves behind in every layer, in float32."""

    num_layers: int
    num_kv_heads: int
    key_dim: int
    value_dim: int

    @property
    def token_bytes(self) -> int:
        return self.num_layers * self.num_kv_heads * (self.key_dim + self.value_dim) * 4

    def bytes_for(self, num_tokens: int, policy: CachePolicy = FULL) -> int:
        """Of a cache that grew to so many tokens, a block of them at a time at the most."""
        if policy.window is not None:
            num_tokens = min(num_tokens, policy.sink + policy.window + 2 * drop_step(policy.window) + BLOCK_TOKENS)
        return capacity_for(num_tokens) * self.token_bytes


def capacity_for(num_tokens: int) -> int:
    return -(-num_tokens // BLOCK_TOKENS) * BLOCK_TOKENS


class KVCache(Rows):
    """One sequence's keys and values."""

    def __init__(self, shape: KVShape, policy: CachePolicy = FULL) -> None:
        super().__init__(policy)
        self._shape = shape
        self._fill([], [], 0)

    def reserve(self, num_tokens: int) -> None:
        """Make room for `num_tokens` behind the committed rows; forgets tentative ones."""
        self.parents = ()
        if self.num_rows + num_tokens > self.capacity:
            self._fill(self.keys, self.values, self.num_rows, room=num_tokens)

    def commit(self, rows: Sequence[int]) -> None:
        start = self.num_rows
        super().commit(rows)
        if rows and rows[-1] != len(rows) - 1:  # not simply the first rows: move them together
            index = mx.array(list(rows)) + start
            for array in (*self.keys, *self.values):
                array[:, :, start : self.num_rows] = mx.take(array, index, axis=2)
        if num_due := self.num_due():
            sink = self.policy.sink
            seen = mx.array([*range(sink), *range(sink + num_due, self.num_rows)])
            keys, values = ([mx.take(array, seen, axis=2) for array in arrays] for arrays in (self.keys, self.values))
            self.dropped += num_due
            self._fill(keys, values, self.num_rows)

    def fork(self, length: int | None) -> KVCache:
        """A copy of the first `length` committed tokens, or of all. ValueError as for truncate."""
        copy = KVCache(self._shape, self.policy)
        copy.length = self.length if length is None else length
        copy.dropped = self.dropped_at(copy.length)
        copy._fill(self.keys, self.values, copy.num_rows)
        return copy

    def save(self) -> dict[str, torch.Tensor]:
        """keys and values of the committed rows, [num_layers, num_kv_heads, num_rows, key_dim | value_dim]."""
        return {
            name: torch.from_numpy(np.array(mx.concatenate([array[:, :, : self.num_rows] for array in arrays])))
            for name, arrays in (("keys", self.keys), ("values", self.values))
        }

    @staticmethod
    def restored(shape: KVShape, tensors: Mapping[str, torch.Tensor], length: int, policy: CachePolicy) -> KVCache:
        """What `save` gave, for so many committed tokens. ValueError for tensors of another name, shape or dtype."""
        found = {name: (tensor.dtype, *tensor.shape) for name, tensor in tensors.items()}
        num_rows = max((form[3] for form in found.values() if len(form) == 5), default=0)
        expected = {
            name: (torch.float32, shape.num_layers, shape.num_kv_heads, num_rows, dim)
            for name, dim in (("keys", shape.key_dim), ("values", shape.value_dim))
        }
        if found != expected:
            raise ValueError(f"The saved tensors are {found}; those of this target are {expected}, whatever the rows.")
        cache = KVCache(shape, policy)
        cache.length, cache.dropped = length, length - num_rows
        unseen = cache.num_unseen(length)
        if not 0 <= cache.dropped <= unseen:
            raise ValueError(f"{num_rows} rows of K/V were saved; {length} tokens need {length - unseen} to {length} of them.")
        keys, values = ([mx.array(layer.numpy())[None] for layer in tensors[name]] for name in ("keys", "values"))
        cache._fill(keys, values, num_rows)
        return cache

    def visible(self, parents: Sequence[int] | None, size: int, window: int | None) -> mx.array | None:
        """bool [size, num_rows + size], what each new node sees in a layer with this window of its own. None: everything."""
        sink, held = self.policy.sink, np.arange(self.num_rows)
        at = self.length + np.array(depths(parents, size))  # [size] positions of the nodes
        rows = np.concatenate([np.where(held < sink, held, held + self.dropped), at])  # [num_rows + size] of all
        sees = np.ones((size, len(rows)), dtype=bool)
        sees[:, self.num_rows :] = ancestry(parents, size).numpy()
        if window is not None:
            sees &= rows > at[:, None] - window
        if self.policy.window is not None:
            sees &= (rows < sink) | (rows > at[:, None] - self.policy.window)
        return None if sees.all() else mx.array(sees)

    def _fill(self, keys: Sequence[mx.array], values: Sequence[mx.array], num_rows: int, room: int = 0) -> None:
        """Buffers of its own with the first `num_rows` rows of these, and room for so many more."""
        self.capacity = capacity_for(num_rows + room)
        shape = self._shape

        def filled(arrays: Sequence[mx.array], dim: int) -> list[mx.array]:
            buffers = [mx.zeros((1, shape.num_kv_heads, self.capacity, dim)) for _ in range(shape.num_layers)]
            for buffer, array in zip(buffers, arrays, strict=bool(num_rows)):
                buffer[:, :, :num_rows] = array[:, :, :num_rows]
            return buffers

        self.keys = filled(keys, shape.key_dim)  # by layer, [1, num_kv_heads, capacity, key_dim]
        self.values = filled(values, shape.value_dim)  # by layer, [1, num_kv_heads, capacity, value_dim]

"""K/V of the sessions of one target: a contiguous growable buffer per cache, so that attention runs on views.

Rows 0..length-1 of a buffer are committed; behind them lie the tentative rows of the last forward, of which `commit` keeps a
root path. Knows nothing of the model beyond the shape of one token's keys and values.

    row      0 ... length-1 | length ... length+m-1 | ... capacity-1
             committed      | tentative: node 0..m-1 | not yet written
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from runtime.backends.segments import check_root_path

CHUNK_TOKENS = 128


@dataclass(frozen=True)
class KVShape:
    """What one token leaves behind in every layer."""

    num_layers: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    device: torch.device

    @property
    def token_bytes(self) -> int:
        return self.num_layers * self.num_kv_heads * (self.key_dim + self.value_dim) * self.dtype.itemsize

    def bytes_for(self, num_tokens: int) -> int:
        """Of a cache that was never longer than this."""
        return capacity_for(num_tokens) * self.token_bytes


def capacity_for(num_tokens: int) -> int:
    """The smallest capacity that holds so many: whole chunks, a quarter more each time, so that growing stays cheap."""
    capacity = 0
    while capacity < num_tokens:
        capacity += max(capacity // 4 // CHUNK_TOKENS, 1) * CHUNK_TOKENS
    return capacity


class KVCache:
    """One sequence's keys and values. `parents` describes the tentative nodes: [i] is node i's parent, -1 the history."""

    def __init__(self, shape: KVShape) -> None:
        self._shape = shape
        self.length = 0
        self.parents: Sequence[int] = ()
        self.keys, self.values = self._allocate(0)  # [num_layers, num_kv_heads, capacity, key_dim | value_dim]

    @property
    def capacity(self) -> int:
        return self.keys.shape[2]

    def _allocate(self, capacity: int) -> tuple[torch.Tensor, torch.Tensor]:
        shape = self._shape
        keys, values = (
            torch.empty(shape.num_layers, shape.num_kv_heads, capacity, dim, dtype=shape.dtype, device=shape.device)
            for dim in (shape.key_dim, shape.value_dim)
        )
        return keys, values

    def reserve(self, num_tokens: int) -> None:
        """Make room for `num_tokens` behind the committed length; forgets tentative rows."""
        self.parents = ()
        needed = capacity_for(self.length + num_tokens)
        if needed > self.capacity:
            keys, values = self._allocate(needed)
            keys[:, :, : self.length] = self.keys[:, :, : self.length]
            values[:, :, : self.length] = self.values[:, :, : self.length]
            self.keys, self.values = keys, values

    def commit(self, rows: Sequence[int]) -> None:
        """Keep the tentative rows of one root path and forget the others. ValueError, and no change, if it is none."""
        check_root_path(self.parents, rows)
        kept = len(rows)
        if rows and rows[-1] != kept - 1:  # not simply the first rows: move them together
            index = torch.tensor(rows, device=self.keys.device) + self.length
            end = self.length + kept
            self.keys[:, :, self.length : end] = self.keys[:, :, index]
            self.values[:, :, self.length : end] = self.values[:, :, index]
        self.length += kept
        self.parents = ()

    def truncate(self, length: int) -> None:
        if not 0 <= length <= self.length:
            raise ValueError(f"Cannot truncate to {length} tokens; the cache holds {self.length}.")
        self.length = length
        self.parents = ()

    def fork(self) -> KVCache:
        copy = KVCache(self._shape)
        copy.reserve(self.length)
        copy.length = self.length
        copy.keys[:, :, : self.length] = self.keys[:, :, : self.length]
        copy.values[:, :, : self.length] = self.values[:, :, : self.length]
        return copy


class KVPool:
    """The caches of one target by handle. Handles are never used twice."""

    def __init__(self, shape: KVShape) -> None:
        self.shape = shape
        self._caches: dict[int, KVCache] = {}
        self._next_handle = 0

    def __getitem__(self, handle: int) -> KVCache:
        self._check(handle)
        return self._caches[handle]

    def _check(self, handle: int) -> None:
        if handle not in self._caches:
            raise ValueError(
                f"Cache {handle!r} is not here: it was dropped, or is no handle of this target. Make one with new_cache()."
            )

    def new(self) -> int:
        return self._add(KVCache(self.shape))

    def fork(self, handle: int) -> int:
        return self._add(self[handle].fork())

    def drop(self, handle: int) -> None:
        self._check(handle)
        del self._caches[handle]

    def _add(self, cache: KVCache) -> int:
        handle = self._next_handle
        self._next_handle += 1
        self._caches[handle] = cache
        return handle

    @property
    def num_bytes(self) -> int:
        return sum(cache.capacity for cache in self._caches.values()) * self.shape.token_bytes

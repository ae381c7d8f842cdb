"""K/V of one sequence: a contiguous growable buffer, so that attention on a CPU runs on views and gathers nothing.

A buffer has room for whole blocks of tokens, and they are what is counted. Which token lies in which row is said in `rows`.
Knows nothing of the model beyond the shape of one token's keys and values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from runtime.backends.base import FULL
from runtime.backends.rows import Rows, drop_step
from runtime.types import CachePolicy

BLOCK_TOKENS = 128


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

    def bytes_for(self, num_tokens: int, policy: CachePolicy = FULL) -> int:
        """Of a cache that was never longer than this, but for the tentative rows of long forwards."""
        return capacity_for(min(num_tokens, most_rows(policy, num_tokens))) * self.token_bytes


def capacity_for(num_tokens: int) -> int:
    """The smallest capacity that holds so many: whole blocks, a quarter more each time, so that growing stays cheap."""
    capacity = 0
    while capacity < num_tokens:
        capacity += max(capacity // 4 // BLOCK_TOKENS, 1) * BLOCK_TOKENS
    return capacity


def most_rows(policy: CachePolicy, num_tokens: int) -> int:
    """The rows that so many tokens can come to hold, a block of tentative ones included where the policy bounds them."""
    if policy.window is None:
        return num_tokens
    return policy.sink + policy.window + 2 * drop_step(policy.window) + BLOCK_TOKENS


class KVCache(Rows):
    """One sequence's keys and values."""

    def __init__(self, shape: KVShape, policy: CachePolicy = FULL) -> None:
        super().__init__(policy)
        self._shape = shape
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
        """Make room for `num_tokens` behind the committed rows; forgets tentative rows."""
        self.parents = ()
        needed = capacity_for(self.num_rows + num_tokens)
        if needed > self.capacity:
            self._take(self, needed, self.num_rows)

    def _take(self, other: KVCache, capacity: int, num_rows: int, gone: int = 0) -> None:
        """New buffers with the first rows of another cache, but for `gone` of them behind its sink."""
        sink = min(self.policy.sink, num_rows) if gone else 0
        buffers = self._allocate(capacity)
        for new, old in zip(buffers, (other.keys, other.values), strict=True):
            new[:, :, :sink] = old[:, :, :sink]
            new[:, :, sink : num_rows - gone] = old[:, :, sink + gone : num_rows]
        self.keys, self.values = buffers

    def commit(self, rows: Sequence[int]) -> None:
        start = self.num_rows
        super().commit(rows)
        kept = len(rows)
        if rows and rows[-1] != kept - 1:  # not simply the first rows: move them together
            index = torch.tensor(rows, device=self.keys.device) + start
            self.keys[:, :, start : start + kept] = self.keys[:, :, index]
            self.values[:, :, start : start + kept] = self.values[:, :, index]
        if num_due := self.num_due():
            capacity = min(self.capacity, capacity_for(most_rows(self.policy, self.length)))
            self._take(self, max(capacity, capacity_for(self.num_rows - num_due)), self.num_rows, num_due)
            self.dropped += num_due

    def fork(self, length: int) -> KVCache:
        copy = KVCache(self._shape, self.policy)
        copy.dropped = self.dropped_at(length)
        copy.length = length
        copy._take(self, capacity_for(copy.num_rows), copy.num_rows)
        return copy

    def save(self) -> dict[str, torch.Tensor]:
        """The committed rows: keys and values [num_layers, num_kv_heads, num_rows, dim]."""
        tensors = {"keys": self.keys, "values": self.values}
        return {
            name: tensor[:, :, : self.num_rows].clone(memory_format=torch.contiguous_format).cpu()
            for name, tensor in tensors.items()
        }

    def load(self, tensors: Mapping[str, torch.Tensor], length: int) -> None:
        """Become what was saved at this length, under this policy. ValueError for tensors that are not that."""
        shape = self._shape
        if set(tensors) != {"keys", "values"}:
            raise ValueError(f"The saved tensors are {sorted(tensors)}; a cache has keys and values.")
        num_rows = tensors["keys"].shape[2] if tensors["keys"].dim() == 4 else -1
        for name, dim in (("keys", shape.key_dim), ("values", shape.value_dim)):
            expected = (shape.num_layers, shape.num_kv_heads, num_rows, dim)
            if tuple(tensors[name].shape) != expected or tensors[name].dtype != shape.dtype:
                raise ValueError(
                    f"The saved {name} are {tensors[name].dtype} of shape {list(tensors[name].shape)}; "
                    f"this target's are {shape.dtype} of shape {list(expected)}, and as many rows as there are keys."
                )
        dropped, unseen = length - num_rows, self.num_unseen(length)
        if not 0 <= dropped <= unseen:
            raise ValueError(f"{num_rows} rows of K/V were saved; {length} tokens need {length - unseen} to {length} of them.")
        self.length, self.dropped = length, dropped
        self.keys, self.values = self._allocate(capacity_for(num_rows))
        self.keys[:, :, :num_rows] = tensors["keys"]
        self.values[:, :, :num_rows] = tensors["values"]

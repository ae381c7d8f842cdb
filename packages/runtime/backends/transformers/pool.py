"""The caches of one target by handle, and the attention of a forward over them.

All that `TransformersTarget` knows of where K/V lives and of how it is attended to; another pool with the same methods, and
another `Attention`, would change nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from runtime.backends.base import Segment
from runtime.backends.transformers.attention import Attention
from runtime.backends.transformers.cache import KVCache, KVShape
from runtime.backends.transformers.contiguous import ContiguousAttention, SegmentPlan
from runtime.types import CachePolicy


class KVPool:
    """A handle is never used twice, and ValueError says that it is dead. Named as in `Target`, a method has its contract."""

    def __init__(self, shape: KVShape, attention: Callable[[Sequence[SegmentPlan]], Attention] = ContiguousAttention) -> None:
        self._shape, self._attention = shape, attention
        self._caches: dict[int, KVCache] = {}
        self._next_handle = 0

    @property
    def shape(self) -> KVShape:
        return self._shape

    def __getitem__(self, handle: int) -> KVCache:
        if handle not in self._caches:
            raise ValueError(
                f"Cache {handle!r} is not here: it was dropped, or is no handle of this target. Make one with new_cache()."
            )
        return self._caches[handle]

    def _add(self, cache: KVCache) -> int:
        handle = self._next_handle
        self._next_handle += 1
        self._caches[handle] = cache
        return handle

    def new(self, policy: CachePolicy) -> int:
        return self._add(KVCache(self._shape, policy))

    def begin(self, segments: Sequence[Segment]) -> Attention:
        """Make room for the segments, which were checked, behind their caches. Forgets what was tentative there."""
        plans: list[SegmentPlan] = []
        start = 0
        for segment in segments:
            cache, size = self[segment.cache], len(segment.token_ids)
            cache.reserve(size)
            plans.append(SegmentPlan(cache, start, segment.parents, size))
            start += size
        return self._attention(plans)

    def end(self, segments: Sequence[Segment]) -> None:
        """Their forward is done: every layer's K/V is written, and may be committed."""
        for segment in segments:
            size = len(segment.token_ids)
            self[segment.cache].parents = range(-1, size - 1) if segment.parents is None else tuple(segment.parents)

    def commit(self, cache: int, rows: Sequence[int]) -> None:
        self[cache].commit(rows)

    def truncate(self, cache: int, length: int) -> None:
        self[cache].truncate(length)

    def fork(self, cache: int, length: int | None) -> int:
        parent = self[cache]
        return self._add(parent.fork(parent.length if length is None else length))

    def drop(self, cache: int) -> None:
        _ = self[cache]
        del self._caches[cache]

    def length(self, cache: int) -> int:
        return self[cache].length

    def dropped(self, cache: int) -> int:
        return self[cache].dropped

    def save(self, cache: int) -> dict[str, torch.Tensor]:
        return self[cache].save()

    def restore(self, tensors: Mapping[str, torch.Tensor], length: int, policy: CachePolicy) -> int:
        cache = KVCache(self._shape, policy)
        cache.load(tensors, length)
        return self._add(cache)

    def num_bytes(self) -> int:
        return sum(cache.capacity for cache in self._caches.values()) * self._shape.token_bytes

    def bytes_for(self, num_tokens: int, policy: CachePolicy) -> int:
        return self._shape.bytes_for(num_tokens, policy)

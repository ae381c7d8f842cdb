"""`MlxTarget`: an mlx-lm model with our own K/V, one sequence after the other within a forward, computed together at its end.

What crosses to torch is float32 on the CPU and shares its memory with MLX. Knows no sessions, no drafter and no sampling.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import count

import mlx.core as mx
import numpy as np
import torch

from runtime.backends.base import FULL, Segment, SegmentOutput, TargetInfo
from runtime.backends.mlx.cache import KVCache, KVShape
from runtime.backends.mlx.model import MlxModel
from runtime.backends.segments import check_batch
from runtime.hidden_states import HiddenStates
from runtime.types import CachePolicy


class MlxTarget:
    """Implements `runtime.backends.base.Target`. One thread at a time; several targets may run side by side."""

    def __init__(
        self, model: MlxModel, info: TargetInfo, shape: KVShape, embedding: torch.Tensor, lm_head: torch.Tensor, device: mx.Device
    ) -> None:
        self._model, self._info, self._shape, self._device = model, info, shape, device
        self._embedding, self._lm_head = embedding, lm_head
        self._caches: dict[int, KVCache] = {}
        self._handles = count()  # none is used twice

    @property
    def info(self) -> TargetInfo:
        return self._info

    @property
    def embedding(self) -> torch.Tensor:
        return self._embedding

    @property
    def lm_head(self) -> torch.Tensor:
        return self._lm_head

    def forward(self, segments: Sequence[Segment]) -> list[SegmentOutput]:
        """See the protocol. ValueError, before anything changes, for a segment that makes no sense."""
        check_batch(segments, self.length, self._info)
        caches = [self._caches[segment.cache] for segment in segments]
        with mx.stream(self._device):
            outputs = []
            for cache, segment in zip(caches, segments, strict=True):
                cache.reserve(len(segment.token_ids))
                outputs.append(self._model(cache, segment.token_ids, segment.parents, segment.num_logits))
            mx.eval([(out.logits, out.aux, out.last) for out in outputs], [(cache.keys, cache.values) for cache in caches])
        for cache, segment in zip(caches, segments, strict=True):
            cache.parents = range(-1, len(segment.token_ids) - 1) if segment.parents is None else tuple(segment.parents)
        return [SegmentOutput(to_torch(out.logits), HiddenStates(to_torch(out.aux), to_torch(out.last))) for out in outputs]

    def new_cache(self, policy: CachePolicy = FULL) -> int:
        return self._add(KVCache(self._shape, policy))

    def commit(self, cache: int, rows: Sequence[int]) -> None:
        with mx.stream(self._device):
            self._cache(cache).commit(rows)

    def truncate(self, cache: int, length: int) -> None:
        self._cache(cache).truncate(length)

    def fork(self, cache: int, length: int | None = None) -> int:
        with mx.stream(self._device):
            return self._add(self._cache(cache).fork(length))

    def drop(self, cache: int) -> None:
        self._cache(cache)
        del self._caches[cache]

    def length(self, cache: int) -> int:
        return self._cache(cache).length

    def dropped(self, cache: int) -> int:
        return self._cache(cache).dropped

    def save(self, cache: int) -> dict[str, torch.Tensor]:
        with mx.stream(self._device):
            return self._cache(cache).save()

    def restore(self, tensors: Mapping[str, torch.Tensor], length: int, policy: CachePolicy) -> int:
        with mx.stream(self._device):
            return self._add(KVCache.restored(self._shape, tensors, length, policy))

    def cache_bytes(self, num_tokens: int = 0, policy: CachePolicy = FULL) -> int:
        if num_tokens:
            return self._shape.bytes_for(num_tokens, policy)
        return sum(cache.capacity for cache in self._caches.values()) * self._shape.token_bytes

    def _add(self, cache: KVCache) -> int:
        handle = next(self._handles)
        self._caches[handle] = cache
        return handle

    def _cache(self, handle: int) -> KVCache:
        if handle not in self._caches:
            raise ValueError(
                f"Cache {handle!r} is not here: it was dropped, or is no handle of this target. Make one with new_cache()."
            )
        return self._caches[handle]


def to_torch(array: mx.array) -> torch.Tensor:
    """The same memory as a torch tensor; it lives as long as the tensor does."""
    return torch.from_numpy(np.array(array, copy=False))

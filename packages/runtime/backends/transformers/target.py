"""`TransformersTarget`: a Hugging Face decoder with our own K/V, many sessions in one forward.

The segments of a forward lie along one row [1, T] with explicit positions; our attention function keeps them apart. How it runs
through the model, and takes the hidden states out on the way, is the network's (`network`); where the K/V lives and how a
forward attends to it is the pool's (`pool`); loading and refusing models is done elsewhere (`loading`, `probe`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from runtime.backends.base import FULL, Segment, SegmentOutput, TargetInfo
from runtime.backends.segments import check_batch, depths
from runtime.backends.transformers.attention import RaggedBatch
from runtime.backends.transformers.network import Network
from runtime.backends.transformers.pool import KVPool
from runtime.types import CachePolicy


class TransformersTarget:
    """Implements `runtime.backends.base.Target`. One thread at a time; several targets may run side by side.

    network: of a model that passed `probe_model`, which is the target's own.
    """

    def __init__(self, network: Network, info: TargetInfo, pool: KVPool, embedding: torch.Tensor, lm_head: torch.Tensor) -> None:
        self._network, self._info, self._pool = network, info, pool
        self._embedding, self._lm_head = embedding, lm_head

    @property
    def info(self) -> TargetInfo:
        return self._info

    @property
    def embedding(self) -> torch.Tensor:
        return self._embedding

    @property
    def lm_head(self) -> torch.Tensor:
        return self._lm_head

    def new_cache(self, policy: CachePolicy = FULL) -> int:
        return self._pool.new(policy)

    @torch.inference_mode()
    def forward(self, segments: Sequence[Segment]) -> list[SegmentOutput]:
        """See the protocol. ValueError, before anything changes, for a segment that makes no sense."""
        if not segments:
            return []
        check_batch(segments, self.length, self._info)
        batch = RaggedBatch(self._pool.begin(segments))
        logits = self._run(batch, segments)
        self._pool.end(segments)
        return self._split(batch, logits, segments)

    @torch.inference_mode()
    def commit(self, cache: int, rows: Sequence[int]) -> None:
        self._pool.commit(cache, rows)

    def truncate(self, cache: int, length: int) -> None:
        self._pool.truncate(cache, length)

    @torch.inference_mode()
    def fork(self, cache: int, length: int | None = None) -> int:
        return self._pool.fork(cache, length)

    def drop(self, cache: int) -> None:
        self._pool.drop(cache)

    def length(self, cache: int) -> int:
        return self._pool.length(cache)

    def dropped(self, cache: int) -> int:
        return self._pool.dropped(cache)

    def save(self, cache: int) -> dict[str, torch.Tensor]:
        return self._pool.save(cache)

    @torch.inference_mode()
    def restore(self, tensors: Mapping[str, torch.Tensor], length: int, policy: CachePolicy) -> int:
        return self._pool.restore(tensors, length, policy)

    def cache_bytes(self, num_tokens: int = 0, policy: CachePolicy = FULL) -> int:
        return self._pool.bytes_for(num_tokens, policy) if num_tokens else self._pool.num_bytes()

    def _run(self, batch: RaggedBatch, segments: Sequence[Segment]) -> torch.Tensor | None:
        """Logits [sum of num_logits, V] float32, or None if no row asks for any."""
        token_ids: list[int] = []
        positions: list[int] = []
        rows: list[int] = []
        for segment in segments:
            length = self._pool.length(segment.cache)
            token_ids.extend(segment.token_ids)
            positions.extend(length + depth for depth in depths(segment.parents, len(segment.token_ids)))
            rows.extend(range(len(token_ids) - segment.num_logits, len(token_ids)))
        return self._network(token_ids, positions, rows, batch)

    def _split(self, batch: RaggedBatch, logits: torch.Tensor | None, segments: Sequence[Segment]) -> list[SegmentOutput]:
        hidden = batch.hidden(self._info.aux_layer_ids)
        if logits is None:
            logits = torch.empty(0, self._info.vocab_size, device=hidden.last.device)
        outputs: list[SegmentOutput] = []
        start = 0
        for segment, rows in zip(segments, torch.split(logits, [segment.num_logits for segment in segments]), strict=True):
            end = start + len(segment.token_ids)
            outputs.append(SegmentOutput(rows, hidden[start:end]))
            start = end
        return outputs

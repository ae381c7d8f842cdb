"""`TransformersTarget`: a Hugging Face decoder with our own K/V, many sessions in one forward.

The segments of a forward lie along one row [1, T] with explicit positions; our attention function keeps them apart. Hooks on
three decoder layers and on the base model take the hidden states out of the same forward. Knows no sessions, no drafter and
no sampling; loading and refusing models is done elsewhere (`loading`, `probe`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from runtime.backends.base import Segment, SegmentOutput, TargetInfo
from runtime.backends.segments import check_segment, depths
from runtime.backends.transformers import attention
from runtime.backends.transformers.attention import BATCH, RaggedBatch, SegmentPlan
from runtime.backends.transformers.cache import KVPool, KVShape
from runtime.backends.transformers.probe import decoder_layers


class TransformersTarget:
    """Implements `runtime.backends.base.Target`. One thread at a time; several targets may run side by side.

    Takes a model that passed `probe_model` for its own: hooks it and gives it our attention.
    """

    def __init__(
        self, model: PreTrainedModel, info: TargetInfo, shape: KVShape, embedding: torch.Tensor, lm_head: torch.Tensor
    ) -> None:
        self._model, self._info, self._pool = model, info, KVPool(shape)
        self._embedding, self._lm_head = embedding, lm_head
        self._decoder: nn.Module = model.get_decoder()  # type: ignore[no-untyped-call]
        attention.register()
        model.set_attn_implementation(attention.NAME)
        layers = decoder_layers(model)
        for layer_id in info.aux_layer_ids:
            layers[layer_id].register_forward_hook(_take_aux(layer_id), with_kwargs=True)
        self._decoder.register_forward_hook(_take_last, with_kwargs=True)

    @property
    def info(self) -> TargetInfo:
        return self._info

    @property
    def embedding(self) -> torch.Tensor:
        return self._embedding

    @property
    def lm_head(self) -> torch.Tensor:
        return self._lm_head

    def new_cache(self) -> int:
        return self._pool.new()

    @torch.inference_mode()
    def forward(self, segments: Sequence[Segment]) -> list[SegmentOutput]:
        """See the protocol. ValueError, before anything changes, for a segment that makes no sense."""
        if not segments:
            return []
        self._check(segments)
        positions: list[int] = []
        plans: list[SegmentPlan] = []
        for segment in segments:
            cache = self._pool[segment.cache]
            size = len(segment.token_ids)
            cache.reserve(size)
            plans.append(SegmentPlan(cache, len(positions), segment.parents, size))
            positions.extend(cache.length + depth for depth in depths(segment.parents, size))
        batch = RaggedBatch(plans)
        logits = self._run(batch, [token for segment in segments for token in segment.token_ids], positions, segments)
        for segment in segments:
            size = len(segment.token_ids)
            self._pool[segment.cache].parents = range(-1, size - 1) if segment.parents is None else tuple(segment.parents)
        return self._split(batch, logits, segments)

    @torch.inference_mode()
    def commit(self, cache: int, rows: Sequence[int]) -> None:
        self._pool[cache].commit(rows)

    def truncate(self, cache: int, length: int) -> None:
        self._pool[cache].truncate(length)

    @torch.inference_mode()
    def fork(self, cache: int) -> int:
        return self._pool.fork(cache)

    def drop(self, cache: int) -> None:
        self._pool.drop(cache)

    def length(self, cache: int) -> int:
        return self._pool[cache].length

    def cache_bytes(self, num_tokens: int = 0) -> int:
        return self._pool.shape.bytes_for(num_tokens) if num_tokens else self._pool.num_bytes

    def _check(self, segments: Sequence[Segment]) -> None:
        seen: set[int] = set()
        for segment in segments:
            length = self._pool[segment.cache].length
            if segment.cache in seen:
                raise ValueError(f"Cache {segment.cache} occurs twice in one forward; give each sequence one segment.")
            seen.add(segment.cache)
            check_segment(segment, self._info.vocab_size)
            end = length + max(depths(segment.parents, len(segment.token_ids))) + 1
            if end > self._info.max_positions:
                raise ValueError(f"Cache {segment.cache} would reach {end} tokens; this model takes {self._info.max_positions}.")

    def _run(
        self, batch: RaggedBatch, token_ids: list[int], positions: list[int], segments: Sequence[Segment]
    ) -> torch.Tensor | None:
        """Run the model; returns logits [sum of num_logits, V] float32, or None if no row asks for any."""
        device = self._pool.shape.device
        rows = [
            row
            for plan, segment in zip(batch.plans, segments, strict=True)
            for row in range(plan.end - segment.num_logits, plan.end)
        ]
        inputs: dict[str, Any] = {
            "input_ids": torch.tensor([token_ids], device=device),  # [1, T]
            "position_ids": torch.tensor([positions], device=device),  # [1, T]
            "use_cache": False,
            BATCH: batch,
        }
        if not rows:
            self._decoder(**inputs)
            return None
        # The whole model, not the head alone: some scale or cap their logits.
        out = self._model(**inputs, logits_to_keep=torch.tensor(rows, device=device))
        logits: torch.Tensor = out.logits[0].float()
        return logits

    def _split(self, batch: RaggedBatch, logits: torch.Tensor | None, segments: Sequence[Segment]) -> list[SegmentOutput]:
        hidden = batch.hidden(self._info.aux_layer_ids)
        if logits is None:
            logits = torch.empty(0, self._info.vocab_size, device=hidden.last.device)
        by_segment = torch.split(logits, [segment.num_logits for segment in segments])
        return [SegmentOutput(rows, hidden[plan.start : plan.end]) for rows, plan in zip(by_segment, batch.plans, strict=True)]


def _take_aux(layer_id: int) -> Any:
    def hook(_module: nn.Module, _args: Any, kwargs: dict[str, Any], output: Any) -> None:
        states = output[0] if isinstance(output, tuple) else output  # [1, T, Ht]
        kwargs[BATCH].aux[layer_id] = states[0]

    return hook


def _take_last(_module: nn.Module, _args: Any, kwargs: dict[str, Any], output: Any) -> None:
    kwargs[BATCH].last = output.last_hidden_state[0]

"""An mlx-lm model with three things taken over: its cache is ours, its positions may be a tree's, its states are kept.

The model's own forward does the rest, so scaled embeddings, soft caps and sliding layers are as mlx-lm has them. What such a
model must offer is little, and `loading` tries it out: `model.model` with `layers` and `embed_tokens`, and attention that
asks its cache for `offset`, `update_and_fetch` and `make_mask` and turns by a module named `rope`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from runtime.backends.mlx.cache import KVCache
from runtime.backends.segments import depths


@dataclass(frozen=True)
class Outputs:
    """Of one segment of T rows, not yet computed."""

    logits: mx.array  # [num_logits, V] float32
    aux: mx.array  # [T, 3*Ht]
    last: mx.array  # [T, Ht]


class MlxModel:
    """Runs one segment at a time. Takes the model for its own."""

    def __init__(self, model: Any, aux_layer_ids: Sequence[int], vocab_size: int) -> None:
        self._model, self._vocab_size = model, vocab_size
        for module in model.modules():
            if "rope" in module:
                module.rope = _RopeByRow(module.rope)
        self._decoder = model.model = _Decoder(model.model)
        layers = self._decoder.layers
        self._aux = [_Kept(layers[layer_id]) for layer_id in aux_layer_ids]
        for layer_id, kept in zip(aux_layer_ids, self._aux, strict=True):
            layers[layer_id] = kept

    def __call__(self, cache: KVCache, token_ids: Sequence[int], parents: Sequence[int] | None, num_logits: int) -> Outputs:
        """Writes K/V of the rows behind the cache's committed ones, where room was reserved."""
        segment = _Segment(cache, parents, len(token_ids))
        caches = [_LayerCache(segment, layer) for layer in range(len(cache.keys))]
        inputs = mx.array([list(token_ids)])
        if num_logits:
            self._decoder.num_logits = num_logits
            logits = self._model(inputs, cache=caches)[0].astype(mx.float32)
        else:
            self._decoder(inputs, cache=caches)
            logits = mx.zeros((0, self._vocab_size))
        aux = mx.concatenate([kept.take() for kept in self._aux], axis=-1)
        return Outputs(logits, aux[0], self._decoder.take()[0])


class _Kept:
    """A part of the model whose output [1, T, Ht] can be taken once, after each call. Otherwise it is that part."""

    def __init__(self, part: Any) -> None:
        self._part = part
        self._output: mx.array | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> mx.array:
        output: mx.array = self._part(*args, **kwargs)
        self._output = output
        return output

    def __getattr__(self, name: str) -> Any:
        return getattr(self._part, name)

    def take(self) -> mx.array:
        output, self._output = self._output, None
        assert output is not None
        return output


class _Decoder(_Kept):
    """The model below its head. Keeps the states of all rows and hands the head those of the last `num_logits`."""

    num_logits = 0

    def __call__(self, *args: Any, **kwargs: Any) -> mx.array:
        states: mx.array = super().__call__(*args, **kwargs)[:, -self.num_logits :]
        return states


class _RopeByRow:
    """The model's own rotary embedding; as an offset it takes the position of the first row, or one of each row, [T]."""

    def __init__(self, rope: Any) -> None:
        self._rope = rope

    def __call__(self, x: mx.array, offset: int | mx.array = 0) -> mx.array:
        if isinstance(offset, int):
            turned: mx.array = self._rope(x, offset=offset)
            return turned
        # x [1, H, T, D]: as T sequences of one row each, [T, H, 1, D]
        turned = self._rope(x.transpose(2, 1, 0, 3), offset=offset)
        return turned.transpose(2, 1, 0, 3)


class _Segment:
    """What the layers of one forward share."""

    def __init__(self, cache: KVCache, parents: Sequence[int] | None, size: int) -> None:
        self.cache, self.start, self.end = cache, cache.num_rows, cache.num_rows + size
        self._parents, self._size = parents, size
        self._masks: dict[int | None, mx.array | None] = {}
        # Of the first row where the others follow it one by one, else of each row.
        self.offset = cache.length if parents is None else mx.array(list(depths(parents, size))) + cache.length

    def mask(self, window: int | None) -> mx.array | None:
        if window not in self._masks:
            self._masks[window] = self.cache.visible(self._parents, self._size, window)
        return self._masks[window]


class _LayerCache:
    """What the attention of one layer takes for its cache."""

    def __init__(self, segment: _Segment, layer: int) -> None:
        self._segment, self._layer = segment, layer
        self.offset = segment.offset

    def make_mask(self, num_rows: int, return_array: bool = False, window_size: int | None = None) -> mx.array | None:
        return self._segment.mask(window_size)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Rows [1, num_kv_heads, T, D] of the segment; all that are there, [1, num_kv_heads, num_rows + T, D]."""
        start, end = self._segment.start, self._segment.end
        all_keys, all_values = self._segment.cache.keys[self._layer], self._segment.cache.values[self._layer]
        all_keys[:, :, start:end] = keys
        all_values[:, :, start:end] = values
        return all_keys[:, :, :end], all_values[:, :, :end]

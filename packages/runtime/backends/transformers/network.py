"""The way of a forward through a model: as transformers wrote it, with hooks that take the hidden states out; or, where every
layer is a `FusedLayer`, from layer to layer without what transformers does in between, which takes a CPU as long as a layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel

from runtime.backends.transformers import attention
from runtime.backends.transformers.attention import BATCH, RaggedBatch
from runtime.backends.transformers.layers import TOLERANCE, TRIAL_POSITIONS, FusedLayer, TrialAttention
from runtime.backends.transformers.probe import decoder_layers
from runtime.norms import rms_norm


class Network(Protocol):
    def __call__(
        self, token_ids: Sequence[int], positions: Sequence[int], rows: Sequence[int], batch: RaggedBatch
    ) -> torch.Tensor | None:
        """A forward of these T tokens, whose states are left in the batch -> logits [len(rows), V] float32 of these rows; None
        if there are no rows."""
        ...


class HookedNetwork:
    """A model as transformers wrote it."""

    def __init__(self, model: PreTrainedModel, aux_layer_ids: Sequence[int]) -> None:
        self._model = model
        self._decoder: nn.Module = model.get_decoder()  # type: ignore[no-untyped-call]
        attention.register()
        model.set_attn_implementation(attention.NAME)
        layers = decoder_layers(model)
        self._hooks = [layers[layer].register_forward_hook(take_aux(layer), with_kwargs=True) for layer in aux_layer_ids]
        self._hooks.append(self._decoder.register_forward_hook(take_last, with_kwargs=True))

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def __call__(
        self, token_ids: Sequence[int], positions: Sequence[int], rows: Sequence[int], batch: RaggedBatch
    ) -> torch.Tensor | None:
        device = self._model.device
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


class FusedNetwork:
    """A model of fused layers, on the device and in the type of its weights."""

    def __init__(self, model: PreTrainedModel, aux_layer_ids: Sequence[int]) -> None:
        decoder: Any = model.get_decoder()  # type: ignore[no-untyped-call]
        self._embedding: torch.Tensor = decoder.embed_tokens.weight.detach()
        self._rotary: nn.Module = decoder.rotary_emb
        self._layers = [(layer.run, layer.parts()) for layer in decoder_layers(model) if isinstance(layer, FusedLayer)]
        self._aux_layer_ids = frozenset(aux_layer_ids)
        self._norm: torch.Tensor = decoder.norm.weight.detach()
        self._eps = torch.tensor(decoder.config.rms_norm_eps)
        head: nn.Module = model.get_output_embeddings()  # type: ignore[no-untyped-call]
        self._head = head.forward

    def __call__(
        self, token_ids: Sequence[int], positions: Sequence[int], rows: Sequence[int], batch: RaggedBatch
    ) -> torch.Tensor | None:
        h = F.embedding(torch.tensor([token_ids]), self._embedding)  # [1, T, H]
        turns = self._rotary(h, torch.tensor([positions]))
        for index, (run, parts) in enumerate(self._layers):
            h = run(parts, h, batch, turns)
            if index in self._aux_layer_ids:
                batch.aux[index] = h[0]
        batch.last = last = rms_norm(h[0], self._norm, self._eps)
        if not rows:
            return None
        logits: torch.Tensor = self._head(last if len(rows) == len(last) else last[torch.tensor(rows)])
        return logits.float()


def network_of(model: PreTrainedModel, aux_layer_ids: Sequence[int]) -> Network:
    """The quicker way if every layer is fused and it says of a trial text what the other one says."""
    hooked = HookedNetwork(model, aux_layer_ids)
    if not all(isinstance(layer, FusedLayer) for layer in decoder_layers(model)):
        return hooked
    fused = FusedNetwork(model, aux_layer_ids)
    if not _agree(hooked, fused, aux_layer_ids):
        return hooked
    hooked.close()
    return fused


@torch.inference_mode()
def _agree(one: Network, other: Network, aux_layer_ids: Sequence[int]) -> bool:
    trials = TrialAttention(), TrialAttention()
    said: list[list[torch.Tensor]] = []
    for network, trial in zip((one, other), trials, strict=True):
        batch = RaggedBatch(trial)
        logits = network([1, 0, 1], TRIAL_POSITIONS, [0, 2], batch)
        assert logits is not None
        states = batch.hidden(aux_layer_ids)
        said.append([logits, states.aux, states.last])
    return trials[0].asked == trials[1].asked and all(
        a.shape == b.shape and float((a - b).abs().max()) <= TOLERANCE * float(a.abs().max()) for a, b in zip(*said, strict=True)
    )


def take_aux(layer_id: int) -> Any:
    """A hook on a decoder layer: its output goes into the forward's RaggedBatch."""

    def hook(_module: nn.Module, _args: Any, kwargs: dict[str, Any], output: Any) -> None:
        states = output[0] if isinstance(output, tuple) else output  # [1, T, Ht]
        kwargs[BATCH].aux[layer_id] = states[0]

    return hook


def take_last(_module: nn.Module, _args: Any, kwargs: dict[str, Any], output: Any) -> None:
    """A hook on the base model, likewise."""
    kwargs[BATCH].last = output.last_hidden_state[0]

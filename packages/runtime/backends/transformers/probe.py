"""One trial forward of a freshly loaded model, to learn how it attends and to refuse what we would compute wrongly.

A model is taken if every decoder layer calls our attention exactly once, with keys and values of one shape, and asks for
nothing beyond scaling, grouped heads, a sliding window and a soft cap. Everything else is a ModelError that names what stood
in the way.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, PretrainedConfig, PreTrainedModel

from runtime.backends.transformers.attention import BATCH
from runtime.backends.transformers.cache import KVShape
from runtime.errors import ModelError

NAME = "slipstream_probe"  # in transformers' table of attention functions

# Rotary embeddings that depend on the longest sequence of a batch: one session would change another's positions.
REFUSED_ROPE = {"dynamic", "longrope"}
KNOWN_LAYER_TYPES = {"full_attention", "sliding_attention"}


@dataclass(frozen=True)
class LayerCall:
    layer: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None
    refused: tuple[str, ...]  # names of inputs that we would ignore


@dataclass
class Probe:
    calls: list[LayerCall] = field(default_factory=list)


def probing_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Write down what is asked, and attend to nothing: only shapes matter here."""
    probe = kwargs.pop(BATCH, None)
    if probe is None:
        raise ModelError(
            f"{type(module).__name__} does not hand keyword arguments to its attention; this model cannot be served."
        )
    refused = [name for name in ("s_aux", "position_bias") if kwargs.get(name) is not None]
    if attention_mask is not None:
        refused.append("attention_mask")
    groups = query.shape[1] // key.shape[1]
    probe.calls.append(
        LayerCall(
            layer=getattr(module, "layer_idx", -1),
            num_kv_heads=key.shape[1],
            key_dim=key.shape[3],
            value_dim=value.shape[3],
            window=sliding_window,
            refused=tuple(refused),
        )
    )
    return value.repeat_interleave(groups, dim=1).transpose(1, 2), None


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """The decoder layers of the base model. ModelError if it has no such list."""
    num_layers = model.config.get_text_config().num_hidden_layers
    decoder: nn.Module = model.get_decoder()  # type: ignore[no-untyped-call]
    for child in decoder.children():
        if isinstance(child, nn.ModuleList) and len(child) == num_layers:
            return child
    raise ModelError(
        f"{type(model).__name__} has no list of {num_layers} decoder layers to take hidden states from; use another model."
    )


def embedding_and_head(model: PreTrainedModel) -> tuple[torch.Tensor, torch.Tensor]:
    """The plain weights [V, Ht] of the input embedding and the output head. ModelError for a model without a head."""
    embedding: nn.Module = model.get_input_embeddings()
    head: nn.Module | None = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    if head is None:
        raise ModelError(f"{type(model).__name__} has no output head, so it cannot generate text; use a causal language model.")
    weights = embedding.weight, head.weight
    assert isinstance(weights[0], torch.Tensor)
    assert isinstance(weights[1], torch.Tensor)
    return weights[0].detach(), weights[1].detach()


def probe_model(model: PreTrainedModel) -> KVShape:
    """Run two tokens through the model to learn the shape of its K/V. ModelError for a model that we cannot serve."""
    name = type(model).__name__
    config = model.config.get_text_config()
    _check_config(name, config, model)
    layers = decoder_layers(model)
    AttentionInterface.register(NAME, probing_attention)
    model.set_attn_implementation(NAME)
    probe = Probe()
    row = torch.arange(2, device=model.device)
    with torch.inference_mode():
        out = model(input_ids=row[None], position_ids=row[None], use_cache=False, logits_to_keep=row[1:], **{BATCH: probe})
    if [call.layer for call in probe.calls] != list(range(len(layers))):
        raise ModelError(
            f"{name} calls the attention interface for layers {[call.layer for call in probe.calls]}, not once for each of its "
            f"{len(layers)} layers; only models whose every layer attends can be served."
        )
    if out.logits.shape[1] != 1:
        raise ModelError(f"{name} does not take logits_to_keep, so it cannot give the logits of chosen rows; use another model.")
    for call in probe.calls:
        _check_call(name, call, probe.calls[0], config)
    first = probe.calls[0]
    return KVShape(len(layers), first.num_kv_heads, first.key_dim, first.value_dim, model.dtype, model.device)


def _check_config(name: str, config: PretrainedConfig, model: PreTrainedModel) -> None:
    kinds = set(getattr(config, "layer_types", None) or ()) - KNOWN_LAYER_TYPES
    if kinds:
        raise ModelError(f"{name} has layers of kind {sorted(kinds)}; only {sorted(KNOWN_LAYER_TYPES)} can be served.")
    for module in model.modules():
        rope = getattr(module, "rope_type", None)
        for kind in rope.values() if isinstance(rope, dict) else (rope,):
            if kind in REFUSED_ROPE:
                raise ModelError(
                    f"{name} scales its rotary positions by {kind!r}, which depends on the longest sequence of a batch; "
                    f"only scalings that do not can be served."
                )


def _check_call(name: str, call: LayerCall, first: LayerCall, config: PretrainedConfig) -> None:
    if call.refused:
        raise ModelError(f"Layer {call.layer} of {name} attends with {', '.join(call.refused)}, which is not supported.")
    geometry = (call.num_kv_heads, call.key_dim, call.value_dim)
    if geometry != (first.num_kv_heads, first.key_dim, first.value_dim):
        raise ModelError(
            f"Layer {call.layer} of {name} has keys and values of shape {geometry}, other than layer 0; "
            f"only models with one shape can be served."
        )
    kinds = getattr(config, "layer_types", None)
    if kinds and (kinds[call.layer] == "sliding_attention") != (call.window is not None):
        raise ModelError(
            f"Layer {call.layer} of {name} is of kind {kinds[call.layer]!r} but attends with window {call.window}; "
            f"this model cannot be served."
        )

"""From a resolved model directory to a target: device, dtype, weights, trial forward, packed layers.

On a CUDA device Llama-like models get kernels of their own (`cuda`); everything else is a `TransformersTarget`.
"""

from __future__ import annotations

import importlib.util
import threading
from typing import Any, cast

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from runtime.backends.base import Target, TargetInfo
from runtime.backends.transformers.contiguous import ContiguousAttention
from runtime.backends.transformers.invariant import InvariantAttention, check_device, check_invariance, make_invariant
from runtime.backends.transformers.layers import fuse_layers
from runtime.backends.transformers.network import network_of
from runtime.backends.transformers.pool import KVPool
from runtime.backends.transformers.probe import embedding_and_head, probe_model
from runtime.backends.transformers.target import TransformersTarget
from runtime.config import BackendConfig, Dtype, ModelConfig, Numerics
from runtime.devices import choose_device
from runtime.errors import ModelError
from runtime.hidden_states import default_aux_layer_ids
from runtime.linear import can_pack, pack_linears
from runtime.models import ResolvedModel, Tokenizer

_READING = threading.Lock()  # while transformers reads a model, it has parts of its classes and of torch replaced for everybody


def load(backend: BackendConfig, model: ModelConfig, resolved: ResolvedModel) -> Target:
    """Load the weights and make a target of them. ModelError for a directory or a model that cannot be used."""
    if backend.num_threads is not None:
        torch.set_num_threads(backend.num_threads)
    device = choose_device(model.device)
    dtype = choose_dtype(model.dtype, device)
    if backend.numerics is Numerics.INVARIANT:
        check_device(device, dtype)
    eos_token_ids = Tokenizer.load(resolved.path).eos_token_ids
    loaded = read_weights(resolved, dtype, device)
    return build(
        loaded,
        name=resolved.name,
        fingerprint=resolved.fingerprint,
        eos_token_ids=eos_token_ids,
        numerics=backend.numerics,
        kv_pool_mib=backend.kv_pool_mib,
    )


def build(
    model: PreTrainedModel,
    *,
    name: str,
    fingerprint: str,
    eos_token_ids: tuple[int, ...],
    numerics: Numerics = Numerics.DEFAULT,
    kv_pool_mib: int | None = None,
) -> Target:
    """A target of a model in memory, which becomes the target's own: its linear layers are packed in place."""
    model.train(False)
    model.requires_grad_(False)
    embedding, lm_head = embedding_and_head(model)  # before packing takes the head's plain weight away
    is_invariant = numerics is Numerics.INVARIANT
    shape = probe_model(model)
    if is_invariant:
        make_invariant(model)
    else:
        if can_pack(embedding):
            fuse_layers(model)
        pack_linears(model)
    max_positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if not max_positions:
        raise ModelError(f"The config of {name} does not say max_position_embeddings; add it to its config.json.")
    info = TargetInfo(
        name=name,
        fingerprint=fingerprint,
        vocab_size=lm_head.shape[0],
        hidden_size=lm_head.shape[1],
        num_layers=shape.num_layers,
        max_positions=max_positions,
        aux_layer_ids=default_aux_layer_ids(shape.num_layers),
        eos_token_ids=eos_token_ids,
        dtype=str(shape.dtype).removeprefix("torch."),
        device=str(shape.device),
    )
    if shape.device.type == "cuda" and not is_invariant and importlib.util.find_spec("triton"):
        from runtime.backends.transformers.cuda.target import load_fused

        if fused := load_fused(model, info, shape, kv_pool_mib):
            return fused
    pool = KVPool(shape, InvariantAttention if is_invariant else ContiguousAttention)
    target = TransformersTarget(network_of(model, info.aux_layer_ids), info, pool, embedding, lm_head)
    if is_invariant:
        check_invariance(target)
    return target


def choose_dtype(dtype: Dtype, device: torch.device) -> torch.dtype:
    """float32 on a CPU, where bfloat16 makes verifying m tokens cost m times one; bfloat16 on CUDA."""
    if dtype is Dtype.AUTO:
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    return torch.float32 if dtype is Dtype.FLOAT32 else torch.bfloat16


def read_weights(resolved: ResolvedModel, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """The model of a directory, in memory; one at a time in a process. ModelError if it cannot be loaded."""
    with _READING:
        loaded = _read(resolved, dtype)
    model, report = loaded
    if missing := sorted(report["missing_keys"]):  # transformers would leave them random
        raise ModelError(
            f"The model in {resolved.path} lacks the weights of {missing[0]} and {len(missing) - 1} more; fetch it again."
        )
    return cast(PreTrainedModel, model.to(device))


def _read(resolved: ResolvedModel, dtype: torch.dtype) -> Any:
    """The model, and what transformers has to report of it."""
    shows_progress = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        return AutoModelForCausalLM.from_pretrained(resolved.path, dtype=dtype, local_files_only=True, output_loading_info=True)
    except (OSError, ValueError, KeyError, ImportError, RuntimeError, SafetensorError) as error:
        said = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ModelError(f"The model in {resolved.path} cannot be loaded: {said}") from error
    finally:
        if shows_progress:
            transformers_logging.enable_progress_bar()  # type: ignore[no-untyped-call]

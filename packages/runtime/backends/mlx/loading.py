"""From a resolved model directory to an `MlxTarget`: the `mlx` extra, weights as float32, and a trial of what we take over."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from runtime.backends.base import TargetInfo
from runtime.config import BackendConfig, Dtype, ModelConfig, Numerics
from runtime.errors import ConfigError, ModelError
from runtime.hidden_states import default_aux_layer_ids
from runtime.models import ResolvedModel, Tokenizer

try:
    import mlx.core as mx
    from mlx_lm.utils import load_model

    from runtime.backends.mlx.cache import KVCache, KVShape
    from runtime.backends.mlx.model import MlxModel
    from runtime.backends.mlx.target import MlxTarget, to_torch
except ImportError as error:
    raise ConfigError(
        f"backend.name is 'mlx', but MLX cannot be imported ({error}); install slipstream[mlx], or choose another backend."
    ) from error

# Its functions, compiled and called on several threads as ours are, end the interpreter with a segmentation fault (0.32.4), and
# would want a C++ compiler on a CPU.
mx.disable_compile()

TRIAL_TOLERANCE = 1e-2  # of the largest logit; float32 forwards of two shapes differ by less than a hundredth of it
_LIMIT = "max_position_embeddings"


def load(backend: BackendConfig, model: ModelConfig, resolved: ResolvedModel) -> MlxTarget:
    """Load the weights and make a target of them. ConfigError or ModelError, in one sentence, for what cannot be used."""
    if model.dtype is Dtype.BFLOAT16:
        raise ConfigError("model.dtype is 'bfloat16'; the mlx backend computes in float32, so it must be auto or float32.")
    if model.device not in ("auto", "cpu"):
        raise ConfigError(f"model.device is {model.device!r}; with the mlx backend it must be auto (MLX's own choice) or cpu.")
    if backend.numerics is not Numerics.DEFAULT:
        raise ConfigError(f"backend.numerics is {backend.numerics.value!r}; the mlx backend knows only default.")
    if backend.num_threads is not None:
        torch.set_num_threads(backend.num_threads)  # of drafting and sampling; MLX has no such setting
    device = mx.default_device() if model.device == "auto" else mx.Device(mx.DeviceType.cpu)
    with mx.stream(device):
        loaded, config = _read(resolved)
        return _build(loaded, config, resolved, device)


def _read(resolved: ResolvedModel) -> tuple[Any, dict[str, Any]]:
    try:
        model, config = load_model(resolved.path, model_config=_rope_settings(resolved.path))
        model.set_dtype(mx.float32)
        mx.eval(model.parameters())
    except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
        said = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ModelError(f"mlx-lm cannot load the model in {resolved.path}: {said}") from error
    return model, config


def _rope_settings(path: Path) -> dict[str, Any]:
    """transformers nests them in rope_parameters since version 5; most models of mlx-lm look for the older names only."""
    nested = json.loads((path / "config.json").read_text()).get("rope_parameters") or {}
    theta = {"rope_theta": nested["rope_theta"]} if "rope_theta" in nested else {}
    scaling = {"rope_scaling": nested} if nested.get("rope_type", "default") != "default" else {}
    return theta | scaling


def _build(model: Any, config: dict[str, Any], resolved: ResolvedModel, device: mx.Device) -> MlxTarget:
    """A target of a loaded model, which becomes the target's own."""
    if not config.get(_LIMIT):
        raise ModelError(f"The config of {resolved.name} does not say {_LIMIT}; add it to its config.json.")
    try:
        embedding, lm_head = _embedding_and_head(model)
        shape, plain = _plain_forward(model)
        aux_layer_ids = default_aux_layer_ids(shape.num_layers)
        ours = MlxModel(model, aux_layer_ids, vocab_size=lm_head.shape[0])
        difference = _difference(ours, shape, plain)
    except (AttributeError, IndexError, TypeError, ValueError) as error:
        raise ModelError(f"The mlx backend cannot run {resolved.name}, a {config.get('model_type')} model: {error}") from error
    if not difference <= TRIAL_TOLERANCE:
        raise ModelError(
            f"The mlx backend cannot run {resolved.name}, a {config.get('model_type')} model: its logits differ by "
            f"{difference:.2g} of the largest from mlx-lm's own. Use another backend or model."
        )
    info = TargetInfo(
        name=resolved.name,
        fingerprint=resolved.fingerprint,
        vocab_size=lm_head.shape[0],
        hidden_size=lm_head.shape[1],
        num_layers=shape.num_layers,
        max_positions=config[_LIMIT],
        aux_layer_ids=aux_layer_ids,
        eos_token_ids=Tokenizer.load(resolved.path).eos_token_ids,
        dtype="float32",
        device="cpu",
    )
    return MlxTarget(ours, info, shape, embedding, lm_head, device)


def _embedding_and_head(model: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """[V, Ht] both; the same tensor where they are tied."""
    embedding = _weight(model.model.embed_tokens)
    return embedding, _weight(model.lm_head) if hasattr(model, "lm_head") else embedding


def _weight(module: Any) -> torch.Tensor:
    """Of a layer, shared with it; of a quantised one what its weight stands for."""
    if "scales" not in module:
        return to_torch(module.weight)
    settings = {"group_size": module.group_size, "bits": module.bits, "mode": module.mode}
    return to_torch(mx.dequantize(module.weight, module.scales, module.get("biases"), **settings).astype(mx.float32))


# The trial: what mlx-lm says of two texts that share a beginning, and what we say of the tree of both.
_COMMON, _ENDS = [1, 2, 3], ([4, 5], [6, 7])


def _plain_forward(model: Any) -> tuple[KVShape, list[mx.array]]:
    """The shape of its K/V, and mlx-lm's own logits [2, V] of each end."""
    logits = []
    for end in _ENDS:
        recorders = [_Recorder() for _ in model.model.layers]
        logits.append(model(mx.array([_COMMON + end]), cache=recorders)[0, -len(end) :].astype(mx.float32))
    if len({recorder.shape for recorder in recorders}) != 1 or recorders[0].shape is None:
        raise ValueError("its layers do not all leave keys and values of one shape")
    heads, key_dim, value_dim = recorders[0].shape
    return KVShape(len(recorders), heads, key_dim, value_dim), logits


class _Recorder:
    """A cache that keeps nothing but the shape of what it is given."""

    offset = 0
    shape: tuple[int, int, int] | None = None

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        self.shape = (keys.shape[1], keys.shape[3], values.shape[3])
        return keys, values


def _difference(model: MlxModel, shape: KVShape, plain: list[mx.array]) -> float:
    """The largest between mlx-lm's logits and ours, as a fraction of the largest logit."""
    cache = KVCache(shape)
    cache.reserve(len(_COMMON))
    model(cache, _COMMON, None, 0)
    cache.parents = range(-1, len(_COMMON) - 1)
    cache.commit(range(len(_COMMON)))
    cache.reserve(4)
    tree = [_ENDS[0][0], _ENDS[1][0], _ENDS[0][1], _ENDS[1][1]]
    ours = model(cache, tree, [-1, -1, 0, 1], 4).logits
    expected = mx.stack([plain[0][0], plain[1][0], plain[0][1], plain[1][1]])
    return float(np.abs(np.array(ours - expected)).max() / np.abs(np.array(expected)).max())

"""Drafters on disk: config.json + model.safetensors, in the form that SGLang and vLLM load, and theirs loaded here.

Three spellings of tensor names are read: ours and SGLang's (`midlayer.*`, with or without `model.` before), vLLM's and
speculators' (`layers.0.*`). Whatever is missing, unknown, mis-shaped, not finite or made for another embedding is refused
with one sentence: a drafter that loads is whole. Never pickle. The spellings that are written are in interchange.py.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Container, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from runtime.eagle3.config import Eagle3Config
from runtime.eagle3.model import Eagle3Model
from runtime.eagle3.reasons import RejectReason, rejected
from runtime.eagle3.vocab import DraftVocabulary
from runtime.files import FILE_MODE, TEMPORARY_PREFIX, dump_json, fsync_tree, write_atomic

__all__ = [
    "CONFIG_FILE",
    "WEIGHTS_FILE",
    "RejectReason",
    "load",
    "read_config",
    "read_json",
    "read_vocabulary",
    "read_weights",
    "save",
    "version_id",
    "write",
]

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
EMBEDDING = "embed_tokens.weight"
_WEIGHT_TYPES = ("F32", "F16", "BF16")
_TABLE_TYPES = {"d2t": ("I64", "I32"), "t2d": ("BOOL",)}
_OTHER_NAMES = {
    "draft_id_to_target_id": "d2t",  # as vLLM holds it
    **{f"aux_norm_{third}.weight": f"fc_norm.{i}.weight" for i, third in enumerate(("low", "mid", "high"))},  # SGLang, once
}
_OPTIONAL = ("t2d", EMBEDDING)


def save(model: Eagle3Model, directory: Path, *, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write the drafter into `directory` (made if missing). The same model always gives the same bytes."""
    tensors = {name: tensor.detach().to("cpu", dtype).contiguous() for name, tensor in model.state_dict().items()}
    tensors |= {"d2t": model.vocabulary.d2t, "t2d": model.vocabulary.t2d}
    write(directory, model.config.to_dict() | {"torch_dtype": str(dtype).removeprefix("torch.")}, tensors, {})


def write(directory: Path, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> None:
    """Write a config.json and tensors as they are named here. metadata: of the weights file, beside what loaders ask for."""
    directory.mkdir(parents=True, exist_ok=True)
    unfinished = directory / f"{TEMPORARY_PREFIX}{WEIGHTS_FILE}"
    save_file(dict(tensors), unfinished, metadata={"format": "pt", **metadata})
    os.chmod(unfinished, FILE_MODE)
    os.replace(unfinished, directory / WEIGHTS_FILE)
    write_atomic(directory / CONFIG_FILE, dump_json(dict(config)))
    fsync_tree(directory)


def read_config(directory: Path) -> Eagle3Config:
    return Eagle3Config.from_dict(read_json(directory / CONFIG_FILE))


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object of a checkpoint."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise rejected(RejectReason.UNREADABLE, f"{path} cannot be read as JSON ({error}).") from error
    if not isinstance(raw, dict):
        raise rejected(RejectReason.UNREADABLE, f"{path} holds {type(raw).__name__}, not an object.")
    return raw


def read_vocabulary(directory: Path) -> DraftVocabulary:
    """The draft vocabulary alone, without the weights."""
    config = read_config(directory)
    tensors = _read_tensors(directory / WEIGHTS_FILE, config, only=_TABLE_TYPES)
    return _vocabulary(config, tensors)


def read_weights(directory: Path, embedding: torch.Tensor) -> tuple[Eagle3Config, dict[str, torch.Tensor]]:
    """The config and every tensor of the draft network as it is stored, by our names, with both tables of the vocabulary.

    embedding: the target's, [V, Ht]. One in the file must be the same, and is not among the tensors.
    """
    config = read_config(directory)
    _check_embedding(config, embedding)
    tensors = _read_tensors(directory / WEIGHTS_FILE, config)
    _take_embedding(tensors, embedding)
    vocabulary = _vocabulary(config, tensors)
    return config, tensors | {"d2t": vocabulary.d2t, "t2d": vocabulary.t2d}


def load(
    directory: Path,
    embedding: torch.Tensor,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Eagle3Model:
    """The drafter in `directory`, on the target's embedding [V, Ht]. Raises DrafterRejected."""
    config = read_config(directory)
    _check_embedding(config, embedding)
    tensors = _read_tensors(directory / WEIGHTS_FILE, config)
    _take_embedding(tensors, embedding)
    vocabulary = _vocabulary(config, tensors)
    with torch.device("meta"):  # nothing to initialise: every parameter comes from the file
        model = Eagle3Model(config, vocabulary, embedding)
    model.load_state_dict({name: tensor.to(device, dtype) for name, tensor in tensors.items()}, assign=True)
    return model


def version_id(directory: Path) -> str:
    """The drafter's content hash: the first 16 hexadecimal digits of sha256 over config.json and model.safetensors."""
    digest = hashlib.sha256()
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        path = directory / name
        try:
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
        except OSError as error:
            raise rejected(RejectReason.UNREADABLE, f"{path} cannot be read ({error}).") from error
    return digest.hexdigest()[:16]


def _check_embedding(config: Eagle3Config, embedding: torch.Tensor) -> None:
    vocab_size, hidden_size = embedding.shape
    if config.vocab_size != vocab_size:
        raise rejected(
            RejectReason.VOCABULARY,
            f"The drafter was made for a vocabulary of {config.vocab_size} tokens; the target's has {vocab_size}.",
        )
    if config.hidden_size != hidden_size:
        raise rejected(
            RejectReason.SHAPE,
            f"The drafter was made for a target of hidden size {config.hidden_size}; this target's is {hidden_size}.",
        )


def _take_embedding(tensors: dict[str, torch.Tensor], embedding: torch.Tensor) -> None:
    """Out of the tensors, after it was held against the target's."""
    own = tensors.pop(EMBEDDING, None)
    if own is not None and not torch.equal(own, embedding.detach().to("cpu", own.dtype)):
        raise rejected(
            RejectReason.TARGET_FINGERPRINT,
            "The drafter's embed_tokens differs from the target's embedding: it was trained for another model.",
        )


def _expected_shapes(config: Eagle3Config) -> dict[str, list[int]]:
    """Every tensor the file may hold, by our names, with its shape."""
    hidden, inner = config.hidden_size, config.intermediate_size
    q_size, kv_size = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    shapes = {
        "fc.weight": [hidden, 3 * hidden],
        "midlayer.self_attn.q_proj.weight": [q_size, 2 * hidden],
        "midlayer.self_attn.k_proj.weight": [kv_size, 2 * hidden],
        "midlayer.self_attn.v_proj.weight": [kv_size, 2 * hidden],
        "midlayer.self_attn.o_proj.weight": [hidden, q_size],
        "midlayer.mlp.gate_proj.weight": [inner, hidden],
        "midlayer.mlp.up_proj.weight": [inner, hidden],
        "midlayer.mlp.down_proj.weight": [hidden, inner],
        "midlayer.hidden_norm.weight": [hidden],
        "midlayer.input_layernorm.weight": [hidden],
        "midlayer.post_attention_layernorm.weight": [hidden],
        "norm.weight": [hidden],
        "lm_head.weight": [config.draft_vocab_size, hidden],
        "d2t": [config.draft_vocab_size],
        "t2d": [config.vocab_size],
        EMBEDDING: [config.vocab_size, hidden],
    }
    if config.fc_norm:
        shapes |= {f"fc_norm.{third}.weight": [hidden] for third in range(3)}
    return shapes


def _our_name(name: str) -> str:
    name = name.removeprefix("model.")
    if name in _OTHER_NAMES:
        return _OTHER_NAMES[name]
    return "midlayer." + name.removeprefix("layers.0.") if name.startswith("layers.0.") else name


def _read_tensors(path: Path, config: Eagle3Config, only: Container[str] | None = None) -> dict[str, torch.Tensor]:
    """Tensors (all, or those named) by our names, after all names, types and shapes and their values have been checked."""
    shapes = _expected_shapes(config)
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            names = _check_names(list(file.keys()), shapes, config)
            for ours, theirs in names.items():
                view = file.get_slice(theirs)
                _check_form(theirs, view.get_dtype(), view.get_shape(), _TABLE_TYPES.get(ours, _WEIGHT_TYPES), shapes[ours])
            tensors = {ours: file.get_tensor(theirs) for ours, theirs in names.items() if only is None or ours in only}
    except (OSError, SafetensorError) as error:
        raise rejected(RejectReason.UNREADABLE, f"{path} cannot be read as safetensors ({error}).") from error
    for ours, tensor in tensors.items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            count = int((~torch.isfinite(tensor)).sum())
            raise rejected(RejectReason.NON_FINITE, f"Tensor {names[ours]} holds {count} values that are not finite.")
    return tensors


def _check_names(found: list[str], shapes: dict[str, list[int]], config: Eagle3Config) -> dict[str, str]:
    """Our name -> the file's name."""
    names: dict[str, str] = {}
    for theirs in sorted(found):
        ours = _our_name(theirs)
        if ours not in shapes:
            raise rejected(RejectReason.UNKNOWN_TENSOR, f"Tensor {theirs} is none of an EAGLE3 drafter's; it is not loaded.")
        if ours in names:
            raise rejected(RejectReason.UNKNOWN_TENSOR, f"Tensors {names[ours]} and {theirs} are two spellings of one.")
        names[ours] = theirs
    is_full = config.draft_vocab_size == config.vocab_size  # then d2t can only be the identity
    optional = {*_OPTIONAL, "d2t"} if is_full else {*_OPTIONAL}
    missing = [name for name in shapes if name not in names and name not in optional]
    if missing:
        raise rejected(RejectReason.MISSING_TENSOR, f"The drafter lacks {', '.join(missing)}.")
    return names


def _check_form(name: str, dtype: str, shape: list[int], types: tuple[str, ...], expected: list[int]) -> None:
    if dtype not in types:
        raise rejected(RejectReason.DTYPE, f"Tensor {name} is {dtype}; it must be {' or '.join(types)}.")
    if list(shape) != expected:
        raise rejected(RejectReason.SHAPE, f"Tensor {name} has shape {list(shape)}; the config makes it {expected}.")


def _vocabulary(config: Eagle3Config, tensors: dict[str, torch.Tensor]) -> DraftVocabulary:
    """Takes d2t and t2d out of the tensors. Only a full vocabulary may come without d2t: it can only be the identity."""
    d2t, t2d = tensors.pop("d2t", None), tensors.pop("t2d", None)
    if d2t is None:
        d2t = torch.zeros(config.draft_vocab_size, dtype=torch.int64)
    return DraftVocabulary.from_d2t(d2t, config.vocab_size) if t2d is None else DraftVocabulary.from_tensors(d2t, t2d)

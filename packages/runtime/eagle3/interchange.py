"""Drafters of other engines: four spellings of one checkpoint, written exactly as each reads it, and read back strictly.

    dialect      tensor names     layer ids in config.json                        config.json
    slipstream   midlayer.*       outputs in eagle_config and entrances on top    flat; SGLang and vLLM read it as it is
    sglang       midlayer.*       outputs in eagle_config, unless the default     flat; SpecForge's too
    vllm         layers.0.*       entrances on top                                flat
    speculators  layers.0.*       entrances on top                                nested, with speculators_config

An output is the id of the layer whose output is read, an entrance the id of the layer that it enters: output + 1. All four
hold d2t and t2d under these names (vLLM renames d2t to its own draft_id_to_target_id while it loads). norm_output is what SGLang,
vLLM and speculators mean by it, the state that is handed on; SpecForge's class has another setting of that name. Tensors are
moved as they are, never cast. Knows no registry and no target's weights.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from runtime.eagle3.checkpoint import CONFIG_FILE, WEIGHTS_FILE, read_json, read_weights, write
from runtime.eagle3.config import LAYER_IDS, Eagle3Config
from runtime.eagle3.reasons import RejectReason, rejected
from runtime.hidden_states import default_aux_layer_ids

FINGERPRINT_KEY = "target_fingerprint"  # in the metadata of the weights file, where no engine minds it
PICKLES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt")
_PICKLE_STARTS = (b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")
_NOT_NESTED = ("architectures", "draft_vocab_size", "target_hidden_size", "eagle_config", LAYER_IDS, "torch_dtype")
_FLAGS = ("fc_norm", "norm_before_residual", "norm_output")


class Dialect(StrEnum):
    SLIPSTREAM = "slipstream"
    SGLANG = "sglang"
    VLLM = "vllm"
    SPECULATORS = "speculators"


@dataclass(frozen=True)
class Verifier:
    """What a drafter's files may say about its target."""

    name: str | None  # None: do not say
    fingerprint: str
    architectures: tuple[str, ...]
    num_layers: int
    draft_tokens: int = 5  # how many an engine should draft, where it asks the checkpoint

    @property
    def default_layer_ids(self) -> tuple[int, int, int]:
        return default_aux_layer_ids(self.num_layers)


@dataclass(frozen=True)
class Offered:
    """A checkpoint that was read: whole, in our names, on the CPU, with the dtypes it was stored in."""

    dialect: Dialect
    config: Eagle3Config  # layer ids always named; dtype: that of the weights
    tensors: Mapping[str, torch.Tensor]  # by our names, d2t and t2d included


def tensor_name(ours: str, dialect: Dialect) -> str:
    has_layers = dialect in (Dialect.VLLM, Dialect.SPECULATORS)
    return ours.replace("midlayer.", "layers.0.", 1) if has_layers and ours.startswith("midlayer.") else ours


def config_json(config: Eagle3Config, dialect: Dialect, verifier: Verifier) -> dict[str, Any]:
    """config.json in a dialect. config: with its layer ids."""
    ours = config.to_dict()
    if dialect is Dialect.SLIPSTREAM:
        return ours
    if dialect is Dialect.SGLANG:
        del ours[LAYER_IDS]
        if config.aux_layer_ids == verifier.default_layer_ids:
            del ours["eagle_config"]
        return ours
    del ours["eagle_config"]
    if dialect is Dialect.VLLM:
        return ours | {"architectures": ["Eagle3LlamaForCausalLM"]}
    nested = {name: value for name, value in ours.items() if name not in (*_NOT_NESTED, *_FLAGS)}
    proposal = {"proposal_type": "greedy", "speculative_tokens": verifier.draft_tokens}
    return {
        "architectures": ["Eagle3Speculator"],
        "model_type": "speculator_model",
        "speculators_model_type": "eagle3",
        "speculators_config": {
            "algorithm": "eagle3",
            "proposal_methods": [proposal],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": verifier.name, "architectures": list(verifier.architectures)},
        },
        "transformer_layer_config": nested,
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.hidden_size,
        **{name: getattr(config, name) for name in _FLAGS},
        "norm_before_fc": False,
        LAYER_IDS: ours[LAYER_IDS],
        "tie_word_embeddings": False,
        "torch_dtype": config.dtype,
    }


def write_as(directory: Path, drafter: Offered, dialect: Dialect, verifier: Verifier) -> None:
    """Write a drafter into `directory` as the dialect spells it; DrafterRejected(CONFIG) if its engine has no such network."""
    if dialect is Dialect.SGLANG and drafter.config.norm_before_residual:
        raise rejected(
            RejectReason.CONFIG,
            "The drafter's config has norm_before_residual = True, which SGLang passes over, and would draft nonsense; export it "
            "for vllm or speculators.",
        )
    is_full = drafter.config.draft_vocab_size == drafter.config.vocab_size
    left_out = ("d2t", "t2d") if dialect is Dialect.SPECULATORS and is_full else ()  # its model has no such buffers then
    tensors = {tensor_name(name, dialect): tensor for name, tensor in drafter.tensors.items() if name not in left_out}
    metadata = {} if dialect is Dialect.SLIPSTREAM else {FINGERPRINT_KEY: verifier.fingerprint}
    write(directory, config_json(drafter.config, dialect, verifier), tensors, metadata)


def read_offered(directory: Path, embedding: torch.Tensor, verifier: Verifier) -> Offered:
    """A checkpoint of any dialect, for this target; DrafterRejected with the first reason against it. embedding: its, [V, Ht]."""
    check_files(directory)
    raw = read_json(directory / CONFIG_FILE)
    dialect = dialect_of(raw)
    _check_verifier(raw, directory / WEIGHTS_FILE, verifier)
    config, tensors = read_weights(directory, embedding)
    dtype = _weights_dtype(tensors)
    stated = _stated_dtype(raw)
    if stated is not None and stated != dtype:
        raise rejected(
            RejectReason.DTYPE, f"The drafter's config has torch_dtype = {stated!r}, and its weights are {dtype}; correct it."
        )
    layer_ids = config.aux_layer_ids or verifier.default_layer_ids
    return Offered(dialect, dataclasses.replace(config, aux_layer_ids=layer_ids, dtype=dtype), tensors)


def dialect_of(raw: Mapping[str, Any]) -> Dialect:
    """Which of the four a config.json is written in; one that names no layer ids is SGLang's."""
    named = raw.get("architectures")
    if "transformer_layer_config" in raw or "speculators_config" in raw:
        return Dialect.SPECULATORS
    if named == ["Eagle3LlamaForCausalLM"] or (LAYER_IDS in raw and "eagle_config" not in raw):
        return Dialect.VLLM
    return Dialect.SLIPSTREAM if LAYER_IDS in raw else Dialect.SGLANG


def check_files(directory: Path, *others: str) -> None:
    """A directory of its own files: config.json and one model.safetensors, no link that leads out, and no pickle instead.

    others: names of files that may be there too.
    """
    if not directory.is_dir():
        raise rejected(
            RejectReason.UNREADABLE, f"{directory} is no directory; give the one that holds the drafter's config.json."
        )
    weights = directory / WEIGHTS_FILE
    if not weights.exists():
        pickles = sorted(entry.name for entry in directory.iterdir() if entry.suffix in PICKLES)
        if pickles:
            raise _pickle(directory / pickles[0])
        if weights.with_name(f"{WEIGHTS_FILE}.index.json").exists():
            raise rejected(
                RejectReason.UNREADABLE, f"{directory} has its weights in several files; save them as one {WEIGHTS_FILE}."
            )
    root = directory.resolve()
    there = [path for path in map(directory.joinpath, others) if path.exists() or path.is_symlink()]
    for path in (directory / CONFIG_FILE, weights, *there):
        real = path.resolve()
        if not real.is_relative_to(root):
            raise rejected(
                RejectReason.OUTSIDE, f"{path} is a link out of its directory, to {real}; copy the file itself to its place."
            )
        if not real.is_file():
            what = "it is no regular file" if real.exists() else "there is no such file"
            raise rejected(RejectReason.UNREADABLE, f"{path} cannot be read: {what}.")
    with weights.open("rb") as file:
        if file.read(4).startswith(_PICKLE_STARTS):
            raise _pickle(weights)


def _pickle(path: Path) -> Exception:
    return rejected(
        RejectReason.PICKLE,
        f"{path} is a pickle, which can run any program when it is read; offer the weights as {WEIGHTS_FILE}.",
    )


def _check_verifier(raw: Mapping[str, Any], weights: Path, verifier: Verifier) -> None:
    """Where the files say which target they are for, it must be this one."""
    try:
        with safe_open(weights, framework="pt") as file:
            made_for = (file.metadata() or {}).get(FINGERPRINT_KEY, verifier.fingerprint)
    except (OSError, SafetensorError) as error:
        raise rejected(RejectReason.UNREADABLE, f"{weights} cannot be read as safetensors ({error}).") from error
    if made_for != verifier.fingerprint:
        raise rejected(
            RejectReason.TARGET_FINGERPRINT,
            f"The drafter was made for target {made_for}; {verifier.name} is {verifier.fingerprint}. Give its own model.name.",
        )
    speculators = raw.get("speculators_config")
    named = speculators.get("verifier") if isinstance(speculators, Mapping) else None
    architectures = named.get("architectures") if isinstance(named, Mapping) else None
    if architectures and architectures != list(verifier.architectures):
        raise rejected(
            RejectReason.TARGET_FINGERPRINT,
            f"The drafter was made for a target of architectures {architectures}; {verifier.name} is "
            f"{list(verifier.architectures)}. Give its own model.name.",
        )


def _weights_dtype(tensors: Mapping[str, torch.Tensor]) -> str:
    found = {name: str(tensor.dtype).removeprefix("torch.") for name, tensor in tensors.items() if tensor.is_floating_point()}
    dtypes = sorted(set(found.values()))
    if len(dtypes) > 1:
        few = [next(name for name, dtype in found.items() if dtype == each) for each in dtypes]
        told = ", ".join(f"{name} is {dtype}" for name, dtype in zip(few, dtypes, strict=True))
        raise rejected(RejectReason.DTYPE, f"The drafter's weights are of several types ({told}); save them in one.")
    return dtypes[0]


def _stated_dtype(raw: Mapping[str, Any]) -> str | None:
    nested = raw.get("transformer_layer_config")
    places = [raw, nested] if isinstance(nested, Mapping) else [raw]
    return next((str(place[key]) for place in places for key in ("torch_dtype", "dtype") if place.get(key)), None)


def same(one: Offered, other: Offered) -> bool:
    """Equal to the last bit, whatever they were spelt in."""
    names_agree = one.tensors.keys() == other.tensors.keys()
    return (
        one.config == other.config
        and names_agree
        and all(
            tensor.dtype == other.tensors[name].dtype and torch.equal(tensor, other.tensors[name])
            for name, tensor in one.tensors.items()
        )
    )

"""`Eagle3Config`: the config.json of a drafter, in our own words, read from three dialects and written in one.

The file is SGLang's and SpecForge's form. Read as well: vLLM's (layer ids at the top are entrances, output id + 1) and
speculators' (the decoder's values nested under `transformer_layer_config`). Knows no tensor.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from runtime.eagle3.reasons import RejectReason, rejected
from runtime.errors import ModelError
from runtime.hidden_states import default_aux_layer_ids

ARCHITECTURE = "LlamaForCausalLMEagle3"
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
_ARCHITECTURES = (ARCHITECTURE, "Eagle3LlamaForCausalLM", "Eagle3DraftModel", "Eagle3Speculator")  # ours, vLLM's, speculators'
MAX_SIZE = 2**31 - 1  # of any one dimension
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
_DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "draft_vocab_size",
    "max_position_embeddings",
)
_NEEDED_OF_TARGET = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_hidden_layers",
    "vocab_size",
    "max_position_embeddings",
)
_FIXED = {  # settings that would make it another network, and the only value of each that is ours
    "model_type": "llama",
    "num_hidden_layers": 1,
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "norm_before_fc": False,
}


@dataclass(frozen=True)
class Eagle3Config:
    """The shape of a draft network. An object that exists is consistent: construction raises DrafterRejected."""

    hidden_size: int  # H, equal to Ht
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int  # V
    draft_vocab_size: int  # Vd
    max_position_embeddings: int
    rms_norm_eps: float = 1e-5
    rope_parameters: Mapping[str, Any] = field(default_factory=lambda: dict(_DEFAULT_ROPE))
    aux_layer_ids: tuple[int, int, int] | None = None  # outputs of decoder layers; None: the file names none
    fc_norm: bool = False  # a norm on each third of aux, before fc
    norm_before_residual: bool = False  # the residual is hidden_norm(h), not h
    norm_output: bool = False  # the state recycled to the next step is norm(h), not h
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        for name in _SIZES:
            _require(_is_size(value := getattr(self, name)), name, value, f"a whole number in 1..{MAX_SIZE}")
        _require(self.head_dim % 2 == 0, "head_dim", self.head_dim, "even, for rotary positions")
        divides = self.num_attention_heads % self.num_key_value_heads == 0
        _require(divides, "num_key_value_heads", self.num_key_value_heads, f"a divisor of {self.num_attention_heads} heads")
        fits = self.draft_vocab_size <= self.vocab_size
        _require(fits, "draft_vocab_size", self.draft_vocab_size, f"at most vocab_size, {self.vocab_size}")
        _require(_is_number(self.rms_norm_eps) and self.rms_norm_eps > 0, "rms_norm_eps", self.rms_norm_eps, "a number above 0")
        _check_rope(self.rope_parameters)
        if self.aux_layer_ids is not None:
            _check_layer_ids(self.aux_layer_ids)

    @staticmethod
    def for_target(
        target_config: Mapping[str, Any],
        draft_vocab_size: int,
        *,
        aux_layer_ids: tuple[int, int, int] | None = None,
        fc_norm: bool = False,
    ) -> Eagle3Config:
        """A drafter for the target whose config.json this is: its hidden size, head geometry, rope and context."""
        missing = [name for name in _NEEDED_OF_TARGET if target_config.get(name) is None]
        if missing:
            raise ModelError(f"The target's config.json lacks {', '.join(missing)}; a drafter can be made for Llama-like models.")
        heads = target_config["num_attention_heads"]
        hidden = target_config["hidden_size"]
        return Eagle3Config(
            hidden_size=hidden,
            intermediate_size=target_config["intermediate_size"],
            num_attention_heads=heads,
            num_key_value_heads=target_config.get("num_key_value_heads") or heads,
            head_dim=target_config.get("head_dim") or hidden // heads,
            vocab_size=target_config["vocab_size"],
            draft_vocab_size=draft_vocab_size,
            max_position_embeddings=target_config["max_position_embeddings"],
            rms_norm_eps=target_config.get("rms_norm_eps", 1e-6),
            rope_parameters=_read_rope(target_config) or _DEFAULT_ROPE,
            aux_layer_ids=aux_layer_ids or default_aux_layer_ids(target_config["num_hidden_layers"]),
            fc_norm=fc_norm,
            bos_token_id=target_config.get("bos_token_id"),
            eos_token_id=target_config.get("eos_token_id"),
            pad_token_id=target_config.get("pad_token_id"),
        )

    @staticmethod
    def from_dict(raw: Mapping[str, Any]) -> Eagle3Config:
        """Read a config.json of any of the three dialects; DrafterRejected with what is wrong with it."""
        nested = raw.get("transformer_layer_config")
        layer: Mapping[str, Any] = nested if isinstance(nested, Mapping) else raw
        _check_network(raw, layer)
        heads, hidden, vocab_size = (_size(layer, name) for name in ("num_attention_heads", "hidden_size", "vocab_size"))
        rope = _read_rope(layer)
        if rope is None:
            raise rejected(
                RejectReason.ROPE, "The drafter's config has neither rope_theta nor rope_parameters; export it with them."
            )
        return Eagle3Config(
            hidden_size=hidden,
            intermediate_size=_size(layer, "intermediate_size"),
            num_attention_heads=heads,
            num_key_value_heads=_size(layer, "num_key_value_heads", heads),
            head_dim=_size(layer, "head_dim", hidden // heads),
            vocab_size=vocab_size,
            draft_vocab_size=_size(raw, "draft_vocab_size", vocab_size),
            max_position_embeddings=_size(layer, "max_position_embeddings"),
            rms_norm_eps=layer.get("rms_norm_eps", 1e-6),
            rope_parameters=rope,
            aux_layer_ids=_read_layer_ids(raw),
            fc_norm=_flag(raw, "fc_norm", _flag(raw, "use_aux_norm", False)),  # SGLang knows both names
            norm_before_residual=_flag(raw, "norm_before_residual", layer is nested),
            norm_output=_flag(raw, "norm_output", False),
            bos_token_id=layer.get("bos_token_id"),
            eos_token_id=layer.get("eos_token_id"),
            pad_token_id=layer.get("pad_token_id"),
            dtype=raw.get("torch_dtype") or raw.get("dtype") or "bfloat16",
        )

    def to_dict(self) -> dict[str, Any]:
        """config.json as SGLang and vLLM read it: each finds rope and the layer ids in its own dialect."""
        rope = dict(self.rope_parameters)
        scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
        result: dict[str, Any] = {
            "architectures": [ARCHITECTURE],
            **_FIXED,
            "hidden_size": self.hidden_size,
            "target_hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_key_value_heads,
            "head_dim": self.head_dim,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_theta": rope["rope_theta"],
            "rope_scaling": None if rope["rope_type"] == "default" else scaling,
            "rope_parameters": rope,
            "max_position_embeddings": self.max_position_embeddings,
            "vocab_size": self.vocab_size,
            "draft_vocab_size": self.draft_vocab_size,
            "tie_word_embeddings": False,
            "torch_dtype": self.dtype,
            "bos_token_id": self.bos_token_id,
            "eos_token_id": self.eos_token_id,
            "pad_token_id": self.pad_token_id,
        }
        flags = {"fc_norm": self.fc_norm, "norm_before_residual": self.norm_before_residual, "norm_output": self.norm_output}
        result |= {name: True for name, value in flags.items() if value}
        if self.aux_layer_ids is not None:
            result["eagle_config"] = {LAYER_IDS: list(self.aux_layer_ids), "use_aux_hidden_state": True}
            result[LAYER_IDS] = [layer_id + 1 for layer_id in self.aux_layer_ids]
        return result


def _check_network(raw: Mapping[str, Any], layer: Mapping[str, Any]) -> None:
    """Refuse what names another network than the one in model.py."""
    named = raw.get("architectures") or []
    known = isinstance(named, list) and len(named) == 1 and named[0] in _ARCHITECTURES
    _require(known, "architectures", named, f"one of {', '.join(_ARCHITECTURES)}")
    kind = raw.get("speculators_model_type")
    _require(kind in (None, "eagle3"), "speculators_model_type", kind, "'eagle3'")
    for source in (raw, layer):
        for name, expected in _FIXED.items():
            value = source.get(name)
            is_other_level = source is not layer and name == "model_type"  # speculators has its own model_type on top
            _require(value is None or value == expected or is_other_level, name, value, repr(expected))
    hidden = layer.get("hidden_size")
    target_hidden = raw.get("target_hidden_size")
    same = target_hidden is None or target_hidden == hidden
    _require(same, "target_hidden_size", target_hidden, f"hidden_size, {hidden}: the drafter shares the target's embedding")
    eagle = raw.get("eagle_config")
    _require(eagle is None or isinstance(eagle, Mapping), "eagle_config", eagle, "an object")
    uses_aux = eagle is None or eagle.get("use_aux_hidden_state", True) is True
    _require(uses_aux, "eagle_config.use_aux_hidden_state", False, "true: the drafter reads three auxiliary states")


def _read_rope(layer: Mapping[str, Any]) -> dict[str, Any] | None:
    """The rope settings from either dialect; None if there are none. Refused when both are there and differ."""
    found: list[dict[str, Any]] = []
    new = layer.get("rope_parameters")
    if isinstance(new, Mapping):
        theta = new.get("rope_theta", layer.get("rope_theta"))
        found.append({**new, "rope_type": new.get("rope_type", new.get("type", "default")), "rope_theta": theta})
    if layer.get("rope_theta") is not None:
        scaling = layer.get("rope_scaling") or {}
        if not isinstance(scaling, Mapping):
            raise rejected(
                RejectReason.ROPE, f"The drafter's config has rope_scaling = {scaling!r}; it must be an object or null."
            )
        kind = scaling.get("rope_type", scaling.get("type", "default"))
        found.append({**scaling, "rope_type": kind, "rope_theta": layer["rope_theta"]})
    for settings in found:
        settings.pop("type", None)
    if len(found) == 2 and found[0] != found[1]:
        raise rejected(
            RejectReason.ROPE,
            f"The drafter's config gives two different ropes: rope_parameters {found[0]}, rope_theta/rope_scaling {found[1]}.",
        )
    return found[0] if found else None


def _check_rope(rope: Mapping[str, Any]) -> None:
    if rope.get("rope_type") not in ROPE_TYPES:
        raise rejected(
            RejectReason.ROPE,
            f"The drafter's config has rope_type = {rope.get('rope_type')!r}; it must be one of {', '.join(ROPE_TYPES)}.",
        )
    theta: Any = rope.get("rope_theta")
    if not (_is_number(theta) and theta > 0):
        raise rejected(RejectReason.ROPE, f"The drafter's config has rope_theta = {theta!r}; it must be a number above 0.")


def _read_layer_ids(raw: Mapping[str, Any]) -> tuple[int, int, int] | None:
    """Output ids: as they stand under eagle_config (SGLang), minus one at the top (vLLM's and speculators' entrances)."""
    outputs = (raw.get("eagle_config") or {}).get(LAYER_IDS)
    entrances = raw.get(LAYER_IDS)
    for value in (outputs, entrances):
        if value is not None:
            _check_layer_ids(value)
    shifted = None if entrances is None else [layer_id - 1 for layer_id in entrances]
    if outputs is not None and shifted is not None and list(outputs) != shifted:
        raise rejected(
            RejectReason.LAYER_IDS,
            f"The drafter's config names two sets of auxiliary layers: outputs {outputs} and entrances {entrances}; an entrance "
            "is the output's id plus one.",
        )
    chosen = outputs if outputs is not None else shifted
    if chosen is None:
        return None
    low, mid, high = chosen
    return (low, mid, high)


def _check_layer_ids(value: object) -> None:
    ok = isinstance(value, list | tuple) and len(value) == 3 and all(_is_int(layer_id) and layer_id >= 0 for layer_id in value)
    if not ok or list(value) != sorted(set(value)):  # type: ignore[call-overload]
        raise rejected(
            RejectReason.LAYER_IDS, f"The drafter's config has {LAYER_IDS} = {value!r}; it must be three ascending layer ids."
        )


def _size(source: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = source.get(name)
    value = default if value is None else value
    _require(_is_size(value), name, value, f"a whole number in 1..{MAX_SIZE}")
    assert value is not None
    return value


def _flag(source: Mapping[str, Any], name: str, default: bool) -> bool:
    value = source.get(name)
    _require(value is None or isinstance(value, bool), name, value, "true or false")
    return default if value is None else bool(value)


def _require(condition: bool, name: str, value: object, expected: str) -> None:
    if not condition:
        raise rejected(RejectReason.CONFIG, f"The drafter's config has {name} = {value!r}; it must be {expected}.")


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value <= MAX_SIZE


def _is_number(value: Any) -> bool:
    """A finite one, as float64 holds it: JSON's whole numbers know no limit."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and bool(-sys.float_info.max <= value <= sys.float_info.max)

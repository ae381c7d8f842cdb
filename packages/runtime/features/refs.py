"""References to training rows: what travels on the control plane in place of tensors.

`SampleMeta` is what the producer of a row knows of it; `SampleRef` adds what the store found out. Both are frozen, go
through JSON strictly, and never carry a tensor: `refuse_tensors` guards that. Standard library only; no model, no file.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
import time
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from types import MappingProxyType, ModuleType
from typing import Any

from runtime.errors import FeatureError

SLICE_LABEL = "slice"  # the label that names a row's slice of the traffic
SAMPLE_ID = re.compile(r"[A-Za-z0-9_-]{1,128}")  # part of a file name, so nothing that could leave its directory


@dataclass(frozen=True)
class FeatureSpec:
    """Shape and dtype of one stored tensor."""

    shape: tuple[int, ...]
    dtype: str  # "bfloat16", "int64", "bool"


@dataclass(frozen=True, kw_only=True)
class SampleMeta:
    """What the producer of a row says about it."""

    sample_id: str
    run_id: str  # the producer's run
    source: str  # session, prompt or file that it comes from
    target_fingerprint: str
    aux_layer_ids: tuple[int, int, int]
    drafter_version: str = ""
    tokenizer_hash: str = ""
    vocabulary_hash: str = ""
    created_at: float = field(default_factory=time.time)  # Unix seconds

    def __post_init__(self) -> None:
        if not SAMPLE_ID.fullmatch(self.sample_id):
            raise FeatureError(f"sample_id is {self.sample_id!r}; it must be 1 to 128 of the characters A-Z a-z 0-9 _ -.")
        if not math.isfinite(self.created_at):
            raise FeatureError(f"created_at of sample {self.sample_id} is {self.created_at}; it must be Unix seconds.")


@dataclass(frozen=True, kw_only=True)
class SampleRef(SampleMeta):
    """One stored row: everything but its tensors."""

    uri: str  # names the file within its store
    generation: int  # grows when the same sample_id is put again; a ref of an older generation is dead
    features: Mapping[str, FeatureSpec] = field(hash=False)
    num_tokens: int
    num_bytes: int  # of the stored file
    labels: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}), hash=False)

    @property
    def slice(self) -> str:
        """The slice of traffic that the row belongs to; empty: none is known."""
        return self.labels.get(SLICE_LABEL, "")

    def to_json(self) -> str:
        values = {item.name: getattr(self, item.name) for item in dataclasses.fields(self)}
        values["features"] = {name: dataclasses.asdict(spec) for name, spec in self.features.items()}
        values["labels"] = dict(self.labels)
        return json.dumps(values, sort_keys=True, separators=(",", ":"), allow_nan=False)

    @staticmethod
    def from_json(text: str) -> SampleRef:
        """The inverse of `to_json`. FeatureError on any unknown, missing or mistyped field."""
        try:
            values = json.loads(text)
        except json.JSONDecodeError as error:
            raise FeatureError(f"A sample reference is not JSON ({error}): {text[:80]!r}.") from error
        _check_fields("A sample reference", values, {item.name: _JSON_TYPES[str(item.type)] for item in _REF_FIELDS})
        layer_ids = _integers("aux_layer_ids", values["aux_layer_ids"])
        if len(layer_ids) != 3:
            raise FeatureError(f"aux_layer_ids of a sample reference must be three integers, got {values['aux_layer_ids']!r}.")
        features = {}
        for name, spec in values["features"].items():
            _check_fields(f"The feature {name!r} of a sample reference", spec, {"shape": (list,), "dtype": (str,)})
            features[name] = FeatureSpec(_integers(f"features.{name}.shape", spec["shape"]), spec["dtype"])
        for name, label in values["labels"].items():
            if not isinstance(label, str):
                raise FeatureError(f"The label {name!r} of a sample reference must be text, got {label!r}.")
        return SampleRef(
            **{
                **values,
                "aux_layer_ids": layer_ids,
                "features": MappingProxyType(features),
                "labels": MappingProxyType(values["labels"]),
            }
        )


_REF_FIELDS = dataclasses.fields(SampleRef)
_JSON_TYPES: Mapping[str, tuple[type, ...]] = MappingProxyType(
    {
        "str": (str,),
        "int": (int,),
        "float": (float, int),
        "tuple[int, int, int]": (list,),
        "Mapping[str, FeatureSpec]": (dict,),
        "Mapping[str, str]": (dict,),
    }
)


def _check_fields(what: str, values: object, types: Mapping[str, tuple[type, ...]]) -> None:
    if not isinstance(values, dict):
        raise FeatureError(f"{what} must be a JSON object, got {type(values).__name__}.")
    if values.keys() != types.keys():
        missing, unknown = sorted(types.keys() - values.keys()), sorted(values.keys() - types.keys())
        raise FeatureError(f"{what} lacks the fields {missing} and has the unknown fields {unknown}.")
    for name, allowed in types.items():
        value = values[name]
        if isinstance(value, bool) or not isinstance(value, allowed):
            raise FeatureError(f"{what}: {name} must be {allowed[0].__name__}, got {value!r}.")


def _integers(name: str, values: list[Any]) -> tuple[int, ...]:
    if not all(isinstance(value, int) and not isinstance(value, bool) for value in values):
        raise FeatureError(f"{name} of a sample reference must be integers, got {values!r}.")
    return tuple(values)


# --- the guard ---


def refuse_tensors(obj: object) -> None:
    """Raise FeatureError, with the path to it, if a tensor hides in obj: of any library, in any container or dataclass.

    A tensor is what has a dtype and a shape and is not a mere FeatureSpec. Cycles are safe.
    """
    seen: dict[int, object] = {}  # keeps what it has seen alive, so that no id comes twice
    stack: list[tuple[str, object]] = [("value", obj)]
    while stack:
        path, value = stack.pop()
        if hasattr(value, "dtype") and hasattr(value, "shape") and not isinstance(value, FeatureSpec):
            raise FeatureError(
                f"{path} is a {type(value).__module__}.{type(value).__name__}; tensors never travel on the control plane. "
                "Put it into the feature store and send its SampleRef."
            )
        if id(value) not in seen:
            seen[id(value)] = value
            stack.extend(_children(path, value))


def _children(path: str, value: object) -> Iterator[tuple[str, object]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield f"a key of {path}", key
            yield f"{path}[{key!r}]", item
    elif isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray | memoryview | range):
        for index, item in enumerate(value):
            yield f"{path}[{index}]", item
    elif isinstance(value, Set):
        for item in value:
            yield f"an element of {path}", item
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for item in dataclasses.fields(value):
            yield f"{path}.{item.name}", getattr(value, item.name, None)
    elif not isinstance(value, type | ModuleType):
        for name, item in getattr(value, "__dict__", {}).items():
            yield f"{path}.{name}", item


# --- deterministic chance ---


def unit_hash(purpose: str, key: str) -> float:
    """A number in [0, 1), uniform over keys, the same in every process; independent between purposes."""
    digest = hashlib.sha256(f"{purpose}\0{key}".encode()).digest()
    return int.from_bytes(digest[:6]) / 2**48

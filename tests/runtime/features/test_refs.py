"""References: strict JSON, safe ids, and no tensor on the control plane."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from runtime.errors import FeatureError
from runtime.features.refs import SampleMeta, SampleRef, refuse_tensors, unit_hash


def test_json_round_trip_keeps_every_field(make_ref: Callable[..., SampleRef]) -> None:
    ref = replace(make_ref(), drafter_version="v", tokenizer_hash="t", vocabulary_hash="u", created_at=12.5)
    again = SampleRef.from_json(ref.to_json())
    assert again == ref
    assert hash(again) == hash(ref)
    assert again.features["aux"].shape == (3, 24)
    assert isinstance(again.aux_layer_ids, tuple)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"num_tokens": "4"}, "num_tokens must be int"),
        ({"num_tokens": True}, "num_tokens must be int"),
        ({"num_bytes": 1.5}, "num_bytes must be int"),
        ({"uri": None}, "uri must be str"),
        ({"labels": {"kind": 3}}, "label 'kind'"),
        ({"labels": []}, "labels must be dict"),
        ({"aux_layer_ids": [1, 2]}, "three integers"),
        ({"aux_layer_ids": [1, 2, "3"]}, "must be integers"),
        ({"features": {"aux": {"shape": [1]}}}, "lacks the fields ['dtype']"),
        ({"features": {"aux": {"shape": [1.0], "dtype": "int64"}}}, "features.aux.shape"),
        ({"features": {"aux": 3}}, "must be a JSON object"),
        ({"sample_id": "../up"}, "sample_id is '../up'"),
        ({"created_at": float("nan")}, "created_at"),
        ({"extra": 1}, "unknown fields ['extra']"),
    ],
)
def test_json_is_strict(make_ref: Callable[..., SampleRef], change: dict[str, Any], said: str) -> None:
    values = json.loads(make_ref().to_json()) | change
    with pytest.raises(FeatureError) as raised:
        SampleRef.from_json(json.dumps(values))
    assert said in str(raised.value)


@pytest.mark.parametrize("text", ["", "[]", "{", "{}", "null"])
def test_what_is_no_reference_is_refused(text: str) -> None:
    with pytest.raises(FeatureError):
        SampleRef.from_json(text)


@pytest.mark.parametrize("sample_id", ["", "a/b", "..", "a.b", "a" * 129, "a\n", "ä"])
def test_ids_that_could_leave_the_directory_are_refused(make_meta: Callable[..., SampleMeta], sample_id: str) -> None:
    with pytest.raises(FeatureError):
        make_meta(sample_id)


@dataclass
class Box:
    content: object


class Lazy:
    """Like an array of a library that is not installed here."""

    dtype, shape = "float16", (2,)


@pytest.mark.parametrize(
    ("value", "path"),
    [
        (torch.zeros(1), "value is"),
        (np.zeros(1), "value is a numpy.ndarray"),
        (np.float32(1.0), "value is"),
        (Lazy(), "value is"),
        ({"a": [1, (2, torch.zeros(1))]}, "value['a'][1][1]"),
        (Box({"x": Box(np.zeros(2))}), "value.content['x'].content"),
        ({Lazy()}, "an element of value"),
        ({Lazy(): 1}, "a key of value"),
        (deque([torch.nn.Parameter(torch.zeros(1))]), "value[0]"),
        ([SimpleNamespace(states=torch.zeros(1))], "value[0].states"),
    ],
)
def test_a_tensor_is_found_wherever_it_hides(value: object, path: str) -> None:
    with pytest.raises(FeatureError) as raised:
        refuse_tensors(value)
    assert path in str(raised.value)


def test_clean_values_pass_cycles_too(make_ref: Callable[..., SampleRef]) -> None:
    cycle: list[Any] = [make_ref(), {"a": (1, "x", b"y", None, frozenset({2}))}]
    cycle.append(cycle)
    cycle.append({"self": cycle})
    refuse_tensors(cycle)


def test_a_cycle_does_not_hide_a_tensor() -> None:
    cycle: list[Any] = []
    cycle.extend([cycle, torch.zeros(1)])
    with pytest.raises(FeatureError, match="tensors never travel"):
        refuse_tensors(cycle)


def test_unit_hash_is_uniform_repeatable_and_independent() -> None:
    values = np.array([unit_hash("one", str(index)) for index in range(4000)])
    others = np.array([unit_hash("two", str(index)) for index in range(4000)])
    assert values[0] == unit_hash("one", "0")
    counts, _ = np.histogram(values, bins=10, range=(0, 1))
    assert counts.min() > 320
    assert counts.max() < 480
    assert abs(np.corrcoef(values, others)[0, 1]) < 0.06

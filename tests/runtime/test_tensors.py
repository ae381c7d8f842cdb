"""Bytes of safetensors files: the library's own, but for what writing them leaves behind."""

from __future__ import annotations

import ctypes

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

from runtime import tensors

DTYPES = list(tensors._NAMES)
SHAPES = st.lists(st.integers(0, 3), max_size=3)


@given(st.dictionaries(st.text(st.characters(codec="utf-8"), max_size=6), st.tuples(st.sampled_from(DTYPES), SHAPES), max_size=6))
def test_the_bytes_are_the_librarys(described: dict[str, tuple[torch.dtype, list[int]]]) -> None:
    made = {name: torch.arange(torch.Size(shape).numel()).to(dtype).reshape(shape) for name, (dtype, shape) in described.items()}
    assert tensors.to_bytes(made) == safetensors.torch.save(made)


def test_strides_and_views_are_written_as_what_they_show() -> None:
    whole = torch.arange(24.0).reshape(4, 6)
    made = {"across": whole.T, "part": whole[1:3], "bf16": whole[:, ::2].bfloat16()}
    read = safetensors.torch.load(tensors.to_bytes(made))
    assert read.keys() == made.keys()
    for name, tensor in made.items():
        assert torch.equal(read[name], tensor)


def test_nothing_stays_behind_for_a_size() -> None:
    kept = ctypes._pointer_type_cache  # type: ignore[attr-defined]
    before = len(kept)
    for length in range(3001, 3101):
        tensors.to_bytes({"a": torch.zeros(length, dtype=torch.uint8)})
    assert len(kept) == before


def test_a_type_that_no_file_holds_is_an_error() -> None:
    with pytest.raises(KeyError):
        tensors.to_bytes({"a": torch.zeros(2, dtype=torch.complex64)})

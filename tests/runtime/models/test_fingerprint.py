"""The fingerprint follows the content and nothing else, and is remembered outside the model."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from runtime.errors import ModelError
from runtime.models import fingerprint


@pytest.fixture
def model(own_home: Path, tiny_path: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_path, tmp_path / "model"))


def edit_json(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def test_it_does_not_depend_on_how_the_files_are_cut(model: Path, tiny_path: Path) -> None:
    before = fingerprint(tiny_path)
    tensors = load_file(model / "model.safetensors")
    names = sorted(tensors)
    shards = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, part in shards.items():
        save_file({name: tensors[name] for name in part}, model / file)
    weight_map = {name: file for file, part in shards.items() for name in part}
    (model / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (model / "model.safetensors").unlink()
    edit_json(model / "config.json", lambda config: config.update(transformers_version="9.9", _name_or_path="x"))
    assert fingerprint(model) == before


def test_one_changed_weight_is_another_model(model: Path) -> None:
    before = fingerprint(model)
    tensors = load_file(model / "model.safetensors")
    tensors["model.norm.weight"][3] += 1e-6
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    assert fingerprint(model) != before


def test_exchanged_tensors_are_another_model(model: Path) -> None:
    before = fingerprint(model)
    tensors = load_file(model / "model.safetensors")
    first, second = "model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.gate_proj.weight"
    tensors[first], tensors[second] = tensors[second], tensors[first]
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    assert fingerprint(model) != before


@pytest.mark.parametrize(
    ("file", "change"),
    [
        ("config.json", lambda config: config.update(rms_norm_eps=1e-6)),
        ("tokenizer.json", lambda config: config["model"]["vocab"].update(zz=400)),
    ],
)
def test_configuration_and_tokenizer_belong_to_it(model: Path, file: str, change: Callable[[dict[str, Any]], object]) -> None:
    before = fingerprint(model)
    edit_json(model / file, change)
    assert fingerprint(model) != before


def test_it_is_remembered_by_sizes_and_times_and_never_in_the_models_directory(model: Path, own_home: Path) -> None:
    files = sorted(file.name for file in model.iterdir())
    value = fingerprint(model)
    [memory] = (own_home / "fingerprints").iterdir()
    edit_json(memory, lambda known: known.update(fingerprint="remembered"))
    assert fingerprint(model) == "remembered"
    os.utime(model / "model.safetensors", ns=(1, 1))
    assert fingerprint(model) == value
    memory.write_text("{")
    assert fingerprint(model) == value
    assert sorted(file.name for file in model.iterdir()) == files


@pytest.mark.parametrize("keep", [0, 5, 100, -1])
def test_a_weight_file_that_is_cut_short_is_damaged(model: Path, keep: int) -> None:
    file = model / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(ModelError, match=r"damaged.*fetch the model again"):
        fingerprint(model)


@pytest.mark.parametrize("header", [[1], {"a": "b"}, {"a": {"dtype": "F32"}}, {"a": {"shape": [1], "data_offsets": ["x", "y"]}}])
def test_a_weight_file_with_a_strange_header_is_damaged(model: Path, header: object) -> None:
    encoded = json.dumps(header).encode()
    (model / "model.safetensors").write_bytes(len(encoded).to_bytes(8, "little") + encoded)
    with pytest.raises(ModelError, match=r"damaged.*fetch the model again"):
        fingerprint(model)


@pytest.mark.parametrize("weight_map", [None, ["a"], {"a": 5}, {"a": ["b"]}])
def test_a_strange_index_is_damaged(model: Path, weight_map: object) -> None:
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ModelError, match=r"index\.json is damaged"):
        fingerprint(model)


def test_a_missing_shard_is_named(model: Path) -> None:
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "model-1.safetensors"}}))
    with pytest.raises(ModelError, match=r"lacks model-1\.safetensors"):
        fingerprint(model)


def test_pickles_are_not_weights(model: Path) -> None:
    (model / "model.safetensors").unlink()
    torch.save({}, model / "pytorch_model.bin")
    with pytest.raises(ModelError, match="never from pickles"):
        fingerprint(model)


@pytest.mark.parametrize("content", [None, "{", "[]"])
def test_a_missing_or_damaged_config_is_one_sentence(model: Path, content: str | None) -> None:
    (model / "config.json").unlink()
    if content is not None:
        (model / "config.json").write_text(content)
    with pytest.raises(ModelError, match=r"config\.json"):
        fingerprint(model)


def test_a_home_that_cannot_be_written_is_one_sentence(model: Path, own_home: Path) -> None:
    own_home.write_text("a file")
    with pytest.raises(ModelError, match="SLIPSTREAM_HOME"):
        fingerprint(model)

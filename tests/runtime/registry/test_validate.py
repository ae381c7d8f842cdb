"""Every reason for which a drafter may not serve, each with a version that has only this one fault."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from runtime.backends.base import TargetInfo
from runtime.drafters.embedded import path_for
from runtime.eagle3 import Eagle3Config, version_id
from runtime.errors import DrafterRejected
from runtime.registry import Manifest, Registry, validate

Publish = Callable[..., str]
MakeCheckpoint = Callable[..., Path]


def refused(version: Any, target: TargetInfo, embedding: torch.Tensor) -> tuple[str, str]:
    with pytest.raises(DrafterRejected) as caught:
        validate(version, target, embedding)
    assert "\n" not in str(caught.value)
    return caught.value.reason, str(caught.value)


def edit_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def republish_as_is(path: Path) -> Path:
    """Give the directory's manifest and name the hash of its present content, as a faulty publisher would."""
    version = version_id(path)
    edit_json(path / "manifest.json", version=version)
    return path.rename(path.with_name(version))


def test_a_good_version_is_loaded(
    registry: Registry, publish: Publish, target: TargetInfo, embedding: torch.Tensor, make_checkpoint: MakeCheckpoint
) -> None:
    record = registry.get(publish())
    model = validate(record, target, embedding, dtype=torch.bfloat16)
    assert model.fc.weight.dtype == torch.bfloat16
    assert not model.training
    assert model.embedding.data_ptr() == embedding.data_ptr()
    assert validate(record.path, target, embedding).vocabulary.hash == model.vocabulary.hash
    assert len(validate(make_checkpoint(5), target, embedding).vocabulary) == 20  # a plain directory, without a manifest


def test_the_embedded_drafter_is_valid_for_its_model() -> None:
    path = path_for("smollm2-135m")
    assert path is not None
    info = TargetInfo("smollm2-135m", "any", 49152, 576, 30, 8192, (1, 14, 26), (2,), "float32", "cpu")
    embedding = torch.randn(49152, 576, generator=torch.Generator().manual_seed(0)) * 0.1
    assert len(validate(path, info, embedding).vocabulary) == 16384


@pytest.mark.parametrize("file", ["model.safetensors", "config.json"])
def test_files_changed_after_publication(
    registry: Registry, publish: Publish, target: TargetInfo, embedding: torch.Tensor, file: str
) -> None:
    record = registry.get(publish())
    path = record.path / file
    if file == "config.json":
        edit_json(path, pad_token_id=1)
    else:
        content = path.read_bytes()
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    reason, sentence = refused(registry.get(record.version), target, embedding)
    assert reason == "HASH"
    assert "changed after it was published" in sentence


def test_another_target(registry: Registry, publish: Publish, target: TargetInfo, embedding: torch.Tensor) -> None:
    record = registry.get(publish(fingerprint="another"))
    reason, sentence = refused(record, target, embedding)
    assert reason == "TARGET_FINGERPRINT"
    assert "another" in sentence
    assert target.fingerprint in sentence


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"aux_layer_ids": (1, 3, 5)}, "LAYER_IDS"),
        ({"aux_layer_ids": (0, 3, 4)}, "LAYER_IDS"),
        ({"max_positions": 129}, "MAX_POSITIONS"),
        ({"fingerprint": "x"}, "TARGET_FINGERPRINT"),
    ],
)
def test_a_target_that_it_does_not_fit(
    registry: Registry, publish: Publish, target: TargetInfo, embedding: torch.Tensor, changes: dict[str, Any], reason: str
) -> None:
    assert refused(registry.get(publish()), dataclasses.replace(target, **changes), embedding)[0] == reason


def test_a_config_without_layer_ids_means_the_default_ones(
    make_checkpoint: MakeCheckpoint, config: Eagle3Config, target: TargetInfo, embedding: torch.Tensor
) -> None:
    path = make_checkpoint(config=dataclasses.replace(config, aux_layer_ids=None))
    assert validate(path, target, embedding).config.aux_layer_ids is None  # 8 layers: 1, 3, 4
    other = dataclasses.replace(target, num_layers=12)
    assert refused(path, dataclasses.replace(other, aux_layer_ids=(1, 3, 4)), embedding)[0] == "LAYER_IDS"
    validate(path, dataclasses.replace(other, aux_layer_ids=(1, 5, 8)), embedding)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"vocabulary_hash": "0" * 16}, "VOCABULARY"),
        ({"aux_layer_ids": [1, 3, 5]}, "LAYER_IDS"),
        ({"dtype": "float32"}, "MANIFEST"),
        ({"version": "0" * 16}, "HASH"),
        ({"step": "many"}, "MANIFEST"),
    ],
)
def test_a_manifest_that_says_something_else(
    registry: Registry, publish: Publish, target: TargetInfo, embedding: torch.Tensor, changes: dict[str, Any], reason: str
) -> None:
    record = registry.get(publish())
    edit_json(record.path / "manifest.json", **changes)
    assert refused(record, target, embedding)[0] == reason
    assert refused(record.path, target, embedding)[0] == reason


def test_a_record_without_a_manifest(registry: Registry, publish: Publish, target: TargetInfo, embedding: torch.Tensor) -> None:
    version = publish()
    (registry.path(version) / "manifest.json").unlink()
    assert refused(registry.get(version), target, embedding)[0] == "MANIFEST"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda t: t.pop("fc.weight"), "MISSING_TENSOR"),
        (lambda t: t.update(extra=torch.ones(1)), "UNKNOWN_TENSOR"),
        (lambda t: t.update({"fc.weight": torch.ones(24, 71)}), "SHAPE"),
        (lambda t: t.update({"fc.weight": torch.ones(24, 72, dtype=torch.float64)}), "DTYPE"),
        (lambda t: t["fc.weight"][0].fill_(float("nan")), "NON_FINITE"),
        (lambda t: t["d2t"].zero_(), "VOCABULARY"),
    ],
)
def test_bad_content_with_a_right_hash(
    registry: Registry,
    publish: Publish,
    target: TargetInfo,
    embedding: torch.Tensor,
    change: Callable[[dict[str, torch.Tensor]], object],
    reason: str,
) -> None:
    path = registry.path(publish())
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors")
    path = republish_as_is(path)
    assert refused(registry.get(path.name), target, embedding)[0] == reason


def test_a_config_without_rope(registry: Registry, publish: Publish, target: TargetInfo, embedding: torch.Tensor) -> None:
    path = registry.path(publish())
    edit_json(path / "config.json", rope_theta=None, rope_parameters=None)
    path = republish_as_is(path)
    assert refused(path, target, embedding)[0] == "ROPE"


def test_finite_weights_whose_outputs_overflow_are_found_by_running_it(
    make_checkpoint: MakeCheckpoint, target: TargetInfo, embedding: torch.Tensor
) -> None:
    path = make_checkpoint()
    tensors = load_file(path / "model.safetensors")
    tensors["lm_head.weight"].fill_(3e38)
    save_file(tensors, path / "model.safetensors")
    reason, sentence = refused(path, target, embedding)
    assert reason == "NON_FINITE"
    assert "depth 1 of a probe run" in sentence


def test_the_manifest_read_by_validation_is_the_published_one(registry: Registry, publish: Publish) -> None:
    record = registry.get(publish())
    assert Manifest.read(record.path) == record.manifest

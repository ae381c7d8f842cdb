from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from runtime.backends.transformers.loading import choose_dtype, load
from runtime.config import BackendConfig, Dtype, ModelConfig
from runtime.errors import ModelError
from runtime.models import ResolvedModel


@pytest.fixture
def copied(tiny: ResolvedModel, tmp_path: Path) -> ResolvedModel:
    return replace(tiny, path=Path(shutil.copytree(tiny.path, tmp_path / "model")))


@pytest.fixture
def _restores_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_dtype_by_default() -> None:
    assert choose_dtype(Dtype.AUTO, torch.device("cpu")) is torch.float32
    assert choose_dtype(Dtype.AUTO, torch.device("cuda")) is torch.bfloat16
    assert choose_dtype(Dtype.BFLOAT16, torch.device("cpu")) is torch.bfloat16
    assert choose_dtype(Dtype.FLOAT32, torch.device("cuda")) is torch.float32


@pytest.mark.usefixtures("_restores_threads")
def test_settings_reach_torch_and_the_model(tiny: ResolvedModel) -> None:
    target = load(BackendConfig(num_threads=1), ModelConfig(dtype=Dtype.BFLOAT16, device="cpu"), tiny)
    assert torch.get_num_threads() == 1
    assert (target.info.dtype, target.info.device) == ("bfloat16", "cpu")
    assert target.embedding.dtype is torch.bfloat16


def test_damaged_weights_are_refused(copied: ResolvedModel) -> None:
    weights = copied.path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(ModelError, match=f"The model in {copied.path} cannot be loaded"):
        load(BackendConfig(), ModelConfig(device="cpu"), copied)


def test_an_unknown_architecture_is_refused(copied: ResolvedModel) -> None:
    config = json.loads((copied.path / "config.json").read_text())
    (copied.path / "config.json").write_text(json.dumps({**config, "model_type": "nonesuch"}))
    with pytest.raises(ModelError, match="cannot be loaded"):
        load(BackendConfig(), ModelConfig(device="cpu"), copied)


def test_missing_weights_are_refused(copied: ResolvedModel) -> None:
    config = json.loads((copied.path / "config.json").read_text())
    (copied.path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 9}))
    with pytest.raises(ModelError, match=r"lacks the weights of model\.layers\.8\..* and 8 more"):
        load(BackendConfig(), ModelConfig(device="cpu"), copied)


def test_weights_of_another_size_are_refused(copied: ResolvedModel) -> None:
    config = json.loads((copied.path / "config.json").read_text())
    (copied.path / "config.json").write_text(json.dumps({**config, "intermediate_size": 100}))
    with pytest.raises(ModelError, match="cannot be loaded"):
        load(BackendConfig(), ModelConfig(device="cpu"), copied)


def test_nothing_is_printed(tiny: ResolvedModel, capfd: pytest.CaptureFixture[str]) -> None:
    load(BackendConfig(), ModelConfig(device="cpu"), tiny)
    assert capfd.readouterr() == ("", "")


def test_several_threads_may_load_at_once(tiny: ResolvedModel) -> None:
    """transformers has its classes patched while it reads: side by side they would find tied weights missing, and for good."""
    with ThreadPoolExecutor(3) as threads:
        targets = list(threads.map(lambda _: load(BackendConfig(), ModelConfig(device="cpu"), tiny), range(6)))
    assert all(torch.equal(target.lm_head, targets[0].lm_head) for target in targets)

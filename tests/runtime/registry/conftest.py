"""A target, checkpoints for it, and a registry in a directory of the test's own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from runtime.backends.base import TargetInfo
from runtime.eagle3 import DraftVocabulary, Eagle3Config, Eagle3Model, save
from runtime.registry import Registry

EMBEDDING = torch.randn(50, 24, generator=torch.Generator().manual_seed(0))
TARGET = TargetInfo(
    name="target",
    fingerprint="0123456789abcdef",
    vocab_size=50,
    hidden_size=24,
    num_layers=8,
    max_positions=128,
    aux_layer_ids=(1, 3, 4),
    eos_token_ids=(2,),
    dtype="float32",
    device="cpu",
)
CONFIG = Eagle3Config(
    hidden_size=24,
    intermediate_size=40,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=8,
    vocab_size=50,
    draft_vocab_size=20,
    max_position_embeddings=128,
    aux_layer_ids=(1, 3, 4),
)


@pytest.fixture
def make_checkpoint(tmp_path: Path) -> Callable[..., Path]:
    """Writes a checkpoint of a random drafter for TARGET; another seed is another content."""

    def make(seed: int = 0, config: Eagle3Config = CONFIG) -> Path:
        model = Eagle3Model(config, DraftVocabulary(torch.arange(5, 25), 50), EMBEDDING)
        model.init_from_target(EMBEDDING, None, torch.Generator().manual_seed(seed))
        directory = tmp_path / f"checkpoint-{seed}"
        save(model, directory)
        return directory

    return make


@pytest.fixture
def target() -> TargetInfo:
    return TARGET


@pytest.fixture
def embedding() -> torch.Tensor:
    return EMBEDDING


@pytest.fixture
def config() -> Eagle3Config:
    return CONFIG


@pytest.fixture
def registry(tmp_path: Path) -> Registry:
    return Registry(tmp_path / "registry")


@pytest.fixture
def publish(registry: Registry, make_checkpoint: Callable[..., Path]) -> Callable[..., str]:
    def do(seed: int = 0, parent: str | None = None, fingerprint: str = TARGET.fingerprint) -> str:
        metrics = {"acceptance_length": 2.5}
        return registry.publish(
            make_checkpoint(seed), parent=parent, step=10 + seed, target_fingerprint=fingerprint, metrics=metrics
        )

    return do

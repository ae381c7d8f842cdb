"""From settings to an engine: model, target, tokenizer, drafter. For programs that keep no registry of drafters.

The engine is not started: its caller owns its life.
"""

from __future__ import annotations

from pathlib import Path

import torch

from runtime.backends import load_target
from runtime.backends.base import Target
from runtime.config import BackendConfig, DrafterConfig, DrafterKind, ModelConfig, SessionsConfig, SpeculationConfig
from runtime.drafters.base import Drafter
from runtime.drafters.eagle3 import Eagle3Drafter
from runtime.drafters.embedded import path_for
from runtime.drafters.ngram import NgramDrafter
from runtime.drafters.none import NoDrafter
from runtime.eagle3 import checkpoint
from runtime.engine.local import LocalEngine
from runtime.models import Tokenizer, resolve


def build_engine(
    model: ModelConfig,
    backend: BackendConfig,
    drafter: DrafterConfig,
    speculation: SpeculationConfig,
    sessions: SessionsConfig,
) -> LocalEngine:
    """Load everything. ModelError, ConfigError or DrafterRejected with one sentence if that fails."""
    resolved = resolve(model.name)
    target = load_target(backend, model, resolved)
    return LocalEngine(target, load_drafter(drafter, target), Tokenizer.load(resolved.path), speculation, sessions)


def load_drafter(config: DrafterConfig, target: Target) -> Drafter:
    """The drafter that the settings name; auto: the one embedded for this model, else n-gram lookup."""
    match config.kind:
        case DrafterKind.NONE:
            return NoDrafter()
        case DrafterKind.NGRAM:
            return NgramDrafter()
        case DrafterKind.EAGLE3:
            assert config.path is not None  # checked by DrafterConfig
            path: Path | None = Path(config.path)
        case DrafterKind.AUTO:
            path = path_for(target.info.name)
    if path is None:
        return NgramDrafter()
    dtype: torch.dtype = getattr(torch, target.info.dtype)
    weights = checkpoint.load(path, target.embedding, dtype=dtype, device=target.info.device)
    return Eagle3Drafter(weights, checkpoint.version_id(path))

"""From settings to a drafter, for programs that keep no registry of versions."""

from __future__ import annotations

from pathlib import Path

import torch

from runtime.backends.base import Target
from runtime.config import DrafterConfig, DrafterKind
from runtime.drafters.base import Drafter
from runtime.drafters.eagle3 import Eagle3Drafter
from runtime.drafters.embedded import path_for
from runtime.drafters.ngram import NgramDrafter
from runtime.drafters.none import NoDrafter
from runtime.eagle3 import checkpoint


def load_drafter(config: DrafterConfig, target: Target) -> Drafter:
    """The drafter that the settings name; auto: the one embedded for this model, else n-gram lookup.
    DrafterRejected if it does not fit."""
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

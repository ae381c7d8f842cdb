"""The feature plane that the settings of a trainer mean: rows on disk, or in a pool, that other processes see too."""

from __future__ import annotations

from pathlib import Path

from runtime.config import FeaturesConfig, StoreKind, require
from runtime.features.ledger import Ledger
from runtime.features.plane import open_feature_plane
from runtime.features.store import FeatureStore
from runtime.models import absolute


def plane_root(config: FeaturesConfig, state_dir: Path) -> Path:
    return state_dir / "features" if config.root is None else absolute("features.root", config.root)


def open_plane(config: FeaturesConfig, state_dir: Path) -> tuple[FeatureStore, Ledger]:
    """Store and ledger. ConfigError for a store that only one process sees."""
    is_shared = config.store is not StoreKind.MEMORY
    require(is_shared, "features.store", config.store.value, "directory or mooncake: no other process reads a memory")
    return open_feature_plane(plane_root(config, state_dir), config)

"""The feature plane of one directory: a store and a ledger that know of each other, and what needs both.

    store, ledger = open_feature_plane(Path("state/features"), FeaturesConfig())

Layout: <root>/ledger.sqlite; of a directory store <root>/rows/*.safetensors too, and of all but memory <root>/store.sqlite,
the store's index.
"""

from __future__ import annotations

import time
from pathlib import Path

import torch

from runtime.config import CaptureConfig, FeaturesConfig
from runtime.features.ledger import Ledger
from runtime.features.refs import SampleRef
from runtime.features.store import FeatureStore, open_store

HOLD_AGE_S = 900.0  # what is younger may still be on its way from the store to the ledger


def open_feature_plane(root: Path, config: FeaturesConfig, *, dtype: torch.dtype = torch.bfloat16) -> tuple[FeatureStore, Ledger]:
    """Open, or make, the feature plane under root; dtype is what hidden states are stored in. Any number of processes may
    do so at once, and all see the same rows unless their store is in memory."""
    store = open_store(config, root, dtype=dtype)
    return store, Ledger(Path(root) / "ledger.sqlite", exists=store.exists)


def make_room(store: FeatureStore, ledger: Ledger, num_bytes: int) -> int:
    """Delete the features of the oldest durable rows until num_bytes are free; returns the bytes that this freed.

    Never touches a row that is pending, leased or held out. The ledger lets go first, so a crash in between leaves files
    that `collect_garbage` removes, never a promise that cannot be kept.
    """
    missing = store.used_bytes() + num_bytes - store.budget_bytes
    if missing <= 0 or num_bytes > store.budget_bytes:  # there is room, or there never will be
        return 0
    return store.delete(ledger.shed_durable(missing))


def collect_garbage(store: FeatureStore, ledger: Ledger, max_hold_age_s: float = HOLD_AGE_S) -> int:
    """Remove what a killed writer left and rows that the ledger does not need; returns how many."""
    return store.gc(max_hold_age_s, ledger.needed())


def retain(store: FeatureStore, ledger: Ledger, config: CaptureConfig) -> int:
    """Delete the features of rows that the settings let live no longer; returns how many rows that concerns."""
    refs: list[SampleRef] = []
    if config.max_age_s is not None:
        refs += ledger.expire(time.time() - config.max_age_s)
    if config.max_trained_rows is not None:
        refs += ledger.keep_newest_durable(config.max_trained_rows)
    store.delete(refs)
    return len(refs)

"""The feature plane: how tokens and hidden states of served traffic reach the trainer, without losing or repeating a row.

`FeatureTap` turns finished turns into `FeatureRow`s, a `FeatureStore` keeps their tensors, the `Ledger` knows who may train
on which, and a `SampleRef` is all that travels between them.
"""

from runtime.features.directory import LocalDirectoryStore
from runtime.features.ledger import Checkpoint, Ledger
from runtime.features.memory import MemoryStore
from runtime.features.plane import collect_garbage, make_room, open_feature_plane
from runtime.features.refs import FeatureSpec, SampleMeta, SampleRef, refuse_tensors
from runtime.features.row import FeatureRow
from runtime.features.samples import SampleState
from runtime.features.store import FeatureStore, Handle, Lease, StoreHealth, open_store
from runtime.features.tap import CapturedTurn, FeatureTap, Outcome, Tap

__all__ = [
    "CapturedTurn",
    "Checkpoint",
    "FeatureRow",
    "FeatureSpec",
    "FeatureStore",
    "FeatureTap",
    "Handle",
    "Lease",
    "Ledger",
    "LocalDirectoryStore",
    "MemoryStore",
    "Outcome",
    "SampleMeta",
    "SampleRef",
    "SampleState",
    "StoreHealth",
    "Tap",
    "collect_garbage",
    "make_room",
    "open_feature_plane",
    "open_store",
    "refuse_tensors",
]

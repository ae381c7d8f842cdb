"""Drafter versions: published atomically, listed with their states, validated before they serve."""

from runtime.registry.life import DrafterEntry, LifecycleEvent, Origin
from runtime.registry.manifest import Manifest
from runtime.registry.store import Registry, VersionRecord, VersionState
from runtime.registry.validate import validate

__all__ = [
    "DrafterEntry",
    "LifecycleEvent",
    "Manifest",
    "Origin",
    "Registry",
    "VersionRecord",
    "VersionState",
    "validate",
]

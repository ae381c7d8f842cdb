"""What operators and trainers are told of drafter versions: entries and events. Servers make them, clients get them."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from runtime.registry.store import VersionState

EventKind = Literal["validated", "rejected", "activated", "failed", "rolled_back"]


@dataclass(frozen=True)
class LifecycleEvent:
    kind: EventKind
    version: str
    previous: str | None = None  # activated: the version that served before
    reason: str | None = None  # rejected, failed: a code
    message: str | None = None
    seconds: float | None = None  # activated: how long the switch held the engine's loop
    at: float = field(default_factory=time.time)  # Unix seconds


@dataclass(frozen=True)
class DrafterEntry:
    """A version as a server sees it."""

    version: str
    state: VersionState
    reason: str  # of a rejection or a roll-back: "<code>: <sentence>"
    is_active: bool  # serves here and now
    is_embedded: bool  # came with the program
    parent: str | None = None
    step: int | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    created_at: float | None = None  # Unix seconds


@dataclass(frozen=True)
class Origin:
    """What a publisher says of a version; the rest of its manifest is read from the checkpoint."""

    parent: str | None = None
    step: int = 0
    target_fingerprint: str = ""  # empty: the target that the server serves
    metrics: Mapping[str, float] = field(default_factory=dict)
    notes: str = ""

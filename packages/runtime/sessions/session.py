"""One session: a growing history of token ids, what is cached for it, and whether somebody is generating on it.

State machine, the only place that knows it:

    idle --begin--> generating --end--> idle          append, evict: only when idle
    any  --close--> gone (the store keeps a tombstone)

The lists here are changed under the engine's lock when the session is idle, and by the engine's thread alone while it is
generating. K/V, kept features and draft state belong to the engine's thread always.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from runtime.drafters.base import Drafter
from runtime.errors import HistoryMismatch, SessionBusy
from runtime.hidden_states import HiddenStates
from runtime.types import SessionOptions

MAX_REMEMBERED_APPENDS = 16


@dataclass
class DraftState:
    """What one drafter holds for one session: rows of positions below `position`."""

    drafter: Drafter
    handle: int
    position: int = 0


@dataclass(eq=False)
class Session:
    id: str
    options: SessionOptions
    ttl_s: float
    request_id: str | None = None  # of the creation
    created_at: float = field(default_factory=time.time)  # Unix seconds
    used_at: float = field(default_factory=time.monotonic)
    history: list[int] = field(default_factory=list)
    is_generating: bool = False
    is_closed: bool = False
    appends: OrderedDict[str, int] = field(default_factory=OrderedDict)  # request id -> history length it led to

    # The engine's thread only. K/V and features cover history[:cached]; the last sampled token is not in them yet.
    cache: int | None = None
    cached: int = 0
    features: list[HiddenStates] = field(default_factory=list)  # kept to prime drafters after a swap, and for the tap
    draft: DraftState | None = None

    def check_idle(self) -> None:
        if self.is_generating:
            raise SessionBusy(self.id)

    def check_length(self, expected: int | None) -> None:
        if expected is not None and expected != len(self.history):
            raise HistoryMismatch(expected, len(self.history))

    def append(self, token_ids: Sequence[int], request_id: str | None) -> int:
        """Add checked ids; a repeated request id adds nothing. Returns the history length that this append led to."""
        if request_id and request_id in self.appends:
            return self.appends[request_id]
        self.history.extend(token_ids)
        self.used_at = time.monotonic()
        if request_id:
            self.appends[request_id] = len(self.history)
            while len(self.appends) > MAX_REMEMBERED_APPENDS:
                self.appends.popitem(last=False)
        return len(self.history)

    def begin(self) -> None:
        self.check_idle()
        self.is_generating = True

    def end(self) -> None:
        self.is_generating = False
        self.used_at = time.monotonic()

    def aux_from(self, position: int) -> torch.Tensor:
        """Kept target states of positions `position` .. cached-1: [m, 3*Ht]. position < cached."""
        parts: list[torch.Tensor] = []
        end = self.cached
        for part in reversed(self.features):
            start = end - len(part)
            parts.append(part.aux[max(position - start, 0) :])
            if start <= position:
                break
            end = start
        return torch.cat(parts[::-1])

    def compact_features(self) -> None:
        """One tensor instead of one per step."""
        if len(self.features) > 1:
            self.features = [HiddenStates.concat(self.features)]

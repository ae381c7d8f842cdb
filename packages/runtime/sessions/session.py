"""One session: a growing history of token ids, what is cached for it, and who is at work on it.

State machine, the only place that knows it:

    idle --begin--> generating --end--> idle
    idle --reserve--> reserved --begin--> generating      for a caller that generates next; end gives it back
    idle --hold--> copying --end--> idle                  its K/V is being forked, saved or restored
    any  --close--> closed                                for good (the store keeps a tombstone)

Append and evict: only when idle. The lists here are changed under the engine's lock when the session is idle, and by the
engine's thread alone while it is generating. K/V, kept features and draft state belong to the engine's thread always.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

import torch

from runtime.drafters.base import Drafter
from runtime.errors import HistoryDiverged, HistoryMismatch, SessionBusy
from runtime.hidden_states import HiddenStates
from runtime.types import SessionOptions

MAX_REMEMBERED_APPENDS = 16


class State(Enum):
    IDLE = "idle"
    RESERVED = "reserved"
    COPYING = "copying"
    GENERATING = "generating"
    CLOSED = "closed"


_NEXT = {
    State.IDLE: {State.RESERVED, State.COPYING, State.GENERATING, State.CLOSED},
    State.RESERVED: {State.GENERATING, State.IDLE, State.CLOSED},
    State.COPYING: {State.IDLE, State.CLOSED},
    State.GENERATING: {State.IDLE, State.CLOSED},
    State.CLOSED: set[State](),
}


@dataclass
class DraftState:
    """What one drafter holds for one session: rows of positions `first` .. `position` - 1."""

    drafter: Drafter
    handle: int
    position: int = 0
    first: int = 0


@dataclass(eq=False)
class Session:
    id: str
    options: SessionOptions
    ttl_s: float
    request_id: str | None = None  # of the creation
    is_anonymous: bool = False  # made for a caller who knows token ids only: continued by whoever begins with its history
    created_at: float = field(default_factory=time.time)  # Unix seconds
    used_at: float = field(default_factory=time.monotonic)
    history: list[int] = field(default_factory=list)
    state: State = State.IDLE
    appends: OrderedDict[str, int] = field(default_factory=OrderedDict)  # request id -> history length it led to

    # The engine's thread only. K/V covers history[:cached], features the last rows of it: all of them, unless some dropped.
    cache: int | None = None
    cached: int = 0
    dropped: int = 0  # of the cached: out of sight under the cache policy, and gone
    has_told_drop: bool = False
    features: list[HiddenStates] = field(
        default_factory=list
    )  # kept to prime drafters after a swap, and for the tap; never changed
    num_settled: int = 0  # of their parts: of earlier turns, or another session's
    num_behind: int = 0  # rows behind the kept ones, the last of the cached, whose states nobody has read from the target yet
    draft: DraftState | None = None

    @property
    def is_idle(self) -> bool:
        return self.state is State.IDLE

    @property
    def is_at_rest(self) -> bool:
        """Nobody is at work on it, though somebody may be about to."""
        return self.state in (State.IDLE, State.RESERVED)

    @property
    def is_generating(self) -> bool:
        return self.state is State.GENERATING

    @property
    def is_closed(self) -> bool:
        return self.state is State.CLOSED

    def check_idle(self) -> None:
        if not self.is_idle:
            raise SessionBusy(self.id)

    def check_ready(self) -> None:
        """For a generation: idle, or reserved for it."""
        if not self.is_at_rest:
            raise SessionBusy(self.id)

    def check_continued_by(self, token_ids: Sequence[int]) -> None:
        self.check_idle()
        if self.history != list(token_ids[: len(self.history)]):
            raise HistoryDiverged(self.id, len(self.history))

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
        self._go(State.GENERATING)

    def reserve(self) -> None:
        self._go(State.RESERVED)
        self.used_at = time.monotonic()

    def hold(self) -> None:
        self._go(State.COPYING)

    def end(self) -> None:
        """Idle again, unless it was closed meanwhile."""
        if not self.is_closed:
            self._go(State.IDLE)
            self.used_at = time.monotonic()

    def close(self) -> None:
        self._go(State.CLOSED)

    def _go(self, state: State) -> None:
        if state not in _NEXT[self.state]:
            raise SessionBusy(self.id)
        self.state = state

    # --- kept features ---

    @property
    def first_kept(self) -> int:
        """The position of the first kept feature row."""
        return self.cached - self.num_behind - sum(map(len, self.features))

    def aux_from(self, position: int) -> torch.Tensor:
        """Kept target states of positions `position` .. cached-1: [m, 3*Ht]. first_kept <= position < cached."""
        assert not self.num_behind, "the target's states are to be read first"
        parts: list[torch.Tensor] = []
        end = self.cached
        for part in reversed(self.features):
            start = end - len(part)
            parts.append(part.aux[max(position - start, 0) :])
            if start <= position:
                break
            end = start
        return torch.cat(parts[::-1])

    def features_upto(self, length: int) -> list[HiddenStates]:
        """The kept rows of positions below `length`, as views."""
        parts: list[HiddenStates] = []
        start = self.first_kept
        for part in self.features:
            if start >= length:
                break
            parts.append(part[: length - start])
            start += len(part)
        return parts

    def compact_features(self) -> None:
        """What the steps of a turn left behind becomes one part. Parts of earlier turns stay: forks and rows share them."""
        if len(self.features) - self.num_settled > 1:
            self.features[self.num_settled :] = [HiddenStates.concat(self.features[self.num_settled :])]
        self.num_settled = len(self.features)

    def forget_features(self, position: int) -> None:
        """Keep none of positions below this one, once they are half of what is kept: rows are copied now and then only."""
        first = self.first_kept
        if 2 * (position - first) >= self.cached - first:
            rows = HiddenStates.concat(self.features)[position - first :]
            self.features, self.num_settled = [HiddenStates(rows.aux.clone(), rows.last.clone())], 0

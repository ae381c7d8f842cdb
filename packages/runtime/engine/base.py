"""`Engine`: sessions in, token events out, drafters swapped underneath. What servers and trainers talk to.

Every method may be called from any thread. `generate` returns at once; its events arrive on the engine's thread through
`on_event`, which must not block. Errors of the call itself are raised; errors after that arrive as one Failed event.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from runtime.backends.base import TargetInfo
from runtime.drafters.base import Drafter
from runtime.types import Event, SamplingParams, SessionInfo, SessionOptions, SpeculationStats

OnEvent = Callable[[Event], None]


@dataclass(frozen=True)
class AppendResult:
    history_length: int
    cached_tokens: int


@dataclass(frozen=True)
class EngineStats:
    """Counters since start and gauges of now. Counts only; ratios are for whoever displays them."""

    num_running: int = 0
    num_waiting: int = 0
    num_preempted: int = 0  # times that a running generation had to wait again, for the K/V of older ones
    num_sessions: int = 0
    num_evicted: dict[str, int] = field(default_factory=dict)  # by reason
    kv_bytes: int = 0
    kv_budget_bytes: int = 0
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    generation_tokens: int = 0
    num_target_forwards: int = 0
    num_drafter_failures: int = 0  # steps that ran without drafts because the drafter raised
    speculation: dict[str, SpeculationStats] = field(default_factory=dict)  # by drafter version
    drafter_version: str = ""
    num_swaps: int = 0


class Generation(Protocol):
    """A handle to a running generation."""

    @property
    def request_id(self) -> str: ...

    def cancel(self) -> None:
        """Stop after at most one more forward; the session keeps what was committed. Idempotent. Ends in Done(cancelled)."""
        ...


class Engine(Protocol):
    @property
    def info(self) -> TargetInfo: ...

    @property
    def drafter_version(self) -> str: ...

    @property
    def is_running(self) -> bool:
        """Between start and stop, and alive: whether it takes new work."""
        ...

    def start(self) -> None: ...

    def stop(self) -> None:
        """Fail what runs with EngineUnavailable, free everything, join the thread."""
        ...

    def create_session(self, options: SessionOptions | None = None, request_id: str | None = None) -> SessionInfo:
        """A new empty session. The same non-empty request_id returns the session that a call with it made before.

        DrafterNotFound if it is to be pinned to a version that is neither active nor added.
        """
        ...

    def open_session(
        self, token_ids: Sequence[int], options: SessionOptions | None = None, session_id: str | None = None
    ) -> SessionInfo:
        """For surfaces without sessions of their own: a session whose history is these ids, reserved until its generation begins.

        It continues the idle session that an earlier call made, with equal options, and whose whole history is the longest
        beginning of these ids; else it is new. Such sessions are the first to be evicted. A caller that never generates closes
        it; if `generate` refuses, the session is idle again by itself.

        session_id: continue this session and no other, with its own options. HistoryDiverged, and no change, if these ids do
        not begin with its history.
        """
        ...

    def reserve_session(self, session_id: str) -> None:
        """Keep an idle session for the caller's next `generate`: until then nobody else may use it, and no room is made of it."""
        ...

    def give_back(self, session_id: str) -> None:
        """A session that was reserved is idle again. Nothing happens if it is gone, or not reserved any more."""
        ...

    def fork_session(
        self,
        session_id: str,
        *,
        options: SessionOptions | None = None,
        request_id: str | None = None,
        history_length: int | None = None,
    ) -> SessionInfo:
        """A new session with the first `history_length` tokens (None: all) of an idle one, and their K/V if there is room.

        options None: the parent's. InvalidRequest for another cache policy than the parent's. Waits for the engine's thread.
        """
        ...

    def save_session(self, session_id: str, directory: Path) -> SessionInfo:
        """Write an idle session into this directory; what was saved there before is replaced once all is written. Of several
        saved there at once the last one stays, whole.

        The session is busy meanwhile; the engine goes on with others while the file is written. OSError if it cannot be.
        """
        ...

    def restore_session(self, directory: Path, *, request_id: str | None = None) -> SessionInfo:
        """A new session with the history and options that were saved, and their K/V if this target can use it.

        SavedSessionRejected if there is nothing, if it is damaged, or of another target, tokenizer or unknown cache policy.
        """
        ...

    def append(
        self,
        session_id: str,
        token_ids: Sequence[int],
        *,
        expected_history_length: int | None = None,
        request_id: str | None = None,
    ) -> AppendResult:
        """Append to the history; all or nothing, checked before anything changes."""
        ...

    def generate(
        self,
        session_id: str,
        params: SamplingParams,
        *,
        on_event: OnEvent,
        expected_history_length: int | None = None,
        request_id: str | None = None,
    ) -> Generation: ...

    def close_session(self, session_id: str) -> None:
        """Close; a running generation is cancelled first (its stream ends with Done(cancelled))."""
        ...

    def get_session(self, session_id: str) -> SessionInfo: ...

    def list_sessions(self) -> list[SessionInfo]: ...

    def swap_drafter(self, drafter: Drafter) -> float:
        """Make this the drafter at the next step boundary; returns the seconds that the switch held the loop."""
        ...

    def add_drafter(self, drafter: Drafter) -> None:
        """Let sessions be pinned to this version; it stays until the last session that was pinned to it has gone."""
        ...

    def stats(self) -> EngineStats: ...

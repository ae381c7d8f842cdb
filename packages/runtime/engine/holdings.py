"""What the engine holds for its sessions beside their ids: K/V in the target, kept hidden states, draft state.

All of it belongs to the engine's thread. Knows no requests and no sampling; what one step adds to a session it is told.
"""

from __future__ import annotations

from collections.abc import Iterable

from runtime.backends.base import Target
from runtime.config import SessionsConfig
from runtime.sessions.session import Session


class Holdings:
    def __init__(self, target: Target, config: SessionsConfig) -> None:
        self.budget_bytes = config.kv_budget_mib * 2**20
        self.kv_bytes = 0  # as of the last step; read by any thread
        self._target = target

    def open(self, session: Session) -> None:
        """Before a session's first forward of a turn: it has a cache."""
        if session.cache is None:
            session.cache = self._target.new_cache()

    def release(self, session: Session) -> None:
        """Free K/V, kept features and draft state; the ids stay. The next call on the session prefills again."""
        self.drop_draft(session)
        if session.cache is not None:
            self._target.drop(session.cache)
            session.cache = None
        session.cached = 0
        session.features = []
        self.count()

    def drop_draft(self, session: Session) -> None:
        if session.draft is not None:
            session.draft.drafter.drop_state(session.draft.handle)
            session.draft = None

    def count(self) -> None:
        self.kv_bytes = self._target.cache_bytes()

    def make_room(self, num_bytes: int, sessions: Iterable[Session]) -> bool:
        """Whether the budget holds so many bytes more; idle sessions give up their K/V for it, the oldest of them first."""
        for session in sessions:
            if self._target.cache_bytes() + num_bytes <= self.budget_bytes:
                return True
            if not session.is_generating and session.cache is not None:
                self.release(session)
        return self._target.cache_bytes() + num_bytes <= self.budget_bytes

    def growth_bytes(self, session: Session, num_tokens: int) -> int:
        """What the session has yet to take until it holds so many tokens."""
        needed = self._target.cache_bytes(num_tokens)
        return needed - self._target.cache_bytes(session.cached) if session.cached else needed

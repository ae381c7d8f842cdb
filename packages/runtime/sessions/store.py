"""The sessions of one engine: ids, capacity, time to live, and tombstones that say why a session is gone.

Knows nothing of K/V: whoever removes a session gets it back and frees what hangs on it. Not thread-safe by itself: the
engine calls it under its lock.
"""

from __future__ import annotations

import time
import uuid
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence

from runtime.config import SessionsConfig
from runtime.errors import CapacityExhausted, InvalidRequest, SessionNotFound
from runtime.sessions.session import Session
from runtime.types import SessionOptions

MAX_TOMBSTONES = 10_000
TAIL_TOKENS = 8  # compared before whole histories are: other conversations end otherwise


class SessionStore:
    def __init__(self, config: SessionsConfig) -> None:
        self._config = config
        self._sessions: OrderedDict[str, Session] = OrderedDict()  # least recently used first
        self._tombstones: OrderedDict[str, str] = OrderedDict()
        self._created_by: dict[str, str] = {}  # request id of the creation -> session id
        self.num_evicted: Counter[str] = Counter()

    @property
    def max_ttl_s(self) -> float:
        return self._config.ttl_s

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[Session]:
        """Least recently used first."""
        return iter(list(self._sessions.values()))

    def created_by(self, request_id: str | None) -> Session | None:
        """The session that this request id made before, if it is still here."""
        return self._sessions[self._created_by[request_id]] if request_id and request_id in self._created_by else None

    def create(
        self, options: SessionOptions, request_id: str | None = None, *, is_anonymous: bool = False
    ) -> tuple[Session, Session | None]:
        """A new session, or the one this request id made before; and the session evicted to make room, if any."""
        if (session := self.created_by(request_id)) is not None:
            return session, None
        ttl_s = self._config.ttl_s if options.ttl_s is None else options.ttl_s
        if not 0 < ttl_s <= self._config.ttl_s:
            raise InvalidRequest("ttl_s", f"ttl_s must lie in (0, {self._config.ttl_s:g}] seconds, got {ttl_s:g}.")
        victim = self._make_room()
        session = Session(uuid.uuid4().hex, options, ttl_s, request_id, is_anonymous)
        self._sessions[session.id] = session
        if request_id:
            self._created_by[request_id] = session.id
        return session, victim

    def _make_room(self) -> Session | None:
        """Evict one if the store is full: of the idle ones an anonymous one if there is any, else the least recently used."""
        if len(self._sessions) < self._config.max_sessions:
            return None
        idle = [session for session in self._sessions.values() if session.is_idle]
        if not idle:
            raise CapacityExhausted(f"All {len(self._sessions)} sessions are in use. Close one, or try again.")
        victim = next((session for session in idle if session.is_anonymous), idle[0])
        self.num_evicted["EVICTED_LRU"] += 1
        return self.remove(victim.id, "EVICTED_LRU")

    def find_continued(self, token_ids: Sequence[int], options: SessionOptions) -> Session | None:
        """Of the idle anonymous sessions with these options, the one whose whole history these ids begin with; the longest."""
        found: Session | None = None
        for session in self._sessions.values():
            length = len(session.history)
            if not (session.is_anonymous and session.is_idle) or length > len(token_ids) or session.options != options:
                continue
            if found is not None and length <= len(found.history):
                continue
            start = max(length - TAIL_TOKENS, 0)
            if session.history[start:] == list(token_ids[start:length]) and session.history == list(token_ids[:length]):
                found = session
        return found

    def get(self, session_id: str) -> Session:
        """The session, or SessionNotFound with the reason why it is gone."""
        session = self._sessions.get(session_id)
        if session is None:
            raise SessionNotFound(session_id, self._tombstones.get(session_id, "UNKNOWN"))
        return session

    def touch(self, session: Session) -> None:
        self._sessions.move_to_end(session.id)

    def remove(self, session_id: str, reason: str) -> Session:
        session = self.get(session_id)
        del self._sessions[session_id]
        session.close()
        if session.request_id:
            del self._created_by[session.request_id]
        self._tombstones[session_id] = reason
        while len(self._tombstones) > MAX_TOMBSTONES:
            self._tombstones.popitem(last=False)
        return session

    def expire(self) -> list[Session]:
        """Remove and return the sessions past their time to live: idle ones, and those reserved for a caller that never came."""
        now = time.monotonic()
        gone = [s for s in self._sessions.values() if s.is_at_rest and now - s.used_at > s.ttl_s]
        self.num_evicted["EVICTED_TTL"] += len(gone)
        return [self.remove(session.id, "EVICTED_TTL") for session in gone]

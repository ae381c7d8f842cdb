"""The sessions of one engine: ids, capacity, time to live, and tombstones that say why a session is gone.

Knows nothing of K/V: whoever removes a session gets it back and frees what hangs on it. Not thread-safe by itself: the
engine calls it under its lock.
"""

from __future__ import annotations

import time
import uuid
from collections import Counter, OrderedDict
from collections.abc import Iterator

from runtime.config import SessionsConfig
from runtime.errors import CapacityExhausted, InvalidRequest, SessionNotFound
from runtime.sessions.session import Session
from runtime.types import SessionOptions

MAX_TOMBSTONES = 10_000


class SessionStore:
    def __init__(self, config: SessionsConfig) -> None:
        self._config = config
        self._sessions: OrderedDict[str, Session] = OrderedDict()  # least recently used first
        self._tombstones: OrderedDict[str, str] = OrderedDict()
        self._created_by: dict[str, str] = {}  # request id of the creation -> session id
        self.num_evicted: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[Session]:
        """Least recently used first."""
        return iter(list(self._sessions.values()))

    def create(self, options: SessionOptions, request_id: str | None) -> tuple[Session, Session | None]:
        """A new session, or the one this request id made before; and the session evicted to make room, if any."""
        if request_id and request_id in self._created_by:
            return self.get(self._created_by[request_id]), None
        ttl_s = self._config.ttl_s if options.ttl_s is None else options.ttl_s
        if not 0 < ttl_s <= self._config.ttl_s:
            raise InvalidRequest("ttl_s", f"ttl_s must lie in (0, {self._config.ttl_s:g}] seconds, got {ttl_s:g}.")
        victim = self._make_room()
        session = Session(id=uuid.uuid4().hex, options=options, ttl_s=ttl_s, request_id=request_id)
        self._sessions[session.id] = session
        if request_id:
            self._created_by[request_id] = session.id
        return session, victim

    def _make_room(self) -> Session | None:
        if len(self._sessions) < self._config.max_sessions:
            return None
        victim = next((session for session in self._sessions.values() if not session.is_generating), None)
        if victim is None:
            raise CapacityExhausted(f"All {len(self._sessions)} sessions are generating. Close one, or try again.")
        self.num_evicted["EVICTED_LRU"] += 1
        return self.remove(victim.id, "EVICTED_LRU")

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
        session.is_closed = True
        if session.request_id:
            del self._created_by[session.request_id]
        self._tombstones[session_id] = reason
        while len(self._tombstones) > MAX_TOMBSTONES:
            self._tombstones.popitem(last=False)
        return session

    def expire(self) -> list[Session]:
        """Remove and return the idle sessions whose time to live is over."""
        now = time.monotonic()
        gone = [s for s in self._sessions.values() if not s.is_generating and now - s.used_at > s.ttl_s]
        self.num_evicted["EVICTED_TTL"] += len(gone)
        return [self.remove(session.id, "EVICTED_TTL") for session in gone]

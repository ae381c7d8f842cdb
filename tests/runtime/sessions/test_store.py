"""SessionStore: ids, capacity, time to live, and reasons for absence."""

from __future__ import annotations

import time

import pytest

from runtime.config import SessionsConfig
from runtime.errors import CapacityExhausted, InvalidRequest, SessionNotFound
from runtime.sessions.session import Session
from runtime.sessions.store import SessionStore
from runtime.types import SessionOptions


def store(max_sessions: int = 2, ttl_s: float = 100.0) -> SessionStore:
    return SessionStore(SessionsConfig(max_sessions=max_sessions, ttl_s=ttl_s))


def test_creation_is_idempotent_by_request_id() -> None:
    sessions = store()
    first, _ = sessions.create(SessionOptions(), "a")
    again, _ = sessions.create(SessionOptions(), "a")
    other, _ = sessions.create(SessionOptions(), "b")
    assert first is again
    assert other is not first
    sessions.remove(first.id, "CLOSED")
    assert sessions.create(SessionOptions(), "a")[0] is not first


def test_a_full_store_evicts_the_least_recently_used_idle_session_and_says_so() -> None:
    sessions = store(max_sessions=2)
    old, _ = sessions.create(SessionOptions(), None)
    young, _ = sessions.create(SessionOptions(), None)
    sessions.touch(old)
    _, victim = sessions.create(SessionOptions(), None)
    assert victim is young
    with pytest.raises(SessionNotFound) as caught:
        sessions.get(young.id)
    assert caught.value.reason == "EVICTED_LRU"
    assert sessions.num_evicted["EVICTED_LRU"] == 1


def test_a_busy_session_is_never_evicted() -> None:
    sessions = store(max_sessions=2)
    for _ in range(2):
        sessions.create(SessionOptions(), None)[0].begin()
    with pytest.raises(CapacityExhausted, match="All 2 sessions"):
        sessions.create(SessionOptions(), None)
    assert len(sessions) == 2


def test_expiry_takes_idle_sessions_past_their_time_to_live() -> None:
    sessions = store(max_sessions=4)
    idle, _ = sessions.create(SessionOptions(ttl_s=0.01), None)
    busy, _ = sessions.create(SessionOptions(ttl_s=0.01), None)
    fresh, _ = sessions.create(SessionOptions(), None)
    busy.begin()
    time.sleep(0.02)
    assert sessions.expire() == [idle]
    assert [session.id for session in sessions] == [busy.id, fresh.id]
    with pytest.raises(SessionNotFound, match="EVICTED_TTL"):
        sessions.get(idle.id)


@pytest.mark.parametrize("ttl_s", [0.0, -1.0, 101.0, float("nan")])
def test_a_time_to_live_out_of_range_is_refused(ttl_s: float) -> None:
    sessions = store(ttl_s=100.0)
    with pytest.raises(InvalidRequest, match="ttl_s"):
        sessions.create(SessionOptions(ttl_s=ttl_s), None)
    assert len(sessions) == 0


def test_reasons_for_absence() -> None:
    sessions = store()
    session, _ = sessions.create(SessionOptions(), None)
    sessions.remove(session.id, "CLOSED")
    for session_id, reason in ((session.id, "CLOSED"), ("nobody", "UNKNOWN")):
        with pytest.raises(SessionNotFound) as caught:
            sessions.remove(session_id, "CLOSED")
        assert caught.value.reason == reason


def opened(sessions: SessionStore, *history: int, options: SessionOptions | None = None) -> Session:
    session, _ = sessions.create(options or SessionOptions(), is_anonymous=True)
    session.append(history, None)
    return session


def test_anonymous_sessions_make_room_first() -> None:
    sessions = store(max_sessions=3)
    named, _ = sessions.create(SessionOptions())
    first, second = opened(sessions, 1), opened(sessions, 2)
    first.reserve()
    assert sessions.create(SessionOptions())[1] is second
    assert sessions.create(SessionOptions())[1] is named  # the reserved one is in use


def test_the_session_that_is_continued() -> None:
    sessions = store(max_sessions=9)
    labelled = SessionOptions(labels={"user": "a"})
    short, long, other = opened(sessions, 1, 2), opened(sessions, *range(1, 30)), opened(sessions, 1, 2, 3, options=labelled)
    named, _ = sessions.create(SessionOptions())
    named.append([1, 2, 3, 4], None)
    ids = list(range(1, 40))
    assert sessions.find_continued(ids, SessionOptions()) is long
    assert sessions.find_continued(ids[:29], SessionOptions()) is long
    assert sessions.find_continued(ids[:28], SessionOptions()) is short
    assert sessions.find_continued(ids, SessionOptions(labels={"user": "a"})) is other
    assert sessions.find_continued([1, 3], SessionOptions()) is None
    assert sessions.find_continued([*ids[:10], 0, *ids[11:]], SessionOptions()) is short  # the tails agree, the middles do not
    long.begin()
    short.reserve()
    assert sessions.find_continued(ids, SessionOptions()) is None


def test_a_reserved_session_expires_if_nobody_comes() -> None:
    sessions = store(max_sessions=4)
    reserved, _ = sessions.create(SessionOptions(ttl_s=0.01))
    copied, _ = sessions.create(SessionOptions(ttl_s=0.01))
    reserved.reserve()
    copied.hold()
    time.sleep(0.02)
    assert sessions.expire() == [reserved]


def test_tombstones_are_bounded() -> None:
    from runtime.sessions.store import MAX_TOMBSTONES

    sessions = store()
    first, _ = sessions.create(SessionOptions())
    sessions.remove(first.id, "CLOSED")
    for _ in range(MAX_TOMBSTONES):
        sessions.remove(sessions.create(SessionOptions())[0].id, "CLOSED")
    with pytest.raises(SessionNotFound, match="UNKNOWN"):
        sessions.get(first.id)

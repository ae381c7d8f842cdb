"""A generation that waits for its permit holds its session, over gRPC: nobody else may use it, and leaving lets go of it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from runtime.config import SessionsConfig
from runtime.errors import CapacityExhausted, EngineUnavailable, SessionBusy, SessionNotFound
from runtime.rpc.client import RuntimeClient
from runtime.rpc.connection import Retry
from runtime.types import Done, SamplingParams, SessionInfo, SessionOptions
from serving.config import AdmissionConfig

from .conftest import Running, StartServer, wait_for

SHORT = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
ENDLESS = SamplingParams(temperature=0, ignore_eos=True)


@pytest.fixture
def full(start_server: StartServer) -> Iterator[tuple[Running, RuntimeClient, Any]]:
    """A server whose only permit is taken by an endless generation, and that generation."""
    running = start_server(admission=AdmissionConfig(max_concurrent=1, queue_max_len=1, queue_max_wait_s=None))
    running.target.delay_s = 0.02
    with RuntimeClient(running.ready.grpc, retry=Retry(max_attempts=1)) as client:
        holder = client.generate(open_with(client).session_id, ENDLESS)
        next(iter(holder))
        yield running, client, holder
        holder.cancel()


def open_with(client: RuntimeClient) -> SessionInfo:
    session = client.create_session()
    client.append(session.session_id, [5, 6, 7])
    return client.get_session(session.session_id)


class Waiting:
    """A generation in a thread of its own, until it waits for a permit."""

    def __init__(self, running: Running, client: RuntimeClient, session_id: str) -> None:
        self.stream = client.generate(session_id, SHORT)
        self.events: list[Any] = []
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._read)
        self._thread.start()
        wait_for(lambda: running.server.admission.num_waiting == 1)

    def _read(self) -> None:
        try:
            self.events.extend(self.stream)
        except BaseException as error:
            self.error = error

    def end(self) -> None:
        self._thread.join(timeout=30)
        assert not self._thread.is_alive()


def test_a_session_that_waits_for_its_turn_is_busy(full: tuple[Running, RuntimeClient, Any]) -> None:
    running, client, holder = full
    session = open_with(client)
    waiting = Waiting(running, client, session.session_id)
    calls: list[Callable[[], Any]] = [
        lambda: client.append(session.session_id, [8]),
        lambda: list(client.generate(session.session_id, SHORT)),
        lambda: client.fork_session(session.session_id),
        lambda: client.save_session(session.session_id, "waiting"),
    ]
    for call in calls:
        with pytest.raises(SessionBusy):
            call()
    with pytest.raises(CapacityExhausted) as refused:
        list(client.generate(open_with(client).session_id, SHORT))
    assert refused.value.retry_after_s >= 1
    holder.cancel()
    waiting.end()
    done = waiting.events[-1]
    assert isinstance(done, Done)
    assert done.history_length == session.history_length + 4
    client.append(session.session_id, [8])


def test_a_session_that_waits_for_its_turn_is_not_evicted(start_server: StartServer) -> None:
    admission = AdmissionConfig(max_concurrent=1, queue_max_wait_s=None)
    running = start_server(admission=admission, sessions=SessionsConfig(max_sessions=3))
    running.target.delay_s = 0.02
    with RuntimeClient(running.ready.grpc, retry=Retry(max_attempts=1)) as client:
        held, queued, idle = open_with(client), open_with(client), open_with(client)
        holder = client.generate(held.session_id, ENDLESS)
        next(iter(holder))
        waiting = Waiting(running, client, queued.session_id)
        assert client.get_session(queued.session_id).state == "reserved"
        another = client.create_session()
        with pytest.raises(SessionNotFound) as gone:
            client.get_session(idle.session_id)
        assert gone.value.reason == "EVICTED_LRU"
        client.close_session(another.session_id)
        holder.cancel()
        waiting.end()
        assert isinstance(waiting.events[-1], Done)


def test_leaving_the_queue_lets_go_of_the_session(full: tuple[Running, RuntimeClient, Any]) -> None:
    running, client, _ = full
    session = open_with(client)
    waiting = Waiting(running, client, session.session_id)
    waiting.stream.cancel()
    waiting.end()
    wait_for(lambda: running.server.admission.num_waiting == 0)
    assert client.append(session.session_id, [8]).history_length == 4
    assert running.server.admission.num_running == 1


def test_a_session_that_is_closed_while_it_waits_is_gone(full: tuple[Running, RuntimeClient, Any]) -> None:
    running, client, holder = full
    session = open_with(client)
    waiting = Waiting(running, client, session.session_id)
    client.close_session(session.session_id)
    holder.cancel()
    waiting.end()
    assert isinstance(waiting.error, SessionNotFound)
    assert waiting.error.reason == "CLOSED"
    wait_for(lambda: running.server.admission.num_running == 0)


def test_a_server_that_stops_refuses_those_that_wait(full: tuple[Running, RuntimeClient, Any]) -> None:
    running, client, _ = full
    waiting = Waiting(running, client, open_with(client).session_id)
    running.stop()
    waiting.end()
    assert isinstance(waiting.error, EngineUnavailable)
    running.ended.result(timeout=30)


def test_an_idle_session_expires_and_says_so(start_server: StartServer) -> None:
    running = start_server(sessions=SessionsConfig(ttl_s=30))
    with running.client() as client:
        short = client.create_session(SessionOptions(ttl_s=0.2))
        kept = client.create_session()
        assert (short.options.ttl_s, kept.options.ttl_s) == (0.2, 30)
        wait_for(lambda: len(client.list_sessions()) == 1, within_s=5)
        with pytest.raises(SessionNotFound) as gone:
            client.append(short.session_id, [5])
        assert gone.value.reason == "EVICTED_TTL"
        assert client.get_session(kept.session_id).state == "idle"

"""Admission: who is let in, in which order, who is refused and when to come back; permits always return."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import httpx
import pytest

from runtime.errors import CapacityExhausted, ConfigError, EngineUnavailable
from runtime.rpc.client import RuntimeClient
from runtime.rpc.connection import Retry
from runtime.types import SamplingParams
from serving.admission import Admission
from serving.config import AdmissionConfig, AdmissionPolicy

from .conftest import Running, StartServer, wait_for

ASK: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "ignore_eos": True}


def test_rejecting_refuses_what_does_not_fit() -> None:
    async def scenario() -> None:
        admission = Admission(AdmissionConfig(policy=AdmissionPolicy.REJECT, max_concurrent=2))
        first, second = await admission.acquire(), await admission.acquire()
        with pytest.raises(CapacityExhausted, match="All 2 places for requests are taken") as refused:
            await admission.acquire()
        assert refused.value.retry_after_s >= 1
        first.release()
        await admission.acquire()
        first.release()  # a second time counts for nothing
        assert admission.num_running == 2
        second.release()
        assert admission.num_running == 1

    asyncio.run(scenario())


def test_queueing_serves_in_order_of_arrival() -> None:
    async def scenario() -> list[int]:
        admission = Admission(AdmissionConfig(max_concurrent=1, queue_max_len=3, queue_max_wait_s=None))
        served: list[int] = []

        async def work(number: int) -> None:
            permit = await admission.acquire()
            served.append(number)
            await asyncio.sleep(0)
            permit.release()

        first = await admission.acquire()
        tasks = [asyncio.create_task(work(number)) for number in range(3)]
        await asyncio.sleep(0)
        assert admission.num_waiting == 3
        with pytest.raises(CapacityExhausted, match="3 requests are waiting"):
            await admission.acquire()
        first.release()
        await asyncio.gather(*tasks)
        assert (admission.num_running, admission.num_waiting) == (0, 0)
        return served

    assert asyncio.run(scenario()) == [0, 1, 2]


def test_waiting_too_long_is_a_refusal_and_takes_nothing() -> None:
    async def scenario() -> None:
        admission = Admission(AdmissionConfig(max_concurrent=1, queue_max_wait_s=0.05))
        permit = await admission.acquire()
        with pytest.raises(CapacityExhausted, match=r"in 0.05 s"):
            await admission.acquire()
        permit.release()
        assert admission.num_waiting == 0
        await asyncio.wait_for(admission.acquire(), 1)

    asyncio.run(scenario())


def test_leaving_the_queue_takes_nothing() -> None:
    async def scenario() -> None:
        admission = Admission(AdmissionConfig(max_concurrent=1, queue_max_wait_s=None))
        permit = await admission.acquire()
        waiting = asyncio.create_task(admission.acquire())
        await asyncio.sleep(0)
        permit.release()  # the place is the waiting one's now, who leaves before it hears of it
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        assert (admission.num_running, admission.num_waiting) == (0, 0)
        await asyncio.wait_for(admission.acquire(), 1)

    asyncio.run(scenario())


def test_closed_admits_nobody_and_refuses_those_in_the_queue() -> None:
    async def scenario() -> None:
        admission = Admission(AdmissionConfig(max_concurrent=1, queue_max_wait_s=None))
        permit = await admission.acquire()
        waiting = asyncio.create_task(admission.acquire())
        await asyncio.sleep(0)
        admission.close()
        with pytest.raises(EngineUnavailable):
            await admission.acquire()
        permit.release()
        with pytest.raises(EngineUnavailable):
            await waiting
        assert admission.num_running == 0

    asyncio.run(scenario())


def test_the_longer_generations_take_the_later_one_is_to_come_back() -> None:
    async def scenario() -> float:
        admission = Admission(AdmissionConfig(policy=AdmissionPolicy.REJECT, max_concurrent=1))
        for _ in range(50):
            permit = await admission.acquire()
            permit._taken_at -= 20.0
            permit.release()
        await admission.acquire()
        with pytest.raises(CapacityExhausted) as refused:
            await admission.acquire()
        return refused.value.retry_after_s

    assert 15 <= asyncio.run(scenario()) <= 20


@pytest.mark.parametrize("bad", [{"max_concurrent": 0}, {"queue_max_len": -1}, {"queue_max_wait_s": 0.0}])
def test_settings_out_of_range(bad: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"admission.{next(iter(bad))}"):
        AdmissionConfig(**bad)


# --- over both surfaces of a real server ---


@pytest.fixture
def narrow(start_server: StartServer) -> Running:
    return start_server(admission=AdmissionConfig(policy=AdmissionPolicy.REJECT, max_concurrent=1))


def ask(running: Running, **more: Any) -> httpx.Response:
    return httpx.post(f"{running.ready.http}/v1/chat/completions", json=ASK | {"max_tokens": 4} | more, timeout=30)


def test_beyond_the_limit_is_429_with_retry_after_on_both_surfaces(narrow: Running) -> None:
    narrow.target.delay_s = 0.02
    busy = threading.Thread(target=lambda: ask(narrow, max_tokens=100))
    busy.start()
    wait_for(lambda: narrow.server.admission.num_running == 1)
    refused = ask(narrow)
    assert refused.status_code == 429
    assert int(refused.headers["retry-after"]) >= 1
    assert refused.json()["error"]["type"] == "rate_limit_error"
    with RuntimeClient(narrow.ready.grpc, timeout_s=30, retry=Retry(max_attempts=1)) as client:
        session = client.create_session()
        client.append(session.session_id, text="Hi")
        with pytest.raises(CapacityExhausted) as caught:
            list(client.generate(session.session_id))
        assert caught.value.retry_after_s >= 1
        assert client.get_session(session.session_id).state == "idle"
        client.close_session(session.session_id)
    busy.join()
    narrow.wait_until_idle()
    assert ask(narrow).status_code == 200


def leave(running: Running, stream: bool) -> None:
    """Ask, and be gone before the answer is whole."""
    url = f"{running.ready.http}/v1/chat/completions"
    if not stream:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(url, json=ASK, timeout=0.2)
        return
    with httpx.stream("POST", url, json=ASK | {"stream": True}, timeout=30) as response:
        next(response.iter_lines())


@pytest.mark.parametrize("stream", [False, True])
def test_permits_are_back_after_every_kind_of_failure(narrow: Running, stream: bool) -> None:
    """One permit in all: had any of these kept it, the next request would be refused."""
    narrow.target.fails = True
    for _ in range(3):
        assert ask(narrow, stream=stream).status_code == (200 if stream else 503)
    narrow.target.fails = False
    assert ask(narrow, stream=stream, max_tokens=5000).status_code == 400
    assert ask(narrow, stream=stream, messages=[{"role": "user", "content": "ab" * 2000}]).status_code == 400
    assert ask(narrow, stream=stream, top_p=7).status_code == 400
    narrow.target.delay_s = 0.02
    leave(narrow, stream)
    narrow.target.delay_s = 0.0
    narrow.wait_until_idle()
    assert ask(narrow).status_code == 200


def test_permits_are_back_after_grpc_failures(narrow: Running) -> None:
    with narrow.client() as client:
        session = client.create_session()
        client.append(session.session_id, text="Hi")
        narrow.target.fails = True
        with pytest.raises(EngineUnavailable, match="forward failed"):
            list(client.generate(session.session_id, SamplingParams(max_tokens=4)))
        narrow.target.fails = False
        narrow.target.delay_s = 0.02
        stream = client.generate(session.session_id, SamplingParams(ignore_eos=True))
        next(iter(stream))
        stream.cancel()
        wait_for(lambda: narrow.server.admission.num_running == 0)
        assert list(client.generate(session.session_id, SamplingParams(max_tokens=2)))

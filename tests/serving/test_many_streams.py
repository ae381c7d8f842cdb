"""Load on one gRPC port: a thousand streams on a fixed number of threads, and readers that do not read."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import grpc
import psutil
import pytest

from runtime.config import SessionsConfig
from runtime.rpc.aio import AsyncRuntimeClient
from runtime.rpc.client import RuntimeClient
from runtime.rpc.v1 import runtime_pb2 as pb
from runtime.rpc.v1 import runtime_pb2_grpc
from runtime.types import Done, SamplingParams
from serving.config import AdmissionConfig, ServerConfig
from serving.generations import Stream

from .conftest import Running, StartServer, wait_for

MAX_POOL_THREADS = 16  # a pool of fixed size starts its threads when it is first wanted
NUM_STREAMS = 1000
NUM_TOKENS = 600
SHORT = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)


# What a connection takes unread grows by itself to some MiB; kept at the 64 KiB it begins with, little has to be generated.
SMALL_WINDOW = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 65536)]


def num_threads() -> int:
    return psutil.Process().num_threads()


def test_a_thousand_streams_share_a_fixed_number_of_threads(start_server: StartServer) -> None:
    running = start_server(
        admission=AdmissionConfig(max_concurrent=16, queue_max_len=NUM_STREAMS, queue_max_wait_s=None),
        sessions=SessionsConfig(max_sessions=NUM_STREAMS + 10),
    )
    admission = running.server.admission
    seen: list[int] = []

    async def one(client: AsyncRuntimeClient) -> Done:
        session = await client.create_session()
        await client.append(session.session_id, [5, 6, 7])
        *_, done = [event async for event in client.generate(session.session_id, SHORT)]
        assert isinstance(done, Done)
        return done

    async def all_at_once() -> list[Done]:
        async with AsyncRuntimeClient(running.ready.grpc) as client:
            await asyncio.gather(*(one(client) for _ in range(20)))  # whatever starts threads has started them
            seen.append(num_threads())
            running.target.delay_s = 0.2
            streams = [asyncio.ensure_future(one(client)) for _ in range(NUM_STREAMS)]
            while admission.num_waiting + admission.num_running < NUM_STREAMS - 64:  # the first have their answers by now
                await asyncio.sleep(0.01)
            seen.append(num_threads())
            running.target.delay_s = 0.0
            return await asyncio.gather(*streams)

    answers = asyncio.run(all_at_once())
    assert len(answers) == NUM_STREAMS
    assert all(done.usage.completion_tokens == 2 for done in answers)
    before, during = seen
    assert during <= before + MAX_POOL_THREADS, f"{before} threads before, {during} with a thousand streams"
    assert (admission.num_running, admission.num_waiting) == (0, 0)


def streams_alive() -> list[Stream]:
    gc.collect()
    return [one for one in gc.get_objects() if type(one) is Stream]


@pytest.fixture
def heavy(client: RuntimeClient) -> pb.GenerateRequest:
    """An answer of far more bytes than a connection takes unread."""
    session = client.create_session()
    client.append(session.session_id, [5, 6, 7])
    return pb.GenerateRequest(
        session_id=session.session_id, temperature=0, ignore_eos=True, max_tokens=NUM_TOKENS, logprobs=True, top_logprobs=20
    )


def test_a_reader_that_does_not_read_holds_back_only_itself(running: Running, client: RuntimeClient, heavy: Any) -> None:
    admission = running.server.admission
    with grpc.insecure_channel(running.ready.grpc, SMALL_WINDOW) as channel:
        slow = runtime_pb2_grpc.RuntimeServiceStub(channel).Generate(heavy)
        started = next(slow)
        other = client.create_session()
        client.append(other.session_id, [8, 9])
        *_, done = client.generate(other.session_id, SamplingParams(temperature=0, max_tokens=50, ignore_eos=True))
        assert isinstance(done, Done)
        wait_for(lambda: admission.num_running == 0, within_s=60)  # nobody read, and yet its permit is back
        assert client.get_session(heavy.session_id).state == "idle"
        assert client.get_session(heavy.session_id).history_length == 3 + NUM_TOKENS
        [unread] = (one._events.qsize() for one in streams_alive())
        assert 100 < unread <= NUM_TOKENS + 2, "what was not read waits, and is at most the answer"
        rest = list(slow)
        assert started.started.history_length == 3
        assert sum(len(message.tokens.token_ids) for message in rest) == NUM_TOKENS
        assert rest[-1].done.history_length == 3 + NUM_TOKENS
    wait_for(lambda: not streams_alive())


def test_what_was_not_read_is_gone_when_its_reader_is(running: Running, heavy: Any) -> None:
    with grpc.insecure_channel(running.ready.grpc, SMALL_WINDOW) as channel:
        slow = runtime_pb2_grpc.RuntimeServiceStub(channel).Generate(heavy)
        next(slow)
        wait_for(lambda: running.server.admission.num_running == 0, within_s=60)
        assert len(streams_alive()) == 1
    wait_for(lambda: not streams_alive())


def test_calls_have_a_limit(start_server: StartServer) -> None:
    ports = ServerConfig(http_port=0, grpc_port=0, shutdown_grace_s=0.5, max_calls=2)
    running = start_server(server=ports)
    running.target.delay_s = 0.02
    with running.client() as client, grpc.insecure_channel(running.ready.grpc) as channel:
        sessions = [client.create_session() for _ in range(2)]
        for session in sessions:
            client.append(session.session_id, [5, 6])
        streams = [client.generate(session.session_id) for session in sessions]
        for stream in streams:
            next(iter(stream))
        with pytest.raises(grpc.RpcError) as refused:
            runtime_pb2_grpc.RuntimeServiceStub(channel).ListSessions(pb.ListSessionsRequest())
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        for stream in streams:
            stream.cancel()
        wait_for(lambda: running.server.admission.num_running == 0)
        assert len(client.list_sessions()) == 2

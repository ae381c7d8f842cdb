"""The gRPC surface through a real channel: sessions, streams, refusals with details, cancellation, health, reflection."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from grpc_status import rpc_status

from runtime.errors import (
    ContextLengthExceeded,
    EngineUnavailable,
    HistoryMismatch,
    InvalidRequest,
    SessionBusy,
    SessionNotFound,
)
from runtime.rpc.client import RuntimeClient
from runtime.rpc.v1 import runtime_pb2 as pb
from runtime.rpc.v1 import runtime_pb2_grpc
from runtime.types import (
    CachePolicy,
    Done,
    DrafterPolicy,
    Grammar,
    SamplingParams,
    SessionInfo,
    SessionOptions,
    Started,
    Switch,
    Tokens,
)
from serving.config import ServerConfig

from .conftest import Running, StartServer, wait_for

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
ENDLESS = SamplingParams(temperature=0, ignore_eos=True, speculate=False)
PROMPT = "Name three rivers."
SLOW_S = 0.02


@pytest.fixture
def channel(running: Running) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(running.ready.grpc) as channel:
        yield channel


@pytest.fixture
def stub(channel: grpc.Channel) -> Any:
    return runtime_pb2_grpc.RuntimeServiceStub(channel)


@pytest.fixture
def session(client: RuntimeClient) -> SessionInfo:
    """A session that holds the prompt."""
    session = client.create_session()
    client.append(session.session_id, text=PROMPT)
    return client.get_session(session.session_id)


def details_of(error: grpc.RpcError, kind: type) -> Any:
    """The detail of this kind in a rich status."""
    status = rpc_status.from_call(error)
    found = kind()
    assert any(detail.Unpack(found) for detail in status.details), f"no {kind.__name__} in {status}"
    return found


def tokens_of(events: list[Any]) -> list[int]:
    return [token_id for event in events if isinstance(event, Tokens) for token_id in event.token_ids]


# --- the life of a session ---


def test_a_session_from_creation_to_its_tombstone(running: Running, client: RuntimeClient) -> None:
    options = SessionOptions(
        "ann", 60.0, (1,), (2, 3), Switch.OFF, CachePolicy(4, 64), DrafterPolicy("off"), labels={"task": "summary"}
    )
    created = client.create_session(options)
    assert created.options == options
    assert created.state == "idle"
    assert created.max_context_tokens == 2048
    assert created.drafter_version == "ngram"
    assert created.target_fingerprint == running.parts.engine.info.fingerprint
    assert abs(created.created_at - time.time()) < 60
    appended = client.append(created.session_id, [5, 6, 7])
    assert (appended.history_length, appended.cached_tokens) == (3, 0)
    assert [one.session_id for one in client.list_sessions()] == [created.session_id]
    client.close_session(created.session_id)
    assert client.list_sessions() == []
    for call in (client.close_session, client.get_session):
        with pytest.raises(SessionNotFound) as gone:
            call(created.session_id)
        assert gone.value.reason == "CLOSED"
    with pytest.raises(SessionNotFound) as gone:
        client.get_session("never")
    assert gone.value.reason == "UNKNOWN"


def test_a_generation_is_started_tokens_done(client: RuntimeClient, session: SessionInfo, running: Running) -> None:
    started, *tokens, done = client.generate(session.session_id, GREEDY, request_id="mine")
    length = session.history_length
    assert started == Started("mine", session.session_id, "ngram", running.parts.engine.info.fingerprint, length)
    assert all(isinstance(event, Tokens) for event in tokens)
    assert isinstance(done, Done)
    assert done.finish_reason == "length"
    assert len(tokens_of(tokens)) == done.usage.completion_tokens == 24
    assert done.history_length == length + 24 == client.get_session(session.session_id).history_length
    assert "".join(event.text for event in tokens) == running.parts.tokenizer.decode(tokens_of(tokens))
    assert sum(done.speculation.accepted_per_position) == done.speculation.num_accepted
    assert sum(sum(event.drafted) for event in tokens) == done.speculation.num_accepted


def test_a_session_goes_on_where_it_stopped(client: RuntimeClient, session: SessionInfo) -> None:
    halves = [*client.generate(session.session_id, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))]
    middle = client.get_session(session.session_id)
    assert middle.cached_tokens == middle.history_length
    halves += client.generate(session.session_id, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))
    other = client.create_session()
    client.append(other.session_id, text=PROMPT)
    assert tokens_of(halves) == tokens_of([*client.generate(other.session_id, GREEDY)])
    assert halves[-1].usage.cached_tokens == middle.cached_tokens - 1  # nothing was appended: the last token is computed again


def test_logprobs_come_one_per_token(client: RuntimeClient, session: SessionInfo) -> None:
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=True, top_logprobs=2)
    events = [event for event in client.generate(session.session_id, params) if isinstance(event, Tokens)]
    logprobs = [one for event in events for one in event.logprobs]
    assert [one.token_id for one in logprobs] == tokens_of(events)
    for one in logprobs:
        assert one.top[0] == (one.token_id, one.logprob)
        assert len(one.top) == 2


def test_a_stop_token_is_told_and_kept(client: RuntimeClient, session: SessionInfo, running: Running) -> None:
    full = tokens_of([*client.generate(session.session_id, GREEDY)])
    other = client.create_session()
    client.append(other.session_id, text=PROMPT)
    *_, done = client.generate(other.session_id, SamplingParams(temperature=0, max_tokens=24, stop_token_ids=(full[5],)))
    assert done.finish_reason == "stop"
    assert done.matched_stop == full[5]
    assert done.history_length == session.history_length + full.index(full[5]) + 1


def test_retries_do_not_repeat(client: RuntimeClient) -> None:
    first = client.create_session(request_id="create-1")
    assert client.create_session(request_id="create-1").session_id == first.session_id
    assert client.append(first.session_id, [1, 2], request_id="append-1").history_length == 2
    assert client.append(first.session_id, [1, 2], request_id="append-1").history_length == 2
    assert client.append(first.session_id, [1, 2], request_id="append-2").history_length == 4


def test_text_and_ids_append_the_same(client: RuntimeClient, running: Running) -> None:
    by_text, by_ids = client.create_session(), client.create_session()
    client.append(by_text.session_id, text=PROMPT)
    client.append(by_ids.session_id, running.parts.tokenizer.encode(PROMPT))
    assert tokens_of([*client.generate(by_text.session_id, GREEDY)]) == tokens_of([*client.generate(by_ids.session_id, GREEDY)])


# --- refusals: the status, its details, and nothing changed ---


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (pb.AppendTokensRequest(token_ids=[1, 320]), "token_ids"),
        (pb.AppendTokensRequest(token_ids=[2**32 - 1]), "token_ids"),
        (pb.AppendTokensRequest(), "token_ids"),
        (pb.AppendTokensRequest(token_ids=[1], text="a"), "token_ids"),
        (pb.AppendTokensRequest(token_ids=[1] * 3000), "token_ids"),
        (pb.AppendTokensRequest(text="a" * 1_000_000), "token_ids"),
    ],
)
def test_a_bad_append_is_named_and_changes_nothing(
    stub: Any, client: RuntimeClient, session: SessionInfo, request_: Any, field: str
) -> None:
    *_, before = client.generate(session.session_id, GREEDY)
    request_.session_id = session.session_id
    with pytest.raises(grpc.RpcError) as refused:
        stub.AppendTokens(request_)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    info = details_of(refused.value, error_details_pb2.ErrorInfo)
    assert info.domain == "slipstream"
    assert info.reason in ("INVALID_REQUEST", "CONTEXT_LENGTH_EXCEEDED")
    [violation] = details_of(refused.value, error_details_pb2.BadRequest).field_violations
    assert violation.field == field
    after = client.get_session(session.session_id)
    assert after.history_length == before.history_length
    assert after.cached_tokens == before.history_length


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 4000}, "max_tokens"),
        ({"temperature": 2.5}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"min_p": 2.0}, "min_p"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"repetition_penalty": 1e-40}, "repetition_penalty"),
        ({"logit_bias": {320: 1.0}}, "logit_bias"),
        ({"stop": [""]}, "stop"),
        ({"stop_token_ids": [999]}, "stop_token_ids"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"speculation": {"max_draft_tokens": 65}}, "speculation.max_draft_tokens"),
    ],
)
def test_a_bad_generate_is_named(
    stub: Any, client: RuntimeClient, session: SessionInfo, change: dict[str, Any], field: str
) -> None:
    with pytest.raises(grpc.RpcError) as refused:
        list(stub.Generate(pb.GenerateRequest(session_id=session.session_id, **change)))
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert details_of(refused.value, error_details_pb2.BadRequest).field_violations[0].field == field
    assert client.get_session(session.session_id).state == "idle"


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"ttl_s": 0.0}, "ttl_s"),
        ({"ttl_s": float("nan")}, "ttl_s"),
        ({"ttl_s": 1e9}, "ttl_s"),
        ({"client_label": "a" * 513}, "client_label"),
        ({"labels": {"a": "b" * 513}}, "labels"),
        ({"labels": {str(number): "" for number in range(33)}}, "labels"),
        ({"capture_policy": 7}, "capture_policy"),
        ({"eos_token_ids": [320]}, "eos_token_ids"),
        ({"stop_token_ids": [320]}, "stop_token_ids"),
        ({"cache_policy": {"sink_window": {"sink": 4}}}, "cache_policy"),
        ({"drafter_policy": {"pinned": {}}}, "drafter_policy"),
    ],
)
def test_a_bad_creation_is_named(stub: Any, client: RuntimeClient, change: dict[str, Any], field: str) -> None:
    with pytest.raises(grpc.RpcError) as refused:
        stub.CreateSession(pb.CreateSessionRequest(options=change))
    assert details_of(refused.value, error_details_pb2.BadRequest).field_violations[0].field == f"options.{field}"
    assert client.list_sessions() == []


def test_a_request_id_that_is_too_long_is_refused(client: RuntimeClient, session: SessionInfo) -> None:
    calls: list[Callable[..., Any]] = [
        client.create_session,
        lambda request_id: client.append(session.session_id, [1], request_id=request_id),
        lambda request_id: client.fork_session(session.session_id, request_id=request_id),
        lambda request_id: list(client.generate(session.session_id, GREEDY, request_id=request_id)),
    ]
    for call in calls:
        with pytest.raises(InvalidRequest, match="129 characters") as refused:
            call(request_id="a" * 129)
        assert refused.value.param == "request_id"
    assert client.get_session(session.session_id).history_length == session.history_length


def test_a_field_of_the_future_is_refused(channel: grpc.Channel) -> None:
    """Field 99 of a message that we do not know may mean that something must not be done."""
    call = channel.unary_unary(
        "/slipstream.v1.RuntimeService/CreateSession", request_serializer=bytes, response_deserializer=pb.Session.FromString
    )
    with pytest.raises(grpc.RpcError) as refused:
        call(b"\x98\x06\x01")  # field 99, varint 1
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "99" in refused.value.details()


@pytest.mark.parametrize("data", [b"\xff", b"\x0a\x02\xff\xfe", b"\x0a\xff\xff\xff\xff\x0f"])
def test_bytes_that_are_no_message_are_refused_as_such(channel: grpc.Channel, client: RuntimeClient, data: bytes) -> None:
    for method in ("CreateSession", "AppendTokens"):
        call = channel.unary_unary(f"/slipstream.v1.RuntimeService/{method}", request_serializer=bytes)
        with pytest.raises(grpc.RpcError) as refused:
            call(data)
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert details_of(refused.value, error_details_pb2.ErrorInfo).reason == "INVALID_REQUEST"
    assert client.list_sessions() == []


def test_a_message_that_is_too_large_is_refused(client: RuntimeClient, session: SessionInfo) -> None:
    with pytest.raises(grpc.RpcError) as refused:
        client.append(session.session_id, text="a" * 9_000_000)
    assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert client.get_session(session.session_id).history_length == session.history_length


def test_an_expectation_that_fails_is_a_precondition(stub: Any, client: RuntimeClient, session: SessionInfo) -> None:
    request = pb.AppendTokensRequest(session_id=session.session_id, token_ids=[1], expected_history_length=0)
    with pytest.raises(grpc.RpcError) as refused:
        stub.AppendTokens(request)
    assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    info = details_of(refused.value, error_details_pb2.ErrorInfo)
    assert info.reason == "HISTORY_MISMATCH"
    assert info.metadata == {"expected": "0", "actual": str(session.history_length)}
    with pytest.raises(HistoryMismatch):
        list(client.generate(session.session_id, GREEDY, expected_history_length=0))
    client.append(session.session_id, [1], expected_history_length=session.history_length)


def test_an_empty_history_and_a_full_context_generate_nothing(client: RuntimeClient) -> None:
    session = client.create_session()
    with pytest.raises(InvalidRequest, match="empty history"):
        list(client.generate(session.session_id))
    client.append(session.session_id, [1] * 2000)
    with pytest.raises(ContextLengthExceeded):
        list(client.generate(session.session_id, SamplingParams(max_tokens=100)))


# --- one operation at a time, cancellation, failures ---


def test_a_second_operation_is_refused_while_one_runs(
    running: Running, stub: Any, client: RuntimeClient, session: SessionInfo
) -> None:
    running.target.delay_s = SLOW_S
    stream = client.generate(session.session_id, ENDLESS)
    next(iter(stream))
    assert client.get_session(session.session_id).state == "generating"
    with pytest.raises(SessionBusy):
        list(client.generate(session.session_id, GREEDY))
    with pytest.raises(grpc.RpcError) as refused:
        stub.AppendTokens(pb.AppendTokensRequest(session_id=session.session_id, token_ids=[1]))
    assert refused.value.code() is grpc.StatusCode.ABORTED
    assert details_of(refused.value, error_details_pb2.ErrorInfo).reason == "SESSION_BUSY"
    stream.cancel()


def test_cancelling_keeps_the_session_and_what_was_committed(
    running: Running, client: RuntimeClient, session: SessionInfo
) -> None:
    running.target.delay_s = SLOW_S
    stream = client.generate(session.session_id, ENDLESS)
    seen: list[int] = []
    for event in stream:
        seen += tokens_of([event])
        if len(seen) == 5:
            break
    stream.cancel()
    wait_for(lambda: client.get_session(session.session_id).state == "idle", within_s=1)
    kept = client.get_session(session.session_id)
    assert session.history_length + 5 <= kept.history_length <= session.history_length + 8
    running.target.delay_s = 0.0
    rest = tokens_of([*client.generate(session.session_id, GREEDY)])

    other = client.create_session()
    client.append(other.session_id, text=PROMPT)
    num_kept = kept.history_length - session.history_length
    params = SamplingParams(temperature=0, max_tokens=num_kept + 24, ignore_eos=True)
    assert tokens_of([*client.generate(other.session_id, params)])[num_kept:] == rest


def test_a_deadline_stops_the_work_and_keeps_the_session(
    running: Running, stub: Any, client: RuntimeClient, session: SessionInfo
) -> None:
    running.target.delay_s = SLOW_S
    with pytest.raises(grpc.RpcError) as ended:
        list(stub.Generate(pb.GenerateRequest(session_id=session.session_id, ignore_eos=True), timeout=0.3))
    assert ended.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    wait_for(lambda: client.get_session(session.session_id).state == "idle", within_s=1)
    assert client.get_session(session.session_id).history_length > session.history_length


def test_closing_ends_a_running_generation(running: Running, client: RuntimeClient, session: SessionInfo) -> None:
    running.target.delay_s = SLOW_S
    events = iter(client.generate(session.session_id, ENDLESS))
    next(events)
    client.close_session(session.session_id)
    *_, done = events
    assert isinstance(done, Done)
    assert done.finish_reason == "cancelled"
    with pytest.raises(SessionNotFound):
        client.get_session(session.session_id)
    wait_for(lambda: running.parts.engine.stats().kv_bytes == 0)


def test_a_large_grammar_holds_up_nobody_else(client: RuntimeClient, session: SessionInfo) -> None:
    grammar = Grammar("lark", f"start: /{'|'.join(f'{number:020x}' for number in range(20_000))}/")  # takes a second
    call = client.generate(session.session_id, SamplingParams(max_tokens=1, grammar=grammar))
    events: list[Any] = []
    reading = threading.Thread(target=lambda: events.extend(call))
    reading.start()
    num_answers = 0
    while reading.is_alive():
        client.list_sessions()
        num_answers += 1
    assert isinstance(events[-1], Done)
    assert num_answers > 10


def test_a_failing_engine_is_unavailable_and_keeps_the_session(
    running: Running, client: RuntimeClient, session: SessionInfo
) -> None:
    running.target.fails = True
    with pytest.raises(EngineUnavailable, match="forward failed"):
        list(client.generate(session.session_id, GREEDY))
    running.target.fails = False
    assert client.get_session(session.session_id).history_length == session.history_length
    assert len(tokens_of([*client.generate(session.session_id, GREEDY)])) == 24


def test_interleaved_sessions_get_what_each_gets_alone(client: RuntimeClient) -> None:
    prompts = ["Name three rivers.", "Once upon a time", "x" * 300, "{"]
    alone, together = {}, {}

    def generate(prompt: str, into: dict[str, list[int]]) -> None:
        session = client.create_session()
        client.append(session.session_id, text=prompt)
        into[prompt] = tokens_of([*client.generate(session.session_id, GREEDY)])

    for prompt in prompts:
        generate(prompt, alone)
    threads = [threading.Thread(target=generate, args=(prompt, together)) for prompt in prompts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert together == alone


# --- beside the service ---


SERVICES = ("slipstream.v1.RuntimeService", "slipstream.v1.DrafterService")


def test_health_is_told_as_probes_ask_for_it(channel: grpc.Channel) -> None:
    health = health_pb2_grpc.HealthStub(channel)
    for name in ("", *SERVICES):
        assert health.Check(health_pb2.HealthCheckRequest(service=name)).status == health_pb2.HealthCheckResponse.SERVING
    with pytest.raises(grpc.RpcError) as refused:
        health.Check(health_pb2.HealthCheckRequest(service="another"))
    assert refused.value.code() is grpc.StatusCode.NOT_FOUND


def test_health_tells_that_the_engine_failed(start_server: StartServer) -> None:
    running = start_server()
    with grpc.insecure_channel(running.ready.grpc) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        watch = health.Watch(health_pb2.HealthCheckRequest(service=SERVICES[0]))
        assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
        running.parts.engine.stop()  # as when its loop failed
        assert next(watch).status == health_pb2.HealthCheckResponse.NOT_SERVING
        assert health.Check(health_pb2.HealthCheckRequest()).status == health_pb2.HealthCheckResponse.NOT_SERVING


def test_a_client_can_be_made_from_reflection_alone(channel: grpc.Channel) -> None:
    """As grpcurl does: list, describe, call; without a stub or a .proto."""
    database = ProtoReflectionDescriptorDatabase(channel)
    assert {*SERVICES, "grpc.health.v1.Health"} <= set(database.get_services())
    pool = DescriptorPool(database)
    described = {name: {method.name for method in pool.FindServiceByName(name).methods} for name in SERVICES}
    assert {"CreateSession", "Generate", "ForkSession", "SaveSession", "RestoreSession"} <= described[SERVICES[0]]
    assert described[SERVICES[1]] == {"Stage", "Validate", "Activate", "Rollback", "List", "Get", "Download", "Watch"}
    method = pool.FindServiceByName(SERVICES[0]).FindMethodByName("CreateSession")
    make, read = (GetMessageClass(one) for one in (method.input_type, method.output_type))
    call = channel.unary_unary(
        f"/{SERVICES[0]}/CreateSession", request_serializer=make.SerializeToString, response_deserializer=read.FromString
    )
    session = call(make(request_id="by-hand"))
    assert session.vocab_size == 320
    assert session.options.ttl_s == 3600


def test_a_stream_that_ends_within_the_grace_is_whole(start_server: StartServer) -> None:
    running = start_server(server=ServerConfig(http_port=0, grpc_port=0, shutdown_grace_s=20))
    with running.client() as client:
        session = client.create_session()
        client.append(session.session_id, text=PROMPT)
        running.target.delay_s = SLOW_S
        events = iter(client.generate(session.session_id, GREEDY))
        next(events)
        running.stop()
        *tokens, done = events
        assert isinstance(done, Done)
        assert (done.finish_reason, len(tokens_of(tokens))) == ("length", 24)
    running.ended.result(timeout=10)


def test_stopping_turns_health_and_ends_streams_after_the_grace(start_server: StartServer) -> None:
    running = start_server()
    running.target.delay_s = SLOW_S
    with grpc.insecure_channel(running.ready.grpc) as channel, running.client() as client:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
        session = client.create_session()
        client.append(session.session_id, text=PROMPT)
        events = iter(client.generate(session.session_id, ENDLESS))
        next(events)
        stopped_at = time.monotonic()
        running.stop()
        assert next(watch).status == health_pb2.HealthCheckResponse.NOT_SERVING
        other = client.create_session()
        client.append(other.session_id, text=PROMPT)
        with pytest.raises(EngineUnavailable, match="takes no new generations"):
            list(client.generate(other.session_id, GREEDY))
        with pytest.raises(EngineUnavailable, match="shutting down"):
            list(events)
        assert time.monotonic() - stopped_at >= running.config.server.shutdown_grace_s
    running.ended.result(timeout=10)

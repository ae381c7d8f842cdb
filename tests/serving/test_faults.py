"""Faults that users of other servers reported, each of its whole kind, over a real gRPC channel."""

from __future__ import annotations

import contextlib
import statistics
import threading
import time
from typing import Any

import grpc
import pytest

from runtime.config import SessionsConfig
from runtime.engine.request import Request
from runtime.errors import (
    CapacityExhausted,
    ContextLengthExceeded,
    EngineUnavailable,
    InvalidRequest,
    SessionBusy,
    SessionNotFound,
)
from runtime.rpc.client import RuntimeClient
from runtime.rpc.connection import Retry
from runtime.types import CachePolicy, Done, DrafterPolicy, SamplingParams, SessionInfo, SessionOptions, TokenLogprob, Tokens
from serving.config import AdmissionConfig, AdmissionPolicy

from .conftest import MakeDrafter, Running, StartServer, wait_for

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
ENDLESS = SamplingParams(temperature=0, ignore_eos=True)
PROMPT = "Name three rivers."
SLOW_S = 0.02
SINK_WINDOW = CachePolicy(sink=4, window=48)


def tokens_of(events: Any) -> list[int]:
    return [token_id for event in events if isinstance(event, Tokens) for token_id in event.token_ids]


def open_with(client: RuntimeClient, text: str = PROMPT, options: SessionOptions | None = None) -> SessionInfo:
    session = client.create_session(options)
    client.append(session.session_id, text=text)
    return client.get_session(session.session_id)


def take(stream: Any, num_tokens: int) -> list[int]:
    """Read until so many tokens are there."""
    taken: list[int] = []
    for event in stream:
        taken += tokens_of([event])
        if len(taken) >= num_tokens:
            return taken
    raise AssertionError("the stream ended")


def idle(client: RuntimeClient, session_id: str, within_s: float = 2.0) -> SessionInfo:
    wait_for(lambda: client.get_session(session_id).state == "idle", within_s)
    return client.get_session(session_id)


# --- 1: a disconnect left a zombie decode that was committed later ---


def test_a_lost_connection_ends_the_work_and_the_next_turn_sees_all_that_was_committed(
    running: Running, client: RuntimeClient
) -> None:
    session = open_with(client)
    running.target.delay_s = SLOW_S
    with running.client() as doomed:
        take(doomed.generate(session.session_id, ENDLESS), 8)
    kept = idle(client, session.session_id)
    forwards = running.target.num_forwards
    time.sleep(5 * SLOW_S)
    assert running.target.num_forwards == forwards, "nobody decodes on"
    assert client.get_session(session.session_id).history_length == kept.history_length
    running.target.delay_s = 0.0
    rest = tokens_of(client.generate(session.session_id, GREEDY, expected_history_length=kept.history_length))
    num_kept = kept.history_length - session.history_length
    assert num_kept >= 8
    alone = open_with(client)
    whole = tokens_of(client.generate(alone.session_id, SamplingParams(temperature=0, max_tokens=num_kept + 24, ignore_eos=True)))
    assert whole[num_kept:] == rest


# --- 2: a close during decode leaked K/V ---


def test_closing_while_it_generates_gives_everything_back(running: Running, client: RuntimeClient) -> None:
    engine = running.parts.engine
    wait_for(lambda: engine.stats().kv_bytes == 0)
    running.target.delay_s = SLOW_S
    sessions = [open_with(client) for _ in range(4)]
    streams = [iter(client.generate(session.session_id, ENDLESS)) for session in sessions]
    for stream in streams:
        next(stream)
    for session in sessions:
        client.close_session(session.session_id)
    for stream in streams:
        *_, done = stream
        assert isinstance(done, Done)
        assert done.finish_reason == "cancelled"
    wait_for(lambda: engine.stats().kv_bytes == 0)
    assert (engine.stats().num_running, engine.stats().num_sessions, running.server.admission.num_running) == (0, 0, 0)


# --- 3: an over-length append overwrote the session ---


def test_an_append_that_is_too_long_changes_nothing(client: RuntimeClient) -> None:
    session, other = open_with(client), open_with(client)
    first = tokens_of(client.generate(session.session_id, GREEDY))
    before = client.get_session(session.session_id)
    with pytest.raises(ContextLengthExceeded):
        client.append(session.session_id, [1] * 2048)
    after = client.get_session(session.session_id)
    assert (after.history_length, after.cached_tokens) == (before.history_length, before.cached_tokens)
    whole = tokens_of(client.generate(other.session_id, SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)))
    assert first + tokens_of(client.generate(session.session_id, GREEDY)) == whole


# --- 4: the bonus token was counted wrongly ---


@pytest.mark.parametrize("speculate", [True, False])
@pytest.mark.parametrize("policy", [CachePolicy(), SINK_WINDOW])
def test_history_is_what_was_delivered_and_what_is_cached_after_each_turn(
    client: RuntimeClient, speculate: bool, policy: CachePolicy
) -> None:
    session = open_with(client, "aaaa bbbb " * 4, SessionOptions(cache_policy=policy))
    length = session.history_length
    for num_tokens in (1, 2, 7, 30, 64):
        params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, speculate=speculate)
        *events, done = client.generate(session.session_id, params)
        length += len(tokens_of(events))
        now = client.get_session(session.session_id)
        assert len(tokens_of(events)) == done.usage.completion_tokens == num_tokens
        assert done.history_length == now.history_length == now.cached_tokens == length
    stop = SamplingParams(temperature=0, max_tokens=64, stop_token_ids=(tokens_of(events)[-1],))
    *events, done = client.generate(session.session_id, stop)
    now = client.get_session(session.session_id)
    assert now.history_length == now.cached_tokens == length + len(tokens_of(events)), "tokens behind the stop do not exist"


# --- 5: generation went on after the client had left ---


def test_a_cancelled_generation_frees_its_slot_after_at_most_one_more_forward(
    running: Running, client: RuntimeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    cancel, heard = Request.cancel, []

    def hear(request: Request) -> None:
        heard.append(running.target.num_forwards)  # begun so far
        cancel(request)

    monkeypatch.setattr(Request, "cancel", hear)
    running.target.delay_s = SLOW_S
    admission, waits_s, forwards = running.server.admission, [], []
    session = open_with(client)
    for number in range(40):
        length = client.get_session(session.session_id).history_length
        stream = client.generate(session.session_id, SamplingParams(temperature=0, ignore_eos=True, max_tokens=40))
        take(stream, 1 + number % 3)
        began = time.monotonic()
        stream.cancel()
        wait_for(lambda: admission.num_running == 0)
        waits_s.append(time.monotonic() - began)
        forwards.append(running.target.num_forwards - heard[-1])
        assert client.get_session(session.session_id).history_length > length
        if length > 1500:
            client.close_session(session.session_id)
            session = open_with(client)
    p99_s = statistics.quantiles(waits_s, n=100)[98]
    print(f"slot free after cancellation: median {statistics.median(waits_s):.3f} s, p99 {p99_s:.3f} s")
    assert len(heard) == 40
    assert max(forwards) <= 1
    assert p99_s < 3 * SLOW_S + 0.5


# --- 9: a prefill that raises leaked its permit ---


def test_permits_are_back_after_any_failure(start_server: StartServer) -> None:
    running = start_server(admission=AdmissionConfig(policy=AdmissionPolicy.REJECT, max_concurrent=1))
    with RuntimeClient(running.ready.grpc, retry=Retry(max_attempts=1)) as client:
        session = open_with(client)
        running.target.fails = True
        for _ in range(3):
            with pytest.raises(EngineUnavailable, match="forward failed"):
                list(client.generate(session.session_id, GREEDY))
        running.target.fails = False
        for params in (SamplingParams(top_p=0), SamplingParams(max_tokens=5000)):
            with pytest.raises(InvalidRequest):
                list(client.generate(session.session_id, params))
        with pytest.raises(SessionNotFound):
            list(client.generate("none"))
        running.target.delay_s = SLOW_S
        stream = client.generate(session.session_id, ENDLESS)
        next(iter(stream))
        with pytest.raises(CapacityExhausted) as refused:
            list(client.generate(open_with(client).session_id, GREEDY))
        assert refused.value.retry_after_s >= 1
        stream.cancel()
        idle(client, session.session_id)
        assert running.server.admission.num_running == 0
        assert len(tokens_of(client.generate(session.session_id, GREEDY))) == 24


# --- 13: after a disconnect two forwards ran at once on one cache ---


def test_one_forward_at_a_time_whoever_comes_and_goes(running: Running, client: RuntimeClient) -> None:
    session = open_with(client)
    running.target.delay_s = 0.005
    running.target.max_inside = 0
    committed: list[int] = []
    for _ in range(12):
        length = client.get_session(session.session_id).history_length
        stream = client.generate(session.session_id, ENDLESS)
        seen = take(stream, 2)
        stream.cancel()
        with contextlib.suppress(SessionBusy):  # at once: before or after the first one has ended
            list(client.generate(session.session_id, SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)))
        committed.append(idle(client, session.session_id).history_length - length)
        assert committed[-1] >= len(seen)
    assert running.target.max_inside == 1
    running.target.delay_s = 0.0
    total = client.get_session(session.session_id).history_length
    fork = client.fork_session(session.session_id, history_length=session.history_length)
    params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=total - session.history_length + 8)
    alone = tokens_of(client.generate(fork.session_id, params))
    rest = tokens_of(client.generate(session.session_id, SamplingParams(temperature=0, ignore_eos=True, max_tokens=8)))
    assert alone[-8:] == rest, "what was committed in pieces is what one turn gives"


# --- 14: LRU evicted a session that was generating; a cancel destroyed one ---


def test_a_busy_session_is_never_evicted_and_a_cancel_destroys_none(start_server: StartServer) -> None:
    running = start_server(sessions=SessionsConfig(max_sessions=2))
    with RuntimeClient(running.ready.grpc, retry=Retry(max_attempts=1)) as client:
        old, young = open_with(client), open_with(client)
        running.target.delay_s = SLOW_S
        streams = [client.generate(old.session_id, ENDLESS)]
        take(streams[0], 1)
        third = open_with(client)
        with pytest.raises(SessionNotFound) as gone:
            client.get_session(young.session_id)
        assert gone.value.reason == "EVICTED_LRU", "the idle one, though it was used later"
        streams.append(client.generate(third.session_id, ENDLESS))
        take(streams[1], 1)
        with pytest.raises(CapacityExhausted) as full:
            client.create_session()
        assert full.value.retry_after_s > 0
        for stream in streams:
            stream.cancel()
        for session in (old, third):
            assert idle(client, session.session_id).history_length > session.history_length


# --- 15: one of two interleaved sessions got the other's continuation ---


def test_sessions_that_run_together_get_what_each_gets_alone(client: RuntimeClient) -> None:
    prompts = [PROMPT, "Once upon a time", "x" * 300, "{", PROMPT + " And"]
    alone = {prompt: tokens_of(client.generate(open_with(client, prompt).session_id, GREEDY)) for prompt in prompts}
    together: dict[str, list[int]] = {}
    sessions = {prompt: open_with(client, prompt).session_id for prompt in prompts}
    barrier = threading.Barrier(len(prompts))

    def generate(prompt: str) -> None:
        barrier.wait()
        halves = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
        together[prompt] = tokens_of(client.generate(sessions[prompt], halves))
        together[prompt] += tokens_of(client.generate(sessions[prompt], halves))

    threads = [threading.Thread(target=generate, args=(prompt,)) for prompt in prompts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert together == alone


# --- 16: one append or many gave different logits past the window ---


@pytest.mark.parametrize("policy", [CachePolicy(), SINK_WINDOW])
def test_a_history_gives_the_same_however_it_was_appended(client: RuntimeClient, policy: CachePolicy) -> None:
    ids = [(7 * index) % 300 + 10 for index in range(200)]  # four windows
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=True)
    answers: list[tuple[list[int], list[TokenLogprob]]] = []
    for size in (200, 64, 7):
        session = client.create_session(SessionOptions(cache_policy=policy))
        for start in range(0, len(ids), size):
            client.append(session.session_id, ids[start : start + size], expected_history_length=start)
        events = [event for event in client.generate(session.session_id, params) if isinstance(event, Tokens)]
        answers.append((tokens_of(events), [one for event in events for one in event.logprobs]))
        client.close_session(session.session_id)
    for token_ids, logprobs in answers[1:]:
        assert token_ids == answers[0][0]
        assert [one.logprob for one in logprobs] == pytest.approx([one.logprob for one in answers[0][1]], abs=1e-3)


# --- 17: greedy speculation differed from plain decoding past the window ---


@pytest.fixture
def drafting(start_server: StartServer, make_drafter: MakeDrafter) -> Running:
    """A server that drafts with a random EAGLE3 drafter, which is wrong nearly always."""
    running = start_server()
    version = running.parts.registry.publish(
        make_drafter(3), parent=None, step=0, target_fingerprint=running.parts.engine.info.fingerprint, metrics={}
    )
    wait_for(lambda: running.parts.engine.drafter_version == version)
    return running


@pytest.mark.parametrize("policy", [CachePolicy(), SINK_WINDOW])
def test_speculation_changes_no_token_past_the_window(running: Running, drafting: Running, policy: CachePolicy) -> None:
    answers: dict[str, list[int]] = {}
    for name, server, drafter in (
        ("plain", running, DrafterPolicy("off")),
        ("ngram", running, DrafterPolicy()),  # nearly perfect on a text that repeats itself
        ("random", drafting, DrafterPolicy()),
    ):
        with server.client() as client:
            session = open_with(client, "abc " * 60, SessionOptions(cache_policy=policy, drafter_policy=drafter))
            *events, done = client.generate(session.session_id, SamplingParams(temperature=0, max_tokens=160, ignore_eos=True))
            answers[name] = tokens_of(events)
            assert bool(done.speculation.num_drafted) == (name != "plain")
            assert (client.get_session(session.session_id).dropped_tokens > 0) == (policy is SINK_WINDOW)
    assert answers["ngram"] == answers["plain"]
    assert answers["random"] == answers["plain"]


# --- 18: an id that is not in the vocabulary gave UNKNOWN after the cache had changed ---


@pytest.mark.parametrize("bad", [320, 2**31, 2**32 - 1])
def test_an_id_that_does_not_exist_is_an_invalid_argument_and_changes_nothing(client: RuntimeClient, bad: int) -> None:
    session = open_with(client)
    list(client.generate(session.session_id, GREEDY))
    before = client.get_session(session.session_id)
    with pytest.raises(InvalidRequest, match=str(bad)) as refused:
        client.append(session.session_id, [5, 6, bad])
    assert refused.value.param == "token_ids"
    cause = refused.value.__cause__
    assert isinstance(cause, grpc.RpcError)
    assert cause.code() is grpc.StatusCode.INVALID_ARGUMENT
    after = client.get_session(session.session_id)
    assert (after.history_length, after.cached_tokens) == (before.history_length, before.cached_tokens)
    assert len(tokens_of(client.generate(session.session_id, GREEDY))) == 24

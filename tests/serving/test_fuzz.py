"""Any request over a real gRPC channel: only documented statuses come back, a refusal changes nothing, and the server lives.

Messages are made from the .proto's own descriptors, field by field: whatever a field can hold, and often what it should hold.
Some are then spoilt as bytes. The table of docs/errors.md is the judge of each refusal; INTERNAL, though it is in there, is
never right.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor, MethodDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from google.rpc import error_details_pb2
from grpc_status import rpc_status
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from runtime.config import RegistryConfig
from runtime.registry import VersionState
from runtime.rpc.client import RuntimeClient
from runtime.rpc.drafters_client import DrafterClient
from runtime.rpc.v1 import drafters_pb2, runtime_pb2
from runtime.types import SamplingParams, Tokens

from .conftest import Running, at_home, make_config, random_drafter, start, wait_for
from .test_error_table import ROWS

SESSIONS = runtime_pb2.DESCRIPTOR.services_by_name["RuntimeService"]
DRAFTERS = drafters_pb2.DESCRIPTOR.services_by_name["DrafterService"]
METHODS = [*SESSIONS.methods, *DRAFTERS.methods]
DOCUMENTED = {(row.reason, row.grpc, letter) for row in ROWS for letter in row.where if row.reason != "INTERNAL"}
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
MAX_EVENTS = 4  # that are read of a stream
WATCH_S = 0.1

# What stands in a message for what only a running server has.
LIVE, CLOSED, KEPT, VERSION, CHECKPOINT, PIPES = "<live>", "<closed>", "<kept>", "<version>", "<checkpoint>", "<pipes>"
LENGTH = 12  # of the live session's history


# --- any message ---


def choice(*values: Any) -> st.SearchStrategy[Any]:
    return st.sampled_from(values)


TEXT = st.one_of(
    st.text(st.characters(codec="utf-8"), max_size=40), choice("", "\0", "a" * 5000, "../..", "\U0001f469‍\U0001f4bb")
)
NUMBERS: dict[int, st.SearchStrategy[Any]] = {
    FieldDescriptor.CPPTYPE_BOOL: st.booleans(),
    FieldDescriptor.CPPTYPE_DOUBLE: st.one_of(st.floats(), choice(0.0, 0.5, 1.0, 5e-324, float("nan"), float("inf"))),
    FieldDescriptor.CPPTYPE_INT64: st.one_of(st.integers(-(2**63), 2**63 - 1), choice(-(2**63), 2**63 - 1)),
    FieldDescriptor.CPPTYPE_UINT64: st.one_of(st.integers(0, 50), choice(2**31, 2**63, 2**64 - 1)),
    FieldDescriptor.CPPTYPE_UINT32: st.one_of(st.integers(0, 330), choice(319, 320, 2**31 - 1, 2**31, 2**32 - 1)),
    FieldDescriptor.CPPTYPE_ENUM: st.integers(-(2**31), 2**31 - 1) | st.integers(0, 4),
}
IDS = st.lists(st.integers(0, 319), min_size=1, max_size=5)
LIKELY: dict[str, st.SearchStrategy[Any]] = {  # three times out of four; else anything
    "session_id": choice(LIVE, LIVE, LIVE, CLOSED),
    "name": choice(KEPT, KEPT, "new", ".", "a/b", "a" * 64, "a" * 65, "é"),
    "version": choice(VERSION, VERSION, VERSION, "0" * 16),
    "path": choice(CHECKPOINT, CHECKPOINT, PIPES, "/", "/" + "a" * 300, "/" + "a/" * 3000, "/etc/passwd"),
    "max_tokens": choice(1, 3, 8),
    "ttl_s": choice(1.0, 60.0, 3600.0),
    "expected_history_length": choice(LENGTH, LENGTH, LENGTH - 1),
    "history_length": st.integers(0, LENGTH),
    "token_ids": IDS,
    "eos_token_ids": IDS,
    "stop_token_ids": IDS,
    "temperature": st.floats(0, 2),
    "top_p": st.floats(0, 1, exclude_min=True),
    "min_p": st.floats(0, 1),
    "presence_penalty": st.floats(-2, 2),
    "frequency_penalty": st.floats(-2, 2),
    "repetition_penalty": st.floats(0.01, 10),
    "logit_bias": st.dictionaries(st.integers(0, 319), st.floats(-100, 100), max_size=4),
    "top_logprobs": st.just(0),
    "max_draft_tokens": st.integers(0, 64),
    "stop": st.lists(st.text(min_size=1, max_size=3), max_size=3),
    "capture_policy": st.integers(0, 3),
    "json_schema": choice("true", '{"type": "integer"}', "[" * 5000, '{"$ref": "#"}', '{"pattern": "(a*)*b"}', "NaN"),
    "lark": choice('start: "a"', "start: start", "start: /[/", "start: " + "(" * 3000),
    "config_bytes": choice(1, 2**20, 2**20 + 1),
    "target_fingerprint": choice("", "", "another"),
}
ALWAYS = {"session_id", "name", "version", "path", "max_tokens"}  # nine times out of ten; without them little happens


def values(one: FieldDescriptor) -> st.SearchStrategy[Any]:
    """Whatever a field can hold, once."""
    if one.message_type is not None:
        return messages(one.message_type)
    if one.cpp_type == FieldDescriptor.CPPTYPE_STRING:
        return st.binary(max_size=64) if one.type == FieldDescriptor.TYPE_BYTES else TEXT
    return NUMBERS[one.cpp_type]


def whole(one: FieldDescriptor) -> st.SearchStrategy[Any]:
    if one.message_type is not None and one.message_type.GetOptions().map_entry:
        key, value = (one.message_type.fields_by_name[name] for name in ("key", "value"))
        return st.dictionaries(values(key), values(value), max_size=4)
    return st.lists(values(one), max_size=5) if one.is_repeated else values(one)


@st.composite
def messages(draw: st.DrawFn, kind: Descriptor) -> Message:
    chosen: dict[str, Any] = {}
    taken: set[str] = set()  # of what is there once at most
    for one in draw(st.permutations(list(kind.fields))):
        group = None if one.containing_oneof is None else one.containing_oneof.name
        if group not in taken and draw(st.sampled_from(range(10))) < (9 if one.name in ALWAYS else 3):
            is_likely = one.name in LIKELY and draw(st.sampled_from(range(4))) < 3
            chosen[one.name] = draw(LIKELY[one.name] if is_likely else whole(one))
            taken |= {group} - {None}
    return GetMessageClass(kind)(**chosen)


Spoil = Callable[[bytes], bytes]


@dataclass(frozen=True)
class Spoilt:
    """What becomes of a message's bytes on their way."""

    how: str
    at: float = 0.0  # place, from 0 to 1
    data: bytes = b""

    def __call__(self, message: bytes) -> bytes:
        place = int(self.at * len(message))
        if self.how == "cut":
            return message[:place]
        if self.how == "inserted":
            return message[:place] + self.data + message[place:]
        return self.data


SPOILT = st.one_of(
    st.builds(Spoilt, st.just("cut"), st.floats(0, 1)),
    st.builds(Spoilt, st.just("inserted"), st.floats(0, 1), st.binary(min_size=1, max_size=4)),
    st.builds(Spoilt, st.just("inserted"), st.just(1.0), choice(b"\x98\x06\x01", b"\xa2\x06\x02hi")),  # fields of the future
    st.builds(Spoilt, st.just("replaced"), st.just(0.0), st.binary(max_size=64)),
)


# --- the server ---


@dataclass
class Fuzzed:
    """One server, and what it is to hold between two requests: one session, a saved one, a drafter version."""

    running: Running
    client: RuntimeClient
    drafters: DrafterClient
    channel: grpc.Channel
    checkpoint: Path
    names: dict[str, str]
    said: list[int]  # before the first request

    def restore(self) -> None:
        """Back to that, whatever the last request made or closed."""
        self.running.wait_until_idle(30)
        live = self.names.get(LIVE)
        for session in self.client.list_sessions():
            if session.session_id != live or session.history_length != LENGTH:
                self.client.close_session(session.session_id)
        for saved in self.client.list_saved_sessions():
            if saved.name != "kept":
                self.client.delete_saved_session(saved.name)
        if not self.client.list_sessions():
            self._make_session()
        if not self.client.list_saved_sessions():
            self.client.save_session(self.names[LIVE], "kept")
        if [entry.state for entry in self.drafters.list()] != [VersionState.STAGED]:
            version = self.drafters.stage_directory(self.checkpoint).version
            self.names |= {VERSION: self.drafters.stage_again(version).version}

    def _make_session(self) -> None:
        closed, live = self.client.create_session(), self.client.create_session()
        self.client.close_session(closed.session_id)
        self.client.append(live.session_id, [5, 6, 7, 8])
        *_, done = self.client.generate(live.session_id, GREEDY)
        assert done.history_length == LENGTH
        wait_for(lambda: self.client.get_session(live.session_id).cached_tokens == LENGTH)  # the last token comes behind the end
        self.names |= {LIVE: live.session_id, CLOSED: closed.session_id}

    def held(self) -> Any:
        """All that a request can change, but for times."""
        sessions = runtime_pb2.ListSessionsResponse.FromString(self._list())
        for session in sessions.sessions:
            session.ClearField("last_used_at")
        return sessions, self.client.list_saved_sessions(), self.drafters.list(), self.drafters.active_version()

    def _list(self) -> bytes:
        reply: bytes = self.channel.unary_unary(f"/{SESSIONS.full_name}/ListSessions")(b"")
        return reply

    def aimed(self, message: Message) -> Message:
        """The same, with the names of what is really here."""
        for one, value in message.ListFields():
            if isinstance(value, Message):
                self.aimed(value)
            elif isinstance(value, str) and value in self.names:
                setattr(message, one.name, self.names[value])
        return message

    def send(self, method: MethodDescriptor, data: list[bytes]) -> grpc.RpcError | None:
        """One call. Returns how it was refused; None: it went through, as far as it was read."""
        name = f"/{method.containing_service.full_name}/{method.name}"
        reply = GetMessageClass(method.output_type).FromString
        try:
            if method.server_streaming:
                timeout_s = WATCH_S if method.name == "Watch" else None
                stream = self.channel.unary_stream(name, response_deserializer=reply)(data[0], timeout=timeout_s)
                for _, _ in zip(range(MAX_EVENTS), stream, strict=False):
                    pass
                stream.cancel()
            elif method.client_streaming:
                self.channel.stream_unary(name, response_deserializer=reply)(iter(data), timeout=60)
            else:
                self.channel.unary_unary(name, response_deserializer=reply)(data[0], timeout=60)
        except grpc.RpcError as error:
            is_watched = method.name == "Watch" and error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            return None if is_watched else error
        return None


def say(client: RuntimeClient) -> list[int]:
    """The tokens of one greedy answer."""
    session = client.create_session()
    client.append(session.session_id, [5, 6, 7, 8])
    events = list(client.generate(session.session_id, GREEDY))
    client.close_session(session.session_id)
    return [token_id for event in events if isinstance(event, Tokens) for token_id in event.token_ids]


@pytest.fixture(scope="module")
def fuzzed(home: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fuzzed]:
    directory = tmp_path_factory.mktemp("fuzzed")
    with at_home(home):
        running = start(make_config(directory / "state", registry=RegistryConfig(poll_s=3600)))
        checkpoint = random_drafter(1, directory / "drafter")
    pipes = directory / "pipes"
    pipes.mkdir()
    for name in ("config.json", "model.safetensors"):
        os.mkfifo(pipes / name)
    with (
        running.client() as client,
        DrafterClient(running.ready.grpc, timeout_s=30) as drafters,
        grpc.insecure_channel(running.ready.grpc) as channel,
    ):
        names = {KEPT: "kept", CHECKPOINT: str(checkpoint), PIPES: str(pipes)}
        yield Fuzzed(running, client, drafters, channel, checkpoint, names, say(client))
    running.stop()
    running.ended.result(timeout=30)


def check_documented(error: grpc.RpcError, letter: str) -> None:
    """The status is one of the table, and says all that the table promises."""
    status = rpc_status.from_call(error)
    assert status is not None, f"{error.code()} without details: {error.details()}"
    details = {kind: kind() for kind in (error_details_pb2.ErrorInfo, error_details_pb2.BadRequest, error_details_pb2.RetryInfo)}
    found = [kind for kind, message in details.items() for detail in status.details if detail.Unpack(message)]
    info = details[error_details_pb2.ErrorInfo]
    assert info.domain == "slipstream"
    assert (info.reason, error.code().name, letter) in DOCUMENTED, f"{error.code()} {info.reason}: {error.details()}"
    if error.code() is grpc.StatusCode.INVALID_ARGUMENT:
        [violation] = details[error_details_pb2.BadRequest].field_violations
        assert violation.field
    assert (error_details_pb2.RetryInfo in found) == (error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED)
    assert error.details()


def judged(fuzzed: Fuzzed, method: MethodDescriptor, data: list[bytes]) -> grpc.RpcError | None:
    before = fuzzed.held()
    error = fuzzed.send(method, data)
    if error is not None:
        check_documented(error, "R" if method.containing_service is SESSIONS else "D")
        marks = method.name in ("Validate", "Activate") and error.code() is grpc.StatusCode.FAILED_PRECONDITION
        after = fuzzed.held()
        assert after[:2] == before[:2]
        assert marks or after == before, "a version is marked rejected by what looks at it, and by nothing else"
    assert fuzzed.running.parts.engine.is_running
    return error


# --- the tests ---


def fuzz(methods: list[MethodDescriptor], num_examples: int) -> Callable[[Any], Any]:
    """Any requests to each of these methods, the same in every run."""
    examples = settings(
        max_examples=num_examples,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
    )
    each = pytest.mark.parametrize("method", methods, ids=lambda method: method.name)
    return lambda test: each(examples(given(draws=st.data())(test)))


RICH = [one for one in METHODS if one.name in ("CreateSession", "AppendTokens", "Generate", "ForkSession", "Stage")]
POOR = [one for one in METHODS if one not in RICH]


@fuzz(RICH, 100)
def test_any_rich_request_gets_a_documented_answer(fuzzed: Fuzzed, method: MethodDescriptor, draws: st.DataObject) -> None:
    try_any(fuzzed, method, draws)


@fuzz(POOR, 20)
def test_any_poor_request_gets_a_documented_answer(fuzzed: Fuzzed, method: MethodDescriptor, draws: st.DataObject) -> None:
    try_any(fuzzed, method, draws)


def try_any(fuzzed: Fuzzed, method: MethodDescriptor, draws: st.DataObject) -> None:
    fuzzed.restore()
    num_messages = draws.draw(st.sampled_from([1, 1, 1, 0, 2, 3])) if method.client_streaming else 1
    made = [fuzzed.aimed(draws.draw(messages(method.input_type))).SerializeToString() for _ in range(num_messages)]
    if made and draws.draw(st.sampled_from(range(4))) == 3:
        made[-1] = draws.draw(SPOILT)(made[-1])
    judged(fuzzed, method, made)


MANY = 1_000_000  # of one byte each, in a packed list; some less where each takes more
PROPERTIES = ", ".join(f'"{number:020x}": {{}}' for number in range(3000))
EXTREME: list[tuple[str, dict[str, Any]]] = [
    ("CreateSession", {"options": {"eos_token_ids": [1] * MANY}}),
    ("CreateSession", {"options": {"stop_token_ids": [2**32 - 1] * MANY}}),
    ("CreateSession", {"options": {"labels": {str(number): "x" for number in range(MANY // 10)}}}),
    ("CreateSession", {"options": {"client_label": "x" * 7 * MANY}}),
    ("CreateSession", {"options": {"cache_policy": {"sink_window": {"sink": 2**32 - 1, "window": 2**32 - 1}}}}),
    ("CreateSession", {"request_id": "x" * 7 * MANY}),
    ("AppendTokens", {"session_id": LIVE, "token_ids": [1] * 7 * MANY}),
    ("AppendTokens", {"session_id": LIVE, "token_ids": [1] * 2000}),
    ("AppendTokens", {"session_id": LIVE, "text": "\U0001f469" * MANY}),
    ("AppendTokens", {"session_id": "x" * 7 * MANY, "token_ids": [1]}),
    ("Generate", {"session_id": LIVE, "stop": ["x"] * (MANY // 2)}),
    ("Generate", {"session_id": LIVE, "stop": ["x" * MANY], "max_tokens": 3}),
    ("Generate", {"session_id": LIVE, "stop_token_ids": [1] * MANY, "max_tokens": 3}),
    ("Generate", {"session_id": LIVE, "logit_bias": dict.fromkeys(range(MANY // 10), 1.0)}),
    ("Generate", {"session_id": LIVE, "grammar": {"json_schema": "[" * MANY}}),
    ("Generate", {"session_id": LIVE, "grammar": {"lark": "start: " + "(" * MANY}}),
    ("Generate", {"session_id": LIVE, "grammar": {"json_schema": f'{{"properties": {{{PROPERTIES}}}}}'}, "max_tokens": 3}),
    ("Generate", {"session_id": LIVE, "grammar": {"json_schema": "true"}, "max_tokens": 3}),
    ("Generate", {"session_id": LIVE, "grammar": {"json_schema": "false"}}),
    ("Generate", {"session_id": LIVE, "max_tokens": 2**32 - 1}),
    ("ForkSession", {"session_id": LIVE, "history_length": 2**64 - 1}),
    ("SaveSession", {"session_id": LIVE, "name": "x" * 7 * MANY}),
    ("RestoreSession", {"name": "x" * 7 * MANY}),
    ("Validate", {"version": "x" * 7 * MANY}),
    ("Rollback", {"reason": "x" * 7 * MANY}),
    ("Stage", {"directory": {"path": CHECKPOINT, "manifest": {"metrics": {"loss": float("nan")}}}}),
    ("Stage", {"directory": {"path": CHECKPOINT, "manifest": {"step": 2**64 - 1, "parent": "x" * MANY}}}),
    ("Stage", {"directory": {"path": "/" + "a" * 300}}),
    ("Stage", {"directory": {"path": PIPES}}),
]


@pytest.mark.parametrize(("name", "fields"), EXTREME, ids=lambda value: value if isinstance(value, str) else "")
def test_what_is_extreme_gets_a_documented_answer(fuzzed: Fuzzed, name: str, fields: dict[str, Any]) -> None:
    fuzzed.restore()
    [method] = (one for one in METHODS if one.name == name)
    message = fuzzed.aimed(GetMessageClass(method.input_type)(**fields))
    judged(fuzzed, method, [message.SerializeToString()])


def test_the_server_still_says_what_it_said(fuzzed: Fuzzed) -> None:
    """After all of that."""
    fuzzed.restore()
    assert say(fuzzed.client) == fuzzed.said
    assert len(fuzzed.said) == GREEDY.max_tokens

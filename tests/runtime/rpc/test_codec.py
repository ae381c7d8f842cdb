"""Messages and nouns of sessions: each survives the way there and back; what a message can say and is not done is refused."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from runtime.errors import InvalidRequest
from runtime.rpc import codec
from runtime.rpc.v1 import runtime_pb2 as pb
from runtime.types import CachePolicy, DrafterPolicy, SessionInfo, SessionOptions, Switch

OPTIONS = SessionOptions("ann", 5.0, (1, 2), (3,), Switch.ON, CachePolicy(4, 64), DrafterPolicy("off"), {"task": "x"})


@pytest.mark.parametrize(
    "options",
    [
        OPTIONS,
        SessionOptions(),
        SessionOptions(capture=Switch.OFF),
        SessionOptions(cache_policy=CachePolicy(0, 9), drafter_policy=DrafterPolicy("pinned", "0123456789abcdef")),
    ],
)
def test_session_options(options: SessionOptions) -> None:
    assert codec.session_options(codec.create_request(options).options) == options


def test_every_option_of_a_session_is_in_the_trial() -> None:
    default = SessionOptions()
    same = [item.name for item in dataclasses.fields(OPTIONS) if getattr(OPTIONS, item.name) == getattr(default, item.name)]
    assert not same


@pytest.mark.parametrize("state", ["idle", "reserved", "generating"])
def test_session_info(state: Any) -> None:
    info = SessionInfo("s", state, 7, 6, OPTIONS, "target", "drafter", 2048, 1_700_000_000.25, 1_700_000_009.5, 3)
    message = codec.session_message(info, vocab_size=320, default_ttl_s=60)
    assert message.vocab_size == 320
    assert codec.session_info(pb.Session.FromString(message.SerializeToString())) == info


def test_a_reply_tells_the_time_to_live_that_counts() -> None:
    info = SessionInfo("s", "idle", 7, 6, SessionOptions(), "target", "drafter", 2048, 0.0, 0.0)
    assert codec.session_message(info, vocab_size=320, default_ttl_s=60).options.ttl_s == 60


def test_refusals_of_options_bear_the_path_in_the_request() -> None:
    with pytest.raises(InvalidRequest) as refused, codec.within_options():
        codec.session_options(pb.SessionOptions(ttl_s=-1))
    assert refused.value.param == "options.ttl_s"
    with pytest.raises(InvalidRequest) as refused, codec.within_options():
        raise InvalidRequest("history_length", "No.")
    assert refused.value.param == "history_length"


def test_saved_sessions() -> None:
    saved = codec.SavedSession("a", 5, 1_700_000_000.25)
    assert codec.saved_session(codec.saved_session_message(saved)) == saved


def test_an_empty_request_means_the_defaults() -> None:
    assert codec.session_options(pb.SessionOptions()) == SessionOptions()


@pytest.mark.parametrize(
    ("make", "data", "param"),
    [
        (pb.GenerateRequest, b"\x98\x06\x01", "GenerateRequest#99"),
        (pb.GenerateRequest, b"\xa2\x01\x03\x98\x06\x01", "speculation#99"),  # inside field 20
    ],
)
def test_unknown_fields_are_refused_at_every_depth(make: Any, data: bytes, param: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        codec.refuse_unknown(make.FromString(data))
    assert refused.value.param == param
    codec.refuse_unknown(make())

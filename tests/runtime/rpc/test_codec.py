"""Messages and nouns: each survives the way there and back, and what a message can say that is not done is refused."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from runtime.errors import InvalidRequest
from runtime.rpc import codec, generation_codec
from runtime.rpc.v1 import runtime_pb2 as pb
from runtime.types import (
    CachePolicy,
    Done,
    DrafterPolicy,
    Grammar,
    HistoryTruncated,
    SamplingParams,
    SessionInfo,
    SessionOptions,
    SpeculationStats,
    Started,
    Switch,
    TokenLogprob,
    Tokens,
    Usage,
)

OPTIONS = SessionOptions("ann", 5.0, (1, 2), (3,), Switch.ON, CachePolicy(4, 64), DrafterPolicy("off"), {"task": "x"})
PARAMS = SamplingParams(
    max_tokens=3,
    temperature=0.3,
    top_p=0.7,
    top_k=5,
    min_p=0.1,
    seed=-5,
    presence_penalty=0.1,
    frequency_penalty=-0.2,
    repetition_penalty=1.2,
    logit_bias={4: -3.5},
    stop=("a", "\u4e2d"),
    stop_token_ids=(9,),
    include_stop=True,
    ignore_eos=True,
    logprobs=True,
    top_logprobs=2,
    grammar=Grammar("json_schema", "{}"),
    speculate=False,
    max_draft_tokens=0,
)


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


@pytest.mark.parametrize("params", [PARAMS, SamplingParams()])
def test_sampling_params(params: SamplingParams) -> None:
    request = generation_codec.generate_request("s", params, request_id="r", expected_history_length=0)
    request = pb.GenerateRequest.FromString(request.SerializeToString())
    assert generation_codec.sampling_params(request, vocab_size=320) == params
    assert request.HasField("expected_history_length")


def test_every_sampling_setting_is_in_the_trial() -> None:
    """So that a new one cannot be forgotten on the way."""
    default = SamplingParams()
    same = [item.name for item in dataclasses.fields(PARAMS) if getattr(PARAMS, item.name) == getattr(default, item.name)]
    assert not same


def test_an_empty_request_means_the_defaults() -> None:
    assert generation_codec.sampling_params(pb.GenerateRequest(), vocab_size=320) == SamplingParams()
    assert codec.session_options(pb.SessionOptions()) == SessionOptions()


@pytest.mark.parametrize(
    "event",
    [
        Started("r", "s", "drafter", "target", 9),
        HistoryTruncated(12),
        Tokens((1, 2), "a\u4e2d", (), (True, False)),
        Tokens((1,), "", (TokenLogprob(1, -0.5, ((1, -0.5), (7, -2.25))),), (False,)),
        Done("stop", "end", Usage(5, 2, 1), SpeculationStats(2, 6, 3, [2, 1], [2, 2, 2]), ("a", "b"), 7),
        Done("stop", 0, Usage(), SpeculationStats(), (), 7),
        Done("length", None, Usage(), SpeculationStats(), (), 7),
        Done("cancelled", None, Usage(), SpeculationStats(), (), 7),
    ],
)
def test_events(event: Any) -> None:
    message = pb.GenerateResponse.FromString(generation_codec.event_message(event).SerializeToString())
    assert generation_codec.event(message, "s") == event


def test_the_message_of_an_end_shows_the_acceptance_length() -> None:
    done = Done("stop", None, Usage(), SpeculationStats(2, 6, 3, [2, 1], [2, 2, 2]), (), 7)
    assert generation_codec.event_message(done).done.speculation.mean_acceptance_length == 2.5


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


def test_refusals_bear_the_names_of_the_message() -> None:
    request = pb.GenerateRequest(speculation=pb.SpeculationOverride(max_draft_tokens=65))
    with pytest.raises(InvalidRequest) as refused:
        generation_codec.sampling_params(request, vocab_size=320)
    assert refused.value.param == "speculation.max_draft_tokens"

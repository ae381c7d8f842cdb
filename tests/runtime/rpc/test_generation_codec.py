"""Messages and nouns of generations: each survives the way there and back, and refusals bear the names of the message."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from runtime.errors import InvalidRequest
from runtime.rpc import generation_codec as codec
from runtime.rpc.v1 import runtime_pb2 as pb
from runtime.types import (
    Done,
    Grammar,
    HistoryTruncated,
    SamplingParams,
    SpeculationStats,
    Started,
    TokenLogprob,
    Tokens,
    Usage,
)

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
SILENT = dataclasses.replace(PARAMS, stop=(), detokenize=False)  # stop strings are looked for in the text


@pytest.mark.parametrize("params", [PARAMS, SILENT, SamplingParams()])
def test_sampling_params(params: SamplingParams) -> None:
    request = codec.generate_request("s", params, request_id="r", expected_history_length=0)
    request = pb.GenerateRequest.FromString(request.SerializeToString())
    assert codec.sampling_params(request, vocab_size=320) == params
    assert request.HasField("expected_history_length")


def test_every_sampling_setting_is_in_the_trial() -> None:
    """So that a new one cannot be forgotten on the way."""
    default = SamplingParams()
    both = [
        {item.name for item in dataclasses.fields(params) if getattr(params, item.name) != getattr(default, item.name)}
        for params in (PARAMS, SILENT)
    ]
    assert set.union(*both) == set(SamplingParams.__dataclass_fields__)


def test_an_empty_request_means_the_defaults() -> None:
    assert codec.sampling_params(pb.GenerateRequest(), vocab_size=320) == SamplingParams()


@pytest.mark.parametrize("grammar", [Grammar("json_schema", "{}"), Grammar("lark", 'start: "a"')])
def test_a_grammar_is_of_either_kind_and_never_of_none(grammar: Grammar) -> None:
    request = codec.generate_request("s", SamplingParams(grammar=grammar))
    assert codec._sampling_params(request).grammar == grammar
    with pytest.raises(InvalidRequest, match="neither json_schema nor lark"):
        codec.sampling_params(pb.GenerateRequest(grammar=pb.Grammar()), vocab_size=320)


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
    message = pb.GenerateResponse.FromString(codec.event_message(event).SerializeToString())
    assert codec.event(message, "s") == event


def test_the_message_of_an_end_shows_the_acceptance_length() -> None:
    done = Done("stop", None, Usage(), SpeculationStats(2, 6, 3, [2, 1], [2, 2, 2]), (), 7)
    assert codec.event_message(done).done.speculation.mean_acceptance_length == 2.5


def test_refusals_bear_the_names_of_the_message() -> None:
    request = pb.GenerateRequest(speculation=pb.SpeculationOverride(max_draft_tokens=65))
    with pytest.raises(InvalidRequest) as refused:
        codec.sampling_params(request, vocab_size=320)
    assert refused.value.param == "speculation.max_draft_tokens"

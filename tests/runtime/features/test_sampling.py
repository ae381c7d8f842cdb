"""What a row remembers of how its tokens were picked."""

from __future__ import annotations

import pytest

from runtime.features.sampling import SAMPLING_LABEL, labelled, sampling_of
from runtime.types import Grammar, SamplingParams


@pytest.mark.parametrize(
    "params", [SamplingParams(), SamplingParams(temperature=0.7, top_p=0.9, top_k=40, min_p=0.05), SamplingParams(max_tokens=9)]
)
def test_sampled_turns_say_how(params: SamplingParams) -> None:
    labels = labelled({"slice": "code"}, params)
    assert labels["slice"] == "code"
    found = sampling_of(labels)
    assert found is not None
    assert (found.temperature, found.top_p, found.top_k, found.min_p) == (
        params.temperature,
        params.top_p,
        params.top_k,
        params.min_p,
    )


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.0),
        SamplingParams(seed=1),
        SamplingParams(presence_penalty=0.5),
        SamplingParams(repetition_penalty=1.1),
        SamplingParams(logit_bias={3: 1.0}),
        SamplingParams(grammar=Grammar("json_schema", "{}")),
    ],
)
def test_turns_whose_drafts_were_certain_or_that_nobody_can_judge_say_nothing(params: SamplingParams) -> None:
    labels = labelled({"slice": "code", SAMPLING_LABEL: '{"temperature":1.0}'}, params)
    assert labels == {"slice": "code"}, "a client cannot say it"
    assert sampling_of(labels) is None


@pytest.mark.parametrize(
    "label",
    ["", "1", "[]", "{}", "{", '{"temperature":-1}', '{"temperature":NaN}', '{"temperature":"1"}', '{"heat":1}', "[" * 10**5],
)
def test_a_label_that_is_none_of_ours_says_nothing(label: str) -> None:
    assert sampling_of({SAMPLING_LABEL: label}) is None

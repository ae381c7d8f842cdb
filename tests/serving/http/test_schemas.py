"""Bodies: what each field means to the engine, and whose name a refusal bears."""

from __future__ import annotations

import time
from typing import Any

import pytest
from pydantic import ValidationError

from runtime.errors import ContextLengthExceeded, InvalidRequest
from runtime.types import SamplingParams
from serving.http.chat_schema import ChatRequest
from serving.http.schemas import CompletionRequest

CHAT: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]}


def test_a_bare_request_means_the_defaults() -> None:
    assert ChatRequest(**CHAT).sampling_params() == SamplingParams()
    completion = CompletionRequest(model="tiny", prompt="Hi")
    assert completion.sampling_params() == SamplingParams(max_tokens=16)


def test_every_field_reaches_the_engine() -> None:
    same: dict[str, Any] = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.1,
        "seed": -3,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.3,
        "repetition_penalty": 1.1,
        "ignore_eos": True,
        "logprobs": True,
        "top_logprobs": 5,
    }
    request = ChatRequest(
        **CHAT,
        **same,
        max_completion_tokens=9,
        stop="end",
        logit_bias={"7": -1},
        user="ann",
        metadata={"task": "summary"},
        speculation={"enabled": False, "max_draft_tokens": 2},
    )
    expected = SamplingParams(**same, max_tokens=9, stop=("end",), logit_bias={7: -1.0}, speculate=False, max_draft_tokens=2)
    assert request.sampling_params() == expected
    options = request.session_options()
    assert (options.client_label, dict(options.labels)) == ("ann", {"task": "summary"})


def test_no_sampling_setting_of_the_engine_is_left_out() -> None:
    """A new one must be offered here, or its absence said here."""
    not_offered = {"stop_token_ids", "include_stop", "detokenize"}
    renamed = {"speculate", "max_draft_tokens", "grammar"}  # under `speculation`; response_format and tools
    assert set(SamplingParams.__dataclass_fields__) - not_offered - renamed <= set(ChatRequest.model_fields)


@pytest.mark.parametrize(
    "limits", [{"max_tokens": 5, "max_completion_tokens": 5}, {"max_completion_tokens": 5}, {"max_tokens": 5}]
)
def test_both_names_of_the_limit_mean_the_same(limits: dict[str, int]) -> None:
    assert ChatRequest(**CHAT, **limits).sampling_params().max_tokens == 5


MANY = {str(index): index for index in range(1000)}


@pytest.mark.parametrize(
    "change",
    [
        {f"field{index}": index for index in range(1000)},
        {"messages": [1] * 1000},
        {"messages": [CHAT["messages"][0] | MANY]},
        {"logit_bias": dict.fromkeys(MANY, "x")},
        {"metadata": MANY},
        {"speculation": MANY},
    ],
)
def test_of_many_mistakes_the_first_is_told(change: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as refused:
        ChatRequest(**CHAT | change)
    assert refused.value.error_count() == 1


def test_two_limits_that_differ_are_refused() -> None:
    with pytest.raises(ValidationError, match="give one of them"):
        ChatRequest(**CHAT, max_tokens=5, max_completion_tokens=6)


def test_refusals_bear_the_name_that_the_client_used() -> None:
    chat = ChatRequest(**CHAT, max_completion_tokens=5)
    completion = CompletionRequest(model="tiny", prompt="Hi")
    assert chat.in_our_words(InvalidRequest("max_tokens", "No.")).param == "max_completion_tokens"
    assert chat.in_our_words(InvalidRequest("max_draft_tokens", "No.")).param == "speculation.max_draft_tokens"
    assert chat.in_our_words(ContextLengthExceeded("token_ids", "No.")).param == "messages"
    assert completion.in_our_words(ContextLengthExceeded("token_ids", "No.")).param == "prompt"
    assert isinstance(completion.in_our_words(ContextLengthExceeded("token_ids", "No.")), ContextLengthExceeded)
    assert completion.in_our_words(InvalidRequest("top_p", "No.")).param == "top_p"


def test_a_request_asks_for_so_many_answers_at_most() -> None:
    assert CompletionRequest.model_validate({"model": "m", "prompt": ["a"] * 16, "n": 4}).num_choices == 4
    with pytest.raises(ValidationError, match="17 prompts with n=4 ask for more than 64 answers"):
        CompletionRequest.model_validate({"model": "m", "prompt": ["a"] * 17, "n": 4})


def test_the_arguments_of_a_call_are_an_object_even_if_its_schema_does_not_say_so() -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"type": "integer"}}}}}
    body = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], "tools": [tool], "tool_choice": "required"}
    grammar = ChatRequest.model_validate(body).sampling_params().grammar
    assert grammar is not None
    assert '%json {"type": "object", "properties"' in grammar.text


@pytest.mark.parametrize(
    ("field", "said", "refused"),
    [
        ("service_tier", "auto", "flex"),
        ("safety_identifier", "someone", 3),
        ("prompt_cache_key", "mine", ["a"]),
        ("modalities", ["text"], ["text", "audio"]),
    ],
)
def test_what_holds_here_anyway_may_be_said_and_nothing_else(field: str, said: object, refused: object) -> None:
    assert (
        ChatRequest.model_validate({**CHAT, field: said}).sampling_params() == ChatRequest.model_validate(CHAT).sampling_params()
    )
    with pytest.raises(ValidationError, match=field):
        ChatRequest.model_validate({**CHAT, field: refused})


def test_a_long_text_is_looked_at_quickly() -> None:
    text = "\N{CJK UNIFIED IDEOGRAPH-65E5}" * 1_000_000
    begun = time.process_time()
    ChatRequest.model_validate({**CHAT, "messages": [{"role": "user", "content": text}]})
    needed_s, begun = time.process_time() - begun, time.process_time()
    for char in text:
        assert char
    assert needed_s < time.process_time() - begun, "slower than a loop over the characters"

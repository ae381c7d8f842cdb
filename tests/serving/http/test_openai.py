"""The OpenAI endpoints through the real openai client, against a real server."""

from __future__ import annotations

from typing import Any

import pytest
from openai import NotFoundError, OpenAI

from ..conftest import Running

ASK: list[Any] = [{"role": "user", "content": "Name three rivers."}]
GREEDY: dict[str, Any] = {"model": "tiny", "temperature": 0, "extra_body": {"ignore_eos": True}}


def streamed(openai: OpenAI, **request: Any) -> tuple[str, list[Any]]:
    chunks = list(openai.chat.completions.create(stream=True, messages=ASK, **request))
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices), chunks


def test_a_chat_answers_with_text_usage_and_what_speculation_did(openai: OpenAI) -> None:
    never_asked: Any = [{"role": "user", "content": "What is it that nobody asked before?"}]
    answer = openai.chat.completions.create(messages=never_asked, max_tokens=24, **GREEDY)
    [choice] = answer.choices
    assert answer.object == "chat.completion"
    assert answer.model == "tiny"
    assert choice.finish_reason == "length"
    assert choice.message.role == "assistant"
    assert choice.message.content
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 24
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 24
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens < answer.usage.prompt_tokens
    own = answer.model_extra["speculation"]
    assert own["drafter_version"] == "ngram"
    assert own["mean_acceptance_length"] == 1 + own["accepted"] / own["steps"]
    assert own["steps"] + own["accepted"] == 23  # each step gives its accepted drafts and one more; the prefill gave the first
    assert sum(own["histogram"]) == own["accepted"] <= own["drafted"]


def test_a_stream_is_the_whole_answer_in_pieces(openai: OpenAI) -> None:
    whole = openai.chat.completions.create(messages=ASK, max_tokens=60, **GREEDY)
    text, chunks = streamed(openai, max_tokens=60, **GREEDY)
    assert text == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert len(chunks) > 10
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices[0].finish_reason] == ["length"]
    assert chunks[-1].choices[0].finish_reason == "length"
    assert chunks[-1].model_extra["speculation"].keys() == whole.model_extra["speculation"].keys()
    assert len({chunk.id for chunk in chunks}) == 1
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}


@pytest.mark.parametrize("seed", range(6))
def test_deltas_never_break_a_character(openai: OpenAI, seed: int) -> None:
    """The tiny model speaks random bytes, so most of its characters come in several tokens and many never complete."""
    request = {**GREEDY, "temperature": 2, "seed": seed, "max_tokens": 120}
    whole = openai.chat.completions.create(messages=ASK, **request)
    text, _ = streamed(openai, **request)
    assert text == whole.choices[0].message.content


def test_the_usage_chunk_comes_last_and_alone(openai: OpenAI) -> None:
    _, chunks = streamed(openai, max_tokens=12, stream_options={"include_usage": True}, **GREEDY)
    *others, last = chunks
    assert all("usage" in chunk.model_fields_set and chunk.usage is None for chunk in others)
    assert last.choices == []
    assert last.usage.completion_tokens == 12
    assert last.model_extra["speculation"]["steps"] >= 1
    assert others[-1].choices[0].finish_reason == "length"


def test_without_include_usage_no_chunk_has_one(openai: OpenAI) -> None:
    _, chunks = streamed(openai, max_tokens=4, **GREEDY)
    assert not any("usage" in chunk.model_fields_set for chunk in chunks)


def test_a_stop_string_ends_text_and_usage_at_once(openai: OpenAI) -> None:
    full = openai.chat.completions.create(messages=ASK, max_tokens=60, **GREEDY)
    text = full.choices[0].message.content
    assert text is not None
    stop = next(text[i : i + 3] for i in range(8, len(text)) if "\ufffd" not in text[i : i + 3])
    cut = openai.chat.completions.create(messages=ASK, max_tokens=60, stop=stop, **GREEDY)
    assert cut.choices[0].message.content == text[: text.index(stop)]
    assert cut.choices[0].finish_reason == "stop"
    assert cut.usage is not None
    assert cut.usage.completion_tokens < 60
    several, _ = streamed(openai, max_tokens=60, stop=["never there", stop], **GREEDY)
    assert several == cut.choices[0].message.content


def test_logprobs_have_one_entry_per_token_with_its_bytes(openai: OpenAI) -> None:
    answer = openai.chat.completions.create(messages=ASK, max_tokens=20, logprobs=True, top_logprobs=3, **GREEDY)
    entries = answer.choices[0].logprobs.content
    assert len(entries) == 20
    raw = b"".join(bytes(entry.bytes) for entry in entries)
    assert raw.decode(errors="replace") == answer.choices[0].message.content
    for entry in entries:
        assert entry.logprob <= 0
        assert len(entry.top_logprobs) == 3
        assert entry.top_logprobs[0].bytes == entry.bytes, "greedy: the token is its own best alternative"
        assert entry.top_logprobs[0].logprob == pytest.approx(entry.logprob)
    _, chunks = streamed(openai, max_tokens=20, logprobs=True, top_logprobs=3, **GREEDY)
    pieces = [entry for chunk in chunks if chunk.choices[0].logprobs for entry in chunk.choices[0].logprobs.content]
    assert [piece.bytes for piece in pieces] == [entry.bytes for entry in entries]


def test_logprobs_are_absent_unless_asked_for(openai: OpenAI) -> None:
    assert openai.chat.completions.create(messages=ASK, max_tokens=4, **GREEDY).choices[0].logprobs is None


def test_the_same_seed_gives_the_same_answer_and_fingerprint(openai: OpenAI) -> None:
    request = {**GREEDY, "temperature": 1, "max_tokens": 30}
    first, second, other = (openai.chat.completions.create(messages=ASK, seed=seed, **request) for seed in (7, 7, 8))
    assert first.choices[0].message.content == second.choices[0].message.content != other.choices[0].message.content
    assert first.system_fingerprint == second.system_fingerprint
    assert first.system_fingerprint.startswith("fp_")


def test_sampling_fields_reach_the_sampler(openai: OpenAI) -> None:
    """A bias of 100 makes one token certain; banning it then makes it impossible."""
    token = ord("x")
    biased = openai.chat.completions.create(messages=ASK, max_tokens=5, logit_bias={token: 100}, **GREEDY)
    assert biased.choices[0].message.content == "xxxxx"
    penalised = openai.chat.completions.create(
        messages=ASK, max_tokens=5, logit_bias={token: 1.0}, frequency_penalty=2, presence_penalty=2, **GREEDY
    )
    assert penalised.choices[0].message.content != "xxxxx"
    one = openai.chat.completions.create(
        messages=ASK, max_tokens=20, model="tiny", temperature=2, extra_body={"top_k": 1, "ignore_eos": True}
    )
    greedy = openai.chat.completions.create(messages=ASK, max_tokens=20, **GREEDY)
    assert one.choices[0].message.content == greedy.choices[0].message.content


def test_speculation_can_be_switched_off_for_a_request_and_changes_nothing(openai: OpenAI) -> None:
    plain = openai.chat.completions.create(
        messages=ASK,
        max_tokens=40,
        model="tiny",
        temperature=0,
        extra_body={"ignore_eos": True, "speculation": {"enabled": False}},
    )
    drafted = openai.chat.completions.create(messages=ASK, max_tokens=40, **GREEDY)
    assert plain.choices[0].message.content == drafted.choices[0].message.content
    assert plain.model_extra["speculation"]["drafted"] == 0
    assert plain.model_extra["speculation"]["steps"] == 39
    assert drafted.model_extra["speculation"]["drafted"] > 0


def test_text_parts_and_the_roles_of_the_template_are_taken(openai: OpenAI) -> None:
    messages: list[Any] = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Name three "}, {"type": "text", "text": "rivers."}]},
        {"role": "assistant", "content": "Rhine."},
        {"role": "user", "content": "And?", "name": "ann"},
    ]
    joined = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Name three rivers."},
        *messages[2:],
    ]
    first = openai.chat.completions.create(messages=messages, max_tokens=8, **GREEDY)
    second = openai.chat.completions.create(messages=joined, max_tokens=8, **GREEDY)
    assert first.usage is not None
    assert second.usage is not None
    assert first.usage.prompt_tokens == second.usage.prompt_tokens
    assert first.choices == second.choices


def test_an_answer_without_limit_ends_with_the_context(openai: OpenAI) -> None:
    long = [{"role": "user", "content": "ab" * 930}]
    answer = openai.chat.completions.create(messages=long, **GREEDY)
    assert answer.usage is not None
    assert answer.usage.total_tokens == 2048
    assert answer.choices[0].finish_reason == "length"


def test_completions_take_text_or_ids(openai: OpenAI, running: Running) -> None:
    prompt = "Once upon a time"
    by_text = openai.completions.create(prompt=prompt, **GREEDY)
    by_ids = openai.completions.create(prompt=running.parts.tokenizer.encode(prompt), **GREEDY)
    chunks = list(openai.completions.create(prompt=prompt, stream=True, stream_options={"include_usage": True}, **GREEDY))
    assert by_text.choices[0].text == by_ids.choices[0].text
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == by_text.choices[0].text
    assert by_text.object == chunks[0].object == "text_completion"
    assert by_text.usage is not None
    assert by_text.usage.completion_tokens == 16, "OpenAI's default for this endpoint"
    assert chunks[-1].usage == by_text.usage


def test_models_are_listed(openai: OpenAI) -> None:
    [model] = openai.models.list().data
    assert model.id == "tiny"
    assert openai.models.retrieve("tiny").id == "tiny"
    with pytest.raises(NotFoundError, match="served here"):
        openai.models.retrieve("org/other")


def test_the_response_names_its_session(openai: OpenAI) -> None:
    raw = openai.chat.completions.with_raw_response.create(messages=ASK, max_tokens=2, **GREEDY)
    assert len(raw.headers["x-session-id"]) == 32
    with openai.chat.completions.with_streaming_response.create(messages=ASK, max_tokens=2, stream=True, **GREEDY) as stream:
        assert stream.headers["x-session-id"] != raw.headers["x-session-id"]
        assert stream.headers["content-type"].startswith("text/event-stream")

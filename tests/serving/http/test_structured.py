"""Several choices, JSON and tools through the real openai client: answers parse, streams equal whole answers."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from typing import Any, Literal

import httpx
import pytest
from openai import APIError, AsyncOpenAI, BadRequestError, OpenAI, pydantic_function_tool
from pydantic import BaseModel

from runtime.types import Grammar

from ..conftest import Running

ASK: list[Any] = [{"role": "user", "content": "Name three rivers."}]
GREEDY: dict[str, Any] = {"model": "tiny", "temperature": 0}
SCHEMA = {
    "type": "object",
    "properties": {"river": {"enum": ["Po", "Rhine"]}, "long": {"type": "boolean"}},
    "required": ["river", "long"],
    "additionalProperties": False,
}
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "river", "schema": SCHEMA, "strict": True}}
WEATHER: Any = {"type": "function", "function": {"name": "weather", "description": "of a river", "parameters": SCHEMA}}
CLOCK: Any = {"type": "function", "function": {"name": "clock", "parameters": {"type": "object", "additionalProperties": False}}}


# --- several choices ---


def test_choices_are_what_their_seeds_give_alone(openai: OpenAI) -> None:
    request: dict[str, Any] = {"model": "tiny", "messages": ASK, "max_tokens": 16, "extra_body": {"ignore_eos": True}}
    several = openai.chat.completions.create(n=3, seed=5, **request)
    assert [choice.index for choice in several.choices] == [0, 1, 2]
    alone = [openai.chat.completions.create(seed=5 + index, **request) for index in range(3)]
    assert [choice.message.content for choice in several.choices] == [one.choices[0].message.content for one in alone]
    assert len({choice.message.content for choice in several.choices}) == 3
    assert several.usage is not None
    assert alone[0].usage is not None
    assert several.usage.prompt_tokens == alone[0].usage.prompt_tokens
    assert several.usage.completion_tokens == 48
    own = several.model_extra["speculation"]
    assert 45 <= own["steps"] + own["accepted"] <= 47  # a fork decodes from its first token on, which else is the prefill's


def test_a_stream_of_choices_is_the_whole_answer_in_pieces(openai: OpenAI) -> None:
    request: dict[str, Any] = {"model": "tiny", "messages": ASK, "max_tokens": 24, "n": 3, "seed": 1, "temperature": 1.2}
    whole = openai.chat.completions.create(**request)
    texts = ["", "", ""]
    finished: dict[int, str] = {}
    chunks = list(openai.chat.completions.create(stream=True, stream_options={"include_usage": True}, **request))
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            if choice.finish_reason:
                assert choice.index not in finished
                finished[choice.index] = choice.finish_reason
    assert texts == [choice.message.content for choice in whole.choices]
    assert [finished[index] for index in range(3)] == [choice.finish_reason for choice in whole.choices]
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens
    assert chunks[-1].model_extra["speculation"].keys() == whole.model_extra["speculation"].keys()


def test_several_prompts_get_their_answers_in_order(openai: OpenAI) -> None:
    request: dict[str, Any] = {"model": "tiny", "temperature": 0, "max_tokens": 8, "extra_body": {"ignore_eos": True}}
    prompts = ["Once upon", "The capital", "Zebra"]
    batch = openai.completions.create(prompt=prompts, n=2, **request)
    alone = [openai.completions.create(prompt=prompt, **request) for prompt in prompts]
    assert [choice.text for choice in batch.choices] == [one.choices[0].text for one in alone for _ in range(2)]
    assert [choice.index for choice in batch.choices] == list(range(6))
    assert batch.usage is not None
    assert batch.usage.prompt_tokens == sum(one.usage.prompt_tokens for one in alone if one.usage)


def test_completions_show_logprobs_in_their_own_form(openai: OpenAI) -> None:
    answer = openai.completions.create(model="tiny", prompt="Once", temperature=0, max_tokens=6, logprobs=2)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert logprobs.token_logprobs is not None
    assert logprobs.top_logprobs is not None
    assert answer.usage is not None
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == answer.usage.completion_tokens
    for token, logprob, top in zip(logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True):
        assert max(top.values()) == pytest.approx(logprob)
        assert token in top


# --- JSON ---


@pytest.mark.parametrize("temperature", [0, 1.5])
@pytest.mark.parametrize("seed", range(3))
def test_a_schema_is_followed(openai: OpenAI, temperature: float, seed: int) -> None:
    request: dict[str, Any] = {"model": "tiny", "messages": ASK, "temperature": temperature, "seed": seed}
    answer = openai.chat.completions.create(response_format=FORMAT, **request)
    [choice] = answer.choices
    assert choice.finish_reason == "stop"
    assert choice.message.content is not None
    said = json.loads(choice.message.content)
    assert said.keys() == {"river", "long"}
    assert said["river"] in ("Po", "Rhine")
    streamed = openai.chat.completions.create(response_format=FORMAT, stream=True, **request)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in streamed) == choice.message.content


def test_speculation_changes_no_structured_answer(openai: OpenAI) -> None:
    answers = [
        openai.chat.completions.create(
            messages=ASK, response_format=FORMAT, extra_body={"speculation": {"enabled": enabled}}, **GREEDY
        )
        for enabled in (True, False)
    ]
    assert answers[0].choices[0].message.content == answers[1].choices[0].message.content


def test_a_json_object_is_one(openai: OpenAI) -> None:
    answer = openai.chat.completions.create(messages=ASK, response_format={"type": "json_object"}, max_tokens=400, **GREEDY)
    text = answer.choices[0].message.content
    assert text is not None
    assert text.startswith("{")
    if answer.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(text), dict)


class River(BaseModel):
    name: Literal["Po", "Rhine"]
    is_long: bool


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")  # of the client's own model_dump
def test_the_clients_own_helpers_read_answers_and_send_them_back(openai: OpenAI) -> None:
    parsed = openai.chat.completions.parse(messages=ASK, response_format=River, **GREEDY).choices[0].message
    assert isinstance(parsed.parsed, River)
    request: dict[str, Any] = {"messages": ASK, "tools": [pydantic_function_tool(River)], "tool_choice": "required", **GREEDY}
    called = openai.chat.completions.parse(parallel_tool_calls=False, **request).choices[0].message
    assert called.tool_calls
    assert isinstance(called.tool_calls[0].function.parsed_arguments, River)
    with openai.chat.completions.stream(parallel_tool_calls=False, **request) as stream:
        streamed = stream.get_final_completion().choices[0].message
    assert streamed.tool_calls
    for said in (parsed, called, streamed):
        results = [{"role": "tool", "tool_call_id": call.id, "content": "yes"} for call in said.tool_calls or ()]
        for written in (said, said.to_dict(), said.model_dump(mode="json")):
            messages: Any = [*ASK, written, *results]
            assert openai.chat.completions.create(messages=messages, max_tokens=1, **GREEDY).choices


@pytest.mark.parametrize("stream", [False, True])
def test_a_schema_that_turns_out_too_complex_fails_alone(openai: OpenAI, stream: bool) -> None:
    schema = {"type": "string", "pattern": "^(a?){500}a{500}$"}
    bad: Any = {"type": "json_schema", "json_schema": {"name": "as", "schema": schema}}
    request: dict[str, Any] = {"messages": ASK, "response_format": bad, "stream": stream, **GREEDY}
    beside: list[Any] = []
    asking = threading.Thread(
        target=lambda: beside.append(
            openai.chat.completions.create(messages=ASK, max_tokens=200, extra_body={"ignore_eos": True}, **GREEDY)
        )
    )
    asking.start()
    with pytest.raises(APIError if stream else BadRequestError, match="too complex to be followed") as caught:
        list(openai.chat.completions.create(**request))
    asking.join()
    assert beside[0].choices[0].finish_reason == "length"
    assert isinstance(caught.value.body, dict)
    assert caught.value.body["param"] == "response_format"


def test_a_grammar_that_takes_long_to_compile_holds_nobody_up(
    running: Running, openai: OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    grammars = running.parts.engine.grammars
    compile_one, may_go_on = grammars._compile, threading.Event()

    def slowly(grammar: Grammar) -> Any:
        assert "event loop" not in threading.current_thread().name
        may_go_on.wait(20)
        return compile_one(grammar)

    monkeypatch.setattr(grammars, "_compile", slowly)

    def ask(number: int) -> None:
        schema = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"const": f"slow {number}"}}}
        answer = openai.chat.completions.create(messages=ASK, response_format=schema, **GREEDY)  # type: ignore[call-overload]
        answers.append(answer.choices[0].message.content)

    answers: list[str] = []
    asking = [threading.Thread(target=ask, args=(number,)) for number in range(40)]
    for thread in asking:
        thread.start()
    try:
        for _ in range(3):
            begun = time.perf_counter()
            assert httpx.get(f"{running.ready.http}/livez").status_code == 200
            assert openai.chat.completions.create(messages=ASK, max_tokens=1, **GREEDY).choices
            assert time.perf_counter() - begun < 10
    finally:
        may_go_on.set()
        for thread in asking:
            thread.join()
    assert sorted(answers) == sorted(json.dumps(f"slow {number}") for number in range(40))


# --- tools ---


@pytest.mark.parametrize("parallel", [True, False])
def test_a_required_call_has_arguments_that_fit(openai: OpenAI, parallel: bool) -> None:
    answer = openai.chat.completions.create(
        model="tiny",
        messages=ASK,
        tools=[WEATHER, CLOCK],
        tool_choice="required",
        parallel_tool_calls=parallel,
        max_tokens=300,
        temperature=0.8,
        seed=3,
    )
    [choice] = answer.choices
    assert choice.message.tool_calls
    if not parallel:
        assert len(choice.message.tool_calls) == 1
    if choice.finish_reason == "tool_calls":
        for call in choice.message.tool_calls:
            arguments = json.loads(call.function.arguments)
            assert arguments.keys() == ({"river", "long"} if call.function.name == "weather" else set())
    assert choice.finish_reason in ("tool_calls", "length")
    assert choice.message.content is None


def test_a_named_function_is_called(openai: OpenAI) -> None:
    named: Any = {"type": "function", "function": {"name": "clock"}}
    request: dict[str, Any] = {"messages": ASK, "tools": [WEATHER, CLOCK], "tool_choice": named, "parallel_tool_calls": False}
    answer = openai.chat.completions.create(**request, **GREEDY)
    [choice] = answer.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.tool_calls is not None
    assert [(call.function.name, call.function.arguments) for call in choice.message.tool_calls] == [("clock", "{}")]
    chunks = list(openai.chat.completions.create(stream=True, **request, **GREEDY))
    calls = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or ()]
    assert calls[0].function.name == "clock"
    assert calls[0].id
    assert "".join(call.function.arguments for call in calls) == "{}"
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_that_is_cut_is_no_content_and_not_told_as_a_call(stream: bool, openai: OpenAI) -> None:
    """By the limit wherever it falls, and by a stop string in its arguments."""
    named: Any = {"type": "function", "function": {"name": "clock"}}
    request: dict[str, Any] = {"messages": ASK, "tools": [WEATHER, CLOCK], "tool_choice": named, "stream": stream, **GREEDY}
    ends = set()
    for limits in (*({"max_tokens": number} for number in (1, 2, 5, 9, 40, 60, 80, 81, 83, 86, 90)), {"stop": ["{}"]}):
        answer: Any = openai.chat.completions.create(**request, **limits)
        if stream:
            chunks = [chunk.choices[0] for chunk in answer if chunk.choices]
            content, end = "".join(one.delta.content or "" for one in chunks), chunks[-1].finish_reason
        else:
            content, end = answer.choices[0].message.content or "", answer.choices[0].finish_reason
        assert content == ""
        assert end == "stop" if "stop" in limits else end in ("length", "tool_calls")  # or it ended by itself
        ends.add(end)
    assert {"stop", "length"} <= ends


def test_without_a_call_tools_leave_no_trace(openai: OpenAI) -> None:
    for choice in ("none", "auto"):
        answer = openai.chat.completions.create(messages=ASK, tools=[WEATHER], tool_choice=choice, max_tokens=12, **GREEDY)  # type: ignore[call-overload]
        assert answer.choices[0].message.tool_calls is None
        assert answer.choices[0].message.content


def test_a_conversation_goes_on_after_a_call(openai: OpenAI) -> None:
    named: Any = {"type": "function", "function": {"name": "clock"}}
    first = openai.chat.completions.create(messages=ASK, tools=[CLOCK], tool_choice=named, parallel_tool_calls=False, **GREEDY)
    said = first.choices[0].message
    assert said.tool_calls is not None
    result = {"role": "tool", "tool_call_id": said.tool_calls[0].id, "content": "12:00"}
    second = openai.chat.completions.create(messages=[*ASK, said, result], tools=[CLOCK], max_tokens=8, **GREEDY)  # type: ignore[list-item]
    assert second.usage is not None
    assert first.usage is not None
    assert second.usage.prompt_tokens > first.usage.prompt_tokens


def test_many_clients_at_once_each_get_their_own(running: Running) -> None:
    async def ask(client: AsyncOpenAI, seed: int) -> str | None:
        answer = await client.chat.completions.create(
            model="tiny", messages=ASK, response_format=FORMAT, seed=seed, temperature=1.0
        )
        return answer.choices[0].message.content

    async def all_of_them() -> list[str | None]:
        url = f"{running.ready.http}/v1"
        async with AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=60) as client:
            return await asyncio.gather(*(ask(client, seed % 4) for seed in range(24)))

    texts = asyncio.run(all_of_them())
    assert all(json.loads(text or "").keys() == {"river", "long"} for text in texts)
    for seed in range(4):
        assert len(set(texts[seed::4])) == 1

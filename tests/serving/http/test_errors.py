"""Refusals over HTTP: OpenAI's envelope, the right status, and the field to blame. None of them leaves anything behind."""

from __future__ import annotations

import gc
import json
from typing import Any

import httpx
import pytest
from fastapi.exceptions import RequestValidationError

from runtime.errors import (
    CapacityExhausted,
    ContextLengthExceeded,
    DrafterRejected,
    EngineUnavailable,
    HistoryMismatch,
    InvalidRequest,
    SessionBusy,
    SessionNotFound,
    SlipstreamError,
)
from serving.http.errors import envelope_of, param_of, status_of

from ..conftest import Running

GOOD: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
USER = {"role": "user"}
CALL: dict[str, Any] = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
BAD_CALL = CALL | {"function": {"name": "f", "arguments": "{"}}


def tool(name: str, parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def json_schema(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}


TOOL = tool("f", {"type": "object"})
BESIDE_SCHEMA = "response_format.json_schema.foo"


def post(running: Running, path: str, **request: Any) -> httpx.Response:
    return httpx.post(f"{running.ready.http}{path}", timeout=30, **request)


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": "Hi"}, "messages"),
        ({"messages": [USER]}, "messages[0].content"),
        ({"messages": [USER | {"content": None}]}, "messages[0].content"),
        ({"messages": [USER | {"content": 5}]}, "messages[0].content"),
        ({"messages": [USER | {"content": "a\ud800"}]}, "messages[0].content"),
        ({"messages": [USER | {"content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "messages[0].content"),
        ({"messages": [USER | {"content": ["Hi"]}]}, "messages[0].content"),
        ({"messages": [USER | {"content": "Hi"}, {"role": "robot", "content": "Hi"}]}, "messages[1].role"),
        ({"messages": [USER | {"content": "Hi", "tool_calls": []}]}, "messages[0].tool_calls"),
        ({"messages": [USER | {"content": "ab" * 1500}]}, "messages"),
        ({"messages": [{"role": "tool", "content": "4"}]}, "messages[0].tool_call_id"),
        ({"messages": [{"role": "assistant"}]}, "messages[0].content"),
        ({"messages": [{"role": "assistant", "tool_calls": [CALL | {"type": "x"}]}]}, "messages[0].tool_calls[0].type"),
        ({"messages": [{"role": "assistant", "tool_calls": [BAD_CALL]}]}, "messages[0].tool_calls[0].function.arguments"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -3}, "max_tokens"),
        ({"max_tokens": 2.5}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"max_tokens": "4"}, "max_tokens"),
        ({"max_tokens": 5000}, "max_tokens"),
        ({"max_tokens": None, "max_completion_tokens": 5000}, "max_completion_tokens"),
        ({"max_tokens": None, "max_completion_tokens": 0}, "max_completion_tokens"),
        ({"max_completion_tokens": 5}, "max_completion_tokens"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"n": 17}, "n"),
        ({"n": 0}, "n"),
        ({"stop": ["a", "b", "c", "d", "e"]}, "stop"),
        ({"stop": ""}, "stop"),
        ({"stop": 5}, "stop"),
        ({"seed": 2**63}, "seed"),
        ({"seed": 1.5}, "seed"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"frequency_penalty": -3}, "frequency_penalty"),
        ({"logit_bias": {"320": 1}}, "logit_bias"),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"logit_bias": {"1": "x"}}, "logit_bias"),
        ({"logit_bias": {"1": True}}, "logit_bias"),
        ({"logit_bias": {"1": None}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias"),
        ({"logit_bias": {"1" * 5000: 1}}, "logit_bias"),
        ({"logit_bias": {"7": 1, "07": 2}}, "logit_bias"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": 1}, "logprobs"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"chunk": 1}}, "stream_options.chunk"),
        ({"response_format": {"type": "json"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "text", "json_schema": {"name": "x", "schema": {}}}}, "response_format.json_schema"),
        ({"response_format": json_schema({"uniqueItems": True})}, "response_format.json_schema.schema"),
        ({"response_format": json_schema({"type": "nothing"})}, "response_format.json_schema.schema"),
        ({"response_format": json_schema(True)}, "response_format.json_schema.schema"),
        ({"response_format": {"type": "json_object"}, "ignore_eos": True}, None),
        ({"tools": [{"type": "function", "function": {"name": "f g"}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "retrieval"}]}, "tools[0].type"),
        ({"tools": [TOOL, TOOL]}, "tools"),
        ({"tools": [TOOL, tool("g", {"not": {}})]}, "tools[1].function.parameters"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice"),
        ({"tools": [tool(f"f{index}", {}) for index in range(129)]}, "tools"),
        ({"messages": [USER] * 4097}, "messages"),  # counted, before the first of them is missed its content
        ({"messages": [USER | {"content": [{}] * 4096}]}, "messages"),
        ({"messages": [{"role": "assistant", "tool_calls": [{}] * 4096}]}, "messages"),
        ({"logit_bias": dict.fromkeys(map(str, range(16385)), 1)}, "logit_bias"),
        ({"tools": [tool("g", {"type": "string"})]}, "tools[0].function.parameters"),
        ({"tools": [tool("g", {"type": ["object", "null"]})]}, "tools[0].function.parameters"),
        ({"tools": [TOOL], "tool_choice": "always"}, "tool_choice"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"user": 5}, "user"),
        ({"metadata": {"a": 1}}, "metadata.a"),
        ({"metadata": {str(index): "x" for index in range(17)}}, "metadata"),
        ({"top_k": -1}, "top_k"),
        ({"min_p": 1.5}, "min_p"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"repetition_penalty": 1e-40}, "repetition_penalty"),
        ({"speculation": {"max_draft_tokens": 65}}, "speculation.max_draft_tokens"),
        ({"speculation": {"drafter": "x"}}, "speculation.drafter"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {}, "foo": 1}}}, BESIDE_SCHEMA),
        ({"functions": []}, "functions"),
        ({"best_of": 2}, "best_of"),
    ],
)
def test_a_field_that_cannot_be_honoured_is_named(running: Running, change: dict[str, Any], param: str | None) -> None:
    response = post(
        running, "/v1/chat/completions", content=json.dumps(GOOD | change), headers={"content-type": "application/json"}
    )
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error.keys() == {"message", "type", "code", "param"}
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    assert error["message"].endswith(".")
    assert error["code"]
    running.wait_until_idle()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"temprature": 1}, "temprature is not a parameter that this server supports. Leave it out, or write temperature."),
        ({"speculation": {"max_drafts": 1}}, "Leave it out, or write max_draft_tokens."),
        ({"qqq": 1, "rrr": 1}, "qqq is not a parameter that this server supports. Leave it out."),
        ({"temperature": "hot"}, 'temperature is "hot"; it should be a valid number.'),
        ({"speculation": False}, "speculation is false; it should be an object."),
        ({"messages": "Hi"}, 'messages is "Hi"; it should be a valid list.'),
        ({"user": "a" * 80, "top_k": "b" * 80}, f'top_k is "{"b" * 60}"; it should be a valid integer.'),
        ({"tools": {}}, "tools is an object; it should be a valid list."),
    ],
)
def test_a_refusal_tells_the_value_and_what_to_do(running: Running, change: dict[str, Any], said: str) -> None:
    message = post(running, "/v1/chat/completions", json=GOOD | change).json()["error"]["message"]
    assert message.endswith(said)


@pytest.mark.parametrize(
    ("prompt", "max_tokens"),
    [
        ("", 1),
        ([], 1),
        (["a", ""], 1),
        (["a", 5], 1),
        ([1, -1], 1),
        ([1, 320], 1),
        ([True], 1),
        (None, 1),
        ("a" * 3000, 1),
        ("a" * 1_000_000, 1),
        (["a"] * 65, 1),
    ],
)
def test_a_prompt_that_cannot_be_continued_is_named(running: Running, prompt: Any, max_tokens: int) -> None:
    response = post(running, "/v1/completions", json={"model": "tiny", "prompt": prompt, "max_tokens": max_tokens})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == "prompt"
    running.wait_until_idle()


def test_null_is_the_same_as_absent(running: Running) -> None:
    names = ("temperature", "top_p", "n", "stop", "seed", "tools", "logprobs", "response_format", "stream_options", "speculation")
    response = post(running, "/v1/chat/completions", json=GOOD | dict.fromkeys(names))
    assert response.status_code == 200, response.text


def test_a_prompt_beyond_the_context_has_its_own_code(running: Running) -> None:
    response = post(running, "/v1/chat/completions", json=GOOD | {"max_tokens": 5000})
    assert response.json()["error"]["code"] == "context_length_exceeded"


def test_an_unknown_model_is_not_found(running: Running) -> None:
    response = post(running, "/v1/chat/completions", json=GOOD | {"model": "gpt-4"})
    assert response.status_code == 404
    assert response.json()["error"] | {"message": ""} == {
        "message": "",
        "type": "not_found_error",
        "code": "model_not_found",
        "param": "model",
    }


@pytest.mark.parametrize("body", ["{", "", "[]", '"text"', "null", "[" * 100_000])
def test_a_body_that_is_no_object_is_400(running: Running, body: str) -> None:
    response = post(running, "/v1/chat/completions", content=body, headers={"content-type": "application/json"})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] is None


@pytest.mark.parametrize("body", [b"\xff{", b"[" * 100_000, b'{"seed": ' + b"9" * 5000 + b"}"])
def test_a_body_that_cannot_be_read_says_why(running: Running, body: bytes) -> None:
    error = post(running, "/v1/chat/completions", content=body, headers={"content-type": "application/json"}).json()["error"]
    assert error["code"] == "invalid_json"
    assert "UTF-8" in error["message"]


def test_a_body_that_is_not_said_to_be_json_is_400(running: Running) -> None:
    response = post(running, "/v1/chat/completions", content=json.dumps(GOOD), headers={"content-type": "text/plain"})
    assert response.status_code == 400
    assert response.json()["error"]["message"].endswith("Content-Type: application/json, which was 'text/plain'.")


def test_paths_and_methods(running: Running) -> None:
    nowhere = httpx.get(f"{running.ready.http}/v1/nothing")
    assert (nowhere.status_code, nowhere.json()["error"]["code"]) == (404, "not_found")
    assert nowhere.json()["error"]["message"] == "There is nothing at /v1/nothing; /openapi.json lists what there is."
    assert "/v1/chat/completions" in httpx.get(f"{running.ready.http}/openapi.json").json()["paths"]
    wrong = httpx.get(f"{running.ready.http}/v1/chat/completions")
    assert (wrong.status_code, wrong.json()["error"]["code"]) == (405, "method_not_allowed")
    assert wrong.headers["allow"] == "POST"
    assert wrong.json()["error"]["message"] == "GET is not allowed at /v1/chat/completions; use POST."


@pytest.mark.parametrize("announced", [True, False])
def test_a_body_beyond_the_limit_is_413(running: Running, announced: bool) -> None:
    body = b"x" * (running.config.server.max_request_mib * 2**20 + 1)
    content: Any = body if announced else (body[start : start + 2**20] for start in range(0, len(body), 2**20))
    response = post(running, "/v1/chat/completions", content=content, headers={"content-type": "application/json"})
    assert response.status_code == 413
    assert response.json()["error"]["code"] == "request_too_large"


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (InvalidRequest("stop", "No."), 400, "invalid_request"),
        (ContextLengthExceeded("messages", "No."), 400, "context_length_exceeded"),
        (SessionNotFound("a", "EVICTED_TTL"), 404, "evicted_ttl"),
        (SessionBusy("a"), 409, "session_busy"),
        (HistoryMismatch(1, 2), 409, "history_mismatch"),
        (DrafterRejected("SHAPE", "No."), 409, "shape"),
        (CapacityExhausted("No."), 429, "capacity_exhausted"),
        (EngineUnavailable("No."), 503, "engine_unavailable"),
        (RuntimeError("a secret"), 500, "internal"),
    ],
)
def test_each_class_has_its_status_and_code(error: Exception, status: int, code: str) -> None:
    assert status_of(error) == status
    body = envelope_of(error)["error"]
    assert body["code"] == code
    assert "secret" not in body["message"]


def test_params_are_written_as_paths() -> None:
    assert param_of(("body", "messages", 0, "content")) == "messages[0].content"
    assert param_of(("body",)) is None


@pytest.mark.parametrize(
    "request_of",
    [
        {"json": GOOD | {"messages": [USER | {"content": "word " * 5000}]}},
        {"json": GOOD | {"nonsense": 1}},
        {"json": GOOD | {"response_format": json_schema({"type": "string", "pattern": "("})}},
        {"json": GOOD | {"model": "other"}},
        {"content": b"{", "headers": {"content-type": "application/json"}},
    ],
    ids=["too long", "unknown field", "bad schema", "no such model", "no JSON"],
)
def test_nothing_of_a_refused_request_waits_for_the_garbage_collector(running: Running, request_of: dict[str, Any]) -> None:
    kinds = SlipstreamError, RequestValidationError, json.JSONDecodeError

    def num_errors() -> int:
        return sum(issubclass(type(one), kinds) for one in gc.get_objects())  # asking an object itself may wake it up

    post(running, "/v1/chat/completions", **request_of)
    gc.collect()
    gc.disable()
    try:
        before = num_errors()
        for _ in range(20):
            assert post(running, "/v1/chat/completions", **request_of).status_code in (400, 404)
        assert num_errors() < before + 5, "a few may be under way still"
    finally:
        gc.enable()

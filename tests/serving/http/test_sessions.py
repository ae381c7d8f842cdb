"""/v1/sessions: the same sessions as over gRPC, with the same rules, in JSON."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from runtime.errors import ConfigError
from runtime.rpc.client import RuntimeClient
from runtime.types import SamplingParams, Tokens
from serving.config import DeprecatedEndpoint, HttpConfig

from ..conftest import Running, StartServer


@pytest.fixture
def http(running: Running) -> Any:
    with httpx.Client(base_url=f"{running.ready.http}/v1", timeout=30) as client:
        yield client


def created(http: httpx.Client, **options: Any) -> str:
    answer = http.post("/sessions", json={"options": options} if options else {})
    assert answer.status_code == 200, answer.text
    return str(answer.json()["session_id"])


def test_a_session_lives_and_ends(http: httpx.Client) -> None:
    session = created(http, client_label="ann", labels={"task": "x"})
    answer = http.post(f"/sessions/{session}/append", json={"token_ids": [65, 66, 67], "expected_history_length": 0})
    assert answer.json() == {"history_length": 3, "cached_tokens": 0}
    assert http.get(f"/sessions/{session}").json()["history_length"] == 3
    assert session in [one["session_id"] for one in http.get("/sessions").json()["sessions"]]
    turn = http.post(f"/sessions/{session}/generate", json={"max_tokens": 6, "temperature": 0, "ignore_eos": True}).json()
    assert turn["started"]["history_length"] == 3
    assert len(turn["tokens"]["token_ids"]) == len(turn["tokens"]["drafted"]) == 6
    assert turn["done"]["history_length"] == 9
    assert turn["done"]["usage"]["completion_tokens"] == 6
    assert http.get(f"/sessions/{session}").json()["cached_tokens"] == 9
    assert http.delete(f"/sessions/{session}").json() == {}
    gone = http.delete(f"/sessions/{session}")
    assert gone.status_code == 404
    assert gone.json()["error"]["code"] == "closed"


def test_http_and_grpc_give_the_same(http: httpx.Client, client: RuntimeClient) -> None:
    over_http, over_grpc = created(http), client.create_session().session_id
    http.post(f"/sessions/{over_http}/append", json={"text": "Once upon a time"})
    client.append(over_grpc, text="Once upon a time")
    request = {"max_tokens": 12, "temperature": 1.0, "seed": 3, "ignore_eos": True, "logprobs": True, "top_logprobs": 2}
    turn = http.post(f"/sessions/{over_http}/generate", json=request).json()
    params = SamplingParams(max_tokens=12, temperature=1.0, seed=3, ignore_eos=True, logprobs=True, top_logprobs=2)
    events = [event for event in client.generate(over_grpc, params) if isinstance(event, Tokens)]
    assert turn["tokens"]["token_ids"] == [token_id for event in events for token_id in event.token_ids]
    assert turn["tokens"]["text"] == "".join(event.text for event in events)
    assert [one["logprob"] for one in turn["tokens"]["logprobs"]] == pytest.approx(
        [one.logprob for event in events for one in event.logprobs], abs=1e-3
    )


def test_a_stream_has_one_event_per_message(http: httpx.Client) -> None:
    session = created(http)
    http.post(f"/sessions/{session}/append", json={"text": "Once"})
    body = {"max_tokens": 8, "temperature": 0, "ignore_eos": True, "stream": True}
    with http.stream("POST", f"/sessions/{session}/generate", json=body) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        blocks = [block for block in response.read().decode().split("\n\n") if block]
    events = [(block.split("\n")[0].removeprefix("event: "), json.loads(block.split("\ndata: ")[1])) for block in blocks]
    assert [name for name, _ in events] == ["started", *["tokens"] * (len(events) - 2), "done"]
    assert sum(len(data["token_ids"]) for name, data in events if name == "tokens") == 8
    assert events[-1][1]["finish_reason"] == "FINISH_REASON_LENGTH"


def test_null_is_the_same_as_absent(http: httpx.Client) -> None:
    session_id = http.post("/sessions", json={"request_id": None}).json()["session_id"]
    http.post(f"/sessions/{session_id}/append", json={"text": "Hi", "token_ids": None})
    answer = http.post(f"/sessions/{session_id}/generate", json={"stream": None, "max_tokens": 1, "seed": None})
    assert answer.json()["done"]["usage"]["completion_tokens"] == 1


def test_forks_and_saved_sessions(http: httpx.Client) -> None:
    session = created(http)
    http.post(f"/sessions/{session}/append", json={"text": "Once upon"})
    http.post(f"/sessions/{session}/generate", json={"max_tokens": 4, "ignore_eos": True})
    whole = http.get(f"/sessions/{session}").json()["history_length"]
    fork = http.post(f"/sessions/{session}/fork", json={"history_length": 5}).json()
    assert fork["session_id"] != session
    assert fork["history_length"] == 5
    assert http.post(f"/sessions/{session}/save", json={"name": "kept"}).status_code == 200
    assert http.post(f"/sessions/{session}/save", json={"name": "kept"}).json()["error"]["code"] == "saved_exists"
    assert [one["name"] for one in http.get("/saved_sessions").json()["saved_sessions"]] == ["kept"]
    restored = http.post("/saved_sessions/kept/restore", json={}).json()
    assert restored["history_length"] == restored["cached_tokens"] == whole
    assert http.delete("/saved_sessions/kept").status_code == 200
    missing = http.post("/saved_sessions/kept/restore")
    assert missing.status_code == 404
    assert missing.json()["error"]["code"] == "saved_not_found"


@pytest.mark.parametrize(
    ("call", "body", "status", "param"),
    [
        ("append", {"token_ids": [99999]}, 400, "token_ids"),
        ("append", {"token_ids": ["x"]}, 400, "token_ids"),
        ("append", {"token_ids": [-1]}, 400, "token_ids"),
        ("append", {"token_ids": [1], "text": "a"}, 400, "token_ids"),
        ("append", {"nothing": 1}, 400, "nothing"),
        ("append", {"session_id": "other", "text": "a"}, 400, "session_id"),
        ("append", [1], 400, "body"),
        ("append", {"text": "a", "expected_history_length": 7}, 409, None),
        ("generate", {"temperature": 9}, 400, "temperature"),
        ("generate", {"max_tokens": 0}, 400, "max_tokens"),
        ("generate", {"stream": "yes"}, 400, "stream"),
        ("generate", {"speculation": {"drafter": 1}}, 400, "speculation.drafter"),
        ("fork", {"history_length": 70}, 400, "history_length"),
        ("save", {"name": "../x"}, 400, "name"),
    ],
)
def test_a_refusal_changes_nothing(http: httpx.Client, call: str, body: Any, status: int, param: str | None) -> None:
    session = created(http)
    http.post(f"/sessions/{session}/append", json={"token_ids": [65]})
    before = http.get(f"/sessions/{session}").json()
    answer = http.post(f"/sessions/{session}/{call}", json=body)
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert error["param"] == param
    assert error["message"].endswith(".")
    after = http.get(f"/sessions/{session}").json()
    assert after | {"last_used_at": None} == before | {"last_used_at": None}


def test_a_body_that_is_no_json(http: httpx.Client) -> None:
    for text in ("{", "[" * 100_000, "nul"):
        answer = http.post("/sessions", content=text)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "body"


# --- x-session-id ---


def test_a_chat_bound_to_a_session_continues_it(running: Running) -> None:
    url, messages = f"{running.ready.http}/v1/chat/completions", [{"role": "user", "content": "Bound?"}]
    body = {"model": "tiny", "messages": messages, "max_tokens": 8, "temperature": 0, "logit_bias": {"257": -100}}
    first = httpx.post(url, json=body, timeout=30)
    session = first.headers["x-session-id"]
    other = httpx.post(url, json=body, timeout=30)
    assert other.headers["x-session-id"] != session, "what was said already is no beginning of the same question"
    diverged = httpx.post(url, json=body, headers={"x-session-id": session}, timeout=30)
    assert diverged.status_code == 409
    assert diverged.json()["error"]["code"] == "history_diverged"
    unknown = httpx.post(url, json=body, headers={"x-session-id": "nobody"}, timeout=30)
    assert unknown.status_code == 404
    several = httpx.post(url, json=body | {"n": 2}, headers={"x-session-id": session}, timeout=30)
    assert several.status_code == 400
    assert several.json()["error"]["param"] == "n"
    running.wait_until_idle()


def test_a_session_that_is_known_by_its_id_answers_prompts_of_ids(running: Running, http: httpx.Client) -> None:
    session = created(http)
    http.post(f"/sessions/{session}/append", json={"token_ids": [65, 66, 67, 68]})
    body = {"model": "tiny", "prompt": [65, 66, 67, 68, 69], "max_tokens": 4, "ignore_eos": True}
    answer = http.post("/completions", json=body, headers={"x-session-id": session})
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-session-id"] == session
    assert http.get(f"/sessions/{session}").json()["history_length"] == 9


# --- what concerns all endpoints ---


def test_time_outs_end_work_and_say_so(start_server: StartServer) -> None:
    running = start_server(http=HttpConfig(request_timeout_s=0.3))
    running.target.delay_s = 0.02
    url = f"{running.ready.http}/v1/chat/completions"
    body = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1500, "ignore_eos": True}
    answer = httpx.post(url, json=body, timeout=30)
    assert answer.status_code == 504
    assert answer.json()["error"]["code"] == "request_timeout"
    running.wait_until_idle(2)
    with httpx.stream("POST", url, json=body | {"stream": True}, timeout=30) as response:
        last = [line for line in response.iter_lines() if line][-1]
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "request_timeout"
    running.wait_until_idle(2)


def test_deprecated_endpoints_say_so_on_every_response(start_server: StartServer) -> None:
    going = DeprecatedEndpoint("/v1/completions", sunset="2099-12-31", successor="/v1/chat/completions", since="2026-01-01")
    forks = DeprecatedEndpoint("/v1/sessions/{session_id}/fork", sunset="2099-12-31", successor="/v2")
    running = start_server(http=HttpConfig(deprecated=[going, forks], cors_origins=["https://example.org"]))
    for body in ({"model": "tiny", "prompt": "Hi", "max_tokens": 1}, {"model": "other"}):
        answer = httpx.post(f"{running.ready.http}/v1/completions", json=body, timeout=30)
        assert answer.headers["deprecation"] == "@1767225600"
        assert answer.headers["sunset"] == "Thu, 31 Dec 2099 00:00:00 GMT"
        assert answer.headers["link"] == '</v1/chat/completions>; rel="successor-version"'
    assert httpx.post(f"{running.ready.http}/v1/sessions/none/fork").headers["link"] == '</v2>; rel="successor-version"'
    for path in ("/v1/models", "/v1/sessions/none", "/v1/sessions/a/b/fork"):
        assert "sunset" not in httpx.get(f"{running.ready.http}{path}").headers
    asked = {"origin": "https://example.org", "access-control-request-method": "POST"}
    allowed = httpx.options(f"{running.ready.http}/v1/completions", headers=asked)
    assert allowed.headers["access-control-allow-origin"] == "https://example.org"
    stranger = httpx.options(f"{running.ready.http}/v1/completions", headers=asked | {"origin": "https://example.com"})
    assert "access-control-allow-origin" not in stranger.headers


@pytest.mark.parametrize(
    "change",
    [{"sunset": "2020-01-01"}, {"sunset": "soon"}, {"path": "v1"}, {"successor": " "}, {"since": "2100-01-01"}],
)
def test_a_deprecation_that_makes_no_sense_is_refused(change: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=r"http\.deprecated"):
        DeprecatedEndpoint(**({"path": "/v1/completions", "sunset": "2099-12-31", "successor": "/x"} | change))


def test_a_deprecated_endpoint_exists(start_server: StartServer) -> None:
    typo = DeprecatedEndpoint("/v1/completion", sunset="2099-12-31", successor="/v1/chat/completions")
    with pytest.raises(ConfigError, match="'/v1/completion', which is no endpoint; it is one of /v1/models"):
        start_server(http=HttpConfig(deprecated=[typo]))

"""A client of the HTTP surface, with what the measurements need: answers with counts and times, drafters, tapped rows."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx
from traffic import Messages

TIMEOUT_S = 300.0
CAPTURED = re.compile(r'^slipstream:capture_samples_total\{outcome="captured"\} (\S+)$', re.MULTILINE)


@dataclass(frozen=True)
class Answer:
    """One answer and what it cost."""

    text: str
    num_tokens: int
    num_steps: int  # verification steps
    num_accepted: int  # draft tokens
    seconds: float  # the whole request, prompt included
    drafter_version: str
    at: float  # Unix seconds when it was complete


@dataclass(frozen=True)
class Step:
    """One token of an answer with the two most likely ones at its place."""

    token: bytes
    second: bytes  # the runner-up
    gap: float  # between the logits of the best two


def acceptance_length(answers: Sequence[Answer]) -> float:
    """1 + accepted / steps over all answers: counts first, division last."""
    return 1.0 + sum(answer.num_accepted for answer in answers) / max(sum(answer.num_steps for answer in answers), 1)


def tokens_per_second(answers: Sequence[Answer]) -> float:
    return sum(answer.num_tokens for answer in answers) / max(sum(answer.seconds for answer in answers), 1e-9)


class Client:
    def __init__(self, url: str, max_tokens: int) -> None:
        self._http = httpx.Client(base_url=url, timeout=TIMEOUT_S)
        self._max_tokens = max_tokens
        self._model = self._get("/v1/models")["data"][0]["id"]

    def chat(self, messages: Messages, *, speculate: bool = True, store: bool = True) -> Answer:
        """A greedy answer. store False: it never becomes training data."""
        began = time.perf_counter()
        body = self._chat(messages, speculate, store)
        seconds = time.perf_counter() - began
        counts = body["speculation"]
        return Answer(
            text=body["choices"][0]["message"]["content"],
            num_tokens=body["usage"]["completion_tokens"],
            num_steps=counts["steps"],
            num_accepted=counts["accepted"],
            seconds=seconds,
            drafter_version=counts["drafter_version"],
            at=time.time(),
        )

    def steps(self, messages: Messages, *, speculate: bool) -> list[Step]:
        """The same answer token by token, with the target's own view of each place."""
        body = self._chat(messages, speculate, store=False, logprobs=True, top_logprobs=2)
        steps = []
        for entry in body["choices"][0]["logprobs"]["content"]:
            best, second = entry["top_logprobs"]
            steps.append(Step(bytes(entry["bytes"]), bytes(second["bytes"]), best["logprob"] - second["logprob"]))
        return steps

    def drafters(self) -> dict[str, Any]:
        return self._get("/v1/drafters")

    def num_captured(self) -> int:
        """Rows that reached the feature store."""
        found = CAPTURED.search(self._http.get("/metrics").raise_for_status().text)
        return int(float(found.group(1))) if found else 0

    def _chat(self, messages: Messages, speculate: bool, store: bool, **more: Any) -> dict[str, Any]:
        body = {
            "model": self._model,
            "messages": messages,
            "max_tokens": self._max_tokens,
            "temperature": 0,
            "store": store,
            "speculation": {"enabled": speculate},
        }
        response = self._http.post("/v1/chat/completions", json=body | more)
        if response.is_error:
            raise httpx.HTTPStatusError(f"{response.status_code}: {response.text}", request=response.request, response=response)
        answer: dict[str, Any] = response.json()
        return answer

    def _get(self, path: str) -> dict[str, Any]:
        answer: dict[str, Any] = self._http.get(path).raise_for_status().json()
        return answer

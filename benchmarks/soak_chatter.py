"""The clients of a soak that chat over HTTP: conversations that grow, and some that are left in the middle of an answer."""

from __future__ import annotations

import json
import random
import time

import httpx
from soak_notes import Notes


class Chatter:
    """One of them. `sessions`: ids that the server named."""

    def __init__(self, number: int, rng: random.Random, url: str, model: str, notes: Notes) -> None:
        self._number = number
        self._rng = rng
        self._url = url
        self._model = model
        self._notes = notes
        self.sessions: set[str] = set()

    async def run(self, until: float) -> None:
        async with httpx.AsyncClient(base_url=self._url, timeout=120) as client:
            messages: list[dict[str, str]] = []
            while time.monotonic() < until:
                if len(messages) > 6 or self._rng.random() < 0.2:
                    messages = []
                messages.append({"role": "user", "content": f"{self._number}: {self._rng.random()}"})
                try:
                    text = await self._ask(client, messages)
                except httpx.HTTPError as error:
                    self._notes.hold(False, f"chat: {type(error).__name__}: {error}")
                    text = ""
                messages.append({"role": "assistant", "content": text})

    async def _ask(self, client: httpx.AsyncClient, messages: list[dict[str, str]]) -> str:
        leaves = self._rng.random() < 0.3
        num_tokens = 400 if leaves else self._rng.randint(1, 32)
        body = {"model": self._model, "messages": messages, "stream": True, "max_tokens": num_tokens, "ignore_eos": True}
        body |= {"stream_options": {"include_usage": True}}
        async with client.stream("POST", "/v1/chat/completions", json=body) as response:
            if response.status_code != 200:
                error = json.loads(await response.aread())["error"]
                self._notes.saw("chat", error["code"])
                self._notes.hold(response.status_code == 429, f"chat: {response.status_code} {error}")
                return ""
            self.sessions.add(response.headers["x-session-id"])
            lines = [] if leaves else [line async for line in response.aiter_lines()]
            if leaves:
                await anext(response.aiter_lines())
                self._notes.saw("chat", "left")
                return ""
        return self._read([line.removeprefix("data: ") for line in lines if line.startswith("data: ")], num_tokens)

    def _read(self, data: list[str], num_tokens: int) -> str:
        chunks = [json.loads(line) for line in data[:-1]]
        choices = [choice for chunk in chunks for choice in chunk.get("choices", ())]
        reasons = [choice["finish_reason"] for choice in choices if choice["finish_reason"]]
        usage = (chunks[-1].get("usage") if chunks else None) or {}
        is_so = data[-1:] == ["[DONE]"] and reasons == ["length"] and usage.get("completion_tokens") == num_tokens
        self._notes.hold(is_so, f"chat: {num_tokens} tokens were asked for; it ended with {data[-3:]}")
        self._notes.saw("chat", "done")
        return "".join(choice["delta"].get("content") or "" for choice in choices)

"""From a generation's events to an HTTP response, whole or as server-sent events, while the client is there.

A client that leaves ends its generation at once, whether it waits for a permit, for a whole answer or for the next chunk.
Pings (comments, which clients skip) keep idle connections open; a failure after the first byte is an error event, never a
finish reason.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Coroutine
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from runtime.errors import EngineUnavailable, SlipstreamError
from runtime.types import Done, Started, TokenLogprob, Tokens
from serving.generations import Stream
from serving.http.answers import Answer
from serving.http.errors import CLIENT_CLOSED_REQUEST, envelope_of

Result = TypeVar("Result")

PING_INTERVAL_S = 15.0


class ClientLeft(Exception):
    """Nobody waits for this answer any more."""


async def while_connected(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """Await the work; if the client leaves first, cancel it and raise ClientLeft. The request's body must have been read."""
    task = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait({task, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientLeft
        return task.result()
    finally:
        leaving.cancel()
        task.cancel()


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        continue


async def whole(request: Request, stream: Stream, started: Started, answer: Answer) -> Response:
    """The answer in one object."""
    texts: list[str] = []
    logprobs: list[TokenLogprob] = []

    async def collect() -> Done:
        while not isinstance(event := await stream.next(), Done):
            if isinstance(event, Tokens):
                texts.append(event.text)
                logprobs.extend(event.logprobs)
        return event

    try:
        done = await while_connected(request.receive, collect())
    except ClientLeft:
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    finally:
        stream.cancel()
    check_not_cancelled(done)
    return JSONResponse(answer.whole("".join(texts), logprobs, done), headers=_headers(started))


class EventStream(Response):
    """The answer as server-sent events, each as soon as its tokens are there."""

    media_type = "text/event-stream"

    def __init__(self, stream: Stream, started: Started, answer: Answer, ping_interval_s: float = PING_INTERVAL_S) -> None:
        super().__init__(headers={**_headers(started), "Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._stream = stream
        self._answer = answer
        self._ping_interval_s = ping_interval_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with contextlib.suppress(ClientLeft):
                await while_connected(receive, self._send_all(send))
        finally:
            self._stream.cancel()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async for text in self._events():
            await send({"type": "http.response.body", "body": text.encode(), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _events(self) -> AsyncIterator[str]:
        try:
            for chunk in self._answer.first():
                yield _event(chunk)
            async for event in self._with_pings():
                if event is None:
                    yield ": ping\n\n"
                elif isinstance(event, Tokens) and (event.text or event.logprobs):
                    yield _event(self._answer.delta(event.text, event.logprobs))
                elif isinstance(event, Done):
                    check_not_cancelled(event)
                    for chunk in self._answer.end(event):
                        yield _event(chunk)
                    yield "data: [DONE]\n\n"
        except SlipstreamError as error:  # the last event: no [DONE] follows what is not done
            yield _event(envelope_of(error))

    async def _with_pings(self) -> AsyncIterator[Started | Tokens | Done | None]:
        """The events up to Done; None after each ping interval without one."""
        event: Started | Tokens | Done | None = None
        while not isinstance(event, Done):
            try:
                event = await asyncio.wait_for(self._stream.next(), self._ping_interval_s)
            except TimeoutError:
                event = None
            yield event


def _event(data: dict[str, Any]) -> str:
    return f"data: {json.dumps(data, ensure_ascii=False, separators=(',', ':'))}\n\n"


def _headers(started: Started) -> dict[str, str]:
    return {"x-session-id": started.session_id}


def check_not_cancelled(done: Done) -> None:
    """Nobody but the client may cancel its generation, so to a client that still listens this is a failure."""
    if done.finish_reason == "cancelled":
        raise EngineUnavailable("The session of this request was closed from elsewhere; the answer is incomplete.")

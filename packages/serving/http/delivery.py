"""From generations' events to an HTTP response, whole or as server-sent events, while the client is there.

A client that leaves ends its generations at once, whether it waits for a permit, for a whole answer or for the next chunk.
Pings (comments, which clients skip) keep idle connections open; a failure after the first byte is an error event, never a
finish reason.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from runtime.errors import EngineUnavailable, InvalidRequest, SlipstreamError
from runtime.types import Done, HistoryTruncated, Started, TokenLogprob, Tokens
from serving.generations import Stream
from serving.http.answers import Answer
from serving.http.errors import CLIENT_CLOSED_REQUEST, envelope_of, until

Result = TypeVar("Result")
AnyEvent = Started | Tokens | HistoryTruncated | Done

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


class Choices:
    """The generations behind one answer, and their events in the order in which they come.

    started: of the first of them. deadline: when, by the event loop's clock, the answer must be complete; None: never.
    """

    def __init__(self, streams: Sequence[Stream], started: Started, deadline: float | None = None) -> None:
        self.started = started
        self._streams = streams
        self._deadline = deadline
        self._next: dict[asyncio.Task[AnyEvent], int] = {}
        self._open = set(range(len(streams)))

    async def events(self) -> AsyncIterator[tuple[int, AnyEvent]]:
        """(choice, event) until each choice had its Done."""
        try:
            while self._open:
                async with until(self._deadline):
                    index, event = await self._one()
                if isinstance(event, Done):
                    check_not_cancelled(event)
                    self._open.discard(index)
                yield index, event
        finally:
            for task in self._next:
                task.cancel()

    async def _one(self) -> tuple[int, AnyEvent]:
        if len(self._streams) == 1:
            return 0, await self._streams[0].next()
        for index in self._open - set(self._next.values()):
            self._next[asyncio.ensure_future(self._streams[index].next())] = index
        done, _ = await asyncio.wait(self._next, return_when=asyncio.FIRST_COMPLETED)
        task = min(done, key=self._next.__getitem__)
        return self._next.pop(task), task.result()

    def __len__(self) -> int:
        return len(self._streams)

    def cancel(self) -> None:
        """Stop the work, if it still runs."""
        for stream in self._streams:
            stream.cancel()

    @property
    def headers(self) -> dict[str, str]:
        return {"x-session-id": self.started.session_id}


async def whole(request: Request, choices: Choices, answer: Answer) -> Response:
    """The answer in one object."""
    texts: list[list[str]] = [[] for _ in range(len(choices))]
    logprobs: list[list[TokenLogprob]] = [[] for _ in range(len(choices))]
    dones: dict[int, Done] = {}
    headers = choices.headers

    async def collect() -> None:
        async for index, event in choices.events():
            if isinstance(event, Tokens):
                texts[index].append(event.text)
                logprobs[index].extend(event.logprobs)
            elif isinstance(event, HistoryTruncated):
                headers["x-history-dropped"] = str(event.dropped)
            elif isinstance(event, Done):
                dones[index] = event

    try:
        await while_connected(request.receive, collect())
    except ClientLeft:
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    finally:
        choices.cancel()
    parts = [("".join(texts[index]), logprobs[index], dones[index]) for index in range(len(choices))]
    return JSONResponse(answer.whole(parts), headers=headers)


class SseResponse(Response):
    """Server-sent events, each sent as soon as it is there. `on_end` is called once nobody reads any more."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[str], on_end: Callable[[], None], headers: dict[str, str]) -> None:
        super().__init__(headers={**headers, "Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._sent_events = events
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with contextlib.suppress(ClientLeft):
                await while_connected(receive, self._send_all(send))
        finally:
            self._on_end()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async for text in self._sent_events:
            await send({"type": "http.response.body", "body": text.encode(), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class EventStream(SseResponse):
    """An answer of OpenAI's endpoints in pieces."""

    def __init__(
        self,
        choices: Choices,
        answer: Answer,
        in_our_words: Callable[[InvalidRequest], InvalidRequest] = lambda error: error,
        ping_interval_s: float = PING_INTERVAL_S,
    ) -> None:
        """in_our_words: a refusal on the way, under the name that the field has in the request's body."""
        super().__init__(self._events(), choices.cancel, choices.headers)
        self._choices = choices
        self._answer = answer
        self._in_our_words = in_our_words
        self._ping_interval_s = ping_interval_s

    async def _events(self) -> AsyncIterator[str]:
        dones: dict[int, Done] = {}
        try:
            for chunk in self._answer.first():
                yield sse(chunk)
            async for item in with_pings(self._choices.events(), self._ping_interval_s):
                if item is None:
                    yield ": ping\n\n"
                    continue
                index, event = item
                if isinstance(event, Tokens):
                    for chunk in self._answer.delta(index, event.text, event.logprobs):
                        yield sse(chunk)
                elif isinstance(event, HistoryTruncated):
                    yield f": history dropped {event.dropped}\n\n"
                elif isinstance(event, Done):
                    dones[index] = event
                    ended = [dones[i] for i in sorted(dones)] if len(dones) == len(self._choices) else None
                    for chunk in self._answer.end(index, event, ended):
                        yield sse(chunk)
            yield "data: [DONE]\n\n"
        except SlipstreamError as error:  # the last event: no [DONE] follows what is not done
            yield sse(envelope_of(self._in_our_words(error) if isinstance(error, InvalidRequest) else error))


async def with_pings(items: AsyncIterator[Result], interval_s: float = PING_INTERVAL_S) -> AsyncIterator[Result | None]:
    """The items; None after each interval without one."""
    pending = asyncio.ensure_future(anext(items, _END))
    try:
        while True:
            done, _ = await asyncio.wait({pending}, timeout=interval_s)
            if not done:
                yield None
                continue
            item = pending.result()
            if item is _END:
                return
            yield item
            pending = asyncio.ensure_future(anext(items, _END))
    finally:
        pending.cancel()


_END: Any = object()


def sse(data: dict[str, Any], name: str | None = None) -> str:
    """One server-sent event."""
    head = "" if name is None else f"event: {name}\n"
    return f"{head}data: {json.dumps(data, ensure_ascii=False, separators=(',', ':'))}\n\n"


def check_not_cancelled(done: Done) -> None:
    """Nobody but the client may cancel its generation, so to a client that still listens this is a failure."""
    if done.finish_reason == "cancelled":
        raise EngineUnavailable("The session of this request was closed from elsewhere; the answer is incomplete.")

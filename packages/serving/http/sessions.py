"""/v1/sessions: the gRPC surface's twin over HTTP. Bodies and answers are the messages of runtime.proto, as JSON.

POST   /v1/sessions                        CreateSession
GET    /v1/sessions                        ListSessions
GET    /v1/sessions/{id}                   GetSession
DELETE /v1/sessions/{id}                   CloseSession
POST   /v1/sessions/{id}/append            AppendTokens
POST   /v1/sessions/{id}/generate          Generate; "stream": true for server-sent events, one per message
POST   /v1/sessions/{id}/fork              ForkSession
POST   /v1/sessions/{id}/save              SaveSession
POST   /v1/saved_sessions/{name}/restore   RestoreSession
GET    /v1/saved_sessions                  ListSavedSessions
DELETE /v1/saved_sessions/{name}           DeleteSavedSession
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any, TypeVar

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from google.protobuf.message import Message

from runtime.errors import InvalidRequest, SlipstreamError
from runtime.rpc import generation_codec
from runtime.rpc.v1 import runtime_pb2 as pb
from runtime.types import Done, Started, Tokens
from serving.auth import Key
from serving.generations import Stream
from serving.http.delivery import ClientLeft, SseResponse, sse, while_connected, with_pings
from serving.http.errors import CLIENT_CLOSED_REQUEST, envelope_of, until
from serving.http.messages import Json, read, schema_of, write
from serving.session_calls import SessionCalls

AnyMessage = TypeVar("AnyMessage", bound=Message)


def key_of(request: Request) -> Key:
    """The caller, whom the gate let pass."""
    key: Key = request.state.key
    return key


def router(calls: SessionCalls, timeout_s: float | None) -> APIRouter:
    routes = APIRouter(prefix="/v1")

    @routes.post("/sessions", openapi_extra=_body(pb.CreateSessionRequest))
    async def create(request: Request) -> Json:
        return write(await calls.create(await _message(request, pb.CreateSessionRequest), key_of(request)))

    @routes.get("/sessions")
    async def list_sessions(request: Request) -> Json:
        return write(await calls.list(pb.ListSessionsRequest(), key_of(request)))

    @routes.get("/sessions/{session_id}")
    async def get(session_id: str, request: Request) -> Json:
        return write(await calls.get(pb.GetSessionRequest(session_id=session_id), key_of(request)))

    @routes.delete("/sessions/{session_id}")
    async def close(session_id: str, request: Request) -> Json:
        return write(await calls.close(pb.CloseSessionRequest(session_id=session_id), key_of(request)))

    @routes.post("/sessions/{session_id}/append", openapi_extra=_body(pb.AppendTokensRequest, "session_id"))
    async def append(session_id: str, request: Request) -> Json:
        message = await _message(request, pb.AppendTokensRequest, session_id=session_id)
        return write(await calls.append(message, key_of(request)))

    @routes.post("/sessions/{session_id}/fork", openapi_extra=_body(pb.ForkSessionRequest, "session_id"))
    async def fork(session_id: str, request: Request) -> Json:
        message = await _message(request, pb.ForkSessionRequest, session_id=session_id)
        return write(await calls.fork(message, key_of(request)))

    @routes.post("/sessions/{session_id}/save", openapi_extra=_body(pb.SaveSessionRequest, "session_id"))
    async def save(session_id: str, request: Request) -> Json:
        message = await _message(request, pb.SaveSessionRequest, session_id=session_id)
        return write(await calls.save(message, key_of(request)))

    @routes.post("/saved_sessions/{name}/restore", openapi_extra=_body(pb.RestoreSessionRequest, "name"))
    async def restore(name: str, request: Request) -> Json:
        return write(await calls.restore(await _message(request, pb.RestoreSessionRequest, name=name), key_of(request)))

    @routes.get("/saved_sessions")
    async def list_saved(request: Request) -> Json:
        return write(await calls.list_saved(pb.ListSavedSessionsRequest(), key_of(request)))

    @routes.delete("/saved_sessions/{name}")
    async def delete_saved(name: str, request: Request) -> Json:
        return write(await calls.delete_saved(pb.DeleteSavedSessionRequest(name=name), key_of(request)))

    @routes.post("/sessions/{session_id}/generate", openapi_extra=_body(pb.GenerateRequest, "session_id", stream=True))
    async def generate(session_id: str, request: Request) -> Response:
        body = await _json(request)
        streams = body.pop("stream", None) if isinstance(body, dict) else None
        if not isinstance(streams, bool | None):
            raise InvalidRequest("stream", f"stream must be true or false, got {streams!r}.")
        message = read(body, pb.GenerateRequest, session_id=session_id)
        deadline = None if timeout_s is None else asyncio.get_running_loop().time() + timeout_s
        try:
            stream, started = await while_connected(request.receive, _begin(calls, message, key_of(request), deadline))
            if streams:
                return SseResponse(_events(stream, started, deadline), stream.cancel, {"x-session-id": session_id})
            return JSONResponse(await while_connected(request.receive, _whole(stream, started, deadline)))
        except ClientLeft:
            return Response(status_code=CLIENT_CLOSED_REQUEST)

    return routes


async def _json(request: Request) -> Any:
    """The body; an empty one is an empty object."""
    text = await request.body()
    try:
        return json.loads(text) if text.strip() else {}
    except (ValueError, RecursionError) as error:
        raise InvalidRequest("body", f"The body is not valid JSON: {error}.") from error


async def _message(request: Request, kind: type[AnyMessage], **given: str) -> AnyMessage:
    """Off the event loop: a long list of ids takes its time."""
    body = await _json(request)
    return await asyncio.to_thread(lambda: read(body, kind, **given))


async def _begin(
    calls: SessionCalls, message: pb.GenerateRequest, key: Key, deadline: float | None
) -> tuple[Stream, Started | Done]:
    async with until(deadline):
        stream = await calls.generate(message, key)
    try:
        async with until(deadline):
            started = await stream.next()
        assert isinstance(started, Started | Done)  # Done: it was cancelled before it ran
    except BaseException:
        stream.cancel()
        raise
    return stream, started


async def _whole(stream: Stream, started: Started | Done, deadline: float | None) -> Json:
    """All messages in one: Started and Done as they are, and the tokens together."""
    answer: Json = {"tokens": {"token_ids": [], "text": "", "logprobs": [], "drafted": []}}
    try:
        event: Any = started
        while True:
            said = write(generation_codec.event_message(event))
            if isinstance(event, Tokens):
                for name, value in said["tokens"].items():
                    answer["tokens"][name] += value
            else:
                answer |= said
            if isinstance(event, Done):
                return answer
            async with until(deadline):
                event = await stream.next()
    finally:
        stream.cancel()


async def _events(stream: Stream, started: Started | Done, deadline: float | None) -> AsyncIterator[str]:
    async def all_of_them() -> AsyncIterator[Any]:
        event: Any = started
        yield event
        while not isinstance(event, Done):
            async with until(deadline):
                event = await stream.next()
            yield event

    try:
        async for event in with_pings(all_of_them()):
            if event is None:
                yield ": ping\n\n"
            else:
                [(name, message)] = write(generation_codec.event_message(event)).items()
                yield sse(message, name)
    except SlipstreamError as error:
        yield sse(envelope_of(error), "error")


def _body(kind: type[Message], *in_path: str, stream: bool = False) -> Json:
    schema = schema_of(kind.DESCRIPTOR, in_path)
    if stream:
        schema["properties"]["stream"] = {"type": "boolean"}
    return {"requestBody": {"content": {"application/json": {"schema": schema}}}}

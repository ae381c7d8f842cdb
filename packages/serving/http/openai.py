"""OpenAI's endpoints: chat completions, completions, models. Each generation is a session of its own, closed at its end."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from fastapi import APIRouter, Request
from fastapi.responses import Response

from runtime.backends.base import TargetInfo
from runtime.errors import InvalidRequest
from runtime.types import Done, SamplingParams, SessionOptions, Started
from serving.generations import Generations, Stream
from serving.http.answers import Answer, ChatAnswer, CompletionAnswer, Json
from serving.http.delivery import ClientLeft, EventStream, check_not_cancelled, while_connected, whole
from serving.http.errors import CLIENT_CLOSED_REQUEST, NotFound
from serving.http.schemas import ChatRequest, CompletionRequest, SampledRequest
from serving.http.token_bytes import TokenBytes
from serving.prompts import Prompts


@dataclass(frozen=True)
class ServedModel:
    """The one model behind this server."""

    name: str
    info: TargetInfo
    prompts: Prompts
    token_bytes: TokenBytes
    created: int = field(default_factory=lambda: int(time.time()))

    def check_name(self, name: str) -> None:
        if name != self.name:
            raise NotFound(f"The model {name!r} is not served here; this server has {self.name!r}.", "model_not_found", "model")

    def card(self) -> Json:
        return {
            "id": self.name,
            "object": "model",
            "created": self.created,
            "owned_by": "slipstream",
            "max_model_len": self.info.max_positions,
            "fingerprint": self.info.fingerprint,
        }


def router(model: ServedModel, generations: Generations) -> APIRouter:
    routes = APIRouter(prefix="/v1")

    @routes.get("/models")
    async def list_models() -> Json:
        return {"object": "list", "data": [model.card()]}

    @routes.get("/models/{name:path}")
    async def get_model(name: str) -> Json:
        model.check_name(name)
        return model.card()

    @routes.post("/chat/completions")
    async def chat(body: ChatRequest, request: Request) -> Response:
        model.check_name(body.model)
        messages = [message.for_template() for message in body.messages]
        prompt = model.prompts.of_chat(messages)
        tokens = model.token_bytes if body.logprobs else None
        return await answer(body, request, prompt, lambda started: ChatAnswer(started, model.name, body.includes_usage, tokens))

    @routes.post("/completions")
    async def complete(body: CompletionRequest, request: Request) -> Response:
        model.check_name(body.model)
        prompt = model.prompts.of(body.prompt)
        return await answer(body, request, prompt, lambda started: CompletionAnswer(started, model.name, body.includes_usage))

    async def answer(
        body: SampledRequest, request: Request, prompt: Awaitable[list[int]], shape: Callable[[Started], Answer]
    ) -> Response:
        try:
            token_ids = await prompt
            params = body.sampling_params()
            params.check(model.info.vocab_size)
            work = _begin(generations, token_ids, params, body.session_options())
            stream, started = await while_connected(request.receive, work)
        except InvalidRequest as error:
            raise body.in_our_words(error) from error
        except ClientLeft:
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        if body.stream:
            return EventStream(stream, started, shape(started))
        return await whole(request, stream, started, shape(started))

    return routes


async def _begin(
    generations: Generations, prompt: list[int], params: SamplingParams, options: SessionOptions
) -> tuple[Stream, Started]:
    """Start the generation. Until its first event, whatever fails becomes an HTTP status."""
    stream = await generations.one_shot(prompt, params, options)
    try:
        started = await stream.next()
    except BaseException:  # the client left: nobody else would stop it
        stream.cancel()
        raise
    if isinstance(started, Done):  # it never ran
        check_not_cancelled(started)
    assert isinstance(started, Started)
    return stream, started

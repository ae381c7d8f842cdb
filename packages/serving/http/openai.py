"""OpenAI's endpoints: chat completions, completions, models. Each choice of an answer is a generation of its own."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from fastapi import APIRouter, Request
from fastapi.responses import Response

from runtime.backends.base import TargetInfo
from runtime.errors import InvalidRequest
from runtime.speculation.grammar import Grammars
from runtime.types import Done, Grammar, SamplingParams, SessionOptions, Started
from serving.generations import Generations
from serving.http.answers import Answer, ChatShape, Json, Shape, TextShape
from serving.http.chat_schema import ChatRequest
from serving.http.delivery import Choices, ClientLeft, EventStream, check_not_cancelled, while_connected, whole
from serving.http.errors import CLIENT_CLOSED_REQUEST, NotFound, until
from serving.http.schemas import CompletionRequest, SampledRequest
from serving.http.token_bytes import TokenBytes
from serving.prompts import Prompts


@dataclass(frozen=True)
class ServedModel:
    """The one model behind this server."""

    name: str
    info: TargetInfo
    prompts: Prompts
    token_bytes: TokenBytes
    grammars: Grammars
    created: int = field(default_factory=lambda: int(time.time()))
    compilers: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(2, "grammar"))

    def check_name(self, name: str) -> None:
        if name != self.name:
            raise NotFound(f"The model {name!r} is not served here; this server has {self.name!r}.", "model_not_found", "model")

    async def compiled(self, grammar: Grammar | None) -> object:
        """Hold it until the engine has been asked, which then finds the grammar ready. InvalidRequest if it cannot be enforced.

        Compiling may take seconds, so it is done neither on the event loop nor in the threads that all other work shares.
        """
        if grammar is None:
            return None
        return await asyncio.get_running_loop().run_in_executor(self.compilers, self.grammars.new_state, grammar)

    async def blame(self, body: ChatRequest, error: InvalidRequest) -> InvalidRequest:
        """A refusal under the name that the field has in this body."""
        return await asyncio.get_running_loop().run_in_executor(self.compilers, body.blame, error, self.grammars.new_state)

    def card(self) -> Json:
        return {
            "id": self.name,
            "object": "model",
            "created": self.created,
            "owned_by": "slipstream",
            "max_model_len": self.info.max_positions,
            "fingerprint": self.info.fingerprint,
        }


def router(model: ServedModel, generations: Generations, timeout_s: float | None) -> APIRouter:
    """timeout_s: for a whole answer; None: as long as it takes."""
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
        messages = await asyncio.to_thread(body.messages_for_template)
        prompts = [model.prompts.of_chat(messages, body.functions)]
        tokens = model.token_bytes if body.logprobs else None
        try:
            return await answer(body, request, prompts, lambda: ChatShape(tokens, body.call_parser()))
        except InvalidRequest as error:
            if (blamed := await model.blame(body, error)) is error:
                raise  # not from itself: that would hold the whole request until the collector comes
            raise blamed from error

    @routes.post("/completions")
    async def complete(body: CompletionRequest, request: Request) -> Response:
        model.check_name(body.model)
        prompts = [model.prompts.of(prompt) for prompt in body.prompt]
        tokens = None if body.logprobs is None else model.token_bytes
        return await answer(body, request, prompts, lambda: TextShape(tokens))

    async def answer(
        body: SampledRequest, request: Request, prompts: Sequence[Awaitable[list[int]]], shape: Callable[[], Shape]
    ) -> Response:
        deadline = None if timeout_s is None else asyncio.get_running_loop().time() + timeout_s
        try:
            token_ids = await asyncio.gather(*prompts)
            params = [body.params_of_choice(index) for index in range(body.num_choices)]
            params[0].check(model.info.vocab_size)
            asked = [(prompt, one) for prompt in token_ids for one in params]
            options = request.state.key.consent(body.session_options())
            work = _begin(model, generations, asked, options, request.headers.get("x-session-id"), deadline)
            choices = await while_connected(request.receive, work)
        except InvalidRequest as error:
            raise body.in_our_words(error) from error
        except ClientLeft:
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        written = Answer(
            choices.started,
            [shape() for _ in asked],
            model=model.name,
            is_chat=isinstance(body, ChatRequest),
            num_prompts=len(prompts),
            has_usage=body.includes_usage,
        )
        if not body.stream:
            return await whole(request, choices, written)
        return EventStream(choices, written, body.blame_field if isinstance(body, ChatRequest) else body.in_our_words)

    return routes


async def _begin(
    model: ServedModel,
    generations: Generations,
    asked: Sequence[tuple[list[int], SamplingParams]],
    options: SessionOptions,
    session_id: str | None,
    deadline: float | None,
) -> Choices:
    """Start the generations. Until the first event of the first, whatever fails becomes an HTTP status."""
    async with until(deadline):
        _held = await model.compiled(asked[0][1].grammar)
        streams = await generations.answers(asked, options, session_id)
    try:
        async with until(deadline):
            started = await streams[0].next()
        if isinstance(started, Done):  # it never ran
            check_not_cancelled(started)
        assert isinstance(started, Started)
    except BaseException:  # it failed, or the client left: nobody else would stop them
        for stream in streams:
            stream.cancel()
        raise
    return Choices(streams, started, deadline)

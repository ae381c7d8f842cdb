"""The bodies that the OpenAI endpoints take, and what each field means to the engine.

A field that is listed here is honoured. Any other, and any value that could not be honoured, is refused with the field's
name, the first of them alone: nobody's hundred thousand mistakes are listed while others wait. `null` is the same as leaving
a field out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    FailFast,
    ValidationInfo,
    field_validator,
    model_validator,
)

from runtime.errors import ContextLengthExceeded, InvalidRequest
from runtime.types import SamplingParams, SessionOptions, Switch

MAX_STOP_STRINGS = 4
MAX_METADATA = 16
_TOKEN_ID = re.compile(r"0|[1-9][0-9]{,17}")  # one spelling, so that no id is given twice
COMPLETION_MAX_TOKENS = 16  # OpenAI's default for /v1/completions; chat has none


def _unicode(text: str) -> str:
    """JSON can spell half a surrogate pair, which no tokenizer takes."""
    if not text.isascii() and any("\ud800" <= char <= "\udfff" for char in text):
        raise ValueError("The text holds an unpaired surrogate, which is not Unicode.")
    return text


Text = Annotated[str, AfterValidator(_unicode)]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _one_unknown_field_is_enough(cls, data: Any) -> Any:
        unknown = [name for name in data if name not in cls.model_fields] if isinstance(data, dict) else []
        more = set(unknown[1:])
        return {name: value for name, value in data.items() if name not in more} if more else data


def _joined_text(content: Any) -> Any:
    """A list of text parts is their text; anything else is for the type check."""
    if not isinstance(content, list):
        return content
    texts = []
    for index, part in enumerate(content):
        is_text = isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)
        if not is_text or set(part) != {"type", "text"}:
            raise ValueError(f'Content part {index} is not {{"type": "text", "text": ...}}; this server takes text alone.')
        texts.append(part["text"])
    return "".join(texts)


class Message(_Body):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[Text, BeforeValidator(_joined_text)]
    name: Text | None = None
    tool_call_id: Text | None = None

    def for_template(self) -> dict[str, str]:
        role = "system" if self.role == "developer" else self.role  # its successor in OpenAI's words
        optional = {"name": self.name, "tool_call_id": self.tool_call_id}
        return {"role": role, "content": self.content, **{key: value for key, value in optional.items() if value is not None}}


class StreamOptions(_Body):
    include_usage: bool = False


class ResponseFormat(_Body):
    type: Literal["text"]


class Speculation(_Body):
    enabled: bool = True
    max_draft_tokens: int | None = None


def _stop_list(stop: Any) -> Any:
    if isinstance(stop, str):
        return [stop]
    if isinstance(stop, list) and len(stop) > MAX_STOP_STRINGS:
        raise ValueError(f"stop takes up to {MAX_STOP_STRINGS} strings, got {len(stop)}.")
    return stop


def _checked_bias(bias: Any) -> Any:
    for key, value in bias.items() if isinstance(bias, dict) else ():
        if not _TOKEN_ID.fullmatch(key):
            raise ValueError(f"logit_bias has the key {key[:20]!r}; its keys are token ids.")
        if type(value) not in (int, float):
            raise ValueError(f"logit_bias of {key} is no number.")
    return bias


def _few_entries(metadata: Any) -> Any:
    if isinstance(metadata, dict) and len(metadata) > MAX_METADATA:
        raise ValueError(f"metadata takes up to {MAX_METADATA} entries, got {len(metadata)}.")
    return metadata


_SAME_NAMES = (  # as in SamplingParams
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "ignore_eos",
)


class SampledRequest(_Body):
    """What both endpoints share."""

    model: Text
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: int | None = None
    stop: Annotated[list[Text] | None, BeforeValidator(_stop_list)] = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Annotated[dict[str, float] | None, BeforeValidator(_checked_bias)] = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: Text | None = None
    store: bool | None = None  # false: nothing of it becomes training data
    metadata: Annotated[dict[Text, Text] | None, BeforeValidator(_few_entries)] = None
    # beyond OpenAI's
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    ignore_eos: bool | None = None
    speculation: Speculation | None = None

    @field_validator("n")
    @classmethod
    def _one_choice(cls, n: int | None) -> int | None:
        if n not in (None, 1):
            raise ValueError(f"n must be 1, got {n}; send the request again for another answer.")
        return n

    @field_validator("stream_options")
    @classmethod
    def _only_when_streaming(cls, options: StreamOptions | None, info: ValidationInfo) -> StreamOptions | None:
        if options is not None and not info.data.get("stream"):
            raise ValueError("stream_options is for stream: true alone.")
        return options

    @property
    def includes_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def limit(self) -> tuple[str, int | None]:
        """The field that limits the answer, and its value."""
        return "max_tokens", self.max_tokens

    @property
    def prompt_field(self) -> str:
        return "prompt"

    def sampling_params(self) -> SamplingParams:
        given = {name: value for name in _SAME_NAMES if (value := getattr(self, name)) is not None}
        speculation = self.speculation or Speculation()
        return SamplingParams(
            **given,
            max_tokens=self.limit[1],
            logit_bias=MappingProxyType({int(key): bias for key, bias in (self.logit_bias or {}).items()}),
            stop=tuple(self.stop or ()),
            speculate=speculation.enabled,
            max_draft_tokens=speculation.max_draft_tokens,
            **self._logprobs(),
        )

    def _logprobs(self) -> Mapping[str, Any]:
        return {}

    def session_options(self) -> SessionOptions:
        capture = {None: Switch.INHERIT, False: Switch.OFF, True: Switch.ON}[self.store]
        return SessionOptions(client_label=self.user or "", capture=capture, labels=MappingProxyType(dict(self.metadata or {})))

    def in_our_words(self, error: InvalidRequest) -> InvalidRequest:
        """The same refusal under the name that the field has in this body."""
        names = {
            "max_tokens": self.limit[0],
            "max_draft_tokens": "speculation.max_draft_tokens",
            "token_ids": self.prompt_field,
            "session_id": self.prompt_field,
        }
        kind = ContextLengthExceeded if isinstance(error, ContextLengthExceeded) else InvalidRequest
        return kind(names.get(error.param, error.param), error.message)


class ChatRequest(SampledRequest):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], FailFast()]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    response_format: ResponseFormat | None = None
    tools: list[Any] | None = None
    tool_choice: Literal["none"] | None = None

    @field_validator("messages")
    @classmethod
    def _some_message(cls, messages: list[Message]) -> list[Message]:
        if not messages:
            raise ValueError("messages is empty; send at least one message.")
        return messages

    @field_validator("max_completion_tokens")
    @classmethod
    def _one_limit(cls, limit: int | None, info: ValidationInfo) -> int | None:
        older = info.data.get("max_tokens")
        if limit is not None and older is not None and limit != older:
            raise ValueError(f"max_completion_tokens is {limit} but max_tokens, its older name, is {older}; give one of them.")
        return limit

    @field_validator("tools", mode="before")
    @classmethod
    def _no_tools(cls, tools: Any) -> Any:
        if tools:
            raise ValueError("This server calls no tools; leave tools out or empty.")
        return tools

    @property
    def limit(self) -> tuple[str, int | None]:
        if self.max_completion_tokens is not None:
            return "max_completion_tokens", self.max_completion_tokens
        return "max_tokens", self.max_tokens

    @property
    def prompt_field(self) -> str:
        return "messages"

    def _logprobs(self) -> Mapping[str, Any]:
        return {"logprobs": bool(self.logprobs), "top_logprobs": self.top_logprobs or 0}


def _checked_prompt(prompt: Any) -> Any:
    is_ids = isinstance(prompt, list) and all(type(token_id) is int for token_id in prompt)
    if not (is_ids or isinstance(prompt, str)):
        raise ValueError("prompt must be one text or one list of token ids.")
    if not prompt:
        raise ValueError("prompt is empty; give at least one token.")
    return _unicode(prompt) if isinstance(prompt, str) else prompt


class CompletionRequest(SampledRequest):
    """POST /v1/completions: text, or token ids, continued as they stand."""

    prompt: Annotated[str | list[int], BeforeValidator(_checked_prompt)]

    @property
    def limit(self) -> tuple[str, int | None]:
        return "max_tokens", COMPLETION_MAX_TOKENS if self.max_tokens is None else self.max_tokens

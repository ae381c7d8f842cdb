"""The bodies that the OpenAI endpoints take, and what each field means to the engine: what all share, and /v1/completions.

A field that is listed here is honoured. Any other, and any value that could not be honoured, is refused with the field's
name, the first of them alone: nobody's hundred thousand mistakes are listed while others wait. `null` is the same as leaving
a field out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from runtime.errors import ContextLengthExceeded, InvalidRequest
from runtime.types import SEED_RANGE, SamplingParams, SessionOptions, Switch

MAX_STOP_STRINGS = 4
MAX_CHOICES = 16  # answers to one prompt
MAX_PROMPTS = 64  # of one request, and answers of one request to all of them
MAX_METADATA = 16
MAX_BIASES = 16384
_TOKEN_ID = re.compile(r"0|[1-9][0-9]{,17}")  # one spelling, so that no id is given twice
COMPLETION_MAX_TOKENS = 16  # OpenAI's default for /v1/completions; chat has none


def _unicode(text: str) -> str:
    """JSON can spell half a surrogate pair, which no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError("The text holds an unpaired surrogate, which is not Unicode.") from error
    return text


Text = Annotated[str, AfterValidator(_unicode)]


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _no_unknown_field(cls, data: Any) -> Any:
        known = [field.alias or name for name, field in cls.model_fields.items()]
        unknown = next((name for name in data if name not in known), None) if isinstance(data, dict) else None
        if unknown is not None:
            raise PydanticCustomError("unknown_parameter", "There is no such field.", {"name": unknown[:80], "known": known})
        return data


class StreamOptions(Body):
    include_usage: bool = False


class Speculation(Body):
    enabled: bool = True
    max_draft_tokens: int | None = None


def _stop_list(stop: Any) -> Any:
    if isinstance(stop, str):
        return [stop]
    if isinstance(stop, list) and len(stop) > MAX_STOP_STRINGS:
        raise ValueError(f"stop takes up to {MAX_STOP_STRINGS} strings, got {len(stop)}.")
    return stop


def _checked_bias(bias: Any) -> Any:
    if isinstance(bias, dict) and len(bias) > MAX_BIASES:
        raise ValueError(f"logit_bias takes up to {MAX_BIASES} tokens, got {len(bias)}.")
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


class SampledRequest(Body):
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
    # what clients say by themselves and what holds here anyway
    service_tier: Literal["auto", "default"] | None = None
    safety_identifier: Text | None = None
    prompt_cache_key: Text | None = None
    # beyond OpenAI's
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    ignore_eos: bool | None = None
    speculation: Speculation | None = None

    @field_validator("n")
    @classmethod
    def _some_choices(cls, n: int | None) -> int | None:
        if n is not None and not 1 <= n <= MAX_CHOICES:
            raise ValueError(f"n must lie in 1..{MAX_CHOICES}, got {n}.")
        return n

    @model_validator(mode="after")
    def _can_end(self) -> SampledRequest:
        if self.ignore_eos and self._more_params().get("grammar") is not None:
            raise ValueError("ignore_eos cannot be met together with a response_format or tools, whose answers must end.")
        return self

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

    @property
    def num_choices(self) -> int:
        """Answers to each prompt."""
        return self.n or 1

    def params_of_choice(self, index: int) -> SamplingParams:
        """Those of answer `index` to one prompt: a seed gives each its own stream of random numbers."""
        params = self.sampling_params()
        return params if params.seed is None or not index else replace(params, seed=_next_seed(params.seed, index))

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
            **self._more_params(),
        )

    def _more_params(self) -> Mapping[str, Any]:
        """What only one of the endpoints has."""
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


def _next_seed(seed: int, index: int) -> int:
    low, high = SEED_RANGE
    return (seed + index - low) % (high - low + 1) + low


def _checked_prompts(prompt: Any) -> Any:
    """One text or list of ids, or a list of either: a list of prompts."""
    if not isinstance(prompt, str | list):
        raise ValueError("prompt must be a text, a list of token ids, or a list of either.")
    if not prompt:
        raise ValueError("prompt is empty; give at least one token.")
    is_one = isinstance(prompt, str) or type(prompt[0]) is int
    prompts = [prompt] if is_one else prompt
    if len(prompts) > MAX_PROMPTS:
        raise ValueError(f"prompt holds {len(prompts)} prompts; up to {MAX_PROMPTS} are taken at once.")
    for index, one in enumerate(prompts):
        where = "prompt" if is_one else f"prompt[{index}]"
        is_ids = isinstance(one, list) and all(type(token_id) is int for token_id in one)
        if not (is_ids or isinstance(one, str)):
            raise ValueError(f"{where} must be one text or one list of token ids.")
        if not one:
            raise ValueError(f"{where} is empty; give at least one token.")
        if isinstance(one, str):
            _unicode(one)
    return prompts


class CompletionRequest(SampledRequest):
    """POST /v1/completions: text, or token ids, continued as they stand."""

    prompt: Annotated[list[str | list[int]], BeforeValidator(_checked_prompts)]
    logprobs: int | None = None
    echo: Literal[False] | None = None

    @field_validator("prompt")
    @classmethod
    def _few_answers(cls, prompts: list[str | list[int]], info: ValidationInfo) -> list[str | list[int]]:
        num_choices = info.data.get("n") or 1
        if len(prompts) * num_choices > MAX_PROMPTS:
            raise ValueError(f"{len(prompts)} prompts with n={num_choices} ask for more than {MAX_PROMPTS} answers at once.")
        return prompts

    @property
    def limit(self) -> tuple[str, int | None]:
        return "max_tokens", COMPLETION_MAX_TOKENS if self.max_tokens is None else self.max_tokens

    def _more_params(self) -> Mapping[str, Any]:
        return {} if self.logprobs is None else {"logprobs": True, "top_logprobs": self.logprobs}

    def in_our_words(self, error: InvalidRequest) -> InvalidRequest:
        return super().in_our_words(InvalidRequest("logprobs", error.message) if error.param == "top_logprobs" else error)

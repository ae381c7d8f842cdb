"""The body of /v1/chat/completions: messages, formats and tools, on top of what all endpoints share."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, FailFast, Field, ValidationInfo, WithJsonSchema, field_validator

from runtime.errors import InvalidRequest
from runtime.types import Grammar
from serving.http.schemas import Body, SampledRequest, Text
from serving.tools import CallParser, Function, grammar_of

MAX_TOOLS = 128
MAX_MESSAGE_PARTS = 4096  # messages of a request, their content parts and their calls together
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_JSON_OBJECT: Mapping[str, Any] = {"type": "object"}
_TOOL_CHOICE_SCHEMA = {
    "anyOf": [
        {"enum": ["none", "auto", "required"]},
        {
            "type": "object",
            "properties": {
                "type": {"const": "function"},
                "function": {
                    "type": "object",
                    "properties": {"name": {"type": "string"}},
                    "required": ["name"],
                    "additionalProperties": False,
                },
            },
            "required": ["type", "function"],
            "additionalProperties": False,
        },
        {"type": "null"},
    ]
}


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


def _few_parts(messages: Any) -> Any:
    """Counted before any is looked at: a hundred thousand would keep everybody else waiting for seconds."""
    if isinstance(messages, list):
        inner = [message.get(name) for message in messages if isinstance(message, dict) for name in ("content", "tool_calls")]
        num_parts = len(messages) + sum(len(parts) for parts in inner if isinstance(parts, list))
        if num_parts > MAX_MESSAGE_PARTS:
            raise ValueError(f"messages has {num_parts} messages, parts and calls; {MAX_MESSAGE_PARTS} are taken.")
    return messages


class CalledFunction(Body):
    name: Text
    arguments: Text
    parsed_arguments: Any = None  # as openai's client read them

    @field_validator("arguments")
    @classmethod
    def _json(cls, arguments: str) -> str:
        try:
            json.loads(arguments)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"arguments is not JSON: {error}.") from error
        return arguments


class ToolCall(Body):
    """A call that an earlier answer made."""

    id: Text
    index: int | None = None  # of a call that was put together from a stream
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(Body):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    tool_calls: list[ToolCall] | None = None
    content: Annotated[Text | None, BeforeValidator(_joined_text)] = Field(None, validate_default=True)
    name: Text | None = None
    tool_call_id: Text | None = Field(None, validate_default=True)
    # Clients send an earlier answer back with all that they hold of it, which says no more than the fields above.
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None
    parsed: Any = None  # `content` as openai's client read it

    @field_validator("tool_calls")
    @classmethod
    def _by_the_assistant(cls, calls: list[ToolCall] | None, info: ValidationInfo) -> list[ToolCall] | None:
        if calls is not None and info.data.get("role") != "assistant":
            raise ValueError("tool_calls is for messages of the assistant alone.")
        return calls

    @field_validator("content")
    @classmethod
    def _says_something(cls, content: str | None, info: ValidationInfo) -> str | None:
        if content is None and not info.data.get("tool_calls"):
            raise ValueError("content is required; only a message that calls tools may do without.")
        return content

    @field_validator("tool_call_id")
    @classmethod
    def _of_a_tool(cls, call_id: str | None, info: ValidationInfo) -> str | None:
        if call_id is None and info.data.get("role") == "tool":
            raise ValueError("A message of a tool needs the tool_call_id that it answers.")
        return call_id

    def for_template(self) -> dict[str, Any]:
        role = "system" if self.role == "developer" else self.role  # its successor in OpenAI's words
        optional = {"name": self.name, "tool_call_id": self.tool_call_id, "tool_calls": self._calls() or None}
        given = {key: value for key, value in optional.items() if value is not None}
        return {"role": role, "content": self.content or "", **given}

    def _calls(self) -> list[dict[str, Any]]:
        calls = [(call.id, call.function) for call in self.tool_calls or ()]
        return [
            {"id": name, "type": "function", "function": {"name": called.name, "arguments": json.loads(called.arguments)}}
            for name, called in calls
        ]


class JsonSchema(Body):
    name: Text
    description: Text | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None  # the schema is enforced either way


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = Field(None, validate_default=True)

    @field_validator("json_schema")
    @classmethod
    def _where_it_belongs(cls, schema: JsonSchema | None, info: ValidationInfo) -> JsonSchema | None:
        if "type" in info.data and (schema is not None) != (info.data["type"] == "json_schema"):
            raise ValueError('json_schema is required with the type "json_schema", and with no other.')
        return schema

    @property
    def schema_to_follow(self) -> Mapping[str, Any] | None:
        if self.json_schema is not None:
            return self.json_schema.schema_
        return _JSON_OBJECT if self.type == "json_object" else None


class DeclaredFunction(Body):
    name: Text
    description: Text | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None  # the parameters are enforced either way

    @field_validator("name")
    @classmethod
    def _usable(cls, name: str) -> str:
        if not _NAME.fullmatch(name):
            raise ValueError(f"A function's name has 1 to 64 letters, digits, '_' and '-'; got {name[:80]!r}.")
        return name

    @field_validator("parameters")
    @classmethod
    def _of_an_object(cls, parameters: dict[str, Any] | None) -> dict[str, Any] | None:
        kind = "object" if parameters is None else parameters.get("type", "object")
        if kind != "object":
            raise ValueError(f'Arguments have names, so the type of parameters is "object"; got {str(kind)[:80]!r}.')
        return parameters


class Tool(Body):
    type: Literal["function"]
    function: DeclaredFunction


@dataclass(frozen=True)
class ToolChoice:
    """mode: none, auto or required; or a function's name, then `is_name`."""

    mode: str
    is_name: bool = False


def _tool_choice(choice: Any) -> Any:
    if choice is None:
        return None
    if choice in ("none", "auto", "required"):
        return ToolChoice(choice)
    if isinstance(choice, dict) and set(choice) == {"type", "function"} and choice["type"] == "function":
        function = choice["function"]
        if isinstance(function, dict) and set(function) == {"name"} and isinstance(function["name"], str):
            return ToolChoice(function["name"], is_name=True)
    raise ValueError('tool_choice is "none", "auto", "required" or {"type": "function", "function": {"name": ...}}.')


class ChatRequest(SampledRequest):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], FailFast(), BeforeValidator(_few_parts)]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    response_format: ResponseFormat | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Annotated[Any, BeforeValidator(_tool_choice), WithJsonSchema(_TOOL_CHOICE_SCHEMA)] = None
    parallel_tool_calls: bool | None = None
    modalities: Annotated[list[Literal["text"]], Field(min_length=1, max_length=1)] | None = None

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

    @field_validator("tools")
    @classmethod
    def _distinct(cls, tools: list[Tool] | None) -> list[Tool] | None:
        names = [tool.function.name for tool in tools or ()]
        if twice := {name for name in names if names.count(name) > 1}:
            raise ValueError(f"tools has the function {min(twice)!r} more than once.")
        return tools

    @field_validator("tool_choice")
    @classmethod
    def _declared(cls, choice: ToolChoice | None, info: ValidationInfo) -> ToolChoice | None:
        names = [tool.function.name for tool in info.data.get("tools") or ()]
        if choice is not None and choice.is_name and choice.mode not in names:
            raise ValueError(f"tool_choice names {choice.mode[:80]!r}, which is not among the tools: {names}.")
        if choice is not None and choice.mode != "none" and not names:
            raise ValueError(f"tool_choice is {choice.mode!r}, but there are no tools.")
        return choice

    @property
    def limit(self) -> tuple[str, int | None]:
        if self.max_completion_tokens is not None:
            return "max_completion_tokens", self.max_completion_tokens
        return "max_tokens", self.max_tokens

    @property
    def prompt_field(self) -> str:
        return "messages"

    @property
    def _choice(self) -> ToolChoice:
        return self.tool_choice or ToolChoice("auto")

    @property
    def functions(self) -> list[Function]:
        """What the model may call."""
        if self._choice == ToolChoice("none"):
            return []
        declared = [tool.function for tool in self.tools or ()]
        return [Function(function.name, function.description or "", function.parameters) for function in declared]

    def call_parser(self) -> CallParser | None:
        """For one answer; None where nothing can be called."""
        return CallParser(is_free=self._choice.mode == "auto" and self._schema() is None) if self.functions else None

    def messages_for_template(self) -> list[dict[str, Any]]:
        return [message.for_template() for message in self.messages]

    def _more_params(self) -> Mapping[str, Any]:
        return {"logprobs": bool(self.logprobs), "top_logprobs": self.top_logprobs or 0, "grammar": self._grammar}

    @cached_property  # each choice asks for it, and a schema may be large
    def _grammar(self) -> Grammar | None:
        schema = self._schema()
        if functions := self.functions:
            return grammar_of(functions, self._choice.mode, parallel=self.parallel_tool_calls is not False, text=schema)
        return None if schema is None else Grammar("json_schema", json.dumps(schema))

    def _schema(self) -> Mapping[str, Any] | None:
        return None if self.response_format is None else self.response_format.schema_to_follow

    def blame(self, error: InvalidRequest, check: Callable[[Grammar], object]) -> InvalidRequest:
        """A refused grammar under the name of the schema that is to blame; `check` raises InvalidRequest for a bad one."""
        if error.param != "grammar":
            return error
        schemas: dict[str, Mapping[str, Any] | None] = {"response_format.json_schema.schema": self._schema()}
        for index, function in enumerate(self.functions):
            schemas[f"tools[{index}].function.parameters"] = function.parameters
        for param, schema in schemas.items():
            if schema is not None:
                try:
                    check(Grammar("json_schema", json.dumps(schema)))
                except InvalidRequest as found:
                    return InvalidRequest(param, found.message)
        return self.blame_field(error)

    def blame_field(self, error: InvalidRequest) -> InvalidRequest:
        """A refused grammar under the name of the field that asked for it."""
        return (
            InvalidRequest("tools" if self.functions else "response_format", error.message) if error.param == "grammar" else error
        )

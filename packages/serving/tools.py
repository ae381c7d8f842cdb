"""Function tools: how a model is told of them, the grammar that its calls follow, and the calls taken out of its text again.

A call in the model's text, the notation of Hermes that several families were trained on:

    <tool_call>
    {"name": "weather", "arguments": {"city": "Rome"}}
    </tool_call>

The grammar makes every call well-formed and its arguments valid under the function's schema; it depends on tool_choice:
`auto` is free text, which may end in calls; `required` and a named function are calls alone.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from runtime.types import Grammar

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_HEAD = re.compile(r'\s*\{\s*"name":\s*("(?:[^"\\]|\\.)*"),\s*"arguments":\s*')
_STYLE = {"x-guidance": {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}}
_ANY_OBJECT: dict[str, Any] = {"type": "object"}


@dataclass(frozen=True)
class Function:
    """One tool of a request."""

    name: str
    description: str = ""
    parameters: Mapping[str, Any] | None = None  # a JSON schema; None: any object

    def declaration(self) -> dict[str, Any]:
        """As chat templates take it."""
        parameters = _ANY_OBJECT if self.parameters is None else dict(self.parameters)
        function = {"name": self.name, "description": self.description, "parameters": parameters}
        return {"type": "function", "function": function}


def explained(messages: Sequence[Mapping[str, Any]], functions: Sequence[Function]) -> list[dict[str, Any]]:
    """The conversation for a template that knows no tools: told in the system message, calls and their results as text."""
    told: list[dict[str, Any]] = []
    for message in messages:
        if message["role"] != "tool":
            told.append(_call_as_text(message))
            continue
        result = f"<tool_response>\n{message['content']}\n</tool_response>"
        if told and told[-1].get("is_result"):  # several calls, one turn of results
            told[-1]["content"] += "\n" + result
        else:
            told.append({"role": "user", "content": result, "is_result": True})
    told = [{key: value for key, value in message.items() if key != "is_result"} for message in told]
    if not functions:
        return told
    listed = "\n".join(json.dumps(function.declaration()["function"], ensure_ascii=False) for function in functions)
    text = (
        f"You can call these functions:\n{listed}\nTo call one, write\n{OPEN}\n"
        f'{{"name": its name, "arguments": an object of its parameters}}\n{CLOSE}\nand nothing behind it.'
    )
    if told and told[0]["role"] == "system":
        return [{**told[0], "content": f"{told[0]['content']}\n\n{text}"}, *told[1:]]
    return [{"role": "system", "content": text}, *told]


def _call_as_text(message: Mapping[str, Any]) -> dict[str, Any]:
    calls = message.get("tool_calls") or ()
    texts = [f"{OPEN}\n{json.dumps(call['function'], ensure_ascii=False)}\n{CLOSE}" for call in calls]
    content = "\n".join(filter(None, [message["content"], *texts]))
    return {key: value for key, value in message.items() if key != "tool_calls"} | {"content": content}


def grammar_of(functions: Sequence[Function], choice: str, *, parallel: bool, text: Mapping[str, Any] | None = None) -> Grammar:
    """What the answer must be. choice: "auto", "required", or the name of one of the functions.

    text: the JSON schema that an answer without calls must follow; None: free text, also before the first call.
    """
    if choice not in ("auto", "required"):
        functions = [function for function in functions if function.name == choice]
    more = "next*" if parallel else ""
    if choice != "auto":
        start = f"start: {json.dumps(OPEN)} call {json.dumps(_end())} {more}"
    elif text is None:
        start = f"start: text | opened call {json.dumps(_end())} {more}\ntext: TEXT\nopened[lazy]: TEXT {json.dumps(OPEN)}"
        start += "\nTEXT: /(.|\\n)*/"
    else:
        start = f"start: text | {json.dumps(OPEN)} call {json.dumps(_end())} {more}\ntext: %json {_json(text)}"
    rules = [start, "call: " + " | ".join(f"call_{index}" for index in range(len(functions)))]
    if parallel:
        rules.append(f"next: {json.dumps(chr(10) + OPEN)} call {json.dumps(_end())}")
    for index, function in enumerate(functions):
        head = f'\n{{"name": {json.dumps(function.name)}, "arguments": '
        rules.append(f'call_{index}: {json.dumps(head)} args_{index} "}}"')
        rules.append(f"args_{index}: %json {_json(_ANY_OBJECT | dict(function.parameters or {}))}")
    return Grammar("lark", "\n".join(rules) + "\n")


def _json(schema: Mapping[str, Any]) -> str:
    return json.dumps(dict(schema) | _STYLE)


def _end() -> str:
    return "\n" + CLOSE


@dataclass(frozen=True)
class Delta:
    """What one piece of text adds: plain content, the begin of a call (id and name), or more of a call's arguments."""

    content: str = ""
    index: int | None = None  # of the call
    id: str | None = None
    name: str | None = None
    arguments: str = ""


class CallParser:
    """Takes a model's text piece by piece and gives it out as content and calls. Nothing is given out that may yet change.

    is_free: text that only begins like a call may be one of its own, and so may text within an answer; else the grammar lets
    nothing but a call begin so, nor does it behind a first call.
    """

    def __init__(self, is_free: bool = True) -> None:
        self.num_calls = 0
        self._is_free = is_free
        self._has_content = False
        self._held = ""
        self._read = self._content
        self._scan = _ValueScan()

    def push(self, text: str) -> list[Delta]:
        self._held += text
        deltas: list[Delta] = []
        while (step := self._read()) is not None:
            deltas += step
        return deltas

    def flush(self) -> list[Delta]:
        """The rest: text that looked like the begin of a call and was none. An unfinished call stays unfinished."""
        rest, self._held = self._held, ""
        is_text = self._read == self._content and not self.num_calls and (self._is_free or self._has_content)
        return [Delta(content=rest)] if rest and is_text else []

    @property
    def has_whole_calls(self) -> bool:
        """There are calls, and the arguments of the last one have their end."""
        return self.num_calls > 0 and self._read != self._arguments

    # Each reader consumes what it can of the held text; None: it needs more.

    def _content(self) -> list[Delta] | None:
        before, found, behind = self._held.partition(OPEN)
        if found:
            self._held, self._read = behind, self._head
        else:
            kept = _overlap(self._held, OPEN)
            before, self._held = self._held[: len(self._held) - kept], self._held[len(self._held) - kept :]
        if self.num_calls and not before.strip():
            before = ""  # the line break between two calls
        if not before:
            return [] if found else None
        self._has_content = True
        return [Delta(content=before)]

    def _head(self) -> list[Delta] | None:
        match = _HEAD.match(self._held)
        if match is None:
            return None
        self._held, self._read, self._scan = self._held[match.end() :], self._arguments, _ValueScan()
        self.num_calls += 1
        return [Delta(index=self.num_calls - 1, id=f"call_{uuid.uuid4().hex[:24]}", name=json.loads(match.group(1)))]

    def _arguments(self) -> list[Delta] | None:
        size = self._scan.take(self._held)
        part, self._held = self._held[:size], self._held[size:]
        if self._scan.is_over:
            self._read = self._tail
        elif not part:
            return None
        return [Delta(index=self.num_calls - 1, arguments=part)] if part else []

    def _tail(self) -> list[Delta] | None:
        _, found, behind = self._held.partition(CLOSE)
        if not found:
            return None
        self._held, self._read = behind, self._content
        return []


class _ValueScan:
    """Finds the end of one JSON object or array in a text that comes in pieces."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._is_escaped = False
        self.is_over = False

    def take(self, text: str) -> int:
        """How many of these characters belong to the value."""
        for place, char in enumerate(text):
            if self._in_string:
                if self._is_escaped:
                    self._is_escaped = False
                elif char == "\\":
                    self._is_escaped = True
                elif char == '"':
                    self._in_string = False
            elif char == '"':
                self._in_string = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if self._depth == 0:
                    self.is_over = True
                    return place + 1
        return len(text)


def _overlap(text: str, tag: str) -> int:
    """The longest end of the text that is a begin of the tag."""
    return next((size for size in range(min(len(text), len(tag) - 1), 0, -1) if tag.startswith(text[-size:])), 0)

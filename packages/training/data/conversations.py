"""JSONL of what a drafter may learn from, read strictly: one object a line, in one of four forms.

    {"id": "a17", "conversations": [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "Because."}, ...]}
    {"id": "a18", "turns": ["first question", "second question"]}         questions alone, one behind the other's answer
    {"id": "a19", "text": "...", "spans": [[120, 180], ...]}              as it stands; characters that the model spoke
    {"id": "a20", "token_ids": [1, 2, ...], "generated": [[5, 9], ...]}   tokens that the model spoke

A message may have `reasoning_content` and `tool_calls`, a conversation `tools`; `category` (or `slice`) names the slice of the
traffic. `id` can be left out: then it is the line's number, behind the file's name where there are several files, and no other
line may have that for its id. A line of no such form is refused with its place; a conversation that is of the form but makes no
sense is counted by its reason, and left out. Knows no tokenizer.
"""

from __future__ import annotations

import glob
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from runtime.errors import ConfigError
from runtime.models import absolute

DUPLICATE_ID = "duplicate_id"  # the first one counts
EMPTY_TURN = "empty_turn"  # a message without text
ODD_ROLES = "odd_roles"  # not: system, then user and assistant in turn, tools where they were called

CALL = "call"  # an assistant's message that calls tools
COMES_AFTER: Mapping[str, tuple[str, ...]] = {  # "": the beginning
    "system": ("",),
    "developer": ("",),
    "user": ("", "system", "developer", "assistant", CALL),
    "assistant": ("user", "tool"),
    "tool": (CALL, "tool"),
}
FORMS = ("conversations", "turns", "text", "token_ids")
Span = tuple[int, int]
"""First, and the one behind the last."""


@dataclass(frozen=True)
class Conversation:
    """Messages as chat templates take them. Questions that wait for the answers before them are in `later`."""

    id: str
    messages: tuple[Mapping[str, Any], ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    later: tuple[str, ...] = ()
    slice: str = ""

    @property
    def asked(self) -> tuple[Mapping[str, Any], ...]:
        """Up to the last user message; none if nobody asks."""
        messages = self.messages
        while messages and messages[-1]["role"] != "user":
            messages = messages[:-1]
        return messages


@dataclass(frozen=True)
class Preformatted:
    """Text as it stands, control tokens and all, or its ids; exactly one of the two."""

    id: str
    spans: tuple[Span, ...]  # of characters, or of ids
    text: str | None = None
    token_ids: tuple[int, ...] | None = None
    slice: str = ""


def files_of(setting: str, given: str) -> list[Path]:
    """The files that a setting means: a file, a directory of *.jsonl, or a pattern. ConfigError if there is none."""
    path = absolute(setting, given)
    if path.is_dir():
        files = sorted(path.glob("*.jsonl"))
    elif path.exists() or not glob.has_magic(given):
        files = [path]
    else:
        files = sorted(Path(name) for name in glob.glob(str(path)))
    if not files:
        raise ConfigError(f"{setting} is {given!r}, and no file is there; give a JSONL file, a directory of them, or a pattern.")
    for file in files:
        if not file.is_file():  # a pipe could be read once, and files are read again and held against what they were
            what = "it is no regular file" if file.exists() else "it is not there"
            raise ConfigError(f"{setting} names {str(file)!r}, which cannot be read ({what}); give a JSONL file.")
        if not _is_text(str(file)):  # by which lines without id go
            raise ConfigError(f"{setting} names {str(file)!r}, and that is no text in UTF-8; give the file another name.")
    return files


def _is_text(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


Report = Callable[[int, int], None]
"""Lines done, of how many."""

REPORT_EVERY = 256  # lines


def read(
    setting: str, files: Sequence[Path], left_out: Counter[str], report: Report = lambda done, total: None
) -> Iterator[Conversation | Preformatted]:
    """What the files hold, in order; what makes no sense is counted in left_out. ConfigError, with file and line, for a file
    that cannot be read and a line of another form."""
    seen: dict[str, _Place] = {}
    texts = [(path, _text(setting, path).split("\n")) for path in files]
    total, done = sum(len(lines) for _, lines in texts), 0
    root = os.path.commonpath([path.parent for path in files])
    for path, lines in texts:
        file = f"{os.path.relpath(path, root)}:" if len(files) > 1 else ""
        for number, line in enumerate(lines, 1):
            done += 1
            if done % REPORT_EVERY == 0:
                report(done, total)
            if not line.strip():
                continue
            record, place = _parse(_Place(setting, path, number, f"{file}{number}"), line)
            if record.id in seen:
                _check_same_kind(seen[record.id], place, record.id)
                left_out[DUPLICATE_ID] += 1
                continue
            seen[record.id] = place
            reason = _nonsense(record) if isinstance(record, Conversation) else None
            if reason is None:
                yield record
            else:
                left_out[reason] += 1


def by_reason(left_out: Mapping[str, int], truncated: Mapping[str, int] | None = None) -> list[str]:
    """What became of lines and rows, in words for a summary: "2 truncated", "3 left out: too long"."""
    cut = [f"{count} {reason.replace('_', ' ')}" for reason, count in sorted((truncated or {}).items())]
    return cut + [f"{count} left out: {reason.replace('_', ' ')}" for reason, count in sorted(left_out.items())]


def _text(setting: str, path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{setting} names {str(path)!r}, which cannot be read ({error}); give a JSONL file.") from error


@dataclass(frozen=True)
class _Place:
    setting: str
    path: Path
    number: int  # of the line, from 1
    name: str  # of a line without id
    has_id: bool = False

    def fault(self, what: str) -> ConfigError:
        return ConfigError(
            f"{self.path}:{self.number}: a line of {self.setting} cannot be taken: {what}. Correct it, or leave it out; a usual "
            'line is {"id": ..., "conversations": [{"role": "user", "content": ...}, ...]}.'
        )


def _check_same_kind(first: _Place, second: _Place, name: str) -> None:
    """ConfigError if one of two lines of one name has it for its id, and the other, as its number, by chance: they are not the
    same line twice."""
    named, numbered = (first, second) if first.has_id else (second, first)
    if not numbered.has_id:
        raise named.fault(
            f"its id is {name!r}, and {numbered.path}:{numbered.number}, which has none, goes by that number; give an id to each "
            "line, or to none"
        )


def _parse(place: _Place, line: str) -> tuple[Conversation | Preformatted, _Place]:
    """What the line says, and its place, which then knows whether the line has an id."""
    record = _object(place, line)
    return _record(place, record), replace(place, has_id="id" in record)


def _object(place: _Place, line: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
        json.dumps(record, ensure_ascii=False).encode()  # an escaped half of a character is JSON, but no text
    except (ValueError, RecursionError) as error:
        raise place.fault(f"it is not JSON of text ({error})") from error
    if not isinstance(record, dict):
        raise place.fault(f"it is a JSON {type(record).__name__}, not an object")
    return record


def _record(place: _Place, record: Mapping[str, Any]) -> Conversation | Preformatted:
    forms = [form for form in FORMS if form in record]
    if len(forms) != 1:
        raise place.fault(f"it needs exactly one of {', '.join(FORMS)}, and has {' and '.join(forms) or 'none'}")
    name = record.get("id", place.name)
    if isinstance(name, bool) or not isinstance(name, str | int):
        raise place.fault(f"its id is {name!r}, neither text nor a whole number")
    label = record.get("slice", record.get("category", ""))
    if not isinstance(label, str):
        raise place.fault(f"its slice is {label!r}, which is no text")
    match forms[0]:
        case "conversations":
            messages = tuple(_message(place, index, given) for index, given in enumerate(_list(place, record, forms[0])))
            return Conversation(str(name), messages, _tools(place, record), slice=label)
        case "turns":
            turns = _list(place, record, "turns")
            if not turns or not all(isinstance(turn, str) for turn in turns):
                raise place.fault("its `turns` are no list of texts, at least one")
            first = {"role": "user", "content": turns[0]}
            return Conversation(str(name), (first,), _tools(place, record), tuple(turns[1:]), label)
        case "text":
            text = record["text"]
            if not isinstance(text, str):
                raise place.fault("its `text` is no text")
            return Preformatted(str(name), _spans(place, record, "spans", len(text)), text=text, slice=label)
    ids = _list(place, record, "token_ids")
    if not all(type(token_id) is int and token_id >= 0 for token_id in ids):
        raise place.fault("its `token_ids` are no list of whole numbers from 0")
    return Preformatted(str(name), _spans(place, record, "generated", len(ids)), token_ids=tuple(ids), slice=label)


def _list(place: _Place, record: Mapping[str, Any], name: str) -> list[Any]:
    if not isinstance(record[name], list):
        raise place.fault(f"its `{name}` is a {type(record[name]).__name__}, not a list")
    return list(record[name])


def _tools(place: _Place, record: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
    tools = record.get("tools") or []
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise place.fault("its `tools` are no list of declarations")
    return tuple(tools)


def _message(place: _Place, index: int, given: Any) -> Mapping[str, Any]:
    if not isinstance(given, dict) or not isinstance(given.get("role"), str):
        raise place.fault(f"its message {index} is no object with a role")
    content = given.get("content")
    if content is not None and not isinstance(content, str):
        raise place.fault(f"the content of its message {index} is a {type(content).__name__}, not text")
    calls = given.get("tool_calls") or []
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise place.fault(f"the tool_calls of its message {index} are no list of calls")
    reasoning = given.get("reasoning_content")
    if reasoning is not None and not isinstance(reasoning, str):
        raise place.fault(f"the reasoning_content of its message {index} is no text")
    return {**{key: value for key, value in given.items() if value is not None}, "content": content or ""}


def _spans(place: _Place, record: Mapping[str, Any], name: str, length: int) -> tuple[Span, ...]:
    spans = record.get(name)
    end = 0
    if not isinstance(spans, list):
        raise place.fault(f"it has no list `{name}` of [first, behind the last]")
    for span in spans:
        is_pair = isinstance(span, list) and len(span) == 2 and all(type(edge) is int for edge in span)
        if not is_pair or not end <= span[0] < span[1] <= length:
            raise place.fault(f"{span!r} in its `{name}` is no span behind the one before it and within {length}")
        end = span[1]
    return tuple((first, stop) for first, stop in spans)


def _nonsense(conversation: Conversation) -> str | None:
    """Why this conversation cannot be one."""
    before = ""
    for message in conversation.messages:
        role = message["role"]
        if before not in COMES_AFTER.get(role, ()):
            return ODD_ROLES
        if not message["content"].strip() and not message.get("tool_calls") and role != "tool":
            return EMPTY_TURN
        before = CALL if role == "assistant" and message.get("tool_calls") else role
    return EMPTY_TURN if any(not turn.strip() for turn in conversation.later) else None

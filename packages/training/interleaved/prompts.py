"""Prompts for the target to answer: JSONL of conversations, each cut behind its last user message.

    {"id": "a17", "conversations": [{"role": "user", "content": "Why is the sky blue?"}, ...], "tools": [...]}

`id` and `tools`, the functions that the target may call, can be left out. A conversation that cannot be asked is counted with
its reason; a file that is not of this form is refused, with the line.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runtime.errors import ConfigError, InvalidRequest
from runtime.models import Tokenizer

TOO_LONG = "too_long"
NOTHING_ASKED = "nothing_asked"  # no user message
REFUSED = "refused_by_template"


@dataclass(frozen=True)
class Prompt:
    id: str
    token_ids: tuple[int, ...]  # through the chat template, up to where the answer begins


def load_prompts(path: Path, tokenizer: Tokenizer, max_tokens: int) -> tuple[list[Prompt], Counter[str]]:
    """Prompts of at most max_tokens tokens in the order of the file, and how many conversations were left out, by reason.

    ConfigError if the file cannot be read, has a line of another form, or leaves nothing to ask.
    """
    prompts: list[Prompt] = []
    left_out: Counter[str] = Counter()
    for name, messages, tools in _conversations(path):
        asked = _up_to_last_question(messages)
        if not asked:
            left_out[NOTHING_ASKED] += 1
            continue
        try:
            token_ids = tokenizer.encode_chat(asked, tools)
        except (InvalidRequest, RecursionError):
            left_out[REFUSED] += 1
            continue
        if len(token_ids) > max_tokens:
            left_out[TOO_LONG] += 1
        else:
            prompts.append(Prompt(name, tuple(token_ids)))
    if not prompts:
        raise ConfigError(f"data.prompts is {str(path)!r}; it leaves nothing to ask ({_told(left_out)}). Give another file.")
    return prompts, left_out


def _told(left_out: Mapping[str, int]) -> str:
    return ", ".join(f"{reason} {count}" for reason, count in left_out.items()) or "no line in it"


def _conversations(path: Path) -> Iterator[tuple[str, list[dict[str, Any]], list[dict[str, Any]]]]:
    """(id, messages, tools) of each line."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"data.prompts is {str(path)!r}, which cannot be read ({error}); give a JSONL file.") from error
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            json.dumps(record, ensure_ascii=False).encode()  # an escaped half of a character is JSON, but no text
        except (ValueError, RecursionError) as error:
            raise _malformed(path, number, f"it is not JSON of text ({error})") from error
        messages: Any = record.get("conversations") if isinstance(record, dict) else None
        if not _are_objects(messages):
            raise _malformed(path, number, "it has no list `conversations` of messages")
        tools = record.get("tools") or []
        if not _are_objects(tools):
            raise _malformed(path, number, "its `tools` are no list of declarations")
        yield str(record.get("id", number)), messages, tools


def _are_objects(values: Any) -> bool:
    return isinstance(values, list) and all(isinstance(value, dict) for value in values)


def _malformed(path: Path, number: int, what: str) -> ConfigError:
    form = '{"id": ..., "conversations": [{"role": "user", "content": ...}, ...]}'
    return ConfigError(f"Line {number} of data.prompts {str(path)!r} cannot be taken: {what}. Each line is {form}.")


def _up_to_last_question(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    while messages and messages[-1].get("role") != "user":
        messages = messages[:-1]
    return messages

"""Prompts for the target to answer: what `conversations` reads, each cut behind its last question.

Of questions alone (`turns`) the first is the prompt, and the others wait for the answers. Text and ids as they stand are cut
where the first thing that a model spoke begins.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runtime.errors import ConfigError
from runtime.models import Tokenizer
from training.data import conversations
from training.data.conversations import Conversation, Report, by_reason
from training.data.encoding import TOO_LONG, Encoder


@dataclass(frozen=True)
class Prompt:
    id: str
    token_ids: tuple[int, ...]  # through the chat template, up to where the answer begins
    slice: str = ""
    messages: tuple[Mapping[str, Any], ...] = ()  # of a conversation, up to the question
    tools: tuple[Mapping[str, Any], ...] = ()
    later: tuple[str, ...] = ()  # questions behind the answer


def load_prompts(
    files: Sequence[Path],
    tokenizer: Tokenizer,
    vocab_size: int,
    max_tokens: int,
    setting: str = "data.prompts",
    report: Report = lambda done, total: None,
) -> tuple[list[Prompt], Counter[str]]:
    """Prompts of at most max_tokens tokens in the order of the files, and how many were left out, by reason.

    ConfigError if a file cannot be read, has a line of another form, or if they leave nothing to ask.
    """
    encoder = Encoder(tokenizer, vocab_size, max_tokens)
    prompts: list[Prompt] = []
    for record in conversations.read(setting, files, encoder.left_out, report):
        token_ids = encoder.prompt(record)
        if token_ids is None:
            continue
        if len(token_ids) > max_tokens:
            encoder.left_out[TOO_LONG] += 1
        elif isinstance(record, Conversation):
            prompts.append(Prompt(record.id, tuple(token_ids), record.slice, record.asked, record.tools, record.later))
        else:
            prompts.append(Prompt(record.id, tuple(token_ids), record.slice))
    if not prompts:
        left_out = ", ".join(by_reason(encoder.left_out)) or "no line in them"
        names = ", ".join(str(path) for path in files)
        raise ConfigError(f"{setting} names {names}, which leaves nothing to ask ({left_out}); give another file.")
    return prompts, encoder.left_out

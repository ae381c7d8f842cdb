"""What an evaluation asks: of each line of a file of prompts the last question, through the target's chat template."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path

from runtime.errors import ConfigError
from runtime.files import sha256_of
from runtime.models import Tokenizer
from training.data.conversations import Conversation, by_reason, files_of, read
from training.data.encoding import TOO_LONG, Encoder

SETTING = "evaluate.prompts"
NO_CATEGORY = "other"
NO_QUESTION = "no_conversation"  # a line of text or tokens as they stand


@dataclass(frozen=True)
class Question:
    suite: str  # the file's name
    id: str  # unique in its suite
    category: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True)
class Suite:
    """A file of prompts."""

    name: str
    sha256: str
    questions: tuple[Question, ...]
    left_out: dict[str, int]  # lines by reason


def read_suites(
    prompts: list[str], tokenizer: Tokenizer, vocab_size: int, max_tokens: int, per_category: int | None, seed: int
) -> list[Suite]:
    """max_tokens: of a question. ConfigError if a file cannot be read, has a line of another form or leaves nothing to ask."""
    files = [file for given in prompts for file in files_of(SETTING, given)]
    names = Counter(file.stem for file in files)
    twice = [name for name, count in names.items() if count > 1]
    if twice:
        raise ConfigError(f"{SETTING} has several files named {twice[0]!r}; give each a name of its own, as tables show it.")
    return [_suite(file, tokenizer, vocab_size, max_tokens, per_category, seed) for file in files]


def _suite(file: Path, tokenizer: Tokenizer, vocab_size: int, max_tokens: int, per_category: int | None, seed: int) -> Suite:
    encoder = Encoder(tokenizer, vocab_size, max_tokens)
    groups: dict[str, list[Question]] = defaultdict(list)
    for record in read(SETTING, [file], encoder.left_out):
        if not isinstance(record, Conversation):
            encoder.left_out[NO_QUESTION] += 1
            continue
        token_ids = encoder.prompt(record)
        if token_ids is None:
            continue
        if len(token_ids) > max_tokens:
            encoder.left_out[TOO_LONG] += 1
            continue
        category = record.slice or NO_CATEGORY
        groups[category].append(Question(file.stem, record.id, category, tuple(token_ids)))
    rng = random.Random(seed)
    chosen = [
        question
        for group in groups.values()
        for question in (group if per_category is None else rng.sample(group, min(per_category, len(group))))
    ]
    if not chosen:
        left_out = ", ".join(by_reason(encoder.left_out)) or "no line in it"
        raise ConfigError(f"{SETTING} names {str(file)!r}, which leaves nothing to ask ({left_out}); give another file.")
    return Suite(file.stem, sha256_of(file), tuple(chosen), dict(encoder.left_out))

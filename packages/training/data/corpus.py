"""From what `data.corpus` names to rows of tokens: directories of shards, or conversations, which are tokenised once.

Tokenised rows are kept under a key of all that they depend on: the files' content, the tokenizer, its chat template, the size
of the vocabulary and the longest row. Loads no model, and knows no features.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save

from runtime.errors import ConfigError, FeatureError
from runtime.files import sha256_of, write_atomic
from runtime.models import ResolvedModel, Tokenizer
from training.data import conversations, shards
from training.data.conversations import Report, by_reason
from training.data.encoding import NOTHING_TO_LEARN, TOO_LONG, TRUNCATED, Encoder
from training.data.tokens import Corpus, TokenRow, clipped, teaches

logger = logging.getLogger(__name__)

ENCODING = 2  # grows when the same files give other rows


@dataclass(frozen=True)
class Found:
    """Rows, and what became of the others."""

    corpus: Corpus
    left_out: Counter[str] = field(default_factory=Counter)  # rows, by reason
    truncated: Counter[str] = field(default_factory=Counter)

    def told(self) -> str:
        """One line for a summary."""
        parts = [f"{len(self.corpus)} rows of {self.corpus.num_tokens} tokens, {self.corpus.num_generated} of them to learn from"]
        return ", ".join(parts + by_reason(self.left_out, self.truncated))


def load_corpus(
    given: str, model: ResolvedModel, tokenizer: Tokenizer, vocab_size: int, max_tokens: int, cache: Path, report: Report
) -> Found:
    """The rows that data.corpus means. cache: a directory for tokenised rows. ConfigError if nothing can be learned from them,
    or they cannot be read, are of another vocabulary, or are what another model than this one answered."""
    directories = shards.directories_of("data.corpus", given)
    if directories:
        found = _of_shards(directories, model, tokenizer, vocab_size, max_tokens)
    else:
        found = encode_files(
            "data.corpus", conversations.files_of("data.corpus", given), tokenizer, vocab_size, max_tokens, cache, report
        )
    if not len(found.corpus):
        raise ConfigError(f"data.corpus is {given!r}, and leaves nothing to learn from ({found.told()}); give other files.")
    return found


def encode_files(
    setting: str, files: Sequence[Path], tokenizer: Tokenizer, vocab_size: int, max_tokens: int, cache: Path, report: Report
) -> Found:
    """The rows of these JSONL files, from the cache if they were tokenised before."""
    key = {
        "encoding": ENCODING,
        "files": [sha256_of(path) for path in files],
        "tokenizer": tokenizer.hash,
        "template": tokenizer.template_hash,
        "vocab_size": vocab_size,
        "max_tokens": max_tokens,
    }
    kept_at = cache / f"{hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:32]}.safetensors"
    kept = _kept(kept_at)
    if kept is not None:
        return kept
    encoder = Encoder(tokenizer, vocab_size, max_tokens)
    rows: list[TokenRow] = []
    for record in conversations.read(setting, files, encoder.left_out, report):
        rows += encoder.rows(record)
    found = Found(Corpus.of(rows, vocab_size), encoder.left_out, encoder.truncated)
    counts = {"left_out": json.dumps(found.left_out), "truncated": json.dumps(found.truncated)}
    cache.mkdir(parents=True, exist_ok=True)
    write_atomic(kept_at, save(found.corpus.tensors(), metadata=counts))
    return found


def _kept(path: Path) -> Found | None:
    """None if it is not there, or damaged: then it is made again."""
    if not path.is_file():
        return None
    try:
        with safe_open(path, framework="pt") as file:
            counts = {name: Counter(json.loads(text)) for name, text in file.metadata().items()}
        return Found(Corpus.from_tensors(load_file(path)), counts["left_out"], counts["truncated"])
    except (OSError, SafetensorError, FeatureError, ValueError, KeyError) as error:
        logger.warning("tokenised rows in %s are damaged (%s), and made again", path, error)
        return None


def _of_shards(
    directories: Sequence[Path], model: ResolvedModel, tokenizer: Tokenizer, vocab_size: int, max_tokens: int
) -> Found:
    origin = shards.read_manifest(directories[0])["origin"]  # the others have this in common with it
    if origin.get("vocabulary_hash") != tokenizer.vocabulary_hash:
        raise ConfigError(
            f"The rows in {directories[0]} are ids of another vocabulary than that of model.name; give that model, or make rows "
            "of this one with mode=capture."
        )
    made_by = origin.get("target_fingerprint")
    if origin.get("answers") is not None and made_by != model.fingerprint:  # else they are as they stood in conversations
        raise ConfigError(
            f"The rows in {directories[0]} are answers of model {origin.get('model')} ({made_by}), and model.name is "
            f"{model.name!r}, which is {model.fingerprint}; give that model, or make rows of this one with mode=capture."
        )
    parts = shards.read_together(directories)
    corpus = Corpus.concat(parts) if parts else Corpus.of([], vocab_size)
    if len(corpus) and int(corpus.token_ids.numpy().max()) >= vocab_size:
        raise ConfigError(
            f"A row in {' or '.join(map(str, directories))} has an id beyond the {vocab_size} of model.name; make the rows anew."
        )
    if not len(corpus) or (int(corpus.lengths.max()) <= max_tokens and corpus.teaches.all()):
        return Found(corpus)
    return _cut(corpus, vocab_size, max_tokens)


def _cut(corpus: Corpus, vocab_size: int, max_tokens: int) -> Found:
    """The same rows, none of them longer, without those that teach nothing."""
    rows: list[TokenRow] = []
    found = Found(corpus)
    for row in map(corpus.row, range(len(corpus))):
        spans = clipped(row.spans, max_tokens)
        if not teaches(spans):
            found.left_out[TOO_LONG if teaches(row.spans) else NOTHING_TO_LEARN] += 1
            continue
        found.truncated[TRUNCATED] += int(spans != row.spans)
        rows.append(replace(row, token_ids=row.token_ids[: spans[-1][1]], spans=spans))
    return Found(Corpus.of(rows, vocab_size), found.left_out, found.truncated)

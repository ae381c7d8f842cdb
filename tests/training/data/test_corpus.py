"""From files to token rows: the cache depends on all that the rows depend on, and on nothing else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from runtime.errors import ConfigError
from runtime.models import Tokenizer
from training.data.corpus import Found, load_corpus
from training.data.shards import TokenShards
from training.data.tokens import TokenRow

MESSAGES = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "Because it is so."}]


@pytest.fixture
def tokenizer(tiny) -> Tokenizer:
    return Tokenizer.load(tiny.path)


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    path = tmp_path / "chats.jsonl"
    lines = [{"id": f"c{n}", "conversations": MESSAGES} for n in range(3)]
    path.write_text("\n".join(map(json.dumps, [*lines, {"id": "c0", "conversations": MESSAGES}])))
    return path


def load(chats: Path, tokenizer: Tokenizer, max_tokens: int = 2048, vocab_size: int | None = None) -> tuple[Found, bool]:
    """What was found, and whether it had to be tokenised."""
    cache = chats.parent / "cache"
    before = set(cache.glob("*"))
    size = vocab_size or tokenizer.vocab_size
    found = load_corpus(str(chats), tokenizer, size, max_tokens, cache, lambda done, total: None)
    return found, set(cache.glob("*")) != before


def test_rows_are_tokenised_once(chats: Path, tokenizer: Tokenizer) -> None:
    first, is_new = load(chats, tokenizer)
    again, is_new_again = load(chats, tokenizer)
    assert (is_new, is_new_again) == (True, False)
    assert first.corpus.digest == again.corpus.digest
    assert first.left_out == again.left_out == {"duplicate_id": 1}
    assert again.told() == first.told()
    assert "3 rows of" in first.told()
    assert "1 left out: duplicate id" in first.told()


def test_another_file_length_vocabulary_or_template_is_tokenised_anew(chats: Path, tokenizer: Tokenizer) -> None:
    found, _ = load(chats, tokenizer)
    assert load(chats, tokenizer, max_tokens=2047)[1]
    assert load(chats, tokenizer, vocab_size=tokenizer.vocab_size + 1)[1]
    chats.write_text(chats.read_text().replace("Because", "Since"))
    assert load(chats, tokenizer)[1]
    tokenizer._pretrained.chat_template = tokenizer._pretrained.chat_template.replace("user", "user", 1) + "{# another #}"
    tokenizer.__dict__.pop("template_hash", None)
    assert load(chats, tokenizer)[1]
    copied = chats.with_name("copied.jsonl")
    copied.write_bytes(chats.read_bytes())
    assert not load(copied, tokenizer)[1]  # the name does not matter
    assert len(found.corpus) == 3


def test_a_corpus_that_teaches_nothing_is_refused(chats: Path, tokenizer: Tokenizer) -> None:
    with pytest.raises(ConfigError, match=r"leaves nothing to learn from \(.*3 left out: too long"):
        load(chats, tokenizer, max_tokens=8)
    with pytest.raises(ConfigError, match="no file is there"):
        load(chats.with_name("absent*"), tokenizer)


def test_the_directory_above_token_rows_is_refused_with_their_name(chats: Path, tokenizer: Tokenizer) -> None:
    (chats.parent / "tokens" / "default").mkdir(parents=True)
    (chats.parent / "tokens" / "default" / "manifest.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"holds directories of token rows; name one, such as .*/tokens/default\."):
        load(chats.parent / "tokens", tokenizer)


def test_rows_of_shards_that_teach_nothing_are_left_out(chats: Path, tokenizer: Tokenizer) -> None:
    rows = [TokenRow("a", "", [1, 2, 3], ((1, 3),)), TokenRow("b", "", [1, 2], ((1, 2),)), TokenRow("c", "", [1], ())]
    origin = {"vocabulary_hash": tokenizer.vocabulary_hash}
    with TokenShards(chats.parent / "rows", origin, tokenizer.vocab_size, shard_tokens=1, flush_every_s=0.0) as shards:
        shards.add(rows)
    found, _ = load(chats.parent / "rows", tokenizer)
    assert [found.corpus.name(r) for r in range(len(found.corpus))] == ["a"]
    assert found.left_out == {"nothing_to_learn": 2}

"""From files to token rows: the cache depends on all that the rows depend on, and on nothing else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from runtime.errors import ConfigError
from runtime.models import ResolvedModel, Tokenizer
from training.data.corpus import Found, load_corpus
from training.data.shards import TokenShards
from training.data.tokens import TokenRow

MODEL = ResolvedModel("mine", Path("mine"), "mine-hash")
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


def row(source: str) -> TokenRow:
    return TokenRow(source, "", [1, 2, 3, 4], ((1, 4),), 0.5)


def make_rows(directory: Path, tokenizer: Tokenizer, rows: list[TokenRow], **origin: object) -> None:
    settings = {"vocabulary_hash": tokenizer.vocabulary_hash} | origin
    with TokenShards(directory, settings, tokenizer.vocab_size, shard_tokens=1, flush_every_s=0.0) as shards:
        shards.add(rows)


def names(found: Found) -> list[str]:
    return [found.corpus.name(r) for r in range(len(found.corpus))]


def load(chats: Path, tokenizer: Tokenizer, max_tokens: int = 2048, vocab_size: int | None = None) -> tuple[Found, bool]:
    """What was found, and whether it had to be tokenised."""
    cache = chats.parent / "cache"
    before = set(cache.glob("*"))
    size = vocab_size or tokenizer.vocab_size
    found = load_corpus(str(chats), MODEL, tokenizer, size, max_tokens, cache, lambda done, total: None)
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


def test_rows_of_shards_that_teach_nothing_are_left_out(chats: Path, tokenizer: Tokenizer) -> None:
    rows = [TokenRow("a", "", [1, 2, 3], ((1, 3),)), TokenRow("b", "", [1, 2], ((1, 2),)), TokenRow("c", "", [1], ())]
    make_rows(chats.parent / "rows", tokenizer, rows)
    found, _ = load(chats.parent / "rows", tokenizer)
    assert names(found) == ["a"]
    assert found.left_out == {"nothing_to_learn": 2}


def test_captures_of_several_machines_are_added_up(chats: Path, tokenizer: Tokenizer) -> None:
    captures = chats.parent / "captures"
    for n in (2, 0, 1):
        make_rows(captures / f"machine-{n}", tokenizer, [row(f"p{n}"), row(f"q{n}")])
    found, _ = load(captures, tokenizer)
    assert names(found) == ["p0", "q0", "p1", "q1", "p2", "q2"]
    assert found.corpus.num_tokens == 24
    assert found.corpus.row(3) == row("q1")
    assert load(captures / "machine-*", tokenizer)[0].corpus.digest == found.corpus.digest
    assert names(load(captures / "machine-[02]", tokenizer)[0]) == ["p0", "q0", "p2", "q2"]
    assert names(load(captures / "machine-1", tokenizer)[0]) == ["p1", "q1"]


def test_answers_of_another_model_are_refused_though_the_vocabulary_is_the_same(chats: Path, tokenizer: Tokenizer) -> None:
    places = {name: chats.parent / "captures" / name for name in ("mine", "theirs", "read")}
    made = {"temperatures": [0.0], "max_tokens": 4, "seed": 0}
    make_rows(places["mine"], tokenizer, [row("p0")], model="mine", target_fingerprint=MODEL.fingerprint, answers=made)
    make_rows(places["theirs"], tokenizer, [row("p1")], model="theirs", target_fingerprint="their-hash", answers=made)
    make_rows(places["read"], tokenizer, [row("p2")], model="theirs", target_fingerprint="their-hash", answers=None)
    assert names(load(places["mine"], tokenizer)[0]) == ["p0"]
    with pytest.raises(
        ConfigError,
        match=r"theirs are answers of model theirs \(their-hash\), and model\.name is 'mine', which is mine-hash; give",
    ):
        load(places["theirs"], tokenizer)
    with pytest.raises(ConfigError, match="made with another model each"):
        load(chats.parent / "captures" / "[mt]*", tokenizer)
    assert names(load(places["read"], tokenizer)[0]) == ["p2"], "what stood in conversations is nobody's answer"


def test_captures_that_do_not_go_together_are_refused(chats: Path, tokenizer: Tokenizer) -> None:
    captures = chats.parent / "captures"
    make_rows(captures / "a", tokenizer, [row("p0")])
    make_rows(captures / "b", tokenizer, [row("p1"), row("p0")])
    with pytest.raises(ConfigError, match=r"captures/a and .*captures/b both hold a row of the name 'p0'.*whose ids differ"):
        load(captures, tokenizer)
    make_rows(captures / "c", tokenizer, [row("p2")], template_hash="another")
    with pytest.raises(ConfigError, match=r"with another chat template each \(template_hash None and 'another'\)"):
        load(captures / "[ac]", tokenizer)
    (captures / "c").rename(captures.with_name("elsewhere"))
    chats.rename(captures / "chats.jsonl")
    with pytest.raises(ConfigError, match=r"token rows, such as .*/a, and also .*/chats\.jsonl, which has no manifest\.json"):
        load(captures, tokenizer)
    (captures / "chats.jsonl").unlink()
    (captures / "half-copied").mkdir()
    with pytest.raises(ConfigError, match=r"token rows, such as .*/a, and also .*/half-copied, which has no manifest\.json"):
        load(captures, tokenizer)

"""Prompts: cut behind the last question, counted when they cannot be asked, refused when nothing is left."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from runtime.errors import ConfigError
from runtime.models import Tokenizer
from training.data.prompts import load_prompts

QUESTION = {"role": "user", "content": "Why?"}
ANSWER = {"role": "assistant", "content": "Because."}


@pytest.fixture
def tokenizer(tiny) -> Tokenizer:
    return Tokenizer.load(tiny.path)


def write(path: Path, *records: list[dict[str, str]] | dict) -> Path:
    lines = []
    for index, record in enumerate(records):
        form = {"conversations": record} if isinstance(record, list) else record
        lines.append(json.dumps({"id": f"c{index}", **form}))
    path.write_text("\n".join(lines) + "\n\n")
    return path


def test_a_conversation_is_cut_behind_its_last_question(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = write(tmp_path / "prompts", [QUESTION, ANSWER, QUESTION, ANSWER], [QUESTION])
    prompts, left_out = load_prompts([path], tokenizer, tokenizer.vocab_size, 1000)
    assert [prompt.id for prompt in prompts] == ["c0", "c1"]
    assert list(prompts[0].token_ids) == tokenizer.encode_chat([QUESTION, ANSWER, QUESTION])
    assert list(prompts[1].token_ids) == tokenizer.encode_chat([QUESTION])
    assert not left_out


def test_of_several_questions_the_first_is_asked_and_the_others_wait(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = write(tmp_path / "prompts", {"turns": ["Why?", "And then?"], "category": "chat"})
    [prompt], _ = load_prompts([path], tokenizer, tokenizer.vocab_size, 1000)
    assert list(prompt.token_ids) == tokenizer.encode_chat([QUESTION])
    assert (prompt.later, prompt.slice) == (("And then?",), "chat")


def test_what_stands_as_it_is_is_cut_where_the_model_speaks(tmp_path: Path, tokenizer: Tokenizer) -> None:
    text = {"text": "Once upon a time", "spans": [[5, 9]]}
    path = write(
        tmp_path / "prompts", text, {"token_ids": [1, 2, 3, 4], "generated": [[3, 4]]}, {"token_ids": [1], "generated": []}
    )
    prompts, _ = load_prompts([path], tokenizer, tokenizer.vocab_size, 1000)
    whole = tokenizer.encode("Once upon a time")
    assert prompts[0].token_ids == tuple(whole[: len(prompts[0].token_ids)])
    assert 0 < len(prompts[0].token_ids) < len(whole)
    assert [prompt.token_ids for prompt in prompts[1:]] == [(1, 2, 3), (1,)]


def test_tools_are_shown_to_the_target(tmp_path: Path, tokenizer: Tokenizer) -> None:
    template = "{% for tool in tools or [] %}{{ tool.name }} {% endfor %}{% for each in messages %}{{ each.content }}{% endfor %}"
    path = tmp_path / "prompts"
    path.write_text(json.dumps({"conversations": [QUESTION], "tools": [{"name": "search"}]}))
    with pytest.raises(ConfigError, match="1 left out: no place for tools"):
        load_prompts([path], tokenizer, tokenizer.vocab_size, 1000)
    tokenizer._pretrained.chat_template = template
    [prompt], _ = load_prompts([path], tokenizer, tokenizer.vocab_size, 1000)
    assert list(prompt.token_ids) == tokenizer.encode("search Why?")


def test_what_cannot_be_asked_is_counted_with_its_reason(tmp_path: Path, tokenizer: Tokenizer) -> None:
    robot = {"role": "robot", "content": "?"}
    long = {"role": "user", "content": "why " * 100}
    system = {"role": "developer", "content": "Be brief."}  # the tiny model's template takes none
    odd = [[robot, QUESTION], [ANSWER]]
    path = write(tmp_path / "prompts", [QUESTION], [], *odd, [long], [system, QUESTION], {"id": "c0", "turns": ["Again?"]})
    prompts, left_out = load_prompts([path], tokenizer, tokenizer.vocab_size, 60)
    assert [prompt.id for prompt in prompts] == ["c0"]
    assert left_out == {"nothing_asked": 1, "odd_roles": 2, "too_long": 1, "refused_by_template": 1, "duplicate_id": 1}


def test_files_that_leave_nothing_to_ask_are_refused(tmp_path: Path, tokenizer: Tokenizer) -> None:
    with pytest.raises(ConfigError, match=r"leaves nothing to ask \(1 left out: nothing asked\)"):
        load_prompts([write(tmp_path / "prompts", [])], tokenizer, tokenizer.vocab_size, 1000)
    with pytest.raises(ConfigError, match=r"absent', which cannot be read \(.*No such file"):
        load_prompts([tmp_path / "absent"], tokenizer, tokenizer.vocab_size, 1000)

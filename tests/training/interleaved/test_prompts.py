"""Prompts: cut behind the last question, counted when they cannot be asked, refused with the line when malformed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from runtime.errors import ConfigError
from runtime.models import Tokenizer
from training.interleaved.prompts import load_prompts

QUESTION = {"role": "user", "content": "Why?"}
ANSWER = {"role": "assistant", "content": "Because."}


@pytest.fixture
def tokenizer(tiny) -> Tokenizer:
    return Tokenizer.load(tiny.path)


def write(path: Path, *conversations: list[dict[str, str]]) -> Path:
    lines = [json.dumps({"id": f"c{index}", "conversations": messages}) for index, messages in enumerate(conversations)]
    path.write_text("\n".join(lines) + "\n\n")
    return path


def test_a_conversation_is_cut_behind_its_last_question(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = write(tmp_path / "prompts", [QUESTION, ANSWER, QUESTION, ANSWER], [QUESTION])
    prompts, left_out = load_prompts(path, tokenizer, 1000)
    assert [prompt.id for prompt in prompts] == ["c0", "c1"]
    assert list(prompts[0].token_ids) == tokenizer.encode_chat([QUESTION, ANSWER, QUESTION])
    assert list(prompts[1].token_ids) == tokenizer.encode_chat([QUESTION])
    assert not left_out


def test_tools_are_shown_to_the_target(tmp_path: Path, tokenizer: Tokenizer) -> None:
    template = "{% for tool in tools or [] %}{{ tool.name }} {% endfor %}{% for each in messages %}{{ each.content }}{% endfor %}"
    tokenizer._pretrained.chat_template = template
    path = tmp_path / "prompts"
    path.write_text(json.dumps({"conversations": [QUESTION], "tools": [{"name": "search"}]}))
    [prompt], _ = load_prompts(path, tokenizer, 1000)
    assert list(prompt.token_ids) == tokenizer.encode("search Why?")


def test_what_cannot_be_asked_is_counted_with_its_reason(tmp_path: Path, tokenizer: Tokenizer) -> None:
    robot = {"role": "robot", "content": "?"}
    long = {"role": "user", "content": "why " * 100}
    path = write(tmp_path / "prompts", [QUESTION], [ANSWER], [], [robot, QUESTION], [long])
    prompts, left_out = load_prompts(path, tokenizer, 60)
    assert [prompt.id for prompt in prompts] == ["c0"]
    assert left_out == {"nothing_asked": 2, "refused_by_template": 1, "too_long": 1}


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", r"Line 2 of data\.prompts .* it is not JSON"),
        ("[1]", "it has no list `conversations`"),
        ('{"messages": []}', "it has no list `conversations`"),
        ('{"conversations": ["Why?"]}', "it has no list `conversations`"),
        ('{"conversations": [{"role": "user", "content": "\\ud83d"}]}', "it is not JSON of text"),
        ('{"id": "\\ud83d", "conversations": []}', "it is not JSON of text"),
        ('{"conversations": ' + "[" * 100_000, "it is not JSON of text"),
        ('{"conversations": [], "tools": "search"}', "`tools` are no list"),
    ],
)
def test_a_malformed_line_is_named(tmp_path: Path, tokenizer: Tokenizer, line: str, said: str) -> None:
    path = write(tmp_path / "prompts", [QUESTION])
    path.write_text(path.read_text().strip() + f"\n{line}\n")
    with pytest.raises(ConfigError, match=said):
        load_prompts(path, tokenizer, 1000)


def test_a_file_that_leaves_nothing_to_ask_is_refused(tmp_path: Path, tokenizer: Tokenizer) -> None:
    with pytest.raises(ConfigError, match=r"leaves nothing to ask \(nothing_asked 1\)\."):
        load_prompts(write(tmp_path / "prompts", [ANSWER]), tokenizer, 1000)
    with pytest.raises(ConfigError, match=r"absent', which cannot be read \(.*No such file"):
        load_prompts(tmp_path / "absent", tokenizer, 1000)

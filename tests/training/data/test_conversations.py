"""Lines of conversations: four forms, each fault named with its place, nonsense counted."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path

import pytest

from runtime.errors import ConfigError
from training.data.conversations import Conversation, Preformatted, files_of, read

USER = {"role": "user", "content": "Why?"}
SAID = {"role": "assistant", "content": "Because."}
CALL = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
RESULT = {"role": "tool", "content": ""}
SYSTEM = {"role": "system", "content": "Be brief."}


def found(path: Path, *lines: str | dict) -> tuple[list[Conversation | Preformatted], Counter[str]]:
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    left_out: Counter[str] = Counter()
    return list(read("data.corpus", [path], left_out)), left_out


def test_the_four_forms(tmp_path: Path) -> None:
    records, left_out = found(
        tmp_path / "file.jsonl",
        {"id": "a", "conversations": [USER, CALL, RESULT, SAID], "tools": [{"name": "f"}], "category": "code", "source": "x"},
        "",
        {"id": 7, "turns": ["One?", "Two?"]},
        {"text": "abc", "spans": [[0, 1], [1, 3]]},
        {"id": "d", "token_ids": [3, 4, 5], "generated": [[1, 3]], "slice": "s"},
    )
    assert not left_out
    assert [record.id for record in records] == ["a", "7", "4", "d"]
    conversation, turns, text, tokens = records
    assert isinstance(conversation, Conversation)
    assert conversation.messages[1] == {"role": "assistant", "content": "", "tool_calls": CALL["tool_calls"]}
    assert (conversation.slice, conversation.tools) == ("code", ({"name": "f"},))
    assert isinstance(turns, Conversation)
    assert (turns.messages, turns.later) == (({"role": "user", "content": "One?"},), ("Two?",))
    assert text == Preformatted("4", ((0, 1), (1, 3)), text="abc")
    assert tokens == Preformatted("d", ((1, 3),), token_ids=(3, 4, 5), slice="s")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "it is not JSON of text"),
        ('{"conversations": [{"role": "user", "content": "\\ud83d"}]}', "it is not JSON of text"),
        ('{"conversations": ' + "[" * 100_000, "it is not JSON of text"),
        ("[1]", "it is a JSON list, not an object"),
        ('{"messages": []}', "and has none"),
        ('{"turns": ["a"], "text": "b"}', "and has turns and text"),
        ('{"id": true, "turns": ["a"]}', "its id is True"),
        ('{"category": 3, "turns": ["a"]}', "its slice is 3"),
        ('{"turns": []}', "its `turns` are no list of texts"),
        ('{"turns": ["a", 3]}', "its `turns` are no list of texts"),
        ('{"conversations": {"role": "user"}}', "its `conversations` is a dict, not a list"),
        ('{"conversations": ["Why?"]}', "its message 0 is no object with a role"),
        ('{"conversations": [{"role": "user", "content": ["x"]}]}', "the content of its message 0 is a list"),
        ('{"conversations": [{"role": "assistant", "content": "", "tool_calls": "f"}]}', "tool_calls of its message 0"),
        (
            '{"conversations": [{"role": "assistant", "content": "", "reasoning_content": 1}]}',
            "reasoning_content of its message 0",
        ),
        ('{"conversations": [], "tools": "search"}', "`tools` are no list"),
        ('{"text": "abc"}', "it has no list `spans`"),
        ('{"text": 3, "spans": []}', "its `text` is no text"),
        ('{"text": "abc", "spans": [[1, 4]]}', r"\[1, 4\] in its `spans` is no span"),
        ('{"text": "abc", "spans": [[1, 2], [0, 1]]}', r"\[0, 1\] in its `spans` is no span"),
        ('{"token_ids": [1, -1], "generated": []}', "its `token_ids` are no list"),
        ('{"token_ids": [1, true], "generated": []}', "its `token_ids` are no list"),
        ('{"token_ids": [1, 2], "generated": [[1, 1]]}', r"\[1, 1\] in its `generated` is no span"),
    ],
)
def test_a_malformed_line_is_named_by_file_and_number(tmp_path: Path, line: str, said: str) -> None:
    with pytest.raises(ConfigError, match=rf"file\.jsonl:2: a line of data\.corpus cannot be taken: .*{said}"):
        found(tmp_path / "file.jsonl", {"turns": ["fine"]}, line)


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([SYSTEM, USER, SAID, USER, SAID], None),
        ([USER, CALL, RESULT, RESULT, SAID], None),
        ([USER, CALL, USER, SAID], None),
        ([USER, SAID, SAID], "odd_roles"),
        ([USER, USER], "odd_roles"),
        ([SAID], "odd_roles"),
        ([USER, SYSTEM], "odd_roles"),
        ([USER, RESULT], "odd_roles"),
        ([USER, SAID, {"role": "robot", "content": "?"}], "odd_roles"),
        ([USER, {"role": "assistant", "content": " "}], "empty_turn"),
        ([{"role": "user"}, SAID], "empty_turn"),
    ],
)
def test_what_makes_no_sense_is_counted_by_its_reason(tmp_path: Path, messages: list[dict], reason: str | None) -> None:
    records, left_out = found(tmp_path / "file.jsonl", {"id": "a", "conversations": messages}, {"id": "b", "turns": ["Why?"]})
    assert [record.id for record in records] == (["b"] if reason else ["a", "b"])
    assert left_out == ({reason: 1} if reason else {})


def test_of_equal_ids_the_first_counts_across_files(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"id": "a", "turns": [name]}))
    left_out: Counter[str] = Counter()
    [record] = read("data.prompts", files_of("data.prompts", str(tmp_path)), left_out)
    assert isinstance(record, Conversation)
    assert record.messages[0]["content"] == "one"
    assert left_out == {"duplicate_id": 1}


@pytest.mark.parametrize("given", [3, "3"])
@pytest.mark.parametrize("is_first", [True, False])
def test_an_id_that_is_another_lines_number_is_refused_with_both_lines(tmp_path: Path, given: object, is_first: bool) -> None:
    """Either would take the other's place, in this file or in rows that were captured from it."""
    named, unnamed = {"id": given, "turns": ["One?"]}, {"turns": ["Two?"]}
    lines = [named, "", unnamed] if is_first else ["", "", unnamed, named]
    at = 1 if is_first else 4
    with pytest.raises(
        ConfigError, match=rf"file\.jsonl:{at}: .* its id is '3', and .*file\.jsonl:3, which has none, goes by that number; give"
    ):
        found(tmp_path / "file.jsonl", *lines)
    records, _ = found(tmp_path / "file.jsonl", named, unnamed, {"id": "a", "turns": ["Three?"]})
    assert [record.id for record in records] == ["3", "2", "a"], "numbers that nobody has for an id disturb nobody"


def test_an_id_that_is_a_line_of_another_file_is_refused_too(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"turns": ["One?"]}))
    (tmp_path / "b.jsonl").write_text(json.dumps({"id": "a.jsonl:1", "turns": ["Two?"]}))
    with pytest.raises(ConfigError, match=r"b\.jsonl:1: .* its id is 'a\.jsonl:1', and .*a\.jsonl:1, which has none"):
        list(read("data.prompts", files_of("data.prompts", str(tmp_path)), Counter()))


def test_long_reading_says_how_far_it_is(tmp_path: Path) -> None:
    (tmp_path / "many.jsonl").write_text("\n".join(json.dumps({"turns": ["Why?"]}) for _ in range(600)))
    told: list[tuple[int, int]] = []
    records = read("data.corpus", [tmp_path / "many.jsonl"], Counter(), lambda done, total: told.append((done, total)))
    assert len(list(records)) == 600
    assert told == [(256, 600), (512, 600)]


def test_files_are_a_file_a_directory_or_a_pattern(tmp_path: Path) -> None:
    for name in ("b.jsonl", "a.jsonl", "c.txt"):
        (tmp_path / name).write_text("{}")
    names = {given: [path.name for path in files_of("data.prompts", str(tmp_path / given))] for given in ("c.txt", "", "?.jsonl")}
    assert names == {"c.txt": ["c.txt"], "": ["a.jsonl", "b.jsonl"], "?.jsonl": ["a.jsonl", "b.jsonl"]}
    with pytest.raises(ConfigError, match=r"data\.prompts is '.*x\*', and no file is there"):
        files_of("data.prompts", str(tmp_path / "x*"))


def test_lines_without_id_of_several_files_are_different_ones(tmp_path: Path) -> None:
    for name in ("a/x.jsonl", "b/x.jsonl"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text("\n".join(json.dumps({"turns": [f"{name} {n}"]}) for n in range(2)))
    left_out: Counter[str] = Counter()
    records = list(read("data.corpus", files_of("data.corpus", str(tmp_path / "*" / "x.jsonl")), left_out))
    assert [record.id for record in records] == ["a/x.jsonl:1", "a/x.jsonl:2", "b/x.jsonl:1", "b/x.jsonl:2"]
    assert not left_out


def test_a_pipe_is_refused_and_nobody_waits_for_it(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.jsonl")
    for given in ("pipe.jsonl", ""):
        with pytest.raises(ConfigError, match=r"pipe\.jsonl', which cannot be read \(it is no regular file\)"):
            files_of("data.corpus", str(tmp_path / given))
    with pytest.raises(ConfigError, match=r"which cannot be read \(it is not there\)"):
        files_of("data.corpus", str(tmp_path / "absent.jsonl"))


def test_a_file_whose_name_is_no_text_is_refused(tmp_path: Path) -> None:
    """Its lines could go by no name that a manifest can hold."""
    (tmp_path / os.fsdecode(b"\xff.jsonl")).write_text(json.dumps({"turns": ["Why?"]}))
    with pytest.raises(ConfigError, match=r"udcff\.jsonl', and that is no text in UTF-8; give the file another name"):
        files_of("data.prompts", str(tmp_path))


def test_files_of_other_systems_are_read(tmp_path: Path) -> None:
    line = json.dumps({"turns": ["One?"]})
    (tmp_path / "file.jsonl").write_bytes(b"\xef\xbb\xbf" + f"{line}\r\n{line}\r\n".encode())
    assert [record.id for record in read("data.corpus", [tmp_path / "file.jsonl"], Counter())] == ["1", "2"]

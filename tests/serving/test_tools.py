"""Tools: what the grammar lets a model say, and what the parser makes of it, however the text is cut."""

from __future__ import annotations

import itertools
import json
import random

import pytest

from runtime.models import Tokenizer, resolve
from runtime.speculation.grammar import Grammars
from serving.tools import CallParser, Delta, Function, explained, grammar_of

WEATHER = Function("weather", "of a city", {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]})
CLOCK = Function("clock")
ROME = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
TIME = '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(resolve("tiny").path)


@pytest.fixture(scope="module")
def grammars(tokenizer: Tokenizer) -> Grammars:
    return Grammars(tokenizer, tokenizer.vocab_size)


@pytest.mark.parametrize(
    ("choice", "parallel", "text", "is_whole"),
    [
        ("auto", True, "Good morning.", True),
        ("auto", True, "I look.\n" + ROME, True),
        ("auto", True, f"{ROME}\n{TIME}", True),
        ("auto", False, f"{ROME}\n{TIME}", False),
        ("auto", True, "<tool_call>\nsomething else", False),
        ("auto", True, ROME + " and more", False),
        ("required", True, ROME, True),
        ("required", True, TIME, True),
        ("required", True, "Good morning.", False),
        ("clock", True, TIME, True),
        ("clock", True, ROME, False),
        ("required", True, ROME.replace("Rome", "Rome\\"), False),
        ("required", True, ROME.replace('"Rome"', "7"), False),
    ],
)
def test_the_grammar(grammars: Grammars, tokenizer: Tokenizer, choice: str, parallel: bool, text: str, is_whole: bool) -> None:
    state = grammars.new_state(grammar_of([WEATHER, CLOCK], choice, parallel=parallel))
    mask = state.allowed(tokenizer.encode(text))
    may_end = mask is not None and bool(mask[list(tokenizer.eos_token_ids)].all())
    assert may_end is is_whole


def test_with_a_format_text_without_calls_follows_it(grammars: Grammars, tokenizer: Tokenizer) -> None:
    state = grammars.new_state(grammar_of([CLOCK], "auto", parallel=True, text={"type": "boolean"}))
    for text, is_whole in (("true", True), (TIME, True), ("maybe", False)):
        mask = state.allowed(tokenizer.encode(text))
        assert (mask is not None and bool(mask[list(tokenizer.eos_token_ids)].all())) is is_whole


def pieces(text: str, seed: int) -> list[str]:
    cut, places = random.Random(seed), [0]
    while places[-1] < len(text):
        places.append(min(places[-1] + cut.choice([1, 1, 2, 3, 7, 40]), len(text)))
    return [text[start:end] for start, end in itertools.pairwise(places)]


def parsed(parts: list[str]) -> tuple[str, list[tuple[str, str]]]:
    """Content and calls, put together again as a client does."""
    parser = CallParser()
    deltas: list[Delta] = [delta for part in parts for delta in parser.push(part)] + parser.flush()
    calls: list[list[str]] = []
    for delta in deltas:
        if delta.id is not None:
            assert delta.index == len(calls)
            calls.append([str(delta.name), ""])
        if delta.arguments:
            assert delta.index == len(calls) - 1
            calls[-1][1] += delta.arguments
    return "".join(delta.content for delta in deltas), [(name, arguments) for name, arguments in calls]


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("plain < text <tool", "plain < text <tool", []),
        (f"I look.\n{ROME}", "I look.\n", [("weather", {"city": "Rome"})]),
        (f"{ROME}\n{TIME}", "", [("weather", {"city": "Rome"}), ("clock", {})]),
        (
            ROME.replace("Rome", 'a \\"}</tool_call> \\\\ [').replace("weather", "w"),
            "",
            [("w", {"city": 'a "}</tool_call> \\ ['})],
        ),
    ],
)
def test_however_the_text_is_cut(text: str, content: str, calls: list[tuple[str, object]], seed: int) -> None:
    got_content, got_calls = parsed(pieces(text, seed))
    assert got_content == content
    assert [(name, json.loads(arguments)) for name, arguments in got_calls] == calls


def test_arguments_leave_as_they_come() -> None:
    parser = CallParser()
    parser.push('<tool_call>\n{"name": "w", "arguments": ')
    assert parser.push('{"city": "Ro') == [Delta(index=0, arguments='{"city": "Ro')]
    assert parser.push('me"}}') == [Delta(index=0, arguments='me"}')]


def test_an_unfinished_call_stays_unfinished() -> None:
    assert parsed(['<tool_call>\n{"name": "w", "arguments": {"city": "Ro']) == ("", [("w", '{"city": "Ro')])
    assert parsed(['<tool_call>\n{"name": "w"']) == ("", [])


@pytest.mark.parametrize("cut", ["", "<", "<tool", f"{ROME}\n<tool_call"])
def test_a_call_that_is_cut_where_it_begins_is_no_text_where_only_calls_may_be(cut: str) -> None:
    parser = CallParser(is_free=False)
    assert not any(delta.content for delta in parser.push(cut) + parser.flush())
    assert parser.has_whole_calls == (ROME in cut)
    assert parsed([ROME, "\n<tool"]) == ("", [("weather", '{"city": "Rome"}')]), "behind a call there are calls alone"


def test_an_answer_that_is_cut_within_keeps_its_end_also_where_calls_might_have_come() -> None:
    parser = CallParser(is_free=False)
    deltas = [*parser.push('{"sign": "'), *parser.push("<"), *parser.flush()]
    assert "".join(delta.content for delta in deltas) == '{"sign": "<'


@pytest.mark.parametrize(
    ("text", "is_whole"), [("", False), (ROME[:-40], False), (ROME[:-14], True), (f"{ROME}\n<tool_call>", True)]
)
def test_calls_are_whole_when_their_arguments_end(text: str, is_whole: bool) -> None:
    parser = CallParser()
    parser.push(text)
    assert parser.has_whole_calls == is_whole


def test_a_template_without_tools_is_told_in_words() -> None:
    calls = [{"function": {"name": "clock", "arguments": {}}}]
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "content": "12:00", "tool_call_id": "call_1"},
        {"role": "tool", "content": "13:00", "tool_call_id": "call_2"},
        {"role": "user", "content": "Thanks."},
    ]
    system, assistant, *rest = explained(messages, [WEATHER])
    assert system["content"].startswith("Be brief.\n\n")
    assert '"name": "weather"' in system["content"]
    assert assistant == {"role": "assistant", "content": TIME}
    results = "<tool_response>\n12:00\n</tool_response>\n<tool_response>\n13:00\n</tool_response>"
    assert rest == [{"role": "user", "content": results}, {"role": "user", "content": "Thanks."}]
    assert [message["role"] for message in explained(messages[1:], [WEATHER])] == ["system", "assistant", "user", "user"]
    assert explained(messages[4:], []) == messages[4:]

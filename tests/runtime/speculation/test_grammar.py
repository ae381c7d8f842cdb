"""Grammars: masks at every place of a draft, what is taken back, what is refused."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence

import pytest
import torch

from runtime.errors import InvalidRequest
from runtime.models import Tokenizer, resolve
from runtime.speculation.grammar import MAX_GRAMMAR_CHARS, MAX_KEPT, Grammars, GrammarState
from runtime.types import Grammar

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
OBJECT = Grammar("json_schema", json.dumps(SCHEMA))


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(resolve("tiny").path)


@pytest.fixture(scope="module")
def grammars(tokenizer: Tokenizer) -> Grammars:
    return Grammars(tokenizer, vocab_size=tokenizer.vocab_size + 5)  # a model may have more rows than its tokenizer has tokens


def texts(state: GrammarState, tokenizer: Tokenizer, path: Sequence[int] = ()) -> set[str]:
    mask = state.allowed(path)
    assert mask is not None
    return {tokenizer.decode([token_id]) for token_id in mask.nonzero().flatten().tolist()}


def follow(state: GrammarState, token_ids: Sequence[int]) -> None:
    for token_id in token_ids:
        assert state.allowed() is not None
        state.advance(token_id)


def test_every_place_of_a_draft_has_a_mask_of_its_own(grammars: Grammars, tokenizer: Tokenizer) -> None:
    state = grammars.new_state(OBJECT)
    draft = tokenizer.encode('{"a": 1')
    assert texts(state, tokenizer) == {"{"}
    assert texts(state, tokenizer, draft[:2]) == {"a"}
    assert texts(state, tokenizer, draft) == {*"0123456789", "}"}


def test_a_draft_that_was_tried_is_taken_back(grammars: Grammars, tokenizer: Tokenizer) -> None:
    state = grammars.new_state(OBJECT)
    before = state.allowed()
    for end in range(1, 7):
        state.allowed(tokenizer.encode('{"a": 1')[:end])
    after = state.allowed()
    assert before is not None
    assert after is not None
    assert torch.equal(before, after)


def test_behind_a_draft_that_leaves_the_grammar_nothing_matters(grammars: Grammars, tokenizer: Tokenizer) -> None:
    state = grammars.new_state(OBJECT)
    assert state.allowed(tokenizer.encode('{"b')) is None
    assert texts(state, tokenizer) == {"{"}


def test_a_complete_text_may_only_end(grammars: Grammars, tokenizer: Tokenizer) -> None:
    state = grammars.new_state(OBJECT)
    for token_id in tokenizer.encode('{"a": 12}'):
        assert not state.is_complete
        state.advance(token_id)
    assert state.is_complete
    mask = state.allowed()
    assert mask is not None
    assert mask.nonzero().flatten().tolist() == list(tokenizer.eos_token_ids)
    state.advance(tokenizer.eos_token_ids[0])
    assert state.is_complete
    assert state.allowed([tokenizer.eos_token_ids[0]]) is None


def test_keeping_a_token_that_is_not_allowed_is_an_error(grammars: Grammars, tokenizer: Tokenizer) -> None:
    with pytest.raises(ValueError, match="does not continue this grammar"):
        grammars.new_state(OBJECT).advance(tokenizer.encode("x")[0])


def test_states_of_one_grammar_do_not_touch_each_other(grammars: Grammars, tokenizer: Tokenizer) -> None:
    first, second = grammars.new_state(OBJECT), grammars.new_state(OBJECT)
    first.advance(tokenizer.encode("{")[0])
    assert texts(second, tokenizer) == {"{"}


def test_ids_without_a_token_are_never_allowed(grammars: Grammars, tokenizer: Tokenizer) -> None:
    state = grammars.new_state(Grammar("lark", r"start: /(.|\n)*/"))
    mask = state.allowed()
    assert mask is not None
    assert mask.shape == (tokenizer.vocab_size + 5,)
    assert not mask[tokenizer.vocab_size :].any()


@pytest.mark.parametrize(
    ("kind", "text", "said"),
    [
        ("json_schema", '{"type": "array", "uniqueItems": true}', "uniqueItems"),
        ("json_schema", '{"not": {"type": "string"}}', "not"),
        ("json_schema", '{"not": {"type": "string"}, "x-guidance": {"lenient": true}}', "not"),
        ("json_schema", '{"type": "strin"}', "strin"),
        ("json_schema", '{"$ref": "http://example.com/x"}', "example.com"),
        ("json_schema", '{"type": "string", "pattern": "(?=a)b"}', "regex"),
        ("json_schema", "{", "not valid JSON"),
        ("json_schema", "[" * 100_000, "not valid JSON"),
        ("json_schema", "[]", "not list"),
        ("json_schema", "false", "allows no text"),
        ("json_schema", '"' + "x" * MAX_GRAMMAR_CHARS + '"', str(MAX_GRAMMAR_CHARS)),
        ("lark", "start: nowhere", "nowhere"),
        ("lark", "start: start", "NoExtensionBias"),
    ],
)
def test_what_cannot_be_enforced_is_refused(grammars: Grammars, kind: str, text: str, said: str) -> None:
    with pytest.raises(InvalidRequest, match=said) as caught:
        grammars.new_state(Grammar(kind, text))  # type: ignore[arg-type]
    assert caught.value.param == "grammar"


def test_the_schema_true_allows_what_the_empty_one_does(grammars: Grammars, tokenizer: Tokenizer) -> None:
    always, empty = (grammars.new_state(Grammar("json_schema", text)) for text in ("true", "{}"))
    assert texts(always, tokenizer) == texts(empty, tokenizer)
    assert "{" in texts(always, tokenizer)


def test_nobody_waits_for_the_grammar_of_another(grammars: Grammars) -> None:
    kept = Grammar("lark", 'start: "a"')
    grammars.new_state(kept)
    properties = {f"{number:020x}": {"type": "string"} for number in range(3000)}
    large = Grammar("json_schema", json.dumps({"type": "object", "properties": properties}))
    compiling = threading.Thread(target=grammars.new_state, args=(large,))
    compiling.start()
    num_asked = 0
    while compiling.is_alive():
        grammars.new_state(kept)
        num_asked += 1
    assert num_asked > 10


def test_compiled_grammars_are_kept_up_to_a_number(grammars: Grammars) -> None:
    for index in range(MAX_KEPT + 3):
        grammars.new_state(Grammar("lark", f'start: "{index}"'))
    assert len(grammars._kept) == MAX_KEPT


# Each compiles, and its engine gives up on it once a text is under way.
TOO_COMPLEX = {
    "expressions": ({"type": "string", "pattern": "^(a?){500}a{500}$"}, '"aaa'),
    "items of a row": ({"type": "object", "properties": {f"p{index}": {} for index in range(2000)}}, '{"p'),
    "items of a step": (
        {"$defs": {"n": {"type": "array", "items": {"$ref": "#/$defs/n"}, "minItems": 1}}, "$ref": "#/$defs/n"},
        "[[[",
    ),
}


@pytest.mark.parametrize("name", TOO_COMPLEX)
def test_a_grammar_that_turns_out_too_complex_says_so(grammars: Grammars, tokenizer: Tokenizer, name: str) -> None:
    schema, begin = TOO_COMPLEX[name]
    state = grammars.new_state(Grammar("json_schema", json.dumps(schema)))
    with pytest.raises(InvalidRequest, match="too complex to be followed"):
        follow(state, tokenizer.encode(begin))
    assert not state.is_complete
    with pytest.raises(InvalidRequest, match="too complex to be followed"):
        state.allowed()


@pytest.mark.parametrize("name", ["expressions", "items of a row"])
def test_a_draft_that_its_grammar_cannot_follow_is_not_taken_for_a_wrong_one(
    grammars: Grammars, tokenizer: Tokenizer, name: str
) -> None:
    schema, begin = TOO_COMPLEX[name]
    state = grammars.new_state(Grammar("json_schema", json.dumps(schema)))
    with pytest.raises(InvalidRequest, match="too complex to be followed"):
        state.allowed(tokenizer.encode(begin))


def test_a_schema_of_more_levels_than_the_engine_reads_is_refused(grammars: Grammars) -> None:
    schema: dict[str, object] = {"type": "integer"}
    for _ in range(300):
        schema = {"type": "array", "items": schema}
    with pytest.raises(InvalidRequest, match="cannot be enforced: recursion limit"):
        grammars.new_state(Grammar("json_schema", json.dumps(schema)))


def test_a_pattern_is_refused_with_its_reason(grammars: Grammars) -> None:
    with pytest.raises(InvalidRequest, match="look-around"):
        grammars.new_state(Grammar("json_schema", json.dumps({"type": "string", "pattern": "^(?!a).*$"})))


def test_a_grammar_in_use_is_not_compiled_again(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    grammars = Grammars(tokenizer, tokenizer.vocab_size)
    held = grammars.new_state(OBJECT)
    for number in range(MAX_KEPT + 1):
        grammars.new_state(Grammar("json_schema", json.dumps({"const": number})))
    monkeypatch.setattr(grammars, "_compile", lambda grammar: pytest.fail("compiled again"))
    assert texts(grammars.new_state(OBJECT), tokenizer) == texts(held, tokenizer)

"""Grammars through the engine: whatever is drafted, the answer is one that the grammar takes, and the one without drafts."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from runtime.drafters.none import NoDrafter
from runtime.drafters.scripted import ScriptedDrafter
from runtime.errors import InvalidRequest
from runtime.models import Tokenizer
from runtime.types import Grammar, SamplingParams, SessionOptions

from .conftest import Listener, MakeEngine, run

SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["ann", "bob"]}, "ages": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3}},
    "required": ["name", "ages"],
    "additionalProperties": False,
}
GRAMMAR = Grammar("json_schema", json.dumps(SCHEMA))
PROMPT = [65, 66, 67, 68]
GREEDY = SamplingParams(temperature=0.0, max_tokens=120, grammar=GRAMMAR)


def drafter_of(kind: str, answer: list[int]) -> NoDrafter | ScriptedDrafter:
    full = [*PROMPT, *answer]
    scripts: dict[str, Callable[[int, int], list[int]]] = {
        "perfect": lambda length, depth: full[length : length + depth],
        "outside the grammar": lambda length, depth: [*full[length : length + 1], *[88] * (depth - 1)],
        "random": lambda length, depth: [(length * 7 + k * 31) % 256 for k in range(depth)],
    }
    script = scripts[kind]
    return ScriptedDrafter(lambda history, depth: script(len(history), depth))


@pytest.mark.parametrize("kind", ["perfect", "outside the grammar", "random"])
@pytest.mark.parametrize("more", [{}, {"repetition_penalty": 1.3, "logit_bias": {34: 2.0}}])
def test_greedy_is_the_same_with_drafts(make_engine: MakeEngine, kind: str, more: dict[str, float]) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=120, grammar=GRAMMAR, **more)  # type: ignore[arg-type]
    plain, done = run(make_engine(), PROMPT, params)
    assert done.finish_reason == "stop"
    answer = json.loads(plain.text)
    assert answer["name"] in ("ann", "bob")
    assert len(answer["ages"]) <= 3
    speculative, done = run(make_engine(drafter_of(kind, plain.token_ids)), PROMPT, params)
    assert speculative.token_ids == plain.token_ids
    assert speculative.text == plain.text
    assert done.finish_reason == "stop"
    if kind != "random":
        assert done.speculation.num_accepted > 0


@pytest.mark.parametrize("seed", range(6))
def test_sampled_answers_parse(make_engine: MakeEngine, seed: int) -> None:
    params = SamplingParams(temperature=1.5, max_tokens=120, grammar=GRAMMAR, seed=seed, top_p=0.9)
    listener, done = run(make_engine(drafter_of("random", [])), PROMPT, params)
    assert done.finish_reason == "stop"
    assert set(json.loads(listener.text)) == {"name", "ages"}


def test_rows_with_and_without_a_grammar_share_steps(make_engine: MakeEngine) -> None:
    engine = make_engine(drafter_of("random", []))
    alone, _ = run(engine, PROMPT, GREEDY)
    listeners = [Listener() for _ in range(4)]
    for index, listener in enumerate(listeners):
        session = engine.create_session().session_id
        engine.append(session, PROMPT)
        params = GREEDY if index % 2 else SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
        engine.generate(session, params, on_event=listener)
    for listener in listeners:
        listener.wait()
    assert listeners[1].token_ids == listeners[3].token_ids == alone.token_ids


def test_a_second_turn_starts_the_grammar_anew(make_engine: MakeEngine) -> None:
    engine = make_engine()
    session = engine.create_session().session_id
    for _ in range(2):
        listener, _ = run(engine, PROMPT, GREEDY, session)
        json.loads(listener.text)


def test_max_tokens_still_ends_the_turn(make_engine: MakeEngine) -> None:
    listener, done = run(make_engine(), PROMPT, SamplingParams(temperature=0.0, max_tokens=5, grammar=GRAMMAR))
    assert done.finish_reason == "length"
    assert len(listener.token_ids) == 5
    assert listener.text.startswith("{")


def test_what_cannot_be_met_is_refused_before_anything_changes(make_engine: MakeEngine, tokenizer: Tokenizer) -> None:
    engine = make_engine()
    plain = engine.create_session().session_id
    other_eos = engine.create_session(SessionOptions(eos_token_ids=(7,))).session_id
    refused = {
        plain: SamplingParams(grammar=Grammar("json_schema", '{"not": {}}')),
        other_eos: SamplingParams(grammar=GRAMMAR),
    }
    for session, params in refused.items():
        engine.append(session, PROMPT)
        with pytest.raises(InvalidRequest) as caught:
            engine.generate(session, params, on_event=Listener())
        assert caught.value.param == "grammar"
        assert engine.get_session(session).state == "idle"
    with pytest.raises(InvalidRequest):
        engine.generate(plain, SamplingParams(grammar=GRAMMAR, ignore_eos=True), on_event=Listener())

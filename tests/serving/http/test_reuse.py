"""A growing conversation over HTTP computes only what is new, with and without speculation, and its answers do not change."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from openai import OpenAI

from runtime.config import SessionsConfig

from ..conftest import StartServer

MODEL: dict[str, Any] = {"model": "tiny", "temperature": 0, "max_tokens": 24}


def turns(openai: OpenAI, first: str, num_turns: int, speculate: bool) -> list[tuple[str, int, int]]:
    """(answer, prompt tokens, cached tokens) of each turn."""
    messages: list[Any] = [{"role": "user", "content": first}]
    seen = []
    for turn in range(num_turns):
        body = {"ignore_eos": True, "speculation": {"enabled": speculate}}
        answer = openai.chat.completions.create(messages=messages, extra_body=body, **MODEL)
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        text = answer.choices[0].message.content or ""
        seen.append((text, answer.usage.prompt_tokens, answer.usage.prompt_tokens_details.cached_tokens or 0))
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": f"And turn {turn}?"}]
    return seen


@pytest.mark.parametrize("speculate", [True, False])
def test_a_growing_conversation_is_continued(start_server: StartServer, speculate: bool) -> None:
    with start_server().openai() as openai:
        seen = turns(openai, "Tell me of the sea, at length and in detail, as one who has been there.", 4, speculate)
    for (_, before, _), (_, _, cached) in itertools.pairwise(seen):
        assert cached >= before, "the earlier prompt is all cached"


def test_speculation_changes_no_cached_count(start_server: StartServer) -> None:
    counts = []
    for speculate in (True, False):
        with start_server().openai() as openai:
            counts.append([(prompt, cached) for _, prompt, cached in turns(openai, "Tell me of the sea.", 4, speculate)])
    assert counts[0] == counts[1]


def test_reuse_changes_no_answer(start_server: StartServer) -> None:
    answers = []
    for reuse in (True, False):
        with start_server(sessions=SessionsConfig(prefix_reuse=reuse)).openai() as openai:
            answers.append([text for text, _, _ in turns(openai, "Tell me of the sea.", 3, True)])
    assert answers[0] == answers[1]


def test_what_may_not_be_stored_shares_no_session(start_server: StartServer) -> None:
    running = start_server()
    with running.openai() as openai:
        for store in (True, False, True, False):
            openai.chat.completions.create(messages=[{"role": "user", "content": "Once more, the sea."}], store=store, **MODEL)
    captures = [session.options.capture.value for session in running.parts.engine.list_sessions()]
    assert sorted(captures) == ["off", "off", "on", "on"]

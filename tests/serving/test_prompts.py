"""Prompts: what cannot fit is refused before it costs anything; the rest is the tokenizer's."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from runtime.errors import ContextLengthExceeded
from runtime.models import Tokenizer, resolve
from serving.prompts import Prompts

CONTEXT = 64


@pytest.fixture
def tokenizer() -> Tokenizer:
    return Tokenizer.load(Path(resolve("tiny").path))


def chat(*contents: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": content} for content in contents]


def test_what_may_fit_is_tokenised(tokenizer: Tokenizer) -> None:
    prompts = Prompts(tokenizer, CONTEXT)
    assert asyncio.run(prompts.of("a river")) == tokenizer.encode("a river")
    assert asyncio.run(prompts.of([1, 2, 3])) == [1, 2, 3]
    assert asyncio.run(prompts.of_chat(chat("Hi", "there"))) == tokenizer.encode_chat(chat("Hi", "there"))
    beyond = "a" * (CONTEXT + 1)  # too long as it happens, but not whatever its tokens are: for the engine to say
    assert len(asyncio.run(prompts.of(beyond))) == len(beyond)


@pytest.mark.parametrize(
    "of", [lambda p: p.of("a" * 2000), lambda p: p.of_chat(chat("a" * 1000, "b" * 1000)), lambda p: p.of_chat(chat(*[""] * 64))]
)
def test_what_cannot_fit_is_refused_before_it_is_tokenised(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, of: Any
) -> None:
    def never(*_: Any) -> list[int]:
        raise AssertionError("it was tokenised")

    for name in ("encode", "encode_chat"):
        monkeypatch.setattr(Tokenizer, name, never)
    with pytest.raises(ContextLengthExceeded, match=f"the context holds {CONTEXT}"):
        asyncio.run(of(Prompts(tokenizer, CONTEXT)))

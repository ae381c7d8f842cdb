"""A tokenizer of texts of numbers, whose template one can see through."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from runtime.errors import InvalidRequest

ASKS, ANSWERS = [5, 6], [7]  # ids in front of a question, and of an answer


class Numerals:
    """goes_on: its template continues the ids before; else it leaves out what was said."""

    def __init__(self, goes_on: bool = True) -> None:
        self._goes_on = goes_on

    def decode(self, token_ids: Sequence[int]) -> str:
        return " ".join(map(str, token_ids))

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()) -> list[int]:
        ids: list[int] = []
        for message in messages:
            if message["content"] == "refused":
                raise InvalidRequest("messages", "No such question.")
            is_question = message["role"] == "user"
            said = [int(word) for word in message["content"].replace(".", "0").split()]
            ids += ASKS * is_question + said * (is_question or self._goes_on) + ANSWERS * is_question
        return ids

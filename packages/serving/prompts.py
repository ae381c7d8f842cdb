"""Text to the token ids of a prompt, for both surfaces, off the event loop.

Text that is too long for the context whatever its tokens are is refused before it is tokenised: that takes seconds and
gigabytes for a few megabytes of text.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from runtime.errors import ContextLengthExceeded
from runtime.models.tokenizer import Tokenizer
from serving.tools import Function, explained


class Prompts:
    def __init__(self, tokenizer: Tokenizer, max_positions: int) -> None:
        self._tokenizer = tokenizer
        self._max_positions = max_positions

    async def of(self, prompt: str | list[int]) -> list[int]:
        """The ids of a text as it stands; ids are taken as they are."""
        if not isinstance(prompt, str):
            return prompt
        self._check_length(self._tokenizer.min_tokens(len(prompt)))
        return await asyncio.to_thread(self._tokenizer.encode, prompt)

    async def of_chat(self, messages: Sequence[Mapping[str, Any]], functions: Sequence[Function] = ()) -> list[int]:
        """The ids of a conversation, its last turn open for the assistant, who is told of the functions that he may call."""
        tools = [function.declaration() for function in functions]
        if not self._tokenizer.knows_tools:
            messages, tools = explained(messages, functions), []
        num_chars = sum(len(message["content"]) for message in messages)
        self._check_length(max(self._tokenizer.min_tokens(num_chars), len(messages)))  # a message has a token at the least
        return await asyncio.to_thread(self._tokenizer.encode_chat, messages, tools)

    def _check_length(self, num_tokens: int) -> None:
        if num_tokens >= self._max_positions:
            raise ContextLengthExceeded(
                "token_ids",
                f"The text has at least {num_tokens} tokens; the context holds {self._max_positions}, one of them to generate. "
                "Send less.",
            )

"""What the OpenAI endpoints answer: whole objects and stream chunks, of chats and of plain completions. Pure data.

Our own block `speculation` is on a whole answer, and on the last chunk of a stream.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Protocol

from runtime.types import Done, Started, TokenLogprob
from serving.http.token_bytes import TokenBytes

Json = dict[str, Any]


class Answer(Protocol):
    """One answer of one endpoint. The same object shapes it whole or chunk by chunk."""

    def first(self) -> list[Json]:
        """Chunks before the first token."""
        ...

    def delta(self, text: str, logprobs: Sequence[TokenLogprob]) -> Json: ...

    def end(self, done: Done) -> list[Json]:
        """The chunk with the finish reason, and the one with the usage if it was asked for."""
        ...

    def whole(self, text: str, logprobs: Sequence[TokenLogprob], done: Done) -> Json: ...


def usage(done: Done) -> Json:
    counts = done.usage
    return {
        "prompt_tokens": counts.prompt_tokens,
        "completion_tokens": counts.completion_tokens,
        "total_tokens": counts.prompt_tokens + counts.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": counts.cached_tokens},
    }


def speculation(done: Done, started: Started) -> Json:
    """`histogram[k]`: steps whose k-th draft token was accepted, k from 0."""
    stats = done.speculation
    return {
        "steps": stats.num_steps,
        "drafted": stats.num_drafted,
        "accepted": stats.num_accepted,
        "mean_acceptance_length": stats.mean_acceptance_length,
        "histogram": list(stats.accepted_per_position),
        "drafter_version": done.drafter_versions[-1] if done.drafter_versions else started.drafter_version,
    }


class _Base:
    """The head that every object of one answer shares."""

    def __init__(self, started: Started, prefix: str, kind: str, chunk_kind: str, model: str, includes_usage: bool) -> None:
        self._started = started
        self._kind, self._chunk_kind = kind, chunk_kind
        self._includes_usage = includes_usage
        self._head = {
            "id": f"{prefix}-{started.request_id}",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": f"fp_{started.target_fingerprint[:8]}_{started.drafter_version[:8]}",
        }

    def _chunk(self, choices: list[Json], **more: Any) -> Json:
        chunk = {**self._head, "object": self._chunk_kind, "choices": choices}
        if self._includes_usage:
            chunk["usage"] = None
        return chunk | more

    def _end(self, choice: Json, done: Done) -> list[Json]:
        own = {"speculation": speculation(done, self._started)}
        if not self._includes_usage:
            return [self._chunk([choice], **own)]
        return [self._chunk([choice]), self._chunk([], usage=usage(done), **own)]

    def _whole(self, choice: Json, done: Done) -> Json:
        own = {"usage": usage(done), "speculation": speculation(done, self._started)}
        return {**self._head, "object": self._kind, "choices": [choice], **own}


class ChatAnswer(_Base):
    def __init__(self, started: Started, model: str, includes_usage: bool, tokens: TokenBytes | None) -> None:
        """tokens: to show logprobs with; None when they were not asked for."""
        super().__init__(started, "chatcmpl", "chat.completion", "chat.completion.chunk", model, includes_usage)
        self._tokens = tokens

    def first(self) -> list[Json]:
        return [self._chunk([_choice(delta={"role": "assistant", "content": ""})])]

    def delta(self, text: str, logprobs: Sequence[TokenLogprob]) -> Json:
        return self._chunk([_choice(delta={"content": text}, logprobs=self._logprobs(logprobs))])

    def end(self, done: Done) -> list[Json]:
        return self._end(_choice(delta={}, finish_reason=done.finish_reason), done)

    def whole(self, text: str, logprobs: Sequence[TokenLogprob], done: Done) -> Json:
        message = {"role": "assistant", "content": text, "refusal": None}
        return self._whole(_choice(message=message, logprobs=self._logprobs(logprobs), finish_reason=done.finish_reason), done)

    def _logprobs(self, logprobs: Sequence[TokenLogprob]) -> Json | None:
        if self._tokens is None:
            return None
        entry = self._tokens.entry
        content = [
            entry(one.token_id, one.logprob) | {"top_logprobs": [entry(token_id, logprob) for token_id, logprob in one.top]}
            for one in logprobs
        ]
        return {"content": content, "refusal": None}


class CompletionAnswer(_Base):
    def __init__(self, started: Started, model: str, includes_usage: bool) -> None:
        super().__init__(started, "cmpl", "text_completion", "text_completion", model, includes_usage)

    def first(self) -> list[Json]:
        return []

    def delta(self, text: str, logprobs: Sequence[TokenLogprob]) -> Json:
        return self._chunk([_choice(text=text)])

    def end(self, done: Done) -> list[Json]:
        return self._end(_choice(text="", finish_reason=done.finish_reason), done)

    def whole(self, text: str, logprobs: Sequence[TokenLogprob], done: Done) -> Json:
        return self._whole(_choice(text=text, finish_reason=done.finish_reason), done)


def _choice(logprobs: Json | None = None, finish_reason: str | None = None, **content: Any) -> Json:
    return {"index": 0, **content, "logprobs": logprobs, "finish_reason": finish_reason}

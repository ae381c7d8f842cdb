"""What the OpenAI endpoints answer: whole objects and stream chunks, of chats and of plain completions. Pure data.

An `Answer` is the envelope and sums up; a `Shape` writes one of its choices. Our own block `speculation` is on a whole answer,
and on the last chunk of a stream.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Protocol

from runtime.types import Done, SpeculationStats, Started, TokenLogprob
from serving.http.token_bytes import TokenBytes
from serving.tools import CallParser, Delta

Json = dict[str, Any]
Logprobs = Sequence[TokenLogprob]


class Shape(Protocol):
    """How one choice is written. The same object writes it whole or piece by piece."""

    def first(self) -> Json | None:
        """The piece before the first token, if there is one."""
        ...

    def pieces(self, text: str, logprobs: Logprobs) -> list[Json]:
        """What a piece of text adds; nothing while it may yet change."""
        ...

    def end(self, done: Done) -> list[Json]:
        """What was held back, and the piece with the finish reason."""
        ...

    def whole(self, text: str, logprobs: Logprobs, done: Done) -> Json: ...


class Answer:
    """One answer of one endpoint: `choices` of them, the same number to each prompt."""

    def __init__(
        self, started: Started, shapes: Sequence[Shape], *, model: str, is_chat: bool, num_prompts: int, has_usage: bool
    ) -> None:
        """started: of the first choice. shapes: of all choices, those of one prompt side by side."""
        self._started = started
        self._shapes = shapes
        self._num_prompts = num_prompts
        self._has_usage = has_usage
        self._kind = "chat.completion" if is_chat else "text_completion"
        self._chunk_kind = "chat.completion.chunk" if is_chat else "text_completion"
        self._head = {
            "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{self._started.request_id}",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": f"fp_{self._started.target_fingerprint[:8]}_{self._started.drafter_version[:8]}",
        }

    def first(self) -> list[Json]:
        pieces = [(index, shape.first()) for index, shape in enumerate(self._shapes)]
        return [self._chunk([{"index": index, **piece}]) for index, piece in pieces if piece is not None]

    def delta(self, index: int, text: str, logprobs: Logprobs) -> list[Json]:
        return [self._chunk([{"index": index, **piece}]) for piece in self._shapes[index].pieces(text, logprobs)]

    def end(self, index: int, done: Done, all_done: Sequence[Done] | None) -> list[Json]:
        """all_done: of every choice, once this was the last one to end."""
        chunks = [self._chunk([{"index": index, **piece}]) for piece in self._shapes[index].end(done)]
        if all_done is not None:
            own = {"speculation": self._speculation(all_done)}
            if self._has_usage:
                chunks.append(self._chunk([], usage=self._usage(all_done), **own))
            else:
                chunks[-1] |= own
        return chunks

    def whole(self, parts: Sequence[tuple[str, Logprobs, Done]]) -> Json:
        """parts: text, logprobs and end of every choice."""
        written = [shape.whole(*part) for shape, part in zip(self._shapes, parts, strict=True)]
        choices = [{"index": index, **choice} for index, choice in enumerate(written)]
        dones = [done for _, _, done in parts]
        own = {"usage": self._usage(dones), "speculation": self._speculation(dones)}
        return {**self._head, "object": self._kind, "choices": choices, **own}

    def _chunk(self, choices: list[Json], **more: Any) -> Json:
        chunk = {**self._head, "object": self._chunk_kind, "choices": choices}
        if self._has_usage:
            chunk["usage"] = None
        return chunk | more

    def _usage(self, dones: Sequence[Done]) -> Json:
        """A prompt counts once, however many answers it gets."""
        firsts = [done.usage for done in dones[:: len(dones) // self._num_prompts]]
        prompt_tokens = sum(usage.prompt_tokens for usage in firsts)
        completion_tokens = sum(done.usage.completion_tokens for done in dones)
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(usage.cached_tokens for usage in firsts)},
        }

    def _speculation(self, dones: Sequence[Done]) -> Json:
        stats = SpeculationStats()
        for done in dones:
            stats.add(done.speculation)
        versions = [version for done in dones for version in done.drafter_versions]
        return speculation_block(stats, versions[-1] if versions else self._started.drafter_version)


def speculation_block(stats: SpeculationStats, drafter_version: str) -> Json:
    """`histogram[k]`: steps whose k-th draft token was accepted, k from 0."""
    return {
        "steps": stats.num_steps,
        "drafted": stats.num_drafted,
        "accepted": stats.num_accepted,
        "mean_acceptance_length": stats.mean_acceptance_length,
        "histogram": list(stats.accepted_per_position),
        "drafter_version": drafter_version,
    }


class ChatShape:
    def __init__(self, tokens: TokenBytes | None, calls: CallParser | None) -> None:
        """tokens: to show logprobs with; None when they were not asked for. calls: None when there are no tools."""
        self._tokens = tokens
        self._calls = calls

    def first(self) -> Json:
        return _choice(delta={"role": "assistant", "content": ""})

    def pieces(self, text: str, logprobs: Logprobs) -> list[Json]:
        deltas = [_delta(delta) for delta in self._parsed(text)]
        if not deltas and logprobs and self._tokens is not None:
            deltas = [{}]  # tokens whose text is held back show their logprobs at once
        shown = self._logprobs(logprobs)
        return [_choice(delta=delta, logprobs=None if index else shown) for index, delta in enumerate(deltas)]

    def _parsed(self, text: str) -> list[Delta]:
        if self._calls is None:
            return [Delta(content=text)] if text else []
        return self._calls.push(text)

    def end(self, done: Done) -> list[Json]:
        held = [] if self._calls is None else self._calls.flush()
        last = _choice(delta={}, finish_reason=self._finish_reason(done))
        return [*(_choice(delta=_delta(delta)) for delta in held), last]

    def whole(self, text: str, logprobs: Logprobs, done: Done) -> Json:
        deltas = self._parsed(text) + ([] if self._calls is None else self._calls.flush())
        content = "".join(delta.content for delta in deltas)
        message: Json = {"role": "assistant", "content": content, "refusal": None}
        if calls := _whole_calls(deltas):
            message |= {"content": content if content.strip() else None, "tool_calls": calls}
        return _choice(message=message, logprobs=self._logprobs(logprobs), finish_reason=self._finish_reason(done))

    def _finish_reason(self, done: Done) -> str:
        called = self._calls is not None and self._calls.has_whole_calls and done.finish_reason == "stop"
        return "tool_calls" if called else done.finish_reason

    def _logprobs(self, logprobs: Logprobs) -> Json | None:
        if self._tokens is None:
            return None
        entry = self._tokens.entry
        content = [
            entry(one.token_id, one.logprob) | {"top_logprobs": [entry(token_id, logprob) for token_id, logprob in one.top]}
            for one in logprobs
        ]
        return {"content": content, "refusal": None}


def _delta(delta: Delta) -> Json:
    if delta.index is None:
        return {"content": delta.content}
    call: Json = {"index": delta.index, "function": {"arguments": delta.arguments}}
    if delta.id is not None:
        call |= {"id": delta.id, "type": "function", "function": {"name": delta.name, "arguments": ""}}
    return {"tool_calls": [call]}


def _whole_calls(deltas: Sequence[Delta]) -> list[Json]:
    calls: list[Json] = []
    for delta in deltas:
        if delta.id is not None:
            calls.append({"id": delta.id, "type": "function", "function": {"name": delta.name, "arguments": ""}})
        elif delta.index is not None:
            calls[delta.index]["function"]["arguments"] += delta.arguments
    return calls


class TextShape:
    """A choice of /v1/completions."""

    def __init__(self, tokens: TokenBytes | None) -> None:
        self._tokens = tokens
        self._offset = 0  # characters before the next token whose logprobs are shown

    def first(self) -> None:
        return None

    def pieces(self, text: str, logprobs: Logprobs) -> list[Json]:
        return [_choice(text=text, logprobs=self._logprobs(logprobs))] if text or (logprobs and self._tokens) else []

    def end(self, done: Done) -> list[Json]:
        return [_choice(text="", finish_reason=done.finish_reason)]

    def whole(self, text: str, logprobs: Logprobs, done: Done) -> Json:
        return _choice(text=text, logprobs=self._logprobs(logprobs), finish_reason=done.finish_reason)

    def _logprobs(self, logprobs: Logprobs) -> Json | None:
        if self._tokens is None:
            return None
        names = [self._tokens.entry(one.token_id, one.logprob)["token"] for one in logprobs]
        offsets = []
        for name in names:
            offsets.append(self._offset)
            self._offset += len(name)
        return {
            "tokens": names,
            "token_logprobs": [max(one.logprob, -9999.0) for one in logprobs],
            "top_logprobs": [self._alternatives(one) for one in logprobs],
            "text_offset": offsets,
        }

    def _alternatives(self, one: TokenLogprob) -> dict[str, float]:
        assert self._tokens is not None
        entries = [self._tokens.entry(token_id, logprob) for token_id, logprob in one.top]
        return {entry["token"]: entry["logprob"] for entry in entries}


def _choice(logprobs: Json | None = None, finish_reason: str | None = None, **content: Any) -> Json:
    return {**content, "logprobs": logprobs, "finish_reason": finish_reason}

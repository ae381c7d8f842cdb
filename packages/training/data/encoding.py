"""Conversations to rows of tokens: through the target's chat template, with the spans that the assistant spoke.

The text is rendered whole and tokenised once; which ids are the assistant's, their places in the text say. Where a turn lies in
the text, the template itself says: turn i stands between what it writes for the messages before i, open for the assistant, and
what it writes for the messages up to i:

    text        <system> <user> <assistant: | answer <end>> <user> <assistant: | answer <end>>
    before i    ------------------------>                                                        must begin the text
    up to i     ------------------------------------------>                                      so must this

A template that writes an earlier turn differently once later ones follow (reasoning is often left out) gets a row of its own for
that turn. Behind the turn's last end-of-turn token nothing is the assistant's: a model stops there. Knows no file.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence

from runtime.errors import InvalidRequest
from runtime.models import Tokenizer
from runtime.models.tokenizer import Guarded
from training.data.conversations import Conversation, Preformatted, Span
from training.data.tokens import TokenRow, clipped, teaches

TRUNCATED = "truncated"  # kept, up to data.max_tokens
TOO_LONG = "too_long"  # nothing of what the model spoke lies in the first data.max_tokens
NOTHING_TO_LEARN = "nothing_to_learn"  # no turn of two tokens that the model spoke
NOTHING_ASKED = "nothing_asked"  # no user message
REFUSED_BY_TEMPLATE = "refused_by_template"
NO_PLACE_FOR_TOOLS = "no_place_for_tools"  # the template would leave them out
NO_PLACE_FOR_REASONING = "no_place_for_reasoning"
REWRITTEN = "turn_rewritten_by_template"  # it cannot be told where the turn lies
UNKNOWN_TOKEN = "unknown_token"  # an id that the model has not


class Encoder:
    """left_out counts rows that were dropped, truncated those that were kept in part; both by reason."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, max_tokens: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._max_tokens = max_tokens
        self._ends = frozenset(tokenizer.eos_token_ids)
        self.left_out: Counter[str] = Counter()
        self.truncated: Counter[str] = Counter()

    def rows(self, record: Conversation | Preformatted) -> Iterator[TokenRow]:
        """What of the record a drafter can learn from; the rest is counted."""
        found = self._preformatted(record) if isinstance(record, Preformatted) else self._conversation(record)
        for part, (ids, spans) in enumerate(found):
            row = self._fitted(record.id, str(part) if part else "", ids, spans, record.slice)
            if row is not None:
                yield row

    def prompt(self, record: Conversation | Preformatted) -> list[int] | None:
        """The ids up to where the first answer to give begins: of a conversation behind its last question. None, counted, if
        it cannot be asked."""
        if isinstance(record, Preformatted):
            [(ids, spans)] = self._preformatted(record)
            prompt = list(ids[: spans[0][0]] if spans else ids)
            reason = UNKNOWN_TOKEN if any(token_id >= self._vocab_size for token_id in prompt) else None
        else:
            prompt, reason = [], self._misfit(record)
            if reason is None and record.asked:
                try:
                    prompt = self._tokenizer.encode_chat(record.asked, record.tools)
                except (InvalidRequest, RecursionError):
                    reason = REFUSED_BY_TEMPLATE
        if reason is None and prompt:
            return prompt
        self.left_out[reason or NOTHING_ASKED] += 1
        return None

    def _fitted(self, source: str, part: str, ids: Sequence[int], spans: Sequence[Span], label: str) -> TokenRow | None:
        if any(token_id >= self._vocab_size for token_id in ids):
            self.left_out[UNKNOWN_TOKEN] += 1
            return None
        if not teaches(spans):
            self.left_out[NOTHING_TO_LEARN] += 1
            return None
        kept = clipped(spans, self._max_tokens)
        if not teaches(kept):
            self.left_out[TOO_LONG] += 1
            return None
        if kept != tuple(spans):
            self.truncated[TRUNCATED] += 1
        return TokenRow(source, part, ids[: kept[-1][1]], kept, slice=label)

    # --- forms ---

    def _preformatted(self, record: Preformatted) -> list[tuple[Sequence[int], Sequence[Span]]]:
        if record.token_ids is not None:
            return [(record.token_ids, record.spans)]
        assert record.text is not None
        ids, places = self._tokenizer.encode_rendered(record.text)
        return [(ids, [span for span in (_tokens_of(places, *each) for each in record.spans) if span[0] < span[1]])]

    def _conversation(self, record: Conversation) -> list[tuple[Sequence[int], Sequence[Span]]]:
        reason = self._misfit(record)
        if reason is None:
            try:
                return self._spoken(record)
            except (InvalidRequest, RecursionError):
                reason = REFUSED_BY_TEMPLATE
        self.left_out[reason] += 1
        return []

    def _misfit(self, record: Conversation) -> str | None:
        """What the template would leave out, so that the target would learn or answer something else."""
        has_tools = record.tools or any(message.get("tool_calls") or message["role"] == "tool" for message in record.messages)
        if has_tools and not self._tokenizer.knows_tools:
            return NO_PLACE_FOR_TOOLS
        has_reasoning = any(message.get("reasoning_content") for message in record.messages)
        if has_reasoning and not self._tokenizer.knows("reasoning_content"):
            return NO_PLACE_FOR_REASONING
        return None

    def _spoken(self, record: Conversation) -> list[tuple[Sequence[int], Sequence[Span]]]:
        guarded = self._tokenizer.guard(record.messages, record.tools)
        texts: list[tuple[str, list[Span]]] = []  # the last turn's first
        for i in reversed([i for i, message in enumerate(record.messages) if message["role"] == "assistant"]):
            before = self._tokenizer.render(guarded, i)
            upto = self._tokenizer.render(guarded, i + 1, is_open=False)
            if not upto.startswith(before):
                self.left_out[REWRITTEN] += 1
            elif texts and texts[-1][0].startswith(upto):
                texts[-1][1].append((len(before), len(upto)))
            else:
                texts.append((upto, [(len(before), len(upto))]))
        if not texts:
            self.left_out[NOTHING_TO_LEARN] += 1
        return [self._tokenised(text, spans[::-1], guarded) for text, spans in reversed(texts)]

    def _tokenised(self, text: str, spans: Sequence[Span], guarded: Guarded) -> tuple[list[int], list[Span]]:
        ids, places = self._tokenizer.encode_rendered(text, guarded)
        found: list[Span] = []
        for span in spans:
            first, stop = _tokens_of(places, *span)
            ends = [at for at in range(first, stop) if ids[at] in self._ends]
            stop = ends[-1] + 1 if ends else stop
            if first < stop:
                found.append((first, stop))
        return ids, found


def _tokens_of(places: Sequence[Span], start: int, stop: int) -> Span:
    """The tokens that lie wholly between two characters of the text."""
    first = bisect_left(places, start, key=lambda place: place[0])
    last = first
    while last < len(places) and places[last][1] <= stop:
        last += 1
    return first, last

"""Grammars: which tokens may come next, at every position of a draft. The grammar engine is llguidance.

It was chosen because it refuses a JSON schema keyword that it does not implement instead of ignoring it, takes tokens back
(a rejected draft), and needs some ten microseconds a mask. Here is what the sampling mathematics needs of it, and no more:
`GrammarState.allowed(path)` for a row of logits behind draft tokens `path`, and `advance` by tokens that were kept.

    text so far   {"a": 1          history: advance(...)
    draft         2 , "            path [2], path [2, ","], ...: tried, and taken back
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Sequence
from threading import Lock
from typing import Any

import llguidance
import numpy as np
import torch

from runtime.errors import InvalidRequest
from runtime.models.tokenizer import Tokenizer
from runtime.types import Grammar

MAX_KEPT = 64  # compiled grammars; requests of one program repeat a few
MAX_GRAMMAR_CHARS = 1_000_000
# One spelling of white space: a small model would else fill its answer with it.
_JSON_STYLE: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class Grammars:
    """Compiles the grammars of one model's requests. Safe for several threads; compiling may take a second."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._lock = Lock()
        self._vocabulary: llguidance.LLTokenizer | None = None
        self._compiled: OrderedDict[Grammar, llguidance.LLMatcher] = OrderedDict()  # the least recently used first

    def new_state(self, grammar: Grammar) -> GrammarState:
        """The start of the grammar. InvalidRequest, with the engine's own words, for one that cannot be enforced."""
        with self._lock:
            matcher = self._compiled.get(grammar)
            if matcher is None:
                matcher = self._compiled[grammar] = self._compile(grammar)
                while len(self._compiled) > MAX_KEPT:
                    self._compiled.popitem(last=False)
            self._compiled.move_to_end(grammar)
            return GrammarState(matcher.deep_copy(), self._vocab_size)

    def _compile(self, grammar: Grammar) -> llguidance.LLMatcher:
        if len(grammar.text) > MAX_GRAMMAR_CHARS:
            raise InvalidRequest(
                "grammar", f"The grammar has {len(grammar.text)} characters; at most {MAX_GRAMMAR_CHARS} are taken."
            )
        if self._vocabulary is None:
            self._vocabulary = llguidance.LLTokenizer(
                self._tokenizer.to_json(), n_vocab=self._vocab_size, eos_token=list(self._tokenizer.eos_token_ids)
            )
        matcher = llguidance.LLMatcher(self._vocabulary, _source(grammar), log_level=0)
        if matcher.is_error():
            raise InvalidRequest("grammar", f"The grammar cannot be enforced: {_first_line(matcher.get_error())}.")
        return matcher


def _source(grammar: Grammar) -> str:
    if grammar.kind == "lark":
        return llguidance.LLMatcher.grammar_from_lark(grammar.text)
    try:
        schema = json.loads(grammar.text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest("grammar", f"The JSON schema is not valid JSON: {error}.") from error
    if not isinstance(schema, dict | bool):
        raise InvalidRequest("grammar", f"A JSON schema is an object or a boolean, not {type(schema).__name__}.")
    if isinstance(schema, dict):
        schema.pop("x-guidance", None)  # the engine's own settings, among them one that ignores what it cannot enforce
    return llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=_JSON_STYLE)


def _first_line(text: str) -> str:
    """What went wrong, without the place in the engine's own sources."""
    return (text.strip().splitlines() or ["unknown error"])[0].strip().rstrip(".")


class GrammarState:
    """One generation's place in its grammar."""

    def __init__(self, matcher: llguidance.LLMatcher, vocab_size: int) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size

    @property
    def is_complete(self) -> bool:
        """Nothing but an end-of-sequence token may follow."""
        return bool(self._matcher.is_stopped())

    def allowed(self, path: Sequence[int] = ()) -> torch.Tensor | None:
        """bool [V]: what may follow the kept tokens and then `path`; None if path is no continuation, so that nothing matters."""
        num_taken = self._matcher.try_consume_tokens(list(path)) if path else 0
        mask = self._mask() if num_taken == len(path) else None
        if num_taken:
            self._matcher.rollback(num_taken)
        return mask

    def advance(self, token_id: int) -> None:
        """Keep a token that `allowed()` allows. The one that ends a complete text changes nothing."""
        if not self.is_complete and not self._matcher.consume_token(token_id):
            raise ValueError(f"Token {token_id} does not continue this grammar: {_first_line(self._matcher.get_error())}.")

    def _mask(self) -> torch.Tensor:
        packed = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        bits = np.unpackbits(packed, count=self._vocab_size, bitorder="little")
        return torch.from_numpy(bits.view(np.bool_))

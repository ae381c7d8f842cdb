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
from weakref import WeakValueDictionary

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


class Compiled:
    """A grammar that is ready to start from. Never moved: every state has a copy of its own."""

    def __init__(self, matcher: llguidance.LLMatcher) -> None:
        self.matcher = matcher


class Grammars:
    """Compiles the grammars of one model's requests. Safe for several threads; compiling may take seconds.

    While a state of a grammar is held, others of the same are made without compiling.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._lock = Lock()
        self._vocabulary: llguidance.LLTokenizer | None = None
        self._in_use: WeakValueDictionary[Grammar, Compiled] = WeakValueDictionary()
        self._kept: OrderedDict[Grammar, Compiled] = OrderedDict()  # the least recently used first

    def new_state(self, grammar: Grammar) -> GrammarState:
        """The start of the grammar. InvalidRequest, with the engine's own words, for one that cannot be enforced."""
        with self._lock:
            compiled = self._in_use.get(grammar)
        if compiled is None:
            compiled = Compiled(self._compile(grammar))  # beside the lock: nobody waits for somebody else's grammar
        with self._lock:
            self._in_use[grammar] = self._kept[grammar] = compiled
            self._kept.move_to_end(grammar)
            while len(self._kept) > MAX_KEPT:
                self._kept.popitem(last=False)
            return GrammarState(compiled, self._vocab_size, self._tokenizer.eos_token_ids)

    def _compile(self, grammar: Grammar) -> llguidance.LLMatcher:
        if len(grammar.text) > MAX_GRAMMAR_CHARS:
            raise InvalidRequest(
                "grammar", f"The grammar has {len(grammar.text)} characters; at most {MAX_GRAMMAR_CHARS} are taken."
            )
        if self._vocabulary is None:
            self._vocabulary = llguidance.LLTokenizer(
                self._tokenizer.to_json(), n_vocab=self._vocab_size, eos_token=list(self._tokenizer.eos_token_ids)
            )
        try:
            matcher = llguidance.LLMatcher(self._vocabulary, _source(grammar), log_level=0)
        except ValueError as error:  # beyond what the engine reads at all, such as hundreds of levels
            raise InvalidRequest("grammar", f"The grammar cannot be enforced: {_said(str(error))}.") from error
        start = matcher.deep_copy()
        if not start.is_error():
            start.compute_bitmask()  # some cannot even begin
        if start.is_error():
            raise InvalidRequest("grammar", f"The grammar cannot be enforced: {_said(start.get_error())}.")
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
    if schema is False:
        raise InvalidRequest("grammar", "The JSON schema false allows no text at all; give one that allows some.")
    if schema is True:  # the engine takes our style with an object alone
        schema = {}
    schema.pop("x-guidance", None)  # the engine's own settings, among them one that ignores what it cannot enforce
    return llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=_JSON_STYLE)


def _said(text: str) -> str:
    """What went wrong, without the place in the engine's own sources."""
    lines = [line.strip() for line in text.strip().splitlines()] or ["unknown error"]
    reason = next((line for line in lines if line.startswith("error: ")), "")  # of a regular expression, below a drawing of it
    return f"{lines[0]} {reason.removeprefix('error: ')}".strip().rstrip(".")


class GrammarState:
    """One generation's place in its grammar.

    A grammar may turn out too complex only while it is followed; `allowed` says so then, and nothing follows any more.
    """

    def __init__(self, compiled: Compiled, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._compiled = compiled  # held, so that the grammar is not compiled again
        self._matcher = compiled.matcher.deep_copy()
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._is_lost = False  # the engine could not follow a token that was kept

    @property
    def is_complete(self) -> bool:
        """Nothing but an end-of-sequence token may follow."""
        return bool(self._matcher.is_stopped()) and not self._matcher.is_error()

    def allowed(self, path: Sequence[int] = ()) -> torch.Tensor | None:
        """bool [V]: what may follow the kept tokens and then `path`; None if path is no continuation, so that nothing matters.

        InvalidRequest if the grammar is too complex to be followed from here on.
        """
        num_taken = self._matcher.try_consume_tokens(list(path)) if path else 0
        mask = self._mask()
        if num_taken < len(path) and mask[path[num_taken]] and path[num_taken] not in self._eos_token_ids:
            raise self._too_complex()  # a token may follow, and cannot be followed
        if num_taken:
            self._matcher.rollback(num_taken)
        return mask if num_taken == len(path) else None

    def advance(self, token_id: int) -> None:
        """Keep a token that `allowed()` allows. The one that ends a complete text changes nothing."""
        if self.is_complete or self._is_lost or self._matcher.try_consume_tokens([token_id]):
            return
        if not self._matcher.is_error() and not self._mask()[token_id]:
            raise ValueError(f"Token {token_id} does not continue this grammar.")
        self._is_lost = True

    def _mask(self) -> torch.Tensor:
        packed = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        if self._is_lost or self._matcher.is_error():
            raise self._too_complex()
        bits = np.unpackbits(packed, count=self._vocab_size, bitorder="little")
        return torch.from_numpy(bits.view(np.bool_))

    def _too_complex(self) -> InvalidRequest:
        said = _said(self._matcher.get_error()) or "its limits are reached"
        return InvalidRequest("grammar", f"The grammar is too complex to be followed further: {said}. Simplify it.")

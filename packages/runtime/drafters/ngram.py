"""`NgramDrafter`: proposes what followed the last time that the history ended like this. Needs no model and no training.

The longest ending wins, of equally long ones the latest occurrence. An index per sequence grows with its history, so a step
costs the new tokens only. Proposals are certain (one-hot); text that repeats itself is continued past its own end.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

from runtime.drafters.base import Draft, DraftRequest


class NgramDrafter:
    """Implements `Drafter`. Looks for endings of max_ngram down to min_ngram tokens."""

    version = "ngram"

    def __init__(self, max_ngram: int = 4, min_ngram: int = 2) -> None:
        if not 1 <= min_ngram <= max_ngram:
            raise ValueError(f"min_ngram {min_ngram} and max_ngram {max_ngram} must satisfy 1 <= min_ngram <= max_ngram.")
        self._sizes = range(max_ngram, min_ngram - 1, -1)  # the longest first
        self._indexes: dict[int, _Index] = {}
        self._handles = count()

    def new_state(self) -> int:
        handle = next(self._handles)
        self._indexes[handle] = _Index(self._sizes)
        return handle

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        drafts = []
        for request in requests:
            index = self._indexes[request.state]
            index.catch_up(request.history, num_unchanged=request.position + 1)
            start = index.find(request.history) if request.depth else None
            drafts.append(Draft([] if start is None else _continue(request.history, start, request.depth)))
        return drafts

    def drop_state(self, state: int) -> None:
        del self._indexes[state]


class _Index:
    """Where each n-gram of a history was last followed by something: n-gram -> place of what followed."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes = sizes
        self._places: dict[tuple[int, ...], int] = {}
        self._num_indexed = 0  # n-grams ending before this place are in

    def catch_up(self, history: Sequence[int], num_unchanged: int) -> None:
        """Take in what is new; start over if what was indexed has changed."""
        if num_unchanged < self._num_indexed:
            self._places.clear()
            self._num_indexed = 0
        for place in range(self._num_indexed + 1, len(history)):
            for size in self._sizes:
                if size <= place:
                    self._places[tuple(history[place - size : place])] = place
        self._num_indexed = max(len(history) - 1, self._num_indexed)

    def find(self, history: Sequence[int]) -> int | None:
        """The place of what followed this history's ending before; None if it is new."""
        for size in self._sizes:
            if size <= len(history) and (place := self._places.get(tuple(history[-size:]))) is not None:
                return place
        return None


def _continue(history: Sequence[int], start: int, num_tokens: int) -> list[int]:
    """num_tokens from `start`; where the history ends, what was just read goes on as its continuation."""
    tokens = list(history[start : start + num_tokens])
    period = len(tokens)
    while len(tokens) < num_tokens:
        tokens.append(tokens[-period])
    return tokens

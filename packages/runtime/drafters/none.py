"""`NoDrafter`: never drafts. With it the engine decodes plainly, one token per forward."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

from runtime.drafters.base import Draft, DraftRequest


class NoDrafter:
    """Implements `Drafter`; keeps nothing."""

    version = "none"

    def __init__(self) -> None:
        self._handles = count()

    def new_state(self) -> int:
        return next(self._handles)

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        return [Draft([]) for _ in requests]

    def drop_state(self, state: int) -> None:
        """There is nothing to free."""

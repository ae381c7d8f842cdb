"""`ScriptedDrafter`: proposes what a function says. Perfect, random and adversarial drafters are made of it.

truth = [...]  # the target's own continuation, history included
perfect = ScriptedDrafter(lambda history, depth: truth[len(history) : len(history) + depth])
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count

from runtime.drafters.base import Draft, DraftRequest

Script = Callable[[Sequence[int], int], list[int]]
"""(history, depth) -> the tokens to propose behind the history, at most `depth` of which are used."""


class ScriptedDrafter:
    """Implements `Drafter`; its proposals are certain (one-hot), so sampled requests stay exact too."""

    def __init__(self, script: Script, version: str = "scripted") -> None:
        self._script = script
        self._version = version
        self._handles = count()

    @property
    def version(self) -> str:
        return self._version

    def new_state(self) -> int:
        return next(self._handles)

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        return [
            Draft(self._script(request.history, request.depth)[: request.depth] if request.depth else []) for request in requests
        ]

    def drop_state(self, state: int) -> None:
        """There is nothing to free."""

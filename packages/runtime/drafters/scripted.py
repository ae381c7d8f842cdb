"""`ScriptedDrafter`: proposes what a function says, chain or tree. Perfect, random and adversarial drafters are made of it.

truth = [...]  # the target's own continuation, history included
perfect = ScriptedDrafter(lambda history, depth: truth[len(history) : len(history) + depth])
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count

from runtime.drafters.base import Draft, DraftRequest

Script = Callable[[Sequence[int], int], list[int] | Draft]
"""(history, depth) -> the tokens to propose behind the history, at most `depth` of which are used; or a draft as it is."""


class ScriptedDrafter:
    """Implements `Drafter`; its chains are certain (one-hot), so sampled requests stay exact too."""

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
        return [self._propose(request) if request.depth else Draft([]) for request in requests]

    def _propose(self, request: DraftRequest) -> Draft:
        proposal = self._script(request.history, request.depth)
        return proposal if isinstance(proposal, Draft) else Draft(proposal[: request.depth])

    def drop_state(self, state: int) -> None:
        """There is nothing to free."""

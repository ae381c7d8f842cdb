"""How much to draft: the shape of the next draft of each decoding session. Pure arithmetic; knows no model and no session."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from runtime.config import SpeculationConfig


@dataclass(frozen=True)
class Shape:
    """What to ask a drafter for. depth 0: nothing."""

    depth: int
    width: int = 1  # 1: a chain


@dataclass(frozen=True)
class Ask:
    """One decoding session's side of the choice."""

    version: str  # of its drafter
    limit: int  # drafts that it can use at most


class Pacer:
    def __init__(self, config: SpeculationConfig) -> None:
        self._fixed = Shape(config.max_draft_tokens)

    def choose(self, asks: Sequence[Ask]) -> list[Shape]:
        """A shape for each session of the next step's batch."""
        return [Shape(min(self._fixed.depth, ask.limit), self._fixed.width) for ask in asks]

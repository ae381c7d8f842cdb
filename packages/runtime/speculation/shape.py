"""What a session may ask for when it drafts, and what it is told to: the shape of its next draft."""

from __future__ import annotations

from typing import NamedTuple


class Shape(NamedTuple):
    """What to ask a drafter for. depth 0: nothing."""

    depth: int
    width: int = 1  # 1: a chain
    num_nodes: int | None = None  # of a tree, at most

    def cut(self, limit: int) -> Shape:
        return self if self.depth <= limit else self._replace(depth=limit)


PLAIN = Shape(0)
GREEDY, SAMPLED, SEEDED = "greedy", "sampled", "seeded"  # drafts certain, sampled; certain for sampled output
Group = tuple[str, str]  # a drafter's version and the kind of its sessions


class Ask(NamedTuple):
    """One decoding session's side of the choice."""

    version: str  # of its drafter
    limit: int  # levels that it can use at most
    kind: str = GREEDY  # sessions whose drafts fare differently are judged apart

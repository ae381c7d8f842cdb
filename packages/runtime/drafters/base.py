"""`Drafter`: proposes tokens that the target then verifies. A drafter can only change speed, never output.

The engine calls `propose` once a step for all sequences together. Each request brings what became history since the last
call (so a drafter with state catches up) and asks for a chain of up to `depth` tokens; depth 0 only catches up.

Alignment: aux[p] (the target's state at position p) pairs with token x[p+1]; the first proposal after the last pair
(aux[p], x[p+1]) is a guess of x[p+2].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True)
class DraftRequest:
    state: int  # handle from new_state()
    position: int  # p of the first new row; a gap to what the drafter saw before is allowed and only costs acceptance
    aux: torch.Tensor  # [m, 3*Ht] target states of positions p .. p+m-1; m may be 0 only when depth is 0
    history: Sequence[int]  # all committed tokens x[0 .. p+m], the token just sampled included
    depth: int
    temperature: float = 0.0  # 0: propose the most likely; else sample each draft from softmax(logits / temperature)
    generator: torch.Generator | None = None  # the request's own; required when temperature > 0


@dataclass(frozen=True)
class SparseProbs:
    """A distribution over some target ids; every other id has probability 0."""

    token_ids: torch.Tensor  # int64 [m]
    probs: torch.Tensor  # float32 [m], sums to 1


@dataclass(frozen=True)
class Draft:
    """A proposed chain or tree. `probs[i]` is exactly what node i was sampled from; None: it was certain (one-hot).

    Siblings stand in the order in which they were drawn, without replacement: each one's `probs` is what was left for it.
    """

    token_ids: list[int]
    probs: list[SparseProbs] | None = None
    parents: list[int] | None = None  # [i] < i: node i's parent, -1: the last token of the history; None: a chain


class Drafter(Protocol):
    @property
    def version(self) -> str:
        """The content hash of an EAGLE3 version, or the drafter's kind."""
        ...

    def new_state(self) -> int: ...

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """One draft per request, at most `depth` tokens each (fewer, or none, is fine)."""
        ...

    def drop_state(self, state: int) -> None: ...

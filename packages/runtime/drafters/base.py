"""`Drafter`: proposes tokens that the target then verifies. A drafter can only change speed, never output.

The engine calls `propose` once a step for all sequences together. Each request brings what became history since the last
call (so a drafter with state catches up) and asks for a chain or a tree of up to `depth` levels; depth 0 only catches up.

Alignment: aux[p] (the target's state at position p) pairs with token x[p+1]; the first proposal after the last pair
(aux[p], x[p+1]) is a guess of x[p+2].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

IsEnough = Callable[[Sequence[float]], bool]
"""Confidences of a chain's nodes so far -> whether deeper ones would not be worth drafting."""


@dataclass(frozen=True)
class DraftRequest:
    state: int  # handle from new_state()
    position: int  # p of the first new row; a gap to what the drafter saw before is allowed and only costs acceptance
    aux: torch.Tensor  # [m, 3*Ht] target states of positions p .. p+m-1; m may be 0 only when depth is 0
    history: Sequence[int]  # all committed tokens x[0 .. p+m], the token just sampled included
    depth: int
    width: int = (
        1  # 1: a chain; else a tree may have so many children behind each node, as far as the drafter can tell them apart
    )
    num_nodes: int | None = None  # of a tree, at most: those with the most likely paths; None: all that there are
    temperature: float = 0.0  # of a chain. 0: propose the most likely; else sample each draft from softmax(logits / temperature)
    uniforms: torch.Tensor | None = None  # float64 [depth] on the CPU, to draw draft k with; required when temperature > 0
    is_enough: IsEnough | None = None  # a certain chain may end early by it, where looking costs nothing


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
    confidences: list[float] | None = None  # [i]: what the drafter itself gives node i behind its parent; None: it does not say

    @property
    def lineage(self) -> Sequence[int]:
        """[i]: node i's parent, of a chain too."""
        return range(-1, len(self.token_ids) - 1) if self.parents is None else self.parents

    @property
    def depth(self) -> int:
        return max(self.depths(), default=-1) + 1

    def only(self, nodes: Sequence[int]) -> Draft:
        """The draft of these nodes, ascending, whose parents are among them or the history."""
        places = {-1: -1, **{node: place for place, node in enumerate(nodes)}}
        return Draft(
            token_ids=[self.token_ids[node] for node in nodes],
            probs=None if self.probs is None else [self.probs[node] for node in nodes],
            parents=None if self.parents is None else [places[self.parents[node]] for node in nodes],
            confidences=None if self.confidences is None else [self.confidences[node] for node in nodes],
        )

    def children(self) -> list[list[int]]:
        """[i + 1]: the children of node i, [0]: of the last token of the history; in order of drawing."""
        children: list[list[int]] = [[] for _ in range(len(self.token_ids) + 1)]
        for node, parent in enumerate(self.lineage):
            children[parent + 1].append(node)
        return children

    def likeliest_chain(self) -> list[int]:
        """From the history on always the child with the greatest confidence; the first, where they tie or say nothing."""
        children, chain = self.children(), [-1]
        while below := children[chain[-1] + 1]:
            chain.append(below[0] if self.confidences is None else max(below, key=self.confidences.__getitem__))
        return chain[1:]

    def depths(self) -> list[int]:
        """Of each node, 0 right behind the history."""
        depths: list[int] = []
        for parent in self.lineage:
            depths.append(0 if parent < 0 else depths[parent] + 1)
        return depths

    def paths(self) -> list[list[int]]:
        """[i + 1]: the tokens from the history to node i, its own included; [0]: none."""
        paths: list[list[int]] = [[]]
        for node, parent in enumerate(self.lineage):
            paths.append([*paths[parent + 1], self.token_ids[node]])
        return paths


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

"""The accept test: which drafted tokens the target keeps, and the one token it adds. Lossless for any draft, chain or tree.

Greedy walks as far as the draft holds what the target would have picked itself. Sampled follows Leviathan et al. 2023, Chen
et al. 2023 and, for siblings, Miao et al. 2024: the tokens that leave here are distributed exactly as if the target had
sampled them one by one from the processed distribution p. Pure mathematics: it moves no cache and no statistics; the caller
advances the `Processor` by what it keeps.

A chain is the tree whose every node has one child. A tree of n nodes and its n + 1 rows of logits, row i + 1 behind node i:

    pending --+-- node 0 --+-- node 2           parents  -1  -1   0   0
    (row 0)   |   (row 1)  |   (row 3)          row 0 judges nodes 0 and 1, row 1 judges nodes 2 and 3,
              |            +-- node 3           a row without children gives the bonus token
              +-- node 1       (row 4)
                  (row 2)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from runtime.drafters.base import Draft, SparseProbs
from runtime.speculation.sampling import Processor, pick

BELOW_ONE = math.nextafter(1.0, 0.0)


@dataclass(frozen=True)
class Verdict:
    """What one verification emits: the accepted drafts and one more token, the corrected or the bonus one."""

    token_ids: list[int]  # len(path) + 1
    path: list[int]  # accepted nodes of the draft from the root, ascending

    @property
    def num_accepted(self) -> int:
        return len(self.path)

    @property
    def sizes(self) -> Sequence[int]:
        """How many tokens came with each verification."""
        return (len(self.token_ids),)


@dataclass(frozen=True)
class Verdicts:
    """The same of several in a row, that nobody looked at in between."""

    token_ids: list[int]
    sizes: Sequence[int]

    @property
    def num_accepted(self) -> int:
        return len(self.token_ids) - len(self.sizes)


class Contradiction(ValueError):
    """A node has no mass in its own distribution. Those before it are judged alike without it."""

    def __init__(self, node: int, token_id: int, mass: float) -> None:
        self.node = node
        super().__init__(
            f"Draft {node} is token {token_id}, but its own distribution gives it {mass}; pass the one it came from."
        )


def verify(logits: torch.Tensor, draft: Draft, processor: Processor, uniforms: torch.Tensor | None = None) -> Verdict:
    """Judge a draft of n nodes by the target's raw logits [n + 1, V]. An empty draft just picks the next token.

    `uniforms` float64 [depth of the draft + 1], on the CPU: number k alone decides the k-th token that is emitted (see
    `Uniforms`); greedy needs none. With certain nodes the emitted tokens depend on p and the uniforms only, not on the
    draft. ModelError when logits are not finite; Contradiction when a node has no mass in its own distribution.
    """
    assert len(logits) == len(draft.token_ids) + 1, "a row of logits for the pending token and one for each node"
    assert draft.probs is None or len(draft.probs) == len(draft.token_ids), "a distribution for each node, or for none"
    # A CPU pays for every row and so looks at one at a time; an accelerator pays for every look and so takes all at once.
    return _walk(_Rows(logits, draft, processor, uniforms, at_once=logits.device.type != "cpu"), draft)


def _walk(rows: _Rows, draft: Draft) -> Verdict:
    """From the pending token down the accepted nodes to the token that no node holds."""
    children = draft.children()
    token_ids: list[int] = []
    path: list[int] = []
    node = -1
    while True:
        token_id, child = _judge(rows, node, token_ids, children[node + 1], draft)
        token_ids.append(token_id)
        if child is None:
            return Verdict(token_ids, path)
        path.append(child)
        node = child


def _judge(rows: _Rows, node: int, path: Sequence[int], children: Sequence[int], draft: Draft) -> tuple[int, int | None]:
    """The token behind `node`, whose path of tokens this is, and the child that holds it, if one does."""
    if draft.probs is None or not children or rows.is_greedy:
        token_id = rows.choice(node, path)
        return token_id, next((child for child in children if draft.token_ids[child] == token_id), None)
    return _reject_in_turn(rows.probs(node, path), rows.uniform(len(path)), children, draft)


def _reject_in_turn(p: torch.Tensor, uniform: float, children: Sequence[int], draft: Draft) -> tuple[int, int | None]:
    """Offer each sampled child to what p [V] leaves for it; if none is taken, draw from what is left at the end.

    A number that failed to accept is, scaled to the part of [0, 1) where it fell, a fresh number: one is enough for all.
    """
    assert draft.probs is not None
    left = p.double()
    total = float(left.sum())
    for child in children:
        token_id, q = draft.token_ids[child], draft.probs[child]
        # accept with probability min(1, p / q), else p <- norm(max(p - q, 0))
        chance = min(1.0, float(left[token_id]) / total / _mass(q, token_id, child))
        if uniform < chance:
            return token_id, child
        uniform = min((uniform - chance) / (1.0 - chance), BELOW_ONE)
        left, total = _residual(left, total, q)
    return int(pick(left.unsqueeze(0), torch.tensor([uniform], dtype=torch.float64))), None


def _mass(q: SparseProbs, token_id: int, node: int) -> float:
    """q(token_id), normalised as `pick` draws from it."""
    weights = q.probs.double()
    mass = float(weights[q.token_ids == token_id].sum() / weights.sum())
    if not mass > 0.0:
        raise Contradiction(node, token_id, mass)
    return mass


def _residual(p: torch.Tensor, total: float, q: SparseProbs) -> tuple[torch.Tensor, float]:
    """max(p - q, 0) [V] and its sum: what to draw from after a token of q was rejected. p [V] sums to `total`."""
    weights = q.probs.to(p)
    residual = (p / total).index_add_(0, q.token_ids.to(p.device), weights / weights.sum(), alpha=-1.0).clamp_(min=0.0)
    mass = float(residual.sum())
    # A rejection means p(token) < q(token), so some mass is left; only rounding, where p == q, can hide it. Then p is the answer.
    return (residual, mass) if mass > 0.0 else (p, total)


class _Rows:
    """The target's view behind each node: its choice, or its distribution. Of all nodes at once, or of those that are asked for;
    greedy rows are cheap and always come together.
    """

    def __init__(
        self, logits: torch.Tensor, draft: Draft, processor: Processor, uniforms: torch.Tensor | None, at_once: bool
    ) -> None:
        self.is_greedy = processor.params.is_greedy
        self._logits, self._processor = logits, processor
        self._choices: list[int] | None = None
        self._probs: torch.Tensor | None = None
        if self.is_greedy:
            self._choices = processor.argmax(logits, draft.paths())
            return
        assert uniforms is not None, "sampling needs the request's random numbers"
        self._uniforms = uniforms
        if at_once:
            self._probs = processor.probs(logits, draft.paths())  # [n + 1, V]
            if draft.probs is None:
                places = torch.tensor([0, *(depth + 1 for depth in draft.depths())])
                self._choices = pick(self._probs, uniforms[places]).tolist()

    def uniform(self, place: int) -> float:
        return float(self._uniforms[place])

    def choice(self, node: int, path: Sequence[int]) -> int:
        """The argmax behind `node`, or a draw from its distribution by the number of its place."""
        if self._choices is not None:
            return self._choices[node + 1]
        place = len(path)
        return int(pick(self.probs(node, path).unsqueeze(0), self._uniforms[place : place + 1]))

    def probs(self, node: int, path: Sequence[int]) -> torch.Tensor:
        """[V]"""
        if self._probs is not None:
            return self._probs[node + 1]
        return self._processor.probs(self._logits[node + 1 : node + 2], [path])[0]

"""What became of drafts so far: how deep they get, and how far a drafter's own confidence can be believed. Pure arithmetic.

Moving averages over verified drafts. Each starts from a guess that counts as a few observations, so that something new is
tried; forgetting makes them follow a change of the traffic.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from operator import mul

from runtime.drafters.base import Draft

FIRST_GUESS = 0.7
GUESS_WEIGHT = 4  # observations that a guess counts for
SIBLING_MISSES = 0.8  # a guess: the share of a chain's misses that its siblings in a tree miss too
MEMORY = 24  # observations that an average remembers,
LEAST_MEMORY = 16  # or fewer where they are rare, down to this: all levels of a draft remember the same steps
BIN_MEMORY = 256  # of one bin of confidence
UNSEEN = 8  # memories until most of what is not looked at is forgotten
NUM_BINS = 16  # of confidence, equally wide in its square root: unlikely nodes are many


class Average:
    """A moving average of the last `memory` observations or so."""

    def __init__(self, guess: float, weight: float = GUESS_WEIGHT) -> None:
        self.value = guess
        self._weight = weight

    def add(self, observed: float, memory: float = MEMORY, number: int = 1) -> None:
        """One observation, or the mean of several."""
        self._weight = min(self._weight + number, max(memory, number))
        self.value += (observed - self.value) * number / self._weight

    def forget(self, weight: float) -> None:
        """Let the value count for no more observations than this, so that new ones move it quickly."""
        self._weight = min(self._weight, weight)


class Acceptance:
    """Of one kind of draft: how often level k of it is accepted where it was asked for and the levels before were accepted.

    A level that was asked for and not made, or cut, is one that was not accepted.
    """

    def __init__(self, like: Acceptance | None = None) -> None:
        """like: of chains, for the first guess at trees, where a miss has siblings that may hit."""
        self._levels: list[Average] = []
        self._like = like
        self._sizes: dict[int, Average] = {}  # by depth asked: nodes verified

    def record(self, depth_asked: int, num_nodes: int, num_accepted: int, memory: float = MEMORY) -> None:
        """One verified draft."""
        self._record_size(depth_asked, num_nodes, memory)
        reach = 1.0
        for k in range(min(num_accepted + 1, depth_asked)):
            self._level(k).add(1.0 if k < num_accepted else 0.0, max(memory * reach, LEAST_MEMORY))
            reach *= self.chance(k)
        self._drift(depth_asked, memory)

    def record_chains(self, depth: int, num_accepted: Sequence[int], memory: float = MEMORY) -> None:
        """Many at once, all of this depth."""
        self._record_size(depth, depth, memory)
        reached, reach = len(num_accepted), 1.0
        for k in range(depth):
            accepted = reached - num_accepted.count(k)
            self._level(k).add(accepted / reached, max(memory * reach, LEAST_MEMORY), reached)
            if not accepted:
                break
            reached, reach = accepted, reach * self.chance(k)
        self._drift(depth, memory, len(num_accepted))

    def _level(self, k: int) -> Average:
        if k == len(self._levels):
            self._levels.append(Average(self._guess(k)))
        return self._levels[k]

    def _record_size(self, depth_asked: int, num_nodes: int, memory: float) -> None:
        size = self._sizes.get(depth_asked)
        if size is None:
            size = self._sizes[depth_asked] = Average(num_nodes)
        size.add(num_nodes, memory)

    def _drift(self, depth_asked: int, memory: float, number: int = 1) -> None:
        """What is not looked at any more goes back to the guess, slowly, and is looked at again."""
        if depth_asked < len(self._levels):
            unseen = self._levels[depth_asked]
            unseen.value += (self._guess(depth_asked) - unseen.value) * min(number / (UNSEEN * memory), 1.0)

    def gains(self, depth: int) -> list[float]:
        """[k]: tokens that a draft of k levels is expected to add, for k from 0 to depth."""
        reach = accumulate((self.chance(k) for k in range(depth)), mul)
        return list(accumulate(reach, initial=0.0))

    def size(self, depth: int, guess: float) -> float:
        """Nodes that a draft asked for at this depth is expected to have."""
        average = self._sizes.get(depth)
        return guess if average is None else average.value

    def forget(self, weight: float) -> None:
        for average in self._levels:
            average.forget(weight)

    def chance(self, k: int) -> float:
        """That level k is accepted where the levels before are."""
        return self._levels[k].value if k < len(self._levels) else self._guess(k)

    def _guess(self, k: int) -> float:
        if self._like is not None:
            return 1.0 - SIBLING_MISSES * (1.0 - self._like.chance(k))
        return self._levels[min(k, len(self._levels)) - 1].value if k and self._levels else FIRST_GUESS


class Confidence:
    """Of one drafter: the chance that a node is accepted when its parent was, by what the drafter itself gives it."""

    def __init__(self) -> None:
        self._bins = [Average(((b + 0.5) / NUM_BINS) ** 2, 8) for b in range(NUM_BINS)]

    def record(self, draft: Draft, path: Sequence[int]) -> None:
        """One verified draft with confidences, and its accepted nodes."""
        assert draft.confidences is not None
        seen = {-1, *path}
        for node, parent in enumerate(draft.lineage):
            if parent in seen:
                self._bin(draft.confidences[node]).add(float(node in seen), BIN_MEMORY)

    def scores(self, draft: Draft) -> list[float]:
        """[i]: the chance that node i of a draft with confidences is accepted, its whole path included."""
        assert draft.confidences is not None
        scores: list[float] = []
        for parent, confidence in zip(draft.lineage, draft.confidences, strict=True):
            scores.append(self._bin(confidence).value * (scores[parent] if parent >= 0 else 1.0))
        return scores

    def reach(self, confidences: Sequence[float]) -> float:
        """The chance that all nodes of a chain with these confidences are accepted."""
        return math.prod(self._bin(confidence).value for confidence in confidences)

    def _bin(self, confidence: float) -> Average:
        return self._bins[min(int(confidence**0.5 * NUM_BINS), NUM_BINS - 1)]

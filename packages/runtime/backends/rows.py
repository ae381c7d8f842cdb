"""Which tokens of a sequence have their K/V in which row of a cache: the arithmetic of it, without the K/V itself.

Rows 0 .. num_rows-1 are committed; behind them lie the tentative rows of the last forward, of which `commit` keeps a root
path. Under a policy with a window the rows that no later token sees are dropped, some at a time, and the rest moves up:

    position   0 ... sink-1 | sink ... sink+dropped-1 | sink+dropped ... length-1 | length + depth of node 0 .. m-1
    row        0 ... sink-1 | gone                    | sink ... num_rows-1       | num_rows ... num_rows+m-1
"""

from __future__ import annotations

from collections.abc import Sequence

from runtime.backends.segments import check_root_path
from runtime.types import CachePolicy


def drop_step(window: int) -> int:
    """So many tokens are dropped at once, which makes moving the others up cheap, and so many unseen ones stay: a way back."""
    return max(window // 4 // 16, 1) * 16


class Rows:
    """Of one cache. `parents` describes the tentative nodes: [i] is node i's parent, -1 the history."""

    def __init__(self, policy: CachePolicy) -> None:
        self.policy = policy
        self.length = 0  # committed tokens, the dropped ones included
        self.dropped = 0
        self.parents: Sequence[int] = ()

    @property
    def num_rows(self) -> int:
        return self.length - self.dropped

    def row(self, position: int) -> int:
        """Where a token that was not dropped lies."""
        return position if position < self.policy.sink else position - self.dropped

    def commit(self, rows: Sequence[int]) -> None:
        """Keep the tentative rows of one root path and forget the others. ValueError, and no change, if it is none."""
        check_root_path(self.parents, rows)
        self.length += len(rows)
        self.parents = ()

    def num_due(self) -> int:
        """How many rows behind the sink are to be dropped now: whole steps of unseen ones, the last step aside."""
        if self.policy.window is None:
            return 0
        step = drop_step(self.policy.window)
        return max((self.num_unseen(self.length) // step - 1) * step - self.dropped, 0)

    def num_unseen(self, length: int) -> int:
        """Of so many tokens, those that no later one sees."""
        return 0 if self.policy.window is None else max(length - self.policy.window + 1 - self.policy.sink, 0)

    def truncate(self, length: int) -> None:
        """Keep the first `length` tokens. ValueError, and no change, as for dropped_at."""
        self.dropped = self.dropped_at(length)
        self.length = length
        self.parents = ()

    def dropped_at(self, length: int) -> int:
        """How many of the first `length` tokens are gone. ValueError if that is too short, too long, or they are needed."""
        if not 0 <= length <= self.length:
            raise ValueError(f"Cannot truncate to {length} tokens; the cache holds {self.length}.")
        dropped = max(0, min(self.dropped, length - self.policy.sink))
        if dropped > self.num_unseen(length):
            raise ValueError(
                f"Cannot truncate to {length} tokens; the cache dropped {self.dropped} of them behind the first "
                f"{self.policy.sink}, and what follows would see some of those. Compute the history anew."
            )
        return dropped

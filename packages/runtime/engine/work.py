"""One session's part in one step: which tokens go into the forward, what was drafted behind them, which rows stay.

rows of the segment    0 ... n-1            | n ... n+m-1
                       history[cached:...]  | the draft's nodes     (nodes only where n = 1: the pending token)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from runtime.backends.base import Segment
from runtime.drafters.base import Draft, Drafter, IsEnough
from runtime.engine.request import Request
from runtime.speculation.shape import PLAIN, Ask, Shape

NO_DRAFT = Draft([])


@dataclass
class Work:
    request: Request
    token_ids: list[int]  # history[cached : cached + n], the pending token or a chunk of prompt
    is_last_chunk: bool  # reaches the end of the history, so its last logits give the next token
    is_settling: bool = False  # the turn is over: only the K/V of its last token is missing
    is_left: bool = False  # a part of a prompt whose states stay with the target until somebody needs them
    draft: Draft = NO_DRAFT
    drafter: Drafter | None = None  # that speculates for this session, if one does
    ask: Ask | None = None  # and how the pacer was asked for the shape of its draft
    shape: Shape = PLAIN
    is_enough: IsEnough | None = None

    @property
    def is_decode(self) -> bool:
        """One pending token behind a cached history: may be drafted for."""
        is_pending_alone = self.is_last_chunk and len(self.token_ids) == 1 and self.request.session.cached > 0
        return is_pending_alone and not self.is_settling

    @property
    def gives_tokens(self) -> bool:
        return self.is_last_chunk and not self.is_settling

    @property
    def segment(self) -> Segment:
        assert self.request.session.cache is not None
        num_logits = 1 + len(self.draft.token_ids) if self.gives_tokens else 0
        parents = None if self.draft.parents is None else [-1, *(parent + 1 for parent in self.draft.parents)]
        token_ids = self.token_ids + self.draft.token_ids
        return Segment(self.request.session.cache, token_ids, parents, num_logits, wants_states=not self.is_left)

    def rows(self, path: Sequence[int] = ()) -> Sequence[int]:
        """Rows of the segment to keep: its own tokens and these nodes of the draft."""
        num_own = len(self.token_ids)
        if all(node == index for index, node in enumerate(path)):
            return range(num_own + len(path))
        return [*range(num_own), *(num_own + node for node in path)]

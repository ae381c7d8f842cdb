"""The teacher: the target's frozen head over stored last states, cut to the draft vocabulary.

The restricted head is kept in float32 and multiplied with every batch. The full head is needed only to know whether a
position's greedy token can be drafted at all; that never changes, so it is computed once per row, in vocabulary chunks, and
remembered while the row is replayed. Shapes: the legend of runtime/types.py; P supervised positions of a batch.
"""

from __future__ import annotations

from itertools import pairwise

import torch

from runtime.eagle3.vocab import DraftVocabulary
from training.data.batches import Batch

VOCABULARY_CHUNK = 8192
MAX_REMEMBERED_ROWS = 8192


class Teacher:
    def __init__(self, lm_head: torch.Tensor, vocabulary: DraftVocabulary, device: torch.device) -> None:
        """lm_head: [V, Ht], in any dtype."""
        self._lm_head = lm_head
        self._can_draft = vocabulary.t2d.to(device)  # bool [V]
        self._to_draft = vocabulary.to_draft.to(device)  # int64 [V]
        self.head = lm_head[vocabulary.target_ids].to(device, torch.float32)  # [Vd, Ht]
        self._covered: dict[str, torch.Tensor] = {}  # sample id -> bool [positions of the row]

    def covered(self, batch: Batch) -> torch.Tensor:
        """bool [P]: the target's greedy token x*[p+2] lies in the draft vocabulary."""
        spans = {name: slice(*span) for name, span in zip(batch.sample_ids, pairwise(batch.query_offsets), strict=True)}
        unknown = {name: batch.last[span] for name, span in spans.items() if name not in self._covered}
        if unknown:
            can_draft = self._can_draft[self._greedy(torch.cat(list(unknown.values())))]
            start = 0
            for name, states in unknown.items():
                self._covered[name] = can_draft[start : start + len(states)].clone()
                start += len(states)
        result = torch.cat([self._covered[sample_id] for sample_id in batch.sample_ids])
        while len(self._covered) > MAX_REMEMBERED_ROWS:
            del self._covered[next(iter(self._covered))]
        return result

    def draft_labels(self, batch: Batch) -> torch.Tensor:
        """int64 [P, L]: x[p+2+k] as a draft id; -1 where it cannot be drafted or is not supervised."""
        return torch.where(batch.chain_ids < 0, -1, self._to_draft[batch.chain_ids.clamp(min=0)])

    def _greedy(self, states: torch.Tensor) -> torch.Tensor:
        """int64 [P]: argmax of the full head over states [P, Ht]."""
        best = states.new_full((len(states),), float("-inf"))
        ids = torch.zeros(len(states), dtype=torch.int64, device=states.device)
        for start in range(0, len(self._lm_head), VOCABULARY_CHUNK):
            chunk = self._lm_head[start : start + VOCABULARY_CHUNK].to(states)  # [chunk, Ht]
            values, indices = (states @ chunk.T).max(-1)
            is_better = values > best
            ids = torch.where(is_better, indices + start, ids)
            best = torch.where(is_better, values, best)
        return ids

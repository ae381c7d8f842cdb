"""The teacher: the target's frozen head over stored last states, cut to the draft vocabulary.

The restricted head is kept in the precision of the layers and multiplied with every batch. The full head is needed only to know
whether a position's greedy token can be drafted at all, and how much of the target's distribution lies in the draft vocabulary;
neither ever changes, so both are computed once per row, in chunks of rows and vocabulary, and remembered while the row is
replayed: nothing of size P * V ever exists. On CUDA chunks are larger, and one kernel reads each once.
Shapes: the legend of runtime/types.py; P supervised positions of a batch.
"""

from __future__ import annotations

from itertools import pairwise

import torch

from runtime.eagle3.vocab import DraftVocabulary
from training.data.batches import Batch
from training.learning.loss import Lesson
from training.learning.precision import compute_dtype, product

VOCABULARY_CHUNK = 8192
ROW_CHUNK = 2048
CUDA_LOGITS = 2**27  # of a chunk of rows over the whole vocabulary: 0.5 GiB
MAX_REMEMBERED_ROWS = 8192


class Teacher:
    def __init__(self, lm_head: torch.Tensor, vocabulary: DraftVocabulary, device: torch.device) -> None:
        """lm_head: [V, Ht], in any dtype."""
        self._lm_head = lm_head
        self._dtype = compute_dtype(device)
        self._can_draft = vocabulary.t2d.to(device)  # bool [V]
        self._to_draft = vocabulary.to_draft.to(device)  # int64 [V]
        self._head = lm_head[vocabulary.target_ids].to(device, self._dtype)  # [Vd, Ht]
        self._known: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}  # sample id -> covered, log_z of the row's positions

    def lesson(self, batch: Batch) -> Lesson:
        """What the target says about a batch."""
        covered, log_z = self._whole_vocabulary(batch)
        labels = torch.where(batch.chain_ids < 0, -1, self._to_draft[batch.chain_ids.clamp(min=0)])
        return Lesson(self._head, batch.last.to(self._dtype), log_z, covered, labels, batch.pairs)

    def _whole_vocabulary(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """bool [P]: the target's greedy token x*[p+2] lies in the draft vocabulary; [P]: logsumexp of all its logits."""
        spans = {name: slice(*span) for name, span in zip(batch.sample_ids, pairwise(batch.query_offsets), strict=True)}
        unknown = {name: batch.last[span] for name, span in spans.items() if name not in self._known}
        if unknown:
            ids, log_z = self._read(torch.cat(list(unknown.values())))
            sizes = [len(states) for states in unknown.values()]
            parts = zip(self._can_draft[ids].split(sizes), log_z.split(sizes), strict=True)  # type: ignore[no-untyped-call]
            self._known |= dict(zip(unknown, parts, strict=True))
        known = [self._known[sample_id] for sample_id in batch.sample_ids]
        while len(self._known) > MAX_REMEMBERED_ROWS:
            del self._known[next(iter(self._known))]
        return torch.cat([covered for covered, _ in known]), torch.cat([log_z for _, log_z in known])

    def _read(self, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Of the full head over states [P, Ht]: its argmax int64 [P], and its logsumexp [P]."""
        if states.is_cuda:
            return read_at_once(states.to(self._dtype), self._lm_head.to(self._dtype))
        parts = [self._read_chunk(some.to(self._dtype)) for some in states.split(ROW_CHUNK)]  # type: ignore[no-untyped-call]
        return torch.cat([ids for ids, _ in parts]), torch.cat([log_z for _, log_z in parts])

    def _read_chunk(self, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        best = torch.full((len(states),), float("-inf"), device=states.device)
        ids = torch.zeros(len(states), dtype=torch.int64, device=states.device)
        total = torch.zeros_like(best)  # of exp(logit - best)
        for start in range(0, len(self._lm_head), VOCABULARY_CHUNK):
            chunk = self._lm_head[start : start + VOCABULARY_CHUNK].to(states)  # [chunk, Ht]
            logits = product(states, chunk)
            values, indices = logits.max(-1)
            ids = torch.where(values > best, indices + start, ids)
            higher = torch.maximum(values, best)
            total = total * torch.exp(best - higher) + logits.sub_(higher[:, None]).exp_().sum(-1)
            best = higher
        return ids, best + total.log()


def read_at_once(states: torch.Tensor, lm_head: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The same, of some rows over the whole vocabulary at a time: few launches, where a launch is what costs."""
    from training.learning.head_kernel import summaries

    log_z = torch.empty(len(states), device=states.device)
    ids = torch.empty(len(states), dtype=torch.int64, device=states.device)
    num_rows = max(1, CUDA_LOGITS // len(lm_head))
    for start in range(0, len(states), num_rows):
        rows = slice(start, start + num_rows)
        summaries(product(states[rows], lm_head), ids[rows], log_z[rows])
    return ids, log_z

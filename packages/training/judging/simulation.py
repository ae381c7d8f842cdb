"""Acceptance length on rows, by the same chain simulation that serving runs.

A verification step stands at a position p of a turn (the first is the last prompt position), drafts a chain of up to D
tokens from the drafter's own recycled states, accepts those that equal the row's next tokens, and moves on by accepted + 1.
Up to its first miss a chain on its own tokens reads exactly what a chain on the row's tokens reads, so one batched unroll
that drops a position at its first miss gives, for every p at once, how far a step there would get; the walk then visits
the positions that serving would. Counts per row are what is returned: whoever adds them divides last. They equal those of a
server whose chains all have that depth.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

import torch

from runtime.drafters.base import DraftRequest
from runtime.drafters.ngram import NgramDrafter
from runtime.eagle3.model import Eagle3Model
from runtime.types import SpeculationStats
from training.data.batches import Batch, TrainingRow, group_by_tokens, pack, supervised
from training.learning.ttt import Unroll

MAX_BATCH_TOKENS = 8192
HEAD_BLOCK = 256  # positions whose logits exist at a time


@torch.no_grad()
def evaluate(model: Eagle3Model, rows: Sequence[TrainingRow], num_draft_tokens: int) -> list[SpeculationStats]:
    """One count per row, in order, of chains of up to num_draft_tokens greedy drafts."""
    device = model.fc.weight.device
    counts: list[SpeculationStats] = []
    for group in group_by_tokens(rows, MAX_BATCH_TOKENS):
        batch = pack(group, num_draft_tokens, device)
        reach = leading_hits(model, batch).tolist()
        depths = batch.depths.tolist()
        for start, stop in pairwise(batch.query_offsets):
            counts.append(walk(reach[start:stop], depths[start:stop], num_draft_tokens))
    return counts


def evaluate_ngram(rows: Sequence[TrainingRow], num_draft_tokens: int) -> list[SpeculationStats]:
    """The same of n-gram lookup, which serves a model that has no drafter yet."""
    counts: list[SpeculationStats] = []
    for row in rows:
        tokens = row.features.token_ids.tolist()
        at, depths = (each.tolist() for each in supervised(row.features.generated))
        drafter = NgramDrafter()
        state = drafter.new_state()
        reach: list[int] = []
        for p, depth in zip(at, depths, strict=True):
            known = p + 2  # x[p+1] was just sampled, x[p+2] is the first to guess
            request = DraftRequest(state, p, torch.empty(1, 0), tokens[:known], min(depth, num_draft_tokens))
            [draft] = drafter.propose([request])
            hits = [guess == token for guess, token in zip(draft.token_ids, tokens[known:], strict=False)]
            reach.append([*hits, False].index(False))
        counts.append(walk(reach, depths, num_draft_tokens))
    return counts


def leading_hits(model: Eagle3Model, batch: Batch) -> torch.Tensor:
    """int64 [P]: how many greedy drafts in a row are right when a chain starts at each supervised position."""
    chain = Unroll(model, batch)
    reach = torch.zeros(batch.num_supervised, dtype=torch.int64, device=batch.aux.device)
    states = chain.first()
    for k in range(batch.chain_ids.shape[1]):
        drafts = greedy(model, states)
        hit = drafts == batch.chain_ids[chain.rows, k]
        reach[chain.rows[hit]] += 1
        can_go_on = hit & (batch.depths[chain.rows] > k + 1)
        keep = can_go_on.nonzero().flatten()
        if not len(keep) or k + 1 == batch.chain_ids.shape[1]:
            break
        states = chain.deeper(keep, drafts[keep])
    return reach


def greedy(model: Eagle3Model, states: torch.Tensor) -> torch.Tensor:
    """int64 [P]: the target ids that the drafter thinks most likely after states [P, H]."""
    drafts = [model.draft_logits(some).argmax(-1) for some in states.split(HEAD_BLOCK)]  # type: ignore[no-untyped-call]
    return model.vocabulary.target_ids.to(states.device)[torch.cat(drafts)]


def walk(reach: Sequence[int], depths: Sequence[int], num_draft_tokens: int) -> SpeculationStats:
    """The verification steps of one row. reach, depths: per supervised position, ascending; depth falls to 1 at a turn's end."""
    stats = SpeculationStats()
    at = 0
    while at < len(reach):
        accepted = reach[at]
        stats.record(min(num_draft_tokens, depths[at]), accepted)
        at += min(accepted + 1, depths[at])  # at the end of a turn: on to the first position of the next one
    return stats


def total(counts: Iterable[SpeculationStats]) -> SpeculationStats:
    """The sum of counts."""
    result = SpeculationStats()
    for stats in counts:
        result.add(stats)
    return result


def depth_acceptance(stats: SpeculationStats) -> list[float]:
    """Per depth: the share of drafts made there that were accepted (a draft behind a rejected one is rejected too)."""
    accepted = [*stats.accepted_per_position, *([0] * len(stats.drafted_per_position))]
    return [hits / drafted for hits, drafted in zip(accepted, stats.drafted_per_position, strict=False)]

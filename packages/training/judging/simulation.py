"""Acceptance on rows, by the chain that serving runs: expected where drafts are sampled, counted where they are certain.

A verification step stands at a position p of a turn (the first is the last prompt position), drafts a chain of up to D
tokens from the drafter's own recycled states, and moves on by accepted + 1. The row tells what was said, x, whatever was
drafted; so all that is left to chance is whether a draft was what was said:

    certain drafts      a_k = 1 if the drafter's most likely token is x[p+2+k], else 0
    sampled drafts      a_k = P(accepted | x[p+2+k] was said) = min(p, q) / p = min(1, q(x) / p(x)) of x = x[p+2+k]

with q the drafter's distribution at the row's temperature and p the target's as it was sampled from. Over what may be said,
x ~ p, the mean of that is alpha = sum_v min(p(v), q(v)); a token outside the draft vocabulary has q = 0. Draft k is offered
only behind k accepted ones, whose tokens are the row's: so a chain on the row's tokens is the chain that serving drafts, and
one batched unroll gives every a_k at once. The walk then follows all courses of steps, each by its probability:

    P(n accepted at p) = a_0 ... a_{n-1} (1 - a_n)      the next step stands at p + n + 1

Of certain drafts there is one course, and its counts equal those of a server whose chains all have that depth; of sampled
ones their expectation. Counts per row are what is returned: whoever adds them divides last.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, zip_longest

import torch

from runtime.drafters.base import DraftRequest
from runtime.drafters.ngram import NgramDrafter
from runtime.eagle3.model import Eagle3Model
from runtime.features.sampling import sampling_of
from runtime.speculation.sampling import process_logits
from runtime.types import SamplingParams
from training.data.batches import Batch, TrainingRow, group_by_tokens, pack, supervised
from training.learning.ttt import Unroll

MAX_BATCH_TOKENS = 8192
HEAD_BLOCK = 256  # positions whose logits exist at a time
VOCABULARY_CHUNK = 8192  # of the target's head
NEGLIGIBLE = 1e-6  # a chain that is reached less often is not followed


@dataclass
class Counts:
    """What verification steps came to, or may be expected to. Add first and divide last."""

    num_steps: float = 0.0
    num_drafted: float = 0.0
    num_accepted: float = 0.0
    accepted_per_position: list[float] = field(default_factory=list)  # [k]: steps whose draft k was accepted
    drafted_per_position: list[float] = field(default_factory=list)  # [k]: steps whose chain was longer than k

    @property
    def mean_acceptance_length(self) -> float:
        """1 + accepted draft tokens / verification steps; the bonus token counts. 1.0 before the first step."""
        return 1.0 + self.num_accepted / self.num_steps if self.num_steps else 1.0

    def add(self, other: Counts) -> None:
        self.num_steps += other.num_steps
        self.num_drafted += other.num_drafted
        self.num_accepted += other.num_accepted
        self.accepted_per_position = _sums(self.accepted_per_position, other.accepted_per_position)
        self.drafted_per_position = _sums(self.drafted_per_position, other.drafted_per_position)


def _sums(one: Sequence[float], other: Sequence[float]) -> list[float]:
    return [a + b for a, b in zip_longest(one, other, fillvalue=0.0)]


class TargetView:
    """What the target gave the tokens of sampled rows, as they were sampled. It never changes, so it is remembered."""

    def __init__(self, lm_head: torch.Tensor) -> None:
        """lm_head: [V, Ht], in any dtype."""
        self._lm_head = lm_head
        self._known: dict[str, torch.Tensor] = {}  # sample id -> [P]

    def keep(self, sample_ids: Iterable[str]) -> None:
        """Forget all rows but these."""
        self._known = {name: self._known[name] for name in sample_ids if name in self._known}

    def probs(self, row: TrainingRow, sampling: SamplingParams) -> torch.Tensor:
        """float32 [n]: p(x[i+1]) at each position i with a state, of the row's tokens x[0 .. n]; 1 where that is no generated
        token, of which nobody asks."""
        if row.sample_id not in self._known:
            features, device = row.features, self._lm_head.device
            asked = features.generated[1:].nonzero().flatten()  # states behind which a token was generated
            said = features.token_ids[asked + 1].to(device)
            given = torch.ones(len(features.generated) - 1)
            for at, states, tokens in zip(*map(_blocks, (asked, features.hidden.last[asked], said)), strict=True):
                p = process_logits(self._logits(states.to(device, torch.float32)), sampling).softmax(dim=-1)
                given[at] = p.gather(-1, tokens[:, None]).squeeze(-1).cpu()
            self._known[row.sample_id] = given
        return self._known[row.sample_id]

    def _logits(self, states: torch.Tensor) -> torch.Tensor:
        """float32 [R, V] of states [R, Ht]"""
        logits = states.new_empty(len(states), len(self._lm_head))
        for start in range(0, len(self._lm_head), VOCABULARY_CHUNK):
            head = self._lm_head[start : start + VOCABULARY_CHUNK]
            logits[:, start : start + len(head)] = states @ head.to(states).T
        return logits


@torch.no_grad()
def evaluate(model: Eagle3Model, rows: Sequence[TrainingRow], num_draft_tokens: int, target: TargetView) -> list[Counts]:
    """One count per row, in order, of chains of up to num_draft_tokens drafts."""
    device = model.fc.weight.device
    counts: list[Counts] = []
    for group in group_by_tokens(rows, MAX_BATCH_TOKENS):
        batch = pack(group, num_draft_tokens, device)
        chances = accept_chances(model, group, batch, target).tolist()
        depths = batch.depths.tolist()
        for start, stop in pairwise(batch.query_offsets):
            counts.append(walk(chances[start:stop], depths[start:stop], num_draft_tokens))
    return counts


def evaluate_ngram(rows: Sequence[TrainingRow], num_draft_tokens: int) -> list[Counts]:
    """The same of n-gram lookup, which serves a model that has no drafter yet. Its drafts are certain."""
    counts: list[Counts] = []
    for row in rows:
        tokens = row.features.token_ids.tolist()
        at, depths = (each.tolist() for each in supervised(row.features.generated))
        drafter = NgramDrafter()
        state = drafter.new_state()
        chances: list[list[float]] = []
        for p, depth in zip(at, depths, strict=True):
            known = p + 2  # x[p+1] was just sampled, x[p+2] is the first to guess
            request = DraftRequest(state, p, torch.empty(1, 0), tokens[:known], min(depth, num_draft_tokens))
            [draft] = drafter.propose([request])
            hits = [float(guess == token) for guess, token in zip(draft.token_ids, tokens[known:], strict=False)]
            chances.append(hits + [0.0] * (num_draft_tokens - len(hits)))
        counts.append(walk(chances, depths, num_draft_tokens))
    return counts


def accept_chances(model: Eagle3Model, rows: Sequence[TrainingRow], batch: Batch, target: TargetView) -> torch.Tensor:
    """float64 [P, D]: a_k of the chain that starts at each supervised position of a batch of these rows; 0 where it does not
    get so far."""
    temperatures, target_probs = _as_sampled(rows, batch.chain_ids.shape[1], target, batch.aux.device)
    chain = Unroll(model, batch)
    num_depths = batch.chain_ids.shape[1]
    chances = torch.zeros(batch.num_supervised, num_depths, dtype=torch.float64, device=batch.aux.device)
    reached = torch.ones(batch.num_supervised, dtype=torch.float64, device=batch.aux.device)
    states = chain.first()
    for k in range(num_depths):
        said = batch.chain_ids[chain.rows, k]
        chance = _accepted(model, states, said, temperatures[chain.rows], target_probs[chain.rows, k])
        chances[chain.rows, k] = chance
        reached = reached * chance
        keep = ((reached > NEGLIGIBLE) & (batch.depths[chain.rows] > k + 1)).nonzero().flatten()
        if not len(keep) or k + 1 == num_depths:
            break
        reached = reached[keep]
        states = chain.deeper(keep, said[keep])
    return chances


def _accepted(
    model: Eagle3Model, states: torch.Tensor, said: torch.Tensor, temperatures: torch.Tensor, target_probs: torch.Tensor
) -> torch.Tensor:
    """float64 [n]: the chance that what is drafted behind states [n, H] is `said` [n] and accepted."""
    to_draft = model.vocabulary.to_draft.to(states.device)  # [V]
    parts = []
    columns = (states, to_draft[said], temperatures, target_probs)
    for h, draft_ids, temperature, p in zip(*map(_blocks, columns), strict=True):
        logits = model.draft_logits(h).float()  # [n, Vd]
        can_draft = draft_ids >= 0
        hit = (logits.argmax(-1) == draft_ids).double()
        q = (logits / temperature.clamp(min=1e-6)[:, None]).softmax(-1).gather(-1, draft_ids.clamp(min=0)[:, None]).squeeze(-1)
        sampled = (q.double() / p.double().clamp(min=1e-30)).clamp(max=1.0)
        parts.append(torch.where(temperature > 0, sampled, hit) * can_draft)
    return torch.cat(parts) if parts else states.new_empty(0, dtype=torch.float64)


def _blocks(rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return rows.split(HEAD_BLOCK)  # type: ignore[no-any-return, no-untyped-call]


def _as_sampled(
    rows: Sequence[TrainingRow], num_depths: int, target: TargetView, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of the supervised positions of rows: temperatures float32 [P], 0 where drafts are certain; and p(x[p+2+k]) float32 [P, D]
    where they are not."""
    temperatures, probs = [], []
    for row in rows:
        at, _ = supervised(row.features.generated)
        sampling = sampling_of(row.features.labels)
        if sampling is None:
            temperatures.append(torch.zeros(len(at)))
            probs.append(torch.ones(len(at), num_depths))
            continue
        given = target.probs(row, sampling)  # [n], at i: of x[i+1]
        where = at[:, None] + 1 + torch.arange(num_depths)  # x[p+2+k] is given at p + 1 + k
        temperatures.append(torch.full((len(at),), sampling.temperature))
        probs.append(given[where.clamp(max=len(given) - 1)])
    return torch.cat(temperatures).to(device), torch.cat(probs).to(device)


def walk(chances: Sequence[Sequence[float]], depths: Sequence[int], num_draft_tokens: int) -> Counts:
    """The verification steps of one row. chances [P, D], depths [P]: per supervised position, ascending; depth falls to 1 at
    a turn's end, and what follows it is the first position of the next turn."""
    counts = Counts()
    visits = [1.0, *([0.0] * len(depths))]  # how often a step stands at each position
    for at, (row, depth) in enumerate(zip(chances, depths, strict=True)):
        visit = visits[at]
        if visit <= 0.0:
            continue
        length = min(num_draft_tokens, depth)
        reached = [visit]  # [n]: how often the first n drafts were accepted
        for chance in row[:length]:
            reached.append(reached[-1] * chance)
        for n, often in enumerate(reached):
            exactly = often - (reached[n + 1] if n < length else 0.0)
            visits[at + min(n + 1, depth)] += exactly
        drafted = [visit] * length
        counts.add(Counts(visit, visit * length, sum(reached[1:]), reached[1:], drafted))
    while counts.accepted_per_position and not counts.accepted_per_position[-1]:
        counts.accepted_per_position.pop()  # a count ends with the deepest draft that was accepted
    return counts


def total(counts: Iterable[Counts]) -> Counts:
    """The sum of counts."""
    result = Counts()
    for each in counts:
        result.add(each)
    return result


def depth_acceptance(counts: Counts) -> list[float]:
    """Per depth: the share of drafts made there that were accepted (a draft behind a rejected one is rejected too)."""
    accepted = [*counts.accepted_per_position, *([0.0] * len(counts.drafted_per_position))]
    return [hits / drafted for hits, drafted in zip(accepted, counts.drafted_per_position, strict=False)]

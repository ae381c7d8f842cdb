"""`Eagle3Drafter`: serves an EAGLE3 draft network, many sequences at a time, each with K/V of its own.

It knows the draft network and nothing of targets or sessions. One call of `propose`, for new rows (aux[p], x[p+1]):

    catch up   the K/V of every new row of every sequence, in one forward
    level 0    each sequence's last row attends to the sequence's K/V and gives the candidates of level 0
    level k    (state behind a node of level k-1, its token) at position p_last + k gives the candidates of level k, for the
               `width` most likely nodes of level k-1 of every sequence; its K/V is dropped with the draft

Trees are those of EAGLE-2 (Li et al. 2024): of all candidates the nodes with the most likely paths are kept. Their nodes are
certain, whatever the temperature. A chain is a tree of width 1; at temperature > 0 its nodes are sampled instead.

Only last rows need the layer's output, so a long prompt costs its K/V projections and no attention. Attention runs sequence
by sequence, everything else for all sequences that share a width; nothing waits for the device before the drafts are complete.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count

import torch

from runtime.drafters.base import Draft, DraftRequest, SparseProbs
from runtime.drafters.eagle3_kv import SequenceKV
from runtime.drafters.eagle3_packed import pack
from runtime.eagle3.model import Attend, Eagle3Model
from runtime.speculation.sampling import LOWEST_TEMPERATURE, pick


class Eagle3Drafter:
    """Implements `Drafter`. Takes a snapshot of the model: training it further changes nothing here."""

    def __init__(self, model: Eagle3Model, version: str) -> None:
        self._version = version
        self._model = _snapshot(model)
        self._max_positions = model.config.max_position_embeddings
        self._target_ids = model.vocabulary.target_ids.to(model.lm_head.weight.device)  # [Vd]
        self._sequences: dict[int, SequenceKV] = {}
        self._handles = count()

    @property
    def version(self) -> str:
        return self._version

    @property
    def model(self) -> Eagle3Model:
        """The snapshot; read only."""
        return self._model

    def new_state(self) -> int:
        handle = next(self._handles)
        config, weight = self._model.config, self._model.norm.weight
        self._sequences[handle] = SequenceKV(config.num_key_value_heads, config.head_dim, weight.dtype, weight.device)
        return handle

    def drop_state(self, state: int) -> None:
        del self._sequences[state]

    @torch.inference_mode()
    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        plans = [self._plan(request) for request in requests]
        # The deepest of each width first: those still drafting are then always the head of their batch.
        order = sorted((plan for plan in plans if plan.num_rows), key=lambda plan: (plan.width, -plan.depth))
        if order:
            last_rows = self._catch_up(order)
            for width in sorted({plan.width for plan in order}):
                places = [place for place, plan in enumerate(order) if plan.width == width and plan.depth]
                if places:
                    self._draft([order[place] for place in places], last_rows.select(self._int64(places)), width)
        return [plan.draft for plan in plans]

    def _plan(self, request: DraftRequest) -> _Plan:
        first, num_new = request.position, len(request.aux)
        assert len(request.history) == first + num_new + 1, "the history ends with the token behind the last new row"
        sequence = self._sequences[request.state]
        sequence.truncate(first)
        num_rows = min(num_new, max(self._max_positions - first, 0))
        # Level k sits at position p_last + k: none without a last row, none at positions that the network does not know.
        room = self._max_positions - (first + num_new - 1) if num_new else 0
        depth = min(request.depth, max(room, 0))
        width = min(request.width, len(self._target_ids))
        return _Plan(request, sequence, num_rows, depth, width, _uniforms(request) if width == 1 else None)

    def _catch_up(self, plans: Sequence[_Plan]) -> _Batch:
        """Keep the K/V of all new rows but those to draft from, and return the last row of each plan."""
        token_ids: list[int] = []
        positions: list[int] = []
        kept: list[int] = []
        last: list[int] = []
        for plan in plans:
            first, start = plan.request.position, len(positions)
            kept += range(start, start + plan.num_kept)
            last.append(start + plan.num_rows - 1)
            positions += range(first, first + plan.num_rows)
            token_ids += plan.request.history[first + 1 : first + 1 + plan.num_rows]
        aux = torch.cat([plan.request.aux[: plan.num_rows] for plan in plans]).to(self._target_ids.device)  # [N, 3*Ht]
        batch = _Batch(self._int64(token_ids), self._model.project(aux), self._int64(positions))
        if kept:
            rows = batch.select(self._int64(kept))
            k, v = self._model.keys_values(rows.token_ids, rows.h, rows.positions)  # [N, kv_heads, D]
            sizes = [plan.num_kept for plan in plans]
            for plan, k_rows, v_rows in zip(plans, torch.split(k, sizes), torch.split(v, sizes), strict=True):
                plan.sequence.append(plan.request.position, k_rows, v_rows)
        return batch.select(self._int64(last))

    def _draft(self, plans: Sequence[_Plan], roots: _Batch, width: int) -> None:
        """Draft all plans of one width, deepest first, each from its row of the batch."""
        model, growth = self._model, _Growth(plans, width, self._target_ids)
        h = model.layer(roots.token_ids, roots.h, roots.positions, _attend_root(plans)).unsqueeze(1)  # [n, beams, H]
        growth.add(model.draft_logits(h))
        for level in range(1, plans[0].depth):
            if growth.is_enough():
                break
            n = growth.num_at(level)
            token_ids, beam = growth.frontier(n)  # [n, width], and which row of h is behind each
            h = h[:n].gather(1, beam[..., None].expand(-1, -1, h.shape[-1])).flatten(0, 1)
            positions = (roots.positions[:n] + level).repeat_interleave(width)
            h = model.layer(token_ids.flatten(), h, positions, _attend_level(plans[:n], growth.ancestors, level))
            h = h.view(n, width, -1)
            growth.add(model.draft_logits(h))
        for plan in plans:
            plan.sequence.keep_row_ahead(plan.last_position)
        growth.hand_out()

    def _int64(self, values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._target_ids.device)


def _snapshot(model: Eagle3Model) -> Eagle3Model:
    """A copy for inference, its weights packed where a CPU gains by it. The target's embedding is shared, not copied."""
    served = copy.deepcopy(model, {id(shared): shared for shared in (model.embedding, model.vocabulary)})
    pack(served)
    return served.eval().requires_grad_(False)


def _uniforms(request: DraftRequest) -> torch.Tensor | None:
    """The numbers to draw this request's drafts with, float64 [depth]; None: nothing to draw."""
    if request.temperature <= 0.0 or not request.depth:
        return None
    assert request.uniforms is not None, "sampled drafts need a number each"
    return request.uniforms


def _attend_root(plans: Sequence[_Plan]) -> Attend:
    """Attention of the plans' last rows: to all kept rows of their own sequence and to themselves."""

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return torch.cat([plan.sequence.attend(q[i : i + 1], k[i : i + 1], v[i : i + 1], 0) for i, plan in enumerate(plans)])

    return attend


def _attend_level(plans: Sequence[_Plan], ancestors: torch.Tensor, level: int) -> Attend:
    """Attention of a level's nodes, `width` of each plan: to its sequence, its last row, their own ancestors and themselves.

    ancestors: bool [n, width, level * width], of each node among the nodes of the levels 1 .. level.
    """
    width = ancestors.shape[1]

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        outputs = []
        for i, plan in enumerate(plans):
            rows = slice(i * width, (i + 1) * width)
            sees = None if width == 1 else ancestors[i]
            outputs.append(plan.sequence.attend(q[rows], k[rows], v[rows], 1 + (level - 1) * width, sees))
        return torch.cat(outputs)

    return attend


@dataclass(frozen=True)
class _Batch:
    """Rows of several sequences, one behind the other."""

    token_ids: torch.Tensor  # int64 [N], x[p+1]
    h: torch.Tensor  # [N, H], project(aux[p])
    positions: torch.Tensor  # int64 [N], p

    def select(self, index: torch.Tensor) -> _Batch:
        return _Batch(self.token_ids[index], self.h[index], self.positions[index])


@dataclass
class _Plan:
    """One request on its way through a call of `propose`."""

    request: DraftRequest
    sequence: SequenceKV
    num_rows: int  # new rows at positions that the network knows
    depth: int  # levels to draft, <= request.depth
    width: int
    uniforms: torch.Tensor | None  # float64 [request.depth], of a sampled chain
    draft: Draft = field(default_factory=lambda: Draft([]))

    def __post_init__(self) -> None:
        if self.uniforms is not None:
            self.draft = Draft([], [])

    @property
    def num_kept(self) -> int:
        """New rows whose K/V the catch-up keeps; the one to draft from follows at level 0."""
        return self.num_rows - 1 if self.depth else self.num_rows

    @property
    def last_position(self) -> int:
        return self.request.position + len(self.request.aux) - 1


class _Growth:
    """The trees of one batch while they grow, level by level; everything stays on the device until `hand_out`.

    A level has `width` candidates behind each of its beams, the frontier of the level before; level 0 has one beam, the root.
    """

    def __init__(self, plans: Sequence[_Plan], width: int, target_ids: torch.Tensor) -> None:
        self._plans, self._width = plans, width
        self._target_ids = target_ids  # [Vd]
        self._sampled = [i for i, plan in enumerate(plans) if plan.uniforms is not None]
        self._probs: list[list[SparseProbs]] = [[] for _ in plans]  # of sampled chains
        self._levels: list[torch.Tensor] = []  # float64 [3, n, candidates]: target id, log q of the path, parent
        self._scores = torch.zeros(len(plans), 1, device=target_ids.device)  # [n, beams] log q of each beam's path
        self._places = torch.full((len(plans), 1), -1, device=target_ids.device)  # [n, beams] node that each beam is
        self._num_nodes = 0  # candidates of a plan so far
        self._confidences: list[list[float]] = [[] for _ in plans]  # of chains that may end early
        self.ancestors = torch.ones(len(plans), 1, 0, dtype=torch.bool, device=target_ids.device)  # [n, beams, nodes fed in]

    def num_at(self, level: int) -> int:
        """Plans that go on to this level."""
        return sum(plan.depth > level for plan in self._plans)

    def add(self, logits: torch.Tensor) -> None:
        """The next level's candidates, from the draft logits [n, beams, Vd] behind the frontier."""
        n, level = len(logits), len(self._levels)
        logits = logits.float()
        best, draft_ids = logits.topk(self._width, dim=-1)  # [n, beams, width]
        log_q = best - logits.logsumexp(dim=-1, keepdim=True)
        for i in self._sampled:
            if i < n:
                draft_ids[i, 0], log_q[i, 0] = self._sample(i, logits[i, 0], level)
        self._log_q = log_q
        self._candidate_ids = self._target_ids[draft_ids].flatten(1)  # [n, beams * width]
        self._candidate_scores = (self._scores[:n, :, None] + log_q).flatten(1)
        parents = self._places[:n].repeat_interleave(self._width, dim=1)
        self._levels.append(torch.stack([self._candidate_ids.double(), self._candidate_scores.double(), parents.double()]))

    def is_enough(self) -> bool:
        """Whether nobody that could go deeper gains by it. Waits for the device, but only where everybody asks to be asked."""
        going = self._plans[: self.num_at(len(self._levels))]
        if self._width > 1 or any(plan.uniforms is not None or plan.request.is_enough is None for plan in going):
            return False
        for confidences, log_q in zip(self._confidences, self._log_q[:, 0, 0].tolist(), strict=False):
            confidences.append(math.exp(log_q))
        return all(
            plan.request.is_enough is None or plan.request.is_enough(confidences)
            for plan, confidences in zip(going, self._confidences, strict=False)
        )

    def _sample(self, i: int, logits: torch.Tensor, level: int) -> tuple[torch.Tensor, torch.Tensor]:
        plan = self._plans[i]
        assert plan.uniforms is not None
        q = (logits / max(plan.request.temperature, LOWEST_TEMPERATURE)).softmax(dim=-1)  # [Vd]
        self._probs[i].append(SparseProbs(self._target_ids, q))
        draft_id = pick(q.unsqueeze(0), plan.uniforms[level : level + 1])  # [1]
        return draft_id, q[draft_id].log()

    def frontier(self, n: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The most likely candidates of the last level become beams: their ids, and which beam was before each, [n, width]."""
        self._scores, chosen = self._candidate_scores[:n].topk(self._width, dim=1)
        beam = chosen // self._width
        self._places = self._num_nodes + chosen
        self._num_nodes += self._candidate_scores.shape[1]
        before = self.ancestors[:n].gather(1, beam[..., None].expand(-1, -1, self.ancestors.shape[2]))
        itself = torch.eye(self._width, dtype=torch.bool, device=chosen.device).expand(n, -1, -1)
        self.ancestors = torch.cat([before, itself], dim=2)
        return self._candidate_ids[:n].gather(1, chosen), beam

    def hand_out(self) -> None:
        """Give each plan its draft: of all candidates those with the most likely paths, in one transfer."""
        shapes = [level.shape[1:] for level in self._levels]
        values = torch.cat([level.flatten() for level in self._levels]).tolist()
        tables: list[list[list[float]]] = [[[], [], []] for _ in self._plans]
        at = 0
        for n, size in shapes:
            for column in range(3):
                for i in range(n):
                    tables[i][column] += values[at : at + size]
                    at += size
        for plan, table, probs in zip(self._plans, tables, self._probs, strict=True):
            plan.draft = _most_likely(table[0], table[1], table[2], plan, probs)


def _most_likely(
    token_ids: Sequence[float], scores: Sequence[float], parents: Sequence[float], plan: _Plan, probs: list[SparseProbs]
) -> Draft:
    """The draft of one plan from its candidates. None that has no mass in its own distribution: a broken network's."""
    nodes = [node for node, score in enumerate(scores) if math.isfinite(score)]
    if plan.request.num_nodes is not None:
        # A path is never more likely than its beginning, and comes behind it: with a node its ancestors are among the best.
        nodes = sorted(sorted(nodes, key=lambda node: -scores[node])[: plan.request.num_nodes])
    places = {node: place for place, node in enumerate(nodes)}
    before = [int(parents[node]) for node in nodes]
    return Draft(
        token_ids=[int(token_ids[node]) for node in nodes],
        probs=None if plan.uniforms is None else probs[: len(nodes)],
        parents=None if plan.width == 1 else [places.get(parent, -1) for parent in before],
        confidences=[
            math.exp(scores[node] - (scores[parent] if parent >= 0 else 0.0)) for node, parent in zip(nodes, before, strict=True)
        ],
    )

"""`Eagle3Drafter`: serves an EAGLE3 draft network, many sequences at a time, each with K/V of its own.

It knows the draft network and nothing of targets or sessions. One call of `propose`, for new rows (aux[p], x[p+1]):

    catch up   the K/V of every new row of every sequence, in one forward
    depth 0    each sequence's last row attends to the sequence's K/V and gives draft 0
    depth k    (state of depth k-1, draft k-1) at position p_last + k gives draft k; its K/V is dropped with the chain

Only last rows need the layer's output, so a long prompt costs its K/V projections and no attention. Attention runs sequence
by sequence, everything else for the whole batch; nothing waits for the device before the chains are complete.
"""

from __future__ import annotations

import copy
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count, takewhile

import torch
import torch.nn.functional as F

from runtime.drafters.base import Draft, DraftRequest, SparseProbs
from runtime.eagle3.model import Attend, Eagle3Model
from runtime.linear import pack_linears
from runtime.speculation.sampling import LOWEST_TEMPERATURE, pick

MIN_CAPACITY_ROWS = 128


class Eagle3Drafter:
    """Implements `Drafter`. Takes a snapshot of the model: training it further changes nothing here."""

    def __init__(self, model: Eagle3Model, version: str) -> None:
        self._version = version
        self._model = _snapshot(model)
        self._max_positions = model.config.max_position_embeddings
        self._target_ids = model.vocabulary.target_ids.to(model.lm_head.weight.device)  # [Vd]
        self._sequences: dict[int, _Sequence] = {}
        self._handles = count()

    @property
    def version(self) -> str:
        return self._version

    def new_state(self) -> int:
        handle = next(self._handles)
        config, weight = self._model.config, self._model.norm.weight
        self._sequences[handle] = _Sequence(config.num_key_value_heads, config.head_dim, weight.dtype, weight.device)
        return handle

    def drop_state(self, state: int) -> None:
        del self._sequences[state]

    @torch.inference_mode()
    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        chains = [self._plan(request) for request in requests]
        # The deepest first: those still drafting are then always the head of the batch.
        order = sorted((chain for chain in chains if chain.num_rows), key=lambda chain: -chain.depth)
        if order:
            last_rows = self._catch_up(order)
            if order[0].depth:
                self._draft([chain for chain in order if chain.depth], last_rows)
        return [chain.draft() for chain in chains]

    def _plan(self, request: DraftRequest) -> _Chain:
        first, num_new = request.position, len(request.aux)
        assert len(request.history) == first + num_new + 1, "the history ends with the token behind the last new row"
        sequence = self._sequences[request.state]
        sequence.truncate(first)
        num_rows = min(num_new, max(self._max_positions - first, 0))
        # Draft k sits at position p_last + k: none without a last row, none at positions that the network does not know.
        room = self._max_positions - (first + num_new - 1) if num_new else 0
        depth = min(request.depth, max(room, 0))
        return _Chain(request, sequence, num_rows, depth, _uniforms(request))

    def _catch_up(self, chains: Sequence[_Chain]) -> _Batch:
        """Keep the K/V of all new rows but those to draft from, and return these."""
        token_ids: list[int] = []
        positions: list[int] = []
        kept: list[int] = []
        last: list[int] = []
        for chain in chains:
            first, end = chain.request.position, len(positions) + chain.num_rows
            kept += range(len(positions), len(positions) + chain.num_kept)
            last += range(len(positions) + chain.num_kept, end)
            positions += range(first, first + chain.num_rows)
            token_ids += chain.request.history[first + 1 : first + 1 + chain.num_rows]
        aux = torch.cat([chain.request.aux[: chain.num_rows] for chain in chains]).to(self._target_ids.device)  # [N, 3*Ht]
        batch = _Batch(self._int64(token_ids), self._model.project(aux), self._int64(positions))
        if kept:
            rows = batch.select(self._int64(kept))
            k, v = self._model.keys_values(rows.token_ids, rows.h, rows.positions)  # [N, kv_heads, D]
            sizes = [chain.num_kept for chain in chains]
            for chain, k_rows, v_rows in zip(chains, torch.split(k, sizes), torch.split(v, sizes), strict=True):
                chain.sequence.append(chain.request.position, k_rows, v_rows)
        return batch.select(self._int64(last))

    def _draft(self, chains: Sequence[_Chain], batch: _Batch) -> None:
        """Draft all chains, deepest first, each from its row of the batch."""
        token_ids, h = batch.token_ids, batch.h
        chooser = _Chooser(chains, self._target_ids)
        for depth in range(chains[0].depth):
            active = [chain for chain in chains if chain.depth > depth]
            n = len(active)
            h = self._model.layer(token_ids[:n], h[:n], batch.positions[:n] + depth, _attend_ahead(active, depth))
            token_ids = chooser.choose(self._model.draft_logits(h), depth)  # [n]
        for chain in chains:
            chain.sequence.keep_row_ahead(chain.last_position)
        chooser.hand_out()

    def _int64(self, values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._target_ids.device)


def _snapshot(model: Eagle3Model) -> Eagle3Model:
    """A copy for inference, its weights packed where a CPU gains by it. The target's embedding is shared, not copied."""
    served = copy.deepcopy(model, {id(shared): shared for shared in (model.embedding, model.vocabulary)})
    fc = served.fc
    pack_linears(served)
    served.fc = fc  # stays plain: `project` reads its dtype
    return served.eval().requires_grad_(False)


def _uniforms(request: DraftRequest) -> torch.Tensor | None:
    """The numbers to draw this request's drafts with, float64 [depth]; None: nothing to draw."""
    if request.temperature <= 0.0 or not request.depth:
        return None
    assert request.uniforms is not None, "sampled drafts need a number each"
    return request.uniforms


def _attend_ahead(chains: Sequence[_Chain], depth: int) -> Attend:
    """Attention of the chains' rows at this depth: to all kept rows of their own sequence and to their own chain."""

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return torch.stack([chain.sequence.attend(q[i], k[i], v[i], depth) for i, chain in enumerate(chains)])

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
class _Chain:
    """One request on its way through a call of `propose`."""

    request: DraftRequest
    sequence: _Sequence
    num_rows: int  # new rows at positions that the network knows
    depth: int  # drafts to make, <= request.depth
    uniforms: torch.Tensor | None  # float64 [request.depth]; None: greedy
    token_ids: list[int] = field(default_factory=list)
    probs: list[SparseProbs] = field(default_factory=list)

    @property
    def num_kept(self) -> int:
        """New rows whose K/V the catch-up keeps; the one to draft from follows at depth 0."""
        return self.num_rows - 1 if self.depth else self.num_rows

    @property
    def last_position(self) -> int:
        return self.request.position + len(self.request.aux) - 1

    def draft(self) -> Draft:
        return Draft(self.token_ids, None if self.uniforms is None else self.probs)


class _Sequence:
    """K/V of one sequence, a row per position seen, with room behind for a chain whose rows are never counted."""

    def __init__(self, num_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
        self._positions: list[int] = []  # ascending, of the rows that count; gaps are fine
        self._keys = torch.empty(num_heads, MIN_CAPACITY_ROWS, head_dim, dtype=dtype, device=device)  # [kv_heads, capacity, D]
        self._values = torch.empty_like(self._keys)

    def truncate(self, position: int) -> None:
        """Forget rows at this position and behind."""
        del self._positions[bisect_left(self._positions, position) :]

    def append(self, first: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Keep rows k, v [m, kv_heads, D] of positions first .. first+m-1."""
        self._write(k, v, 0)
        self._positions += range(first, first + len(k))

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ahead: int) -> torch.Tensor:
        """Write a row k, v [kv_heads, D] `ahead` places behind those that count; q [heads, D] sees everything up to it."""
        end = self._write(k.unsqueeze(0), v.unsqueeze(0), ahead)
        keys, values = self._keys[None, :, :end], self._values[None, :, :end]  # [1, kv_heads, end, D]
        return F.scaled_dot_product_attention(q[None, :, None], keys, values, enable_gqa=True)[0, :, 0]

    def keep_row_ahead(self, position: int) -> None:
        """Let the first row behind those that count be one of them; the rest of the chain is thereby dropped."""
        self._positions.append(position)

    def _write(self, k: torch.Tensor, v: torch.Tensor, ahead: int) -> int:
        start = len(self._positions) + ahead
        end = start + len(k)
        if end > self._keys.shape[1]:
            self._keys, self._values = _grown(self._keys, end), _grown(self._values, end)
        self._keys[:, start:end] = k.transpose(0, 1)
        self._values[:, start:end] = v.transpose(0, 1)
        return end


def _grown(old: torch.Tensor, num_rows: int) -> torch.Tensor:
    """The same rows [kv_heads, capacity, D] with room for num_rows, and for as many again as there were."""
    capacity = old.shape[1]
    new = old.new_empty(old.shape[0], max(2 * capacity, num_rows), old.shape[2])
    new[:, :capacity] = old
    return new


class _Chooser:
    """Picks the batch's tokens depth by depth; everything stays on the device until `hand_out`."""

    def __init__(self, chains: Sequence[_Chain], target_ids: torch.Tensor) -> None:
        self._chains = chains
        self._target_ids = target_ids  # [Vd]
        self._sampled = [i for i, chain in enumerate(chains) if chain.uniforms is not None]
        self._tokens: list[torch.Tensor] = []  # per depth: target ids [n]
        self._masses: list[torch.Tensor] = []  # per depth: q of each token, 1 where it was certain [n]

    def choose(self, logits: torch.Tensor, depth: int) -> torch.Tensor:
        """One token for each row of draft logits [n, Vd]; target ids [n]."""
        draft_ids = logits.argmax(dim=-1)
        mass = torch.ones(len(logits), device=logits.device)
        sampled = [i for i in self._sampled if i < len(logits)]
        if sampled:
            rows = torch.tensor(sampled, device=logits.device)
            temperatures = [max(self._chains[i].request.temperature, LOWEST_TEMPERATURE) for i in sampled]
            scale = torch.tensor(temperatures, device=logits.device).unsqueeze(-1)  # [num sampled, 1]
            q = (logits[rows].float() / scale).softmax(dim=-1)  # [num sampled, Vd]
            draft_ids[rows] = picked = pick(q, torch.stack([self._uniform(i, depth) for i in sampled]))
            mass[rows] = q.gather(-1, picked.unsqueeze(-1)).squeeze(-1)
            for i, row in zip(sampled, q, strict=True):
                self._chains[i].probs.append(SparseProbs(self._target_ids, row))
        self._tokens.append(self._target_ids[draft_ids])
        self._masses.append(mass)
        return self._tokens[-1]

    def hand_out(self) -> None:
        """Give each chain its tokens, up to one without mass in its own distribution: not a draft (a broken network's)."""
        sizes = [len(tokens) for tokens in self._tokens]
        tokens, masses = torch.cat(self._tokens).tolist(), torch.cat(self._masses).tolist()
        starts = [sum(sizes[:depth]) for depth in range(len(sizes))]
        for i, chain in enumerate(self._chains):
            places = [start + i for start in starts[: chain.depth]]
            chain.token_ids = [tokens[place] for place in takewhile(lambda place: masses[place] > 0.0, places)]
            del chain.probs[len(chain.token_ids) :]

    def _uniform(self, i: int, depth: int) -> torch.Tensor:
        uniforms = self._chains[i].uniforms
        assert uniforms is not None
        return uniforms[depth]

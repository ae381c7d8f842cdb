"""Attention of the training-time test: causal over the keys of depth 0, plus one key of each later depth at the same position.

Rows lie packed along one axis. The depth-0 keys are attended to by one of two kernels: in blocks of queries on any device, or by
flash attention on CUDA (learning/flash.py). Either gives its output and log-sum-exp, and the few diagonal scores are merged into
those, so nothing of size S * (k + 1) * S ever exists. A kernel's backward holds unchanged when it is given the MERGED output and
log-sum-exp: with those, exp(score - lse) is a key's weight among all keys, whichever of them the kernel visits.

Legend: T packed depth-0 keys, Q packed queries, m diagonal depths, G query heads per key head.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from training.learning import flash

QUERY_BLOCK = 256


@dataclass(frozen=True)
class Spans:
    """Each row's queries as one run of positions up to the row's last key, the gaps between its turns included.

        keys      0 1 2 3 4 5 6 7 8        a row of two turns, whose positions 2 3 and 6 7 8 are supervised
        queries       2 3     6 7 8        (keys end with the last query)
        span          2 3 4 5 6 7 8        the queries' slots: 0 1 . . 4 5 6

    In that form a causal kernel can align queries and keys at their ends. Rows without queries have no span.
    """

    slots: torch.Tensor  # int64 [Q] where each query lies in the spans
    query_offsets: torch.Tensor  # [R'+1] of the spans
    key_offsets: torch.Tensor  # [R'+1] of the same rows' keys
    longest_query: int
    longest_key: int
    num_slots: int

    @staticmethod
    def between(query_at: np.ndarray, query_offsets: np.ndarray, row_offsets: np.ndarray) -> Spans:
        """query_at: int64 [Q] into the keys. query_offsets, row_offsets: int64 [R+1] of each row's queries, keys."""
        counts = np.diff(query_offsets)
        has_queries = counts > 0
        first = query_at[query_offsets[:-1][has_queries]]  # [R']
        ends = row_offsets[1:][has_queries]  # [R']
        spans, keys = np.append(0, (ends - first).cumsum()), np.append(0, ends)
        slots = query_at + (spans[:-1] - first).repeat(counts[has_queries])
        longest_query, longest_key = (int(np.diff(offsets).max(initial=0)) for offsets in (spans, keys))
        offsets = torch.from_numpy(spans), torch.from_numpy(keys)
        return Spans(torch.from_numpy(slots), *offsets, longest_query, longest_key, num_slots=int(spans[-1]))

    @property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.slots, self.query_offsets, self.key_offsets

    def moved(self, slots: torch.Tensor, query_offsets: torch.Tensor, key_offsets: torch.Tensor) -> Spans:
        """The same, with its tensors elsewhere: the offsets there as a kernel takes them."""
        return dataclasses.replace(self, slots=slots, query_offsets=query_offsets.int(), key_offsets=key_offsets.int())


@dataclass(frozen=True)
class Packing:
    """Which queries see which keys: query i those of its row up to query_at[i]."""

    key_offsets: Sequence[int]  # [R+1] of each row's keys
    query_at: torch.Tensor  # int64 [Q] the packed depth-0 key at each query's own position, ascending
    spans: Spans

    def select(self, keep: torch.Tensor) -> Packing:
        """The same keys, with only the queries `keep` (int64, ascending)."""
        return Packing(self.key_offsets, self.query_at[keep], dataclasses.replace(self.spans, slots=self.spans.slots[keep]))

    def attend(
        self,
        q: torch.Tensor,  # [Q, heads, D]
        k0: torch.Tensor,  # [T, kv_heads, D]
        v0: torch.Tensor,  # [T, kv_heads, D]
        diagonal: torch.Tensor,  # [2, m, Q, kv_heads, D] keys and values of depths 1..m at each query's own position
    ) -> torch.Tensor:
        """[Q, heads, D]: each query over the depth-0 keys of its row up to its own position, and over its diagonal keys."""
        out: torch.Tensor = _MergedAttention.apply(q.contiguous(), k0, v0, diagonal, self)  # type: ignore[no-untyped-call]
        return out

    def blocks(self) -> Iterator[tuple[slice, slice, torch.Tensor]]:
        """(queries, keys, hidden) with hidden bool [queries, keys] true where a query must not look."""
        bounds = torch.tensor(self.key_offsets, device=self.query_at.device)
        for r, (start, stop) in enumerate(pairwise(torch.searchsorted(self.query_at, bounds).tolist())):
            for low in range(start, stop, QUERY_BLOCK):
                queries = slice(low, min(low + QUERY_BLOCK, stop))
                at = self.query_at[queries]
                keys = slice(self.key_offsets[r], int(at.max()) + 1)
                columns = torch.arange(keys.start, keys.stop, device=at.device)
                yield queries, keys, columns > at[:, None]


def _scores(q_KBD: torch.Tensor, k_SKD: torch.Tensor, hidden: torch.Tensor, scale: float) -> torch.Tensor:
    """Masked scores [K, G*B, S] of a block of B queries, heads grouped under their key head."""
    scores = torch.matmul(q_KBD, k_SKD.permute(1, 2, 0)).mul_(scale)
    group = scores.shape[1] // hidden.shape[0]
    return scores.view(scores.shape[0], group, *hidden.shape).masked_fill_(hidden, float("-inf")).view_as(scores)


def _grouped(x_BND: torch.Tensor, num_kv: int) -> torch.Tensor:
    """[B, heads, D] -> [kv, G*B, D]"""
    num_queries, num_heads, dim = x_BND.shape
    return x_BND.view(num_queries, num_kv, num_heads // num_kv, dim).permute(1, 2, 0, 3).reshape(num_kv, -1, dim)


def _ungrouped(x_KBD: torch.Tensor, num_queries: int) -> torch.Tensor:
    """[kv, G*B, D] -> [B, heads, D]"""
    num_kv, _, dim = x_KBD.shape
    return x_KBD.view(num_kv, -1, num_queries, dim).permute(2, 0, 1, 3).reshape(num_queries, -1, dim)


def _blocks_forward(q: torch.Tensor, k0: torch.Tensor, v0: torch.Tensor, packing: Packing) -> tuple[torch.Tensor, torch.Tensor]:
    """Over the depth-0 keys alone: (output [Q, heads, D], log-sum-exp [Q, heads])."""
    num_kv, scale = k0.shape[1], q.shape[-1] ** -0.5
    out, lse = torch.empty_like(q), q.new_empty(q.shape[:2])
    for queries, keys, hidden in packing.blocks():
        count = queries.stop - queries.start
        scores = _scores(_grouped(q[queries], num_kv), k0[keys], hidden, scale)
        block_lse = scores.logsumexp(-1)  # [kv, G*B]
        probs = scores.sub_(block_lse[..., None]).exp_()
        out[queries] = _ungrouped(torch.matmul(probs, v0[keys].transpose(0, 1)), count)
        lse[queries] = _ungrouped(block_lse[..., None], count)[..., 0]
    return out, lse


def _blocks_backward(
    d_out: torch.Tensor,  # [Q, heads, D]
    q: torch.Tensor,
    k0: torch.Tensor,
    v0: torch.Tensor,
    out: torch.Tensor,  # [Q, heads, D] merged
    lse: torch.Tensor,  # [Q, heads] merged
    packing: Packing,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(dq, dk0, dv0) through the depth-0 keys."""
    num_kv, scale = k0.shape[1], q.shape[-1] ** -0.5
    dq, dk0, dv0 = torch.empty_like(q), torch.zeros_like(k0), torch.zeros_like(v0)
    delta = (d_out * out).sum(-1)  # [Q, heads]
    for queries, keys, hidden in packing.blocks():
        count = queries.stop - queries.start
        q_block, d_block = _grouped(q[queries], num_kv), _grouped(d_out[queries], num_kv)
        probs = _scores(q_block, k0[keys], hidden, scale)
        probs.sub_(_grouped(lse[queries][..., None], num_kv)).exp_()
        d_scores = torch.matmul(d_block, v0[keys].permute(1, 2, 0))
        d_scores.sub_(_grouped(delta[queries][..., None], num_kv)).mul_(probs).mul_(scale)
        dq[queries] = _ungrouped(torch.matmul(d_scores, k0[keys].transpose(0, 1)), count)
        dk0[keys] += torch.matmul(d_scores.transpose(1, 2), q_block).transpose(0, 1)
        dv0[keys] += torch.matmul(probs.transpose(1, 2), d_block).transpose(0, 1)
    return dq, dk0, dv0


def _merge(
    q: torch.Tensor, diagonal: torch.Tensor, out: torch.Tensor, lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(output and log-sum-exp over the diagonal keys too, their scores [m, Q, kv, G] if the backward wants them)."""
    if not diagonal.shape[1]:
        return out, lse, lse.new_empty(0)
    if q.is_cuda:
        from training.learning import diagonal_kernel

        diagonal_kernel.merge(q, diagonal, out, lse)
        return out, lse, lse.new_empty(0)
    num_queries, num_heads, dim = q.shape
    keys, values = diagonal
    grouped = (num_queries, keys.shape[2], -1)
    scores = torch.einsum("qkgd,mqkd->mqkg", q.view(*grouped, dim), keys).to(lse.dtype).mul_(dim**-0.5)
    lse_QKG = lse.view(grouped)
    merged = torch.cat([lse_QKG[None], scores]).logsumexp(0)
    out = out * torch.exp(lse_QKG - merged).view(num_queries, num_heads, 1).to(q.dtype)
    weights = torch.exp(scores - merged).to(q.dtype)
    out += torch.einsum("mqkg,mqkd->qkgd", weights, values).reshape_as(out)
    return out, merged.view(num_queries, num_heads), scores


def _merge_backward(
    d_out: torch.Tensor,  # [Q, heads, D]
    q: torch.Tensor,
    diagonal: torch.Tensor,
    out: torch.Tensor,  # [Q, heads, D] merged
    lse: torch.Tensor,  # [Q, heads] merged
    scores: torch.Tensor,
    dq: torch.Tensor,  # [Q, heads, D] what goes through the diagonal keys is added
) -> torch.Tensor:
    """The gradient of the diagonal keys and values."""
    if not diagonal.shape[1]:
        return torch.empty_like(diagonal)
    if q.is_cuda:
        from training.learning import diagonal_kernel

        return diagonal_kernel.merge_backward(d_out, q, diagonal, out, lse, dq)
    keys, values = diagonal
    grouped = (len(q), keys.shape[2], -1)
    q_QKGD, d_QKGD = q.view(*grouped, q.shape[2]), d_out.view(*grouped, q.shape[2])
    delta = (d_out * out).sum(-1, dtype=lse.dtype).view(grouped)
    weights = torch.exp(scores - lse.view(grouped))  # [m, Q, kv, G]
    d_scores = torch.einsum("qkgd,mqkd->mqkg", d_QKGD, values).to(lse.dtype)
    d_scores = d_scores.sub_(delta).mul_(weights).mul_(q.shape[2] ** -0.5).to(q.dtype)
    dq += torch.einsum("mqkg,mqkd->qkgd", d_scores, keys).reshape_as(dq)
    d_keys = torch.einsum("mqkg,qkgd->mqkd", d_scores, q_QKGD)
    return torch.stack([d_keys, torch.einsum("mqkg,qkgd->mqkd", weights.to(q.dtype), d_QKGD)])


class _MergedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,  # [Q, heads, D]
        k0: torch.Tensor,  # [T, kv, D]
        v0: torch.Tensor,  # [T, kv, D]
        diagonal: torch.Tensor,  # [2, m, Q, kv, D]
        packing: Packing,
    ) -> torch.Tensor:
        uses_flash = flash.is_usable(q)
        if uses_flash:
            out, lse = flash.forward(q, k0, v0, packing.spans)
        else:
            out, lse = _blocks_forward(q, k0, v0, packing)
        out, lse, scores = _merge(q, diagonal, out, lse)
        ctx.packing, ctx.uses_flash = packing, uses_flash
        ctx.save_for_backward(q, k0, v0, diagonal, out, lse, scores)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k0, v0, diagonal, out, lse, scores = ctx.saved_tensors
        d_out = grads[0].contiguous()
        if ctx.uses_flash:
            dq, dk0, dv0 = flash.backward(d_out, q, k0, v0, out, lse, ctx.packing.spans)
        else:
            dq, dk0, dv0 = _blocks_backward(d_out, q, k0, v0, out, lse, ctx.packing)
        return dq, dk0, dv0, _merge_backward(d_out, q, diagonal, out, lse, scores, dq), None

"""Attention of the training-time test: causal over the keys of depth 0, plus one key of each later depth at the same position.

Rows lie packed along one axis. Scores over depth-0 keys are computed in blocks of queries and merged with the few diagonal
scores by log-sum-exp, so nothing of size S * (k + 1) * S ever exists, and the backward recomputes what the forward dropped.
Flash attention's backward holds unchanged when it is given the merged output and log-sum-exp, which is what happens here.

Legend: T packed depth-0 keys, Q packed queries, m diagonal depths, G query heads per key head.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

QUERY_BLOCK = 256


@dataclass(frozen=True)
class Packing:
    """Which queries see which keys. Row r owns keys key_offsets[r]:key_offsets[r+1] and queries query_offsets[r]:..."""

    key_offsets: Sequence[int]  # [R+1]
    query_offsets: Sequence[int]  # [R+1]
    query_at: torch.Tensor  # int64 [Q] the packed depth-0 key at each query's own position: the last one that it sees

    def select(self, keep: torch.Tensor) -> Packing:
        """The same keys, with only the queries `keep` (int64, ascending)."""
        offsets = torch.searchsorted(keep, torch.tensor(self.query_offsets, device=keep.device)).tolist()
        return Packing(self.key_offsets, offsets, self.query_at[keep])

    def attend(
        self,
        q: torch.Tensor,  # [Q, heads, D]
        k0: torch.Tensor,  # [T, kv_heads, D]
        v0: torch.Tensor,  # [T, kv_heads, D]
        diagonal: Sequence[tuple[torch.Tensor, torch.Tensor]],  # keys and values of depths 1..m, each [Q, kv_heads, D]
    ) -> torch.Tensor:
        """[Q, heads, D]: each query over the depth-0 keys of its row up to its own position, and over its diagonal keys."""
        keys = torch.stack([k for k, _ in diagonal]) if diagonal else q.new_empty(0, len(q), *k0.shape[1:])
        values = torch.stack([v for _, v in diagonal]) if diagonal else keys
        out: torch.Tensor = _MergedAttention.apply(q.contiguous(), k0, v0, keys, values, self)  # type: ignore[no-untyped-call]
        return out

    def blocks(self) -> Iterator[tuple[slice, slice, torch.Tensor]]:
        """(queries, keys, hidden) with hidden bool [queries, keys] true where a query must not look."""
        for r in range(len(self.key_offsets) - 1):
            start, stop = self.query_offsets[r], self.query_offsets[r + 1]
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


class _MergedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,  # [Q, heads, D]
        k0: torch.Tensor,  # [T, kv, D]
        v0: torch.Tensor,  # [T, kv, D]
        kd: torch.Tensor,  # [m, Q, kv, D] keys of depths 1..m at each query's own position
        vd: torch.Tensor,  # [m, Q, kv, D]
        packing: Packing,
    ) -> torch.Tensor:
        num_queries, num_heads, dim = q.shape
        num_kv = k0.shape[1]
        grouped = (num_queries, num_kv, num_heads // num_kv)
        scale = dim**-0.5
        out = torch.empty_like(q)
        lse = q.new_empty(num_queries, num_heads)
        for queries, keys, hidden in packing.blocks():
            count = queries.stop - queries.start
            scores = _scores(_grouped(q[queries], num_kv), k0[keys], hidden, scale)
            block_lse = scores.logsumexp(-1)  # [kv, G*B]
            probs = scores.sub_(block_lse[..., None]).exp_()
            out[queries] = _ungrouped(torch.matmul(probs, v0[keys].transpose(0, 1)), count)
            lse[queries] = _ungrouped(block_lse[..., None], count)[..., 0]
        diagonal = torch.einsum("qkgd,mqkd->mqkg", q.view(*grouped, dim), kd).mul_(scale)  # [m, Q, kv, G]
        if len(kd):
            lse_QKG = lse.view(grouped)
            merged = torch.cat([lse_QKG[None], diagonal]).logsumexp(0)
            out = out * torch.exp(lse_QKG - merged).view(num_queries, num_heads, 1)
            weights = torch.exp(diagonal - merged)
            out += torch.einsum("mqkg,mqkd->qkgd", weights, vd).reshape_as(out)
            lse = merged.view(num_queries, num_heads)
        ctx.packing = packing
        ctx.save_for_backward(q, k0, v0, kd, vd, out, lse, diagonal)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k0, v0, kd, vd, out, lse, diagonal = ctx.saved_tensors
        d_out = grads[0].contiguous()
        num_queries, num_heads, dim = q.shape
        num_kv = k0.shape[1]
        scale = dim**-0.5
        delta = (d_out * out).sum(-1)  # [Q, heads]
        dq, dk0, dv0 = torch.empty_like(q), torch.zeros_like(k0), torch.zeros_like(v0)
        for queries, keys, hidden in ctx.packing.blocks():
            count = queries.stop - queries.start
            q_block, d_block = _grouped(q[queries], num_kv), _grouped(d_out[queries], num_kv)
            probs = _scores(q_block, k0[keys], hidden, scale)
            probs.sub_(_grouped(lse[queries][..., None], num_kv)).exp_()
            d_scores = torch.matmul(d_block, v0[keys].permute(1, 2, 0))
            d_scores.sub_(_grouped(delta[queries][..., None], num_kv)).mul_(probs).mul_(scale)
            dq[queries] = _ungrouped(torch.matmul(d_scores, k0[keys].transpose(0, 1)), count)
            dk0[keys] += torch.matmul(d_scores.transpose(1, 2), q_block).transpose(0, 1)
            dv0[keys] += torch.matmul(probs.transpose(1, 2), d_block).transpose(0, 1)
        grouped = (num_queries, num_kv, num_heads // num_kv)
        q_QKGD, d_QKGD = q.view(*grouped, dim), d_out.view(*grouped, dim)
        weights = torch.exp(diagonal - lse.view(grouped))  # [m, Q, kv, G]
        d_diagonal = torch.einsum("qkgd,mqkd->mqkg", d_QKGD, vd).sub_(delta.view(grouped)).mul_(weights).mul_(scale)
        dq += torch.einsum("mqkg,mqkd->qkgd", d_diagonal, kd).reshape_as(dq)
        dkd = torch.einsum("mqkg,qkgd->mqkd", d_diagonal, q_QKGD)
        dvd = torch.einsum("mqkg,qkgd->mqkd", weights, d_QKGD)
        return dq, dk0, dv0, dkd, dvd, None

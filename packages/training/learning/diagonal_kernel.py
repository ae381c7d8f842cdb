# mypy: ignore-errors
"""The diagonal keys of attention as Triton kernels: merged into what was attended to before, and the gradients through them.

A program holds the query heads of one key head of one query, and visits its few diagonal keys one after the other; scores exist
in registers alone. All arithmetic is float32. mypy does not look at this file: Triton compiles it, not Python.

Legend: Q queries, N query heads, m diagonal depths, G key heads, D their width. Everything is contiguous.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

VARYING = ("num_queries", "num_depths")  # from call to call: no variant is compiled for some of their values


@triton.jit(do_not_specialize=VARYING)
def _merge(q, diagonal, out, lse, num_queries, num_depths, scale,
           N: tl.constexpr, G: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr):  # fmt: skip
    query, key_head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    head, d = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    heads = query * N + key_head * (N // G) + head
    ok, ok_d = head < N // G, d < D
    at, mask = heads[:, None] * D + d[None, :], ok[:, None] & ok_d[None, :]
    q_tile = tl.load(q + at, mask=mask, other=0.0).to(tl.float32)
    acc = tl.load(out + at, mask=mask, other=0.0).to(tl.float32)
    top = tl.load(lse + heads, mask=ok, other=0.0).to(tl.float32)
    total = tl.full([ROWS], 1.0, tl.float32)
    values = diagonal + num_depths.to(tl.int64) * num_queries * G * D
    for depth in range(num_depths):
        key = ((depth * num_queries.to(tl.int64) + query) * G + key_head) * D + d
        k = tl.load(diagonal + key, mask=ok_d, other=0.0).to(tl.float32)
        v = tl.load(values + key, mask=ok_d, other=0.0).to(tl.float32)
        score = tl.sum(q_tile * k[None, :], 1) * scale
        higher = tl.maximum(top, score)
        before, now = tl.exp(top - higher), tl.exp(score - higher)
        total = total * before + now
        acc = acc * before[:, None] + now[:, None] * v[None, :]
        top = higher
    tl.store(out + at, (acc / total[:, None]).to(out.dtype.element_ty), mask=mask)
    tl.store(lse + heads, top + tl.log(total), mask=ok)


@triton.jit(do_not_specialize=VARYING)
def _merge_backward(d_out, q, diagonal, out, lse, dq, d_diagonal, num_queries, num_depths, scale,
                    N: tl.constexpr, G: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr):  # fmt: skip
    query, key_head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    head, d = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    heads = query * N + key_head * (N // G) + head
    ok, ok_d = head < N // G, d < D
    at, mask = heads[:, None] * D + d[None, :], ok[:, None] & ok_d[None, :]
    q_tile = tl.load(q + at, mask=mask, other=0.0).to(tl.float32)
    d_tile = tl.load(d_out + at, mask=mask, other=0.0).to(tl.float32)
    delta = tl.sum(d_tile * tl.load(out + at, mask=mask, other=0.0).to(tl.float32), 1)
    top = tl.load(lse + heads, mask=ok, other=0.0).to(tl.float32)
    acc = tl.load(dq + at, mask=mask, other=0.0).to(tl.float32)
    to_values = num_depths.to(tl.int64) * num_queries * G * D
    for depth in range(num_depths):
        key = ((depth * num_queries.to(tl.int64) + query) * G + key_head) * D + d
        k = tl.load(diagonal + key, mask=ok_d, other=0.0).to(tl.float32)
        v = tl.load(diagonal + to_values + key, mask=ok_d, other=0.0).to(tl.float32)
        weight = tl.where(ok, tl.exp(tl.sum(q_tile * k[None, :], 1) * scale - top), 0.0)
        d_score = (tl.sum(d_tile * v[None, :], 1) - delta) * weight * scale
        acc += d_score[:, None] * k[None, :]
        dk, dv = tl.sum(d_score[:, None] * q_tile, 0), tl.sum(weight[:, None] * d_tile, 0)
        tl.store(d_diagonal + key, dk.to(d_diagonal.dtype.element_ty), mask=ok_d)
        tl.store(d_diagonal + to_values + key, dv.to(d_diagonal.dtype.element_ty), mask=ok_d)
    tl.store(dq + at, acc.to(dq.dtype.element_ty), mask=mask)


def merge(q: torch.Tensor, diagonal: torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> None:
    """q: [Q, N, D]. diagonal: [2, m, Q, G, D] keys and values. out [Q, N, D] and lse [Q, N], over other keys, become those over
    the diagonal ones too."""
    grid, sizes = _sizes(diagonal, q.shape[1])
    if len(q):
        _merge[grid](q, diagonal, out, lse, len(q), diagonal.shape[1], q.shape[2] ** -0.5, **sizes)


def merge_backward(
    d_out: torch.Tensor, q: torch.Tensor, diagonal: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, dq: torch.Tensor
) -> torch.Tensor:
    """The gradient of the diagonal keys and values; what goes through them is added to dq. out, lse: merged."""
    grid, sizes = _sizes(diagonal, q.shape[1])
    d_diagonal = torch.empty_like(diagonal)
    if len(q):
        _merge_backward[grid](
            d_out, q, diagonal, out, lse, dq, d_diagonal, len(q), diagonal.shape[1], q.shape[2] ** -0.5, **sizes
        )
    return d_diagonal


def _sizes(diagonal: torch.Tensor, num_heads: int) -> tuple[tuple[int, int], dict[str, int]]:
    num_queries, num_kv, dim = diagonal.shape[2:]
    rows, width = triton.next_power_of_2(num_heads // num_kv), triton.next_power_of_2(dim)
    return (num_queries, num_kv), {"N": num_heads, "G": num_kv, "D": dim, "ROWS": rows, "WIDTH": width, "num_warps": 1}

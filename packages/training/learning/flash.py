"""Causal attention over packed rows by PyTorch's own flash kernels, in the form that the training-time test needs.

A row's queries are laid out as one run that ends with the row's last key (attention.Spans); places of the run where no query
stands hold zeros, and get no gradient since none comes in. Forward gives the log-sum-exp; backward takes output and log-sum-exp
as arguments, so that whoever merged more keys into them hands in the merged ones. Knows no diagonal keys.
Legend: T packed keys, Q packed queries, W slots of all spans.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from training.learning.attention import Spans


def is_usable(q: torch.Tensor) -> bool:
    """The kernels run on CUDA, in half precision, on heads of at most 256 elements and a multiple of 8."""
    return q.is_cuda and q.dtype in (torch.bfloat16, torch.float16) and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256


def forward(
    q: torch.Tensor,  # [Q, heads, D]
    k: torch.Tensor,  # [T, kv_heads, D]
    v: torch.Tensor,  # [T, kv_heads, D]
    spans: Spans,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(output [Q, heads, D], log-sum-exp float32 [Q, heads]) of each query over the keys of its row up to its own."""
    if not len(q):
        return torch.empty_like(q), q.new_empty(q.shape[:2], dtype=torch.float32)
    out, lse = varlen_forward(_spread(q, spans), k, v, spans)  # [W, heads, D], [heads, W]
    return _gather(out, spans), _gather(lse.T, spans).contiguous()


def backward(
    d_out: torch.Tensor,  # [Q, heads, D]
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,  # [Q, heads, D] after every merge
    lse: torch.Tensor,  # float32 [Q, heads] after every merge
    spans: Spans,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(dq, dk, dv) through these keys."""
    if not len(q):
        return torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
    lse_HW = _spread(lse, spans).T.contiguous()
    dq, dk, dv = varlen_backward(_spread(d_out, spans), _spread(q, spans), k, v, _spread(out, spans), lse_HW, spans)
    return _gather(dq, spans), dk, dv


def varlen_forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spans: Spans) -> tuple[torch.Tensor, torch.Tensor]:
    """q [W, heads, D] -> (output [W, heads, D], log-sum-exp float32 [heads, W]); queries and keys of a row end together."""
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        q,
        k,
        v,
        spans.query_offsets,
        spans.key_offsets,
        spans.longest_query,
        spans.longest_key,
        0.0,  # dropout
        True,  # causal
        False,
        scale=q.shape[-1] ** -0.5,
    )
    return out, lse


def varlen_backward(
    d_out: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, spans: Spans
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(dq, dk, dv) of `varlen_forward`."""
    unused = torch.empty(0, device=q.device)
    dq, dk, dv = torch.ops.aten._flash_attention_backward(
        d_out,
        q,
        k,
        v,
        out,
        lse,
        spans.query_offsets,
        spans.key_offsets,
        spans.longest_query,
        spans.longest_key,
        0.0,
        True,
        torch.empty(2, dtype=torch.uint64, device=q.device),  # the state of a generator that no dropout reads
        unused,
        scale=q.shape[-1] ** -0.5,
    )
    return dq, dk, dv


def _spread(x: torch.Tensor, spans: Spans) -> torch.Tensor:
    """x [Q, ...] in its slots [W, ...], zeros elsewhere."""
    if len(x) == spans.num_slots:
        return x.contiguous()
    return x.new_zeros(spans.num_slots, *x.shape[1:]).index_copy_(0, spans.slots, x)


def _gather(x: torch.Tensor, spans: Spans) -> torch.Tensor:
    """The inverse of `_spread`."""
    return x if len(spans.slots) == len(x) else x[spans.slots]

"""What tests of learning share: a lesson for a batch, a plain stand-in for flash attention, and where a Triton kernel can run."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch

from runtime.eagle3.model import Eagle3Model
from training.data.batches import Batch
from training.learning.attention import Spans
from training.learning.loss import Lesson


@pytest.fixture
def make_lesson() -> Callable[..., Lesson]:
    """What a target with a random head over the whole vocabulary says about a batch, in the model's precision."""

    def make(model: Eagle3Model, batch: Batch, seed: int = 7) -> Lesson:
        vocabulary, width = model.vocabulary, batch.last.shape[1]
        generator = torch.Generator().manual_seed(seed)
        lm_head = torch.randn(vocabulary.vocab_size, width, generator=generator).to(model.fc.weight.dtype)
        last = batch.last.to(lm_head.dtype)
        logits = last @ lm_head.T
        labels = torch.where(batch.chain_ids < 0, -1, vocabulary.to_draft[batch.chain_ids.clamp(min=0)])
        covered = vocabulary.t2d[logits.argmax(-1)]
        return Lesson(lm_head[vocabulary.target_ids], last, logits.logsumexp(-1), covered, labels, batch.pairs)

    return make


@pytest.fixture(scope="session")
def kernel_device() -> torch.device:
    """A CUDA device, or with TRITON_INTERPRET=1 the CPU, slowly."""
    if importlib.util.find_spec("triton") and torch.cuda.is_available():
        return torch.device("cuda")
    if importlib.util.find_spec("triton") and os.environ.get("TRITON_INTERPRET") == "1":
        return torch.device("cpu")
    pytest.skip("needs triton and a CUDA device, or TRITON_INTERPRET=1")


def segments(spans: Spans) -> list[tuple[slice, slice]]:
    return [
        (slice(*queries), slice(*keys))
        for queries, keys in zip(pairwise(spans.query_offsets.tolist()), pairwise(spans.key_offsets.tolist()), strict=True)
    ]


def weights_and_lse(q: torch.Tensor, k: torch.Tensor, lse: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """exp(score - lse) [heads, W, T] of one row whose queries and keys end together, by the row's own lse or a given one."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5
    hidden = torch.ones(scores.shape[1:], dtype=torch.bool).triu(scores.shape[2] - scores.shape[1] + 1)
    scores = scores.masked_fill(hidden, float("-inf"))
    lse = scores.logsumexp(-1) if lse is None else lse
    return torch.exp(scores - lse[..., None]), lse


def plain_forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spans: Spans) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = torch.full_like(q, float("nan")), q.new_full((q.shape[1], len(q)), float("nan"))
    for queries, keys in segments(spans):
        weights, lse[:, queries] = weights_and_lse(q[queries], k[keys], None)
        out[queries] = torch.einsum("hqk,khd->qhd", weights, v[keys].repeat_interleave(q.shape[1] // v.shape[1], 1))
    return out, lse


def plain_backward(d_out, q, k, v, out, lse, spans: Spans) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What a flash backward computes from the output and the log-sum-exp that it is given."""
    group = q.shape[1] // k.shape[1]
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for queries, keys in segments(spans):
        weights, _ = weights_and_lse(q[queries], k[keys], lse[:, queries])
        wide_k, wide_v = (each[keys].repeat_interleave(group, 1) for each in (k, v))
        delta = (d_out[queries] * out[queries]).sum(-1).T  # [heads, W]
        d_scores = weights * (torch.einsum("qhd,khd->hqk", d_out[queries], wide_v) - delta[..., None]) * q.shape[-1] ** -0.5
        dq[queries] = torch.einsum("hqk,khd->qhd", d_scores, wide_k)
        for d_keys, wide in (
            (dk, torch.einsum("hqk,qhd->khd", d_scores, q[queries])),
            (dv, torch.einsum("hqk,qhd->khd", weights, d_out[queries])),
        ):
            d_keys[keys] += wide.unflatten(1, (-1, group)).sum(2)
    return dq, dk, dv


@pytest.fixture
def plain_flash() -> tuple[Callable, Callable]:
    """Forward and backward as `flash.varlen_forward` and `flash.varlen_backward` are called, in plain PyTorch."""
    return plain_forward, plain_backward

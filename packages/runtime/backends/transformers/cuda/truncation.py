# mypy: ignore-errors
"""top_k and top_p on the device: one Triton kernel that excludes all but the best tokens of each row, without sorting them.

Both keep the smallest set of best tokens whose weight reaches a limit: `top_k` counts them, `top_p` adds up their mass. The
logit of the last one is found digit by digit, a base-4 digit a pass over the row, in the order-preserving integers that float32
makes; where several tokens have that logit, the lowest ids get the room that is left. Exactly as many stay as
`speculation.sampling` keeps.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from runtime.backends.transformers.cuda.kernels import varying
from runtime.backends.transformers.cuda.launch import next_power_of_2

MAX_BLOCK = 8192  # of a row at a time
NUM_DIGITS = tl.constexpr(16)  # of 32 bits, two at a time
ZERO = tl.constexpr(0x7F800000)  # what 0.0 becomes; -FLT_MAX becomes 0, -inf less


@triton.jit
def _places(x):
    """float32 not above 0 -> int64 in the same order."""
    bits = x.to(tl.int32, bitcast=True).to(tl.int64)
    return tl.where(bits < 0, -2147483649 - bits, bits) + ZERO


@triton.jit
def _weights(x, seen, normalizer, BY_MASS: tl.constexpr):
    if BY_MASS:
        return tl.where(seen, tl.exp(x - normalizer), 0.0).to(tl.float64)
    return tl.where(seen, 1.0, 0.0).to(tl.float64)


@triton.jit(**varying("stride"))
def keep_best_kernel(rows, stride, limits, normalizers, V: tl.constexpr, BLOCK: tl.constexpr, BY_MASS: tl.constexpr):  # fmt: skip
    """rows float32 [R, V], whose best is 0: -inf from where the weight before a token, best first, reaches limits [R] float64.

    normalizers float32 [R]: with BY_MASS, of the softmax. A limit of infinity keeps all.
    """
    row = rows + tl.program_id(0).to(tl.int64) * stride
    limit = tl.load(limits + tl.program_id(0))
    if limit < float("inf"):
        normalizer = tl.load(normalizers + tl.program_id(0))
        last = tl.zeros([], tl.int64)  # the greatest place such that the weight from there on reaches the limit
        for digit in range(NUM_DIGITS):
            step = tl.full([], 1, tl.int64) << (2 * (15 - digit))
            one = tl.zeros([BLOCK], tl.float64)
            two = tl.zeros([BLOCK], tl.float64)
            three = tl.zeros([BLOCK], tl.float64)
            for first in range(0, V, BLOCK):
                at = first + tl.arange(0, BLOCK)
                x = tl.load(row + at, mask=at < V, other=float("-inf"))
                place = _places(x)
                weight = _weights(x, x > float("-inf"), normalizer, BY_MASS)
                one += tl.where(place >= last + step, weight, 0.0)
                two += tl.where(place >= last + 2 * step, weight, 0.0)
                three += tl.where(place >= last + 3 * step, weight, 0.0)
            reached = (tl.sum(one, 0) >= limit).to(tl.int64) + (tl.sum(two, 0) >= limit).to(tl.int64)
            last += step * (reached + (tl.sum(three, 0) >= limit).to(tl.int64))
        above = tl.zeros([BLOCK], tl.float64)
        for first in range(0, V, BLOCK):
            at = first + tl.arange(0, BLOCK)
            x = tl.load(row + at, mask=at < V, other=float("-inf"))
            above += tl.where(_places(x) > last, _weights(x, x > float("-inf"), normalizer, BY_MASS), 0.0)
        before = tl.sum(above, 0)
        for first in range(0, V, BLOCK):
            at = first + tl.arange(0, BLOCK)
            x = tl.load(row + at, mask=at < V, other=float("-inf"))
            place = _places(x)
            weight = tl.where(place == last, _weights(x, x > float("-inf"), normalizer, BY_MASS), 0.0)
            upto = tl.cumsum(weight, 0)
            has_room = before + upto - weight < limit
            tl.store(row + at, float("-inf"), mask=(at < V) & ((place < last) | ((place == last) & (has_room == 0))))
            before += tl.sum(weight, 0)


def keep_best(rows: torch.Tensor, limits: torch.Tensor, normalizers: torch.Tensor | None = None) -> None:
    """In place, on rows [R, V]. limits float64 [R]: how many tokens, or with normalizers [R] how much mass; infinite: all."""
    block = min(MAX_BLOCK, next_power_of_2(rows.shape[1]))
    keep_best_kernel[(len(rows),)](
        rows, rows.stride(0), limits, limits if normalizers is None else normalizers, V=rows.shape[1], BLOCK=block,
        BY_MASS=normalizers is not None, num_warps=max(1, block // 512),
    )  # fmt: skip

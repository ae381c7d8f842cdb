# mypy: ignore-errors
"""The Triton kernels of a Llama-like decoder layer over paged K/V: five launches a layer, each streaming weights once.

A product of few rows is bound by reading its weights, so everything around it is fused into it: the norm of its input, the
rotation and the write into the K/V pool, the merge of split attention, the residual, SiLU. Rows are independent of each other:
whatever stands in a padded row reaches no other. mypy does not look at this file: Triton compiles it, not Python.

Symbols: T rows, K width of the input, N of the output, D head size. Rows of weights are outputs, as in nn.Linear.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _dot_two(x_rows, rows_ok, gain, wa_rows, wb_rows, cols_ok, eps, K: tl.constexpr, NORM: tl.constexpr,
             BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):  # fmt: skip
    """x wa^T and x wb^T, [BM, BN] float32 each; with NORM the rows of x are RMS-normalised first.

    x_rows [BM], wa_rows and wb_rows [BN] are pointers to the rows. 1/rms scales a whole row, so it can come after the product.
    """
    a = tl.zeros([BM, BN], tl.float32)
    b = tl.zeros([BM, BN], tl.float32)
    squares = tl.zeros([BM], tl.float32)
    for first in range(0, K, BK):
        k = first + tl.arange(0, BK)
        x = tl.load(x_rows[:, None] + k[None, :], mask=rows_ok[:, None] & (k < K)[None, :], other=0.0)
        if NORM:
            wide = x.to(tl.float32)
            squares += tl.sum(wide * wide, 1)
            x = (wide * tl.load(gain + k, mask=k < K, other=0.0).to(tl.float32)[None, :]).to(x.dtype)
        ok = cols_ok[None, :] & (k < K)[:, None]
        a = tl.dot(x, tl.load(wa_rows[None, :] + k[:, None], mask=ok, other=0.0), a, input_precision="ieee")
        b = tl.dot(x, tl.load(wb_rows[None, :] + k[:, None], mask=ok, other=0.0), b, input_precision="ieee")
    if NORM:
        scale = tl.rsqrt(squares / K + eps)[:, None]
        a *= scale
        b *= scale
    return a, b


@triton.jit
def _normed_pair(low, high, gain_low, gain_high, eps, D: tl.constexpr):
    """RMS norm of whole heads given as their two halves [BM, D/2] (Qwen3 norms queries and keys)."""
    scale = tl.rsqrt((tl.sum(low * low, 1) + tl.sum(high * high, 1)) / D + eps)[:, None]
    return low * scale * gain_low[None, :], high * scale * gain_high[None, :]


@triton.jit
def qkv_kernel(x, x_stride, gain, ids, ids_stride, embedding, embedding_gain, w, bias, q_gain, k_gain, cos, sin, positions,
               slots, q, keys, values, num_rows, eps, K: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr,
               BLOCK: tl.constexpr, WITH_EMBEDDING: tl.constexpr, HAS_BIAS: tl.constexpr, NORM_QK: tl.constexpr,
               BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):  # fmt: skip
    """q, k, v of normed rows, q and k rotated; q [T, HEADS, D] is written out, k and v go into their slots of the pool.

    A program does BN columns of the lower half of a head and their partners in the upper half, so that it can rotate. With
    WITH_EMBEDDING the input is [norm(embedding[id]), norm(x)], as a draft network has it.
    """
    HALF: tl.constexpr = D // 2
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    ok = rows < num_rows
    head = tl.program_id(1) // (HALF // BN)
    col = (tl.program_id(1) % (HALF // BN)) * BN + tl.arange(0, BN)
    cols_ok = col < HALF
    WIDTH: tl.constexpr = 2 * K if WITH_EMBEDDING else K
    w_low = w + (head * D + col).to(tl.int64) * WIDTH
    w_high = w_low + HALF * WIDTH
    x_rows = x + rows.to(tl.int64) * x_stride
    if WITH_EMBEDDING:
        e_rows = embedding + tl.load(ids + rows * ids_stride, mask=ok, other=0).to(tl.int64) * K
        low, high = _dot_two(e_rows, ok, embedding_gain, w_low, w_high, cols_ok, eps, K, True, BM, BN, BK)
        low_x, high_x = _dot_two(x_rows, ok, gain, w_low + K, w_high + K, cols_ok, eps, K, True, BM, BN, BK)
        low += low_x
        high += high_x
    else:
        low, high = _dot_two(x_rows, ok, gain, w_low, w_high, cols_ok, eps, K, True, BM, BN, BK)
    if HAS_BIAS:
        low += tl.load(bias + head * D + col).to(tl.float32)[None, :]
        high += tl.load(bias + head * D + HALF + col).to(tl.float32)[None, :]
    if head < HEADS + KV_HEADS:
        if NORM_QK:  # BN is HALF then
            gains = q_gain if head < HEADS else k_gain
            low, high = _normed_pair(low, high, tl.load(gains + col).to(tl.float32), tl.load(gains + HALF + col).to(tl.float32),
                                     eps, D)  # fmt: skip
        at = tl.load(positions + rows, mask=ok, other=0)[:, None] * HALF + col[None, :]
        c = tl.load(cos + at)
        s = tl.load(sin + at)
        low, high = low * c - high * s, high * c + low * s
    if head < HEADS:
        to = q + (rows.to(tl.int64)[:, None] * HEADS + head) * D + col[None, :]
        tl.store(to, low.to(q.dtype.element_ty), mask=ok[:, None])
        tl.store(to + HALF, high.to(q.dtype.element_ty), mask=ok[:, None])
    else:
        slot = tl.load(slots + rows, mask=ok, other=0).to(tl.int64)
        kv_head = (head - HEADS) % KV_HEADS
        pool = keys if head < HEADS + KV_HEADS else values
        to = pool + (((slot // BLOCK) * KV_HEADS + kv_head) * BLOCK + slot % BLOCK)[:, None] * D + col[None, :]
        tl.store(to, low.to(keys.dtype.element_ty), mask=ok[:, None])
        tl.store(to + HALF, high.to(keys.dtype.element_ty), mask=ok[:, None])


@triton.jit
def linear_kernel(x, x_stride, rows_of, w, residual, out, num_rows, K: tl.constexpr, N: tl.constexpr, GATHER: tl.constexpr,
                  ADD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):  # fmt: skip
    """out [T, N] = x w^T, plus residual [T, N] with ADD. With GATHER row i of x is x[rows_of[i]]."""
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    ok = rows < num_rows
    col = tl.program_id(1) * BN + tl.arange(0, BN)
    source = tl.load(rows_of + rows, mask=ok, other=0) if GATHER else rows
    x_rows = x + source.to(tl.int64) * x_stride
    w_rows = w + col.to(tl.int64) * K
    acc = tl.zeros([BM, BN], tl.float32)
    for first in range(0, K, BK):
        k = first + tl.arange(0, BK)
        part = tl.load(x_rows[:, None] + k[None, :], mask=ok[:, None] & (k < K)[None, :], other=0.0)
        weights = tl.load(w_rows[None, :] + k[:, None], mask=(col < N)[None, :] & (k < K)[:, None], other=0.0)
        acc = tl.dot(part, weights, acc, input_precision="ieee")
    to = rows.to(tl.int64)[:, None] * N + col[None, :]
    ok2 = ok[:, None] & (col < N)[None, :]
    if ADD:
        acc += tl.load(residual + to, mask=ok2, other=0.0).to(tl.float32)
    tl.store(out + to, acc.to(out.dtype.element_ty), mask=ok2)


@triton.jit
def merge_linear_kernel(parts, lse, w, residual, out, num_rows, HEADS: tl.constexpr, D: tl.constexpr, N: tl.constexpr,
                        SPLITS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):  # fmt: skip
    """out [T, N] = residual + o w^T, where o [T, HEADS * D] is merged from attention over SPLITS parts of the keys.

    parts float32 [SPLITS, T, HEADS, D], lse float32 [SPLITS, T, HEADS] in base 2.
    """
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    ok = rows < num_rows
    col = tl.program_id(1) * BN + tl.arange(0, BN)
    d = tl.arange(0, D)
    w_rows = w + col.to(tl.int64) * (HEADS * D)
    acc = tl.zeros([BM, BN], tl.float32)
    for head in range(HEADS):
        best = tl.full([BM], -1e30, tl.float32)
        for split in tl.static_range(SPLITS):
            at = ((split * num_rows + rows) * HEADS + head).to(tl.int64)
            best = tl.maximum(best, tl.load(lse + at, mask=ok, other=-1e30))
        total = tl.zeros([BM], tl.float32)
        o = tl.zeros([BM, D], tl.float32)
        for split in tl.static_range(SPLITS):
            at = ((split * num_rows + rows) * HEADS + head).to(tl.int64)
            share = tl.exp2(tl.load(lse + at, mask=ok, other=-1e30) - best)
            total += share
            o += share[:, None] * tl.load(parts + at[:, None] * D + d[None, :], mask=ok[:, None], other=0.0)
        o = (o / total[:, None]).to(w.dtype.element_ty)
        weights = tl.load(w_rows[None, :] + (head * D + d)[:, None], mask=(col < N)[None, :], other=0.0)
        acc = tl.dot(o, weights, acc, input_precision="ieee")
    to = rows.to(tl.int64)[:, None] * N + col[None, :]
    ok2 = ok[:, None] & (col < N)[None, :]
    acc += tl.load(residual + to, mask=ok2, other=0.0).to(tl.float32)
    tl.store(out + to, acc.to(out.dtype.element_ty), mask=ok2)


@triton.jit
def gate_up_kernel(x, gain, w, out, num_rows, eps, K: tl.constexpr, I: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
                   BK: tl.constexpr):  # fmt: skip
    """out [T, I] = silu(gate) * up of normed rows; w [2I, K] has the gate's rows first."""
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    ok = rows < num_rows
    col = tl.program_id(1) * BN + tl.arange(0, BN)
    w_rows = w + col.to(tl.int64) * K
    x_rows = x + rows.to(tl.int64) * K
    gate, up = _dot_two(x_rows, ok, gain, w_rows, w_rows + I * K, col < I, eps, K, True, BM, BN, BK)
    y = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + rows.to(tl.int64)[:, None] * I + col[None, :], y.to(out.dtype.element_ty),
             mask=ok[:, None] & (col < I)[None, :])  # fmt: skip


@triton.jit
def norm_kernel(x, gain, out, out_stride, eps, H: tl.constexpr, HP: tl.constexpr):
    """RMS norm of rows x [T, H] into out, whose rows lie out_stride apart. HP: the power of two that holds H."""
    row = tl.program_id(0).to(tl.int64)
    h = tl.arange(0, HP)
    wide = tl.load(x + row * H + h, mask=h < H, other=0.0).to(tl.float32)
    y = (wide * tl.rsqrt(tl.sum(wide * wide, 0) / H + eps)).to(x.dtype.element_ty).to(tl.float32)
    y *= tl.load(gain + h, mask=h < H, other=0.0).to(tl.float32)
    tl.store(out + row * out_stride + h, y.to(out.dtype.element_ty), mask=h < H)


@triton.jit
def keep_states_kernel(low, mid, high, x, gain, slots, hidden, pool, eps, H: tl.constexpr, HP: tl.constexpr):
    """What a forward leaves behind, [low, mid, high, norm(x)] of each row, [4H]: into `hidden` by row, into `pool` by slot."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    h = tl.arange(0, HP)
    ok = h < H
    for part in tl.static_range(3):
        source = low if part == 0 else (mid if part == 1 else high)
        y = tl.load(source + row * H + h, mask=ok)
        tl.store(hidden + (row * 4 + part) * H + h, y, mask=ok)
        tl.store(pool + (slot * 4 + part) * H + h, y, mask=ok)
    wide = tl.load(x + row * H + h, mask=ok, other=0.0).to(tl.float32)
    y = (wide * tl.rsqrt(tl.sum(wide * wide, 0) / H + eps)).to(x.dtype.element_ty).to(tl.float32)
    y = (y * tl.load(gain + h, mask=ok, other=0.0).to(tl.float32)).to(hidden.dtype.element_ty)
    tl.store(hidden + (row * 4 + 3) * H + h, y, mask=ok)
    tl.store(pool + (slot * 4 + 3) * H + h, y, mask=ok)


@triton.jit
def head_kernel(x, x_stride, gain, w, logits, best, best_id, num_rows, eps, K: tl.constexpr, V: tl.constexpr,
                TILES: tl.constexpr, NORM: tl.constexpr, ARGMAX: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
                BK: tl.constexpr):  # fmt: skip
    """Logits float32 [T, V]; with ARGMAX only each tile's best and its id, [T, TILES]: NaN counts as infinite."""
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    ok = rows < num_rows
    col = tl.program_id(1) * BN + tl.arange(0, BN)
    x_rows = x + rows.to(tl.int64) * x_stride
    w_rows = w + col.to(tl.int64) * K
    acc = tl.zeros([BM, BN], tl.float32)
    squares = tl.zeros([BM], tl.float32)
    for first in range(0, K, BK):
        k = first + tl.arange(0, BK)
        part = tl.load(x_rows[:, None] + k[None, :], mask=ok[:, None] & (k < K)[None, :], other=0.0)
        if NORM:
            wide = part.to(tl.float32)
            squares += tl.sum(wide * wide, 1)
            part = (wide * tl.load(gain + k, mask=k < K, other=0.0).to(tl.float32)[None, :]).to(part.dtype)
        weights = tl.load(w_rows[None, :] + k[:, None], mask=(col < V)[None, :] & (k < K)[:, None], other=0.0)
        acc = tl.dot(part, weights, acc, input_precision="ieee")
    if NORM:
        acc *= tl.rsqrt(squares / K + eps)[:, None]
    acc = acc.to(x.dtype.element_ty).to(tl.float32)  # as the model's own head rounds
    if ARGMAX:
        acc = tl.where(acc == acc, acc, float("inf"))
        acc = tl.where((col < V)[None, :], acc, float("-inf"))
        to = rows * TILES + tl.program_id(1)
        tl.store(best + to, tl.max(acc, 1), mask=ok)
        tl.store(best_id + to, tl.program_id(1) * BN + tl.argmax(acc, 1), mask=ok)
    else:
        tl.store(logits + rows.to(tl.int64)[:, None] * V + col[None, :], acc, mask=ok[:, None] & (col < V)[None, :])


@triton.jit
def best_kernel(best, best_id, ids_of, out, out_stride, TILES: tl.constexpr, TP: tl.constexpr, MAP: tl.constexpr,
                FALLBACK: tl.constexpr):  # fmt: skip
    """The best id of each row from its tiles, the lowest on ties; FALLBACK if it is not finite. MAP: through ids_of."""
    row = tl.program_id(0)
    t = tl.arange(0, TP)
    value = tl.load(best + row * TILES + t, mask=t < TILES, other=float("-inf"))
    top = tl.max(value, 0)
    ids = tl.load(best_id + row * TILES + t, mask=t < TILES, other=2147483647)
    token = tl.min(tl.where(value == top, ids, 2147483647), 0)
    is_finite = (top < float("inf")) & (top > float("-inf"))
    if MAP:
        token = tl.load(ids_of + tl.where(is_finite, token, 0)).to(tl.int32)
    tl.store(out + row * out_stride, tl.where(is_finite, token, FALLBACK))

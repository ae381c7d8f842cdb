# mypy: ignore-errors
"""The Triton kernels of a Llama-like decoder layer over paged K/V. A product of few rows is bound by reading its weights.

So what stands around a product is fused into it: rotation and the write into the K/V pool, SiLU, the residual. An RMS norm is
split in two, so that no kernel needs a whole row before its product: whoever writes a row also writes it times the next norm's
gain, and sums of its squares tile by tile; whoever reads it scales its result by 1/rms in the end.

Rows are independent: whatever stands in a padded row reaches no other. mypy does not look at this file: Triton compiles it, not
Python. Symbols: T rows, K width of the input, N of the output, D head size. Rows of weights are outputs, as in nn.Linear.
"""

from __future__ import annotations

import triton
import triton.language as tl


def varying(*names):
    """Arguments that differ from call to call: no variant of a kernel is compiled for some of their values or alignments."""
    return {"do_not_specialize": names, "do_not_specialize_on_alignment": names}


@triton.jit
def _dot_two(x_rows, rows_ok, gain, wa_rows, wb_rows, cols_ok, eps, K: tl.constexpr, NORM: tl.constexpr,
             BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):  # fmt: skip
    """x wa^T and x wb^T, [BM, BN] float32 each; with NORM the rows of x are RMS-normalised first.

    x_rows [BM], wa_rows and wb_rows [BN] are pointers to the rows.
    """
    a = tl.zeros([BM, BN], tl.float32)
    b = tl.zeros([BM, BN], tl.float32)
    squares = tl.zeros([BM, BK], tl.float32)
    for first in range(0, K, BK):
        k = first + tl.arange(0, BK)
        x = tl.load(x_rows[:, None] + k[None, :], mask=rows_ok[:, None] & (k < K)[None, :], other=0.0)
        if NORM:
            wide = x.to(tl.float32)
            squares += wide * wide
            x = (wide * tl.load(gain + k, mask=k < K, other=0.0).to(tl.float32)[None, :]).to(x.dtype)
        ok = cols_ok[None, :] & (k < K)[:, None]
        a = tl.dot(x, tl.load(wa_rows[None, :] + k[:, None], mask=ok, other=0.0), a, input_precision="ieee")
        b = tl.dot(x, tl.load(wb_rows[None, :] + k[:, None], mask=ok, other=0.0), b, input_precision="ieee")
    if NORM:
        scale = tl.rsqrt(tl.sum(squares, 1) / K + eps)[:, None]
        a *= scale
        b *= scale
    return a, b


@triton.jit
def _inverse_rms(squares, rows, ok, eps, K: tl.constexpr, TILES: tl.constexpr, TP: tl.constexpr):
    """1/rms of rows [BM] from their sums of squares by tile, [T, TILES]."""
    t = tl.arange(0, TP)
    parts = tl.load(squares + rows[:, None] * TILES + t[None, :], mask=ok[:, None] & (t < TILES)[None, :], other=0.0)
    return tl.rsqrt(tl.sum(parts, 1) / K + eps)


@triton.jit
def _pass_on(y, to, ok2, rows, ok, col, gain, scaled, squares, tile, N: tl.constexpr, TILES: tl.constexpr):
    """For the norm of the next product: y times its gain, and this tile's sums of squares. y as it was stored."""
    wide = y.to(tl.float32)
    g = tl.load(gain + col, mask=col < N, other=0.0).to(tl.float32)
    tl.store(scaled + to, (wide * g[None, :]).to(y.dtype), mask=ok2)
    tl.store(squares + rows * TILES + tile, tl.sum(tl.where(ok2, wide * wide, 0.0), 1), mask=ok)


@triton.jit(**varying("ids"))
def embed_kernel(ids, embedding, gain, x, scaled, squares, H: tl.constexpr, HP: tl.constexpr, TILES: tl.constexpr,
                 TP: tl.constexpr):  # fmt: skip
    """Rows of the embedding into x [T, H], and what the first norm needs."""
    row = tl.program_id(0).to(tl.int64)
    h = tl.arange(0, HP)
    y = tl.load(embedding + tl.load(ids + row).to(tl.int64) * H + h, mask=h < H, other=0.0)
    wide = y.to(tl.float32)
    g = tl.load(gain + h, mask=h < H, other=0.0).to(tl.float32)
    tl.store(x + row * H + h, y, mask=h < H)
    tl.store(scaled + row * H + h, (wide * g).to(y.dtype), mask=h < H)
    t = tl.arange(0, TP)
    tl.store(squares + row * TILES + t, tl.where(t == 0, tl.sum(wide * wide, 0), 0.0), mask=t < TILES)


@triton.jit
def _normed_pair(low, high, gain_low, gain_high, eps, D: tl.constexpr):
    """RMS norm of whole heads given as their two halves [BM, D/2] (Qwen3 norms queries and keys)."""
    scale = tl.rsqrt((tl.sum(low * low, 1) + tl.sum(high * high, 1)) / D + eps)[:, None]
    return low * scale * gain_low[None, :], high * scale * gain_high[None, :]


@triton.jit(**varying("num_rows", "ids_stride", "ids", "positions", "slots"))
def qkv_kernel(x, squares, ids, ids_stride, embedding, embedding_gain, w, bias, q_gain, k_gain, cos, sin, positions, slots, q,
               keys, values, num_rows, eps, K: tl.constexpr, TILES: tl.constexpr, TP: tl.constexpr,
               HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
               WITH_EMBEDDING: tl.constexpr, HAS_BIAS: tl.constexpr, NORM_QK: tl.constexpr,
               BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):  # fmt: skip
    """q, k, v of rows x, given times the norm's gain and with `squares`; q [T, HEADS, D] is written out, k and v into the pool.

    A program does BN columns of the lower half of a head and their partners in the upper half, so that it can rotate q and k.
    With WITH_EMBEDDING the input is [norm(embedding[id]), norm(x)], as a draft network has it.
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
    x_rows = x + rows.to(tl.int64) * K
    scale = _inverse_rms(squares, rows, ok, eps, K, TILES, TP)[:, None]
    if WITH_EMBEDDING:
        e_rows = embedding + tl.load(ids + rows * ids_stride, mask=ok, other=0).to(tl.int64) * K
        low, high = _dot_two(e_rows, ok, embedding_gain, w_low, w_high, cols_ok, eps, K, True, BM, BN, BK)
        low_x, high_x = _dot_two(x_rows, ok, x, w_low + K, w_high + K, cols_ok, eps, K, False, BM, BN, BK)
        low += low_x * scale
        high += high_x * scale
    else:
        low, high = _dot_two(x_rows, ok, x, w_low, w_high, cols_ok, eps, K, False, BM, BN, BK)
        low *= scale
        high *= scale
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


@triton.jit(**varying("num_rows", "rows_of"))
def linear_kernel(x, x_stride, rows_of, w, residual, out, gain, scaled, squares, num_rows, K: tl.constexpr,
                  N: tl.constexpr, TILES: tl.constexpr, GATHER: tl.constexpr, ADD: tl.constexpr, PASS_ON: tl.constexpr,
                  BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):  # fmt: skip
    """out [T, N] = x w^T, plus residual [T, N] with ADD. With GATHER row i of x is x[rows_of[i]].

    With PASS_ON also out times `gain`, into scaled [T, N], and sums of squares by tile, for the norm that follows.
    """
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    ok = rows < num_rows
    col = tl.program_id(1) * BN + tl.arange(0, BN)
    w_rows = w + tl.minimum(col, N - 1).to(tl.int64) * K
    source = tl.load(rows_of + rows, mask=ok, other=0) if GATHER else rows
    x_rows = x + source.to(tl.int64) * x_stride
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
    y = acc.to(out.dtype.element_ty)
    tl.store(out + to, y, mask=ok2)
    if PASS_ON:
        _pass_on(y, to, ok2, rows, ok, col, gain, scaled, squares, tl.program_id(1), N, TILES)


@triton.jit(**varying("num_rows"))
def merge_kernel(parts, lse, out, num_rows, HEADS: tl.constexpr, D: tl.constexpr, SPLITS: tl.constexpr):
    """One head of one row out of attention over SPLITS parts of the keys: parts float32 [SPLITS, T, HEADS, D], lse in base 2."""
    at = tl.program_id(0).to(tl.int64) * HEADS + tl.program_id(1)
    split = tl.arange(0, SPLITS)
    d = tl.arange(0, D)
    from_ = at + split.to(tl.int64) * num_rows * HEADS
    weight = tl.load(lse + from_)
    weight = tl.exp2(weight - tl.max(weight, 0))
    values = tl.load(parts + from_[:, None] * D + d[None, :])
    o = tl.sum(values * weight[:, None], 0) / tl.sum(weight, 0)
    tl.store(out + at * D + d, o.to(out.dtype.element_ty))


@triton.jit(**varying("num_rows"))
def gate_up_kernel(x, squares, w, out, num_rows, eps, K: tl.constexpr, WIDTH: tl.constexpr, TILES: tl.constexpr,
                   TP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):  # fmt: skip
    """out [T, WIDTH] = silu(gate) * up of rows x, given as for `qkv_kernel`; w [2 * WIDTH, K] has the gate's rows first."""
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    ok = rows < num_rows
    col = tl.program_id(1) * BN + tl.arange(0, BN)
    w_rows = w + tl.minimum(col, WIDTH - 1).to(tl.int64) * K
    scale = _inverse_rms(squares, rows, ok, eps, K, TILES, TP)[:, None]
    x_rows = x + rows.to(tl.int64) * K
    gate, up = _dot_two(x_rows, ok, x, w_rows, w_rows + WIDTH * K, col < WIDTH, eps, K, False, BM, BN, BK)
    gate *= scale
    y = gate / (1.0 + tl.exp(-gate)) * (up * scale)
    tl.store(out + rows.to(tl.int64)[:, None] * WIDTH + col[None, :], y.to(out.dtype.element_ty),
             mask=ok[:, None] & (col < WIDTH)[None, :])  # fmt: skip


@triton.jit(**varying("slots"))
def keep_states_kernel(low, mid, high, x, gain, slots, hidden, pool, eps, H: tl.constexpr, HP: tl.constexpr):  # fmt: skip
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


@triton.jit(**varying("num_rows"))
def head_kernel(x, x_stride, gain, w, logits, best, best_id, num_rows, eps, K: tl.constexpr, V: tl.constexpr,
                TILES: tl.constexpr, NORM: tl.constexpr, ARGMAX: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
                BK: tl.constexpr):  # fmt: skip
    """Logits float32 [T, V]; with ARGMAX only each tile's best and its id, [T, TILES]: NaN counts as infinite."""
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    ok = rows < num_rows
    col = tl.program_id(1) * BN + tl.arange(0, BN)
    x_rows = x + rows.to(tl.int64) * x_stride
    w_rows = w + tl.minimum(col, V - 1).to(tl.int64) * K
    acc = tl.zeros([BM, BN], tl.float32)
    squares = tl.zeros([BM, BK], tl.float32)
    for first in range(0, K, BK):
        k = first + tl.arange(0, BK)
        part = tl.load(x_rows[:, None] + k[None, :], mask=ok[:, None] & (k < K)[None, :], other=0.0)
        if NORM:
            wide = part.to(tl.float32)
            squares += wide * wide
            part = (wide * tl.load(gain + k, mask=k < K, other=0.0).to(tl.float32)[None, :]).to(part.dtype)
        weights = tl.load(w_rows[None, :] + k[:, None], mask=(col < V)[None, :] & (k < K)[:, None], other=0.0)
        acc = tl.dot(part, weights, acc, input_precision="ieee")
    if NORM:
        acc *= tl.rsqrt(tl.sum(squares, 1) / K + eps)[:, None]
    acc = acc.to(x.dtype.element_ty).to(tl.float32)  # as the model's own head rounds
    if ARGMAX:
        acc = tl.where(acc == acc, acc, float("inf"))
        acc = tl.where((col < V)[None, :], acc, float("-inf"))
        to = rows * TILES + tl.program_id(1)
        tl.store(best + to, tl.max(acc, 1), mask=ok)
        tl.store(best_id + to, tl.program_id(1) * BN + tl.argmax(acc, 1), mask=ok)
    else:
        tl.store(logits + rows.to(tl.int64)[:, None] * V + col[None, :], acc, mask=ok[:, None] & (col < V)[None, :])


@triton.jit(**varying("out_stride", "out"))
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

# mypy: ignore-errors
"""Attention of chains and trees over paged K/V, one Triton kernel: grouped queries, sliding windows, sinks, split keys.

    position     0 ............ length-1 | length ... length+n-1        of one sequence, in table order, 16 to a block
                 committed, seen by all  | new: node i is seen by node r if i is r or its ancestor

A program does one sequence, one K/V head, BM pairs of (row, query head of that K/V head) and one part of the keys. Parts are
merged by the kernel that follows (`merge_kernel`), so a single long sequence fills the device too. Block 0 is dead: it
stands where blocks were dropped or never taken, padded rows write to it, and nobody reads it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from runtime.backends.transformers.cuda.kernels import varying

MAX_NODES = tl.constexpr(64)  # rows of a tree: one bit each


@triton.jit
def _is_ancestor(sees, node):
    """[BM, BN] whether each of the nodes [BN] is in the bit masks `sees` [BM]; what is committed is seen by all."""
    bit = sees[:, None] >> tl.minimum(tl.maximum(node, 0), 63).to(tl.int64)[None, :]
    return (node < 0)[None, :] | ((bit & 1) == 1)


@triton.jit(**varying("stride_split", "table_rows", "starts", "sizes", "lengths", "positions", "ancestors", "sinks", "windows"))
def attention_kernel(q, keys, values, out, lse, table, table_stride, table_rows, starts, sizes, lengths, positions, ancestors,
                     sinks, windows, scale, stride_split, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr,
                     BLOCK: tl.constexpr, LAYER_WINDOW: tl.constexpr, TREE: tl.constexpr, SPLITS: tl.constexpr,
                     BM: tl.constexpr, BN: tl.constexpr):  # fmt: skip
    """q [T, HEADS, D] -> out [T, HEADS, D]; with SPLITS > 1 float32 parts [SPLITS, T, HEADS, D] and their lse, in base 2.

    Per sequence s: rows starts[s] .. +sizes[s], row table_rows[s] of the block table, lengths[s] committed tokens, and a cache
    policy (sinks[s], windows[s]). Per row: positions, and with TREE a bit mask of the nodes that it sees; a
    sequence of more than MAX_NODES rows is a chain all the same.
    """
    GROUPS: tl.constexpr = HEADS // KV_HEADS
    s = tl.program_id(0)
    kv_head = tl.program_id(2) // SPLITS
    split = tl.program_id(2) % SPLITS
    size = tl.load(sizes + s)
    pair = tl.program_id(1) * BM + tl.arange(0, BM)
    if tl.program_id(1) * BM < size * GROUPS:
        start = tl.load(starts + s)
        length = tl.load(lengths + s)
        blocks = table + tl.load(table_rows + s).to(tl.int64) * table_stride
        sink = tl.load(sinks + s)
        window = tl.load(windows + s)
        row = pair // GROUPS
        ok = row < size
        head = kv_head * GROUPS + pair % GROUPS
        d = tl.arange(0, D)
        at = ((start + row) * HEADS + head).to(tl.int64)
        queries = tl.load(q + at[:, None] * D + d[None, :], mask=ok[:, None], other=0.0)
        my_position = tl.load(positions + start + row, mask=ok, other=0)
        if TREE:
            sees = tl.load(ancestors + start + row, mask=ok, other=0)
            end = length + size
        else:
            end = length + tl.minimum(size, (tl.program_id(1) * BM + BM - 1) // GROUPS + 1)
        # Tiles of keys worth a look: those of the sink, then everything from the oldest that some row's window reaches.
        oldest = tl.min(tl.where(ok, my_position, 2147483647), 0)
        if LAYER_WINDOW > 0:
            first = tl.maximum(oldest - LAYER_WINDOW + 1, 0)
            num_sink = 0
        else:
            first = tl.maximum(oldest - window + 1, 0)
            num_sink = tl.minimum((tl.minimum(sink, first) + BN - 1) // BN, first // BN)
        first_tile = first // BN
        num_tiles = num_sink + (end + BN - 1) // BN - first_tile
        share = (num_tiles + SPLITS - 1) // SPLITS
        best = tl.full([BM], -1e30, tl.float32)
        total = tl.zeros([BM], tl.float32)
        acc = tl.zeros([BM, D], tl.float32)
        for tile in range(split * share, tl.minimum(num_tiles, (split + 1) * share)):
            key = tl.where(tile < num_sink, tile, tile - num_sink + first_tile) * BN + tl.arange(0, BN)
            block = tl.load(blocks + key // BLOCK, mask=key < end, other=0)
            live = block > 0
            base = ((block.to(tl.int64) * KV_HEADS + kv_head) * BLOCK + key % BLOCK) * D
            k = tl.load(keys + base[None, :] + d[:, None], mask=live[None, :], other=0.0)  # [D, BN]
            scores = tl.dot(queries, k, input_precision="ieee") * (scale * 1.4426950408889634)
            node = key - length
            is_new = (node >= 0) & (key < end)
            key_position = tl.where(is_new, tl.load(positions + start + node, mask=is_new, other=0), key)
            seen = node[None, :] <= row[:, None]
            if TREE:
                seen = (seen & (size > MAX_NODES)) | (_is_ancestor(sees, node) & (size <= MAX_NODES))
            age = my_position[:, None] - key_position[None, :]
            seen &= live[None, :] & ((age < window) | (key_position < sink)[None, :])
            if LAYER_WINDOW > 0:
                seen &= age < LAYER_WINDOW
            scores = tl.where(seen, scores, -1e30)
            new_best = tl.maximum(best, tl.max(scores, 1))
            p = tl.where(seen, tl.exp2(scores - new_best[:, None]), 0.0)
            fade = tl.exp2(best - new_best)
            total = total * fade + tl.sum(p, 1)
            v = tl.load(values + base[:, None] + d[None, :], mask=live[:, None], other=0.0)  # [BN, D]
            acc = tl.dot(p.to(v.dtype), v, acc * fade[:, None], input_precision="ieee")
            best = new_best
        has_any = total > 0  # a part of the keys may hold none that a row sees
        acc = acc / tl.where(has_any, total, 1.0)[:, None]
        if SPLITS > 1:
            at += split.to(tl.int64) * stride_split * HEADS
            tl.store(lse + at, tl.where(has_any, best + tl.log2(tl.where(has_any, total, 1.0)), -1e30), mask=ok)
        tl.store(out + at[:, None] * D + d[None, :], acc.to(out.dtype.element_ty), mask=ok[:, None])

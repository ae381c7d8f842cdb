# mypy: ignore-errors
"""The two kernels around a fused step: who has which rows in it, and what of the draft is accepted.

The state of a sequence lies on the device, a row of int32 by its row of the block table, and a step leaves there what the
next one needs, so the host only says which sequences take part:

    LENGTH  FRESH  SINK  WINDOW  PLACE  recent[0] ... recent[R-1]

LENGTH tokens are committed; the last FRESH of them are new to the drafter; recent[:FRESH] are the tokens behind them, so
recent[FRESH - 1] is the pending one; the next one comes at PLACE of the output. Row 0 is nobody's: what a padded sequence
computes goes nowhere.
"""

from __future__ import annotations

import triton
import triton.language as tl

from runtime.backends.transformers.cuda.kernels import varying

LENGTH, FRESH, SINK, WINDOW, PLACE, RECENT = 0, 1, 2, 3, 4, 5
KNOWN = RECENT + 1  # of it, when the host says where a sequence stands: one token is pending


@triton.jit
def _slot(blocks, position, ok, BLOCK: tl.constexpr):
    block = tl.load(blocks + position // BLOCK, mask=ok, other=0)
    return tl.where(ok & (block > 0), block * BLOCK + position % BLOCK, 0)


@triton.jit(**varying("num"))
def plan_kernel(table_rows, state, state_stride, table, table_stride, sinks, windows, new_ids, new_positions, new_slots,
                last_rows, draft_positions, draft_slots, verify_ids, verify_positions, verify_slots, lengths, live, sizes, num,
                DEPTH: tl.constexpr, R: tl.constexpr, RP: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """One program a sequence s of num. Positions of its rows and where in the pool they write:

    new_*     [num, R]         what the drafter catches up on: row p holds the token of p + 1; last_rows the one to draft from
    draft_*   [DEPTH, num]     the chain, from that row on
    verify_*  [num, DEPTH + 1] the pending token and the chain, whose ids the head of the draft network writes
    lengths [num], live [num] (1, or 0 for nobody), sizes [num] (rows to verify), sinks, windows [num]
    """
    s = tl.program_id(0)
    seat = tl.load(table_rows + s)
    mine = state + seat * state_stride
    blocks = table + seat.to(tl.int64) * table_stride
    is_live = seat > 0
    length = tl.where(is_live, tl.load(mine + 0), 0)
    fresh = tl.where(is_live, tl.load(mine + 1), 0)
    tl.store(sinks + s, tl.load(mine + 2))
    tl.store(windows + s, tl.load(mine + 3))
    tl.store(lengths + s, length)
    tl.store(live + s, tl.where(is_live, 1, 0))
    tl.store(sizes + s, tl.where(is_live, DEPTH + 1, 0))
    i = tl.arange(0, RP)
    if DEPTH > 0:
        position = length - fresh + i
        ok = (i < fresh) & (position >= 0)
        at = s * R + i
        tl.store(new_ids + at, tl.maximum(tl.load(mine + 5 + i, mask=ok, other=0), 0), mask=i < R)
        tl.store(new_positions + at, tl.where(ok, position, 0), mask=i < R)
        tl.store(new_slots + at, _slot(blocks, position, ok, BLOCK), mask=i < R)
        tl.store(last_rows + s, s * R + tl.maximum(fresh - 1, 0))
        position = tl.where(is_live, length - 1, 0) + i
        tl.store(draft_positions + i * num + s, tl.where(is_live, position, 0), mask=i < DEPTH)
        tl.store(draft_slots + i * num + s, _slot(blocks, position, is_live & (i < DEPTH), BLOCK), mask=i < DEPTH)
    at = s * (DEPTH + 1) + i
    ok = is_live & (i <= DEPTH)
    pending = tl.maximum(tl.load(mine + 5 + tl.maximum(fresh - 1, 0)), 0)  # -1: the step before went wrong, the host will see
    tl.store(verify_ids + at, tl.where(is_live, pending, 0), mask=i == 0)
    tl.store(verify_positions + at, tl.where(is_live, length + i, 0), mask=i <= DEPTH)
    tl.store(verify_slots + at, _slot(blocks, length + i, ok, BLOCK), mask=i <= DEPTH)


@triton.jit
def accept_kernel(table_rows, state, state_stride, verify_ids, best, result, DEPTH: tl.constexpr, RP: tl.constexpr):  # fmt: skip
    """Keep the longest prefix of the chain that the target would have picked itself, and one token more.

    best [num, DEPTH + 1] is the target's pick behind each verified row. result [num, DEPTH + 2]: how many tokens, then they.
    """
    s = tl.program_id(0)
    seat = tl.load(table_rows + s)
    mine = state + seat * state_stride
    i = tl.arange(0, RP)
    picked = tl.load(best + s * (DEPTH + 1) + i, mask=i <= DEPTH, other=-1)
    drafted = tl.load(verify_ids + s * (DEPTH + 1) + 1 + i, mask=i < DEPTH, other=-2)
    num_accepted = tl.min(tl.where(picked == drafted, RP, i), 0)  # the first place where they part, DEPTH at the latest
    count = num_accepted + 1
    tl.store(result + s * (DEPTH + 2), count)
    tl.store(result + s * (DEPTH + 2) + 1 + i, tl.where(i < count, picked, -1), mask=i <= DEPTH)
    if seat > 0:
        tl.store(mine + 0, tl.load(mine + 0) + count)
        tl.store(mine + 1, count)
        tl.store(mine + 4, tl.load(mine + 4) + count)
        tl.store(mine + 5 + i, picked, mask=i < count)

"""Cutting a captured turn into rows of at most max_tokens tokens. Pure index arithmetic: no store, no thread.

A turn is a kept history x[0..n] whose last part was generated. Position p of the hidden states pairs with x[p+1] and
teaches x[p+2], and only generated x[p+1], x[p+2] teach, so the token before the first generated one must stay:

    x:          0 . . . . . . . g-1 | g . . . . . . . . . n
    too long:           [ keep the last max_tokens -------- ]          the start of the prompt is cut off
    g-1..n too long:            [ row 0 --------- ]
                                            [ row 1 ------- ]          overlap: context, of which only the last token
                                                  e                    (e) is marked generated, so x[e+1] is taught once
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Cut:
    """Tokens start .. stop-1 of the turn; of them, those from taught_from on keep their generated mark."""

    start: int
    stop: int
    taught_from: int


def cut_turn(generated: Sequence[bool], max_tokens: int) -> list[Cut]:
    """The rows of a turn, in order; none if nothing was generated. Each generated token but the first, which no drafter ever
    proposes, is what exactly one row teaches its first drafting step."""
    if True not in generated:
        return []
    first = generated.index(True)
    end = len(generated) - list(reversed(generated)).index(True)  # what follows the last generated token teaches nothing
    must_start = max(first - 1, 0)
    if end - must_start <= max_tokens:
        start = max(end - max_tokens, 0)
        return [Cut(start, end, first)]
    cuts = [Cut(must_start, must_start + max_tokens, first)]
    while cuts[-1].stop < end:
        taught_from = cuts[-1].stop - 1
        stop = min(cuts[-1].stop + max_tokens - max(max_tokens // 4, 2), end)
        cuts.append(Cut(stop - max_tokens, stop, taught_from))
    return cuts

"""The pairs of a batch by their teachers, against the rule written out."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from training.learning.pairs import Pairs

L = 4


@given(st.lists(st.integers(1, 7), max_size=6), st.integers(1, 5))
def test_pairs_are_sorted_by_their_teachers_and_cut_into_blocks_of_them(turns: list[int], block: int) -> None:
    """Turns of so many supervised positions: the last of one has one depth, the one before it two, and so on."""
    depths = np.array([depth for turn in turns for depth in range(turn, 0, -1)], dtype=np.int64)
    unrolled = [(int(i), k) for k in range(L) for i in np.flatnonzero(depths > k)]
    pairs = Pairs.of([np.flatnonzero(depths > k) for k in range(L)], len(depths))
    ordered = sorted(unrolled, key=lambda pair: (pair[0] + pair[1], pair[1]))
    assert [unrolled[n] for n in pairs.at.tolist()] == ordered
    assert list(zip(pairs.rows.tolist(), pairs.depths.tolist(), strict=True)) == ordered
    assert pairs.num_drafted == [int((depths > k).sum()) for k in range(L)]
    blocks = pairs.blocks(block)
    assert [n for each in blocks for n in range(each.start, each.stop)] == list(range(len(ordered)))
    for number, each in enumerate(blocks):
        assert {(i + k) // block for i, k in ordered[each]} == {number}

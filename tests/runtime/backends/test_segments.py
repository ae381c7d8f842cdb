"""Who sees whom in a segment, and which rows of it can become history."""

from __future__ import annotations

import pytest

from runtime.backends.segments import ancestry, check_root_path, depths

#   0 - 1 - 3
#   |
#   2       4 apart
PARENTS = [-1, 0, 0, 1, -1]


def test_ancestry_of_a_tree() -> None:
    sees = ancestry(PARENTS, 5)
    assert [row.nonzero().flatten().tolist() for row in sees] == [[0], [0, 1], [0, 2], [0, 1, 3], [4]]


def test_ancestry_of_a_chain() -> None:
    assert ancestry(None, 3).tolist() == ancestry([-1, 0, 1], 3).tolist() == [[1, 0, 0], [1, 1, 0], [1, 1, 1]]


def test_depths() -> None:
    assert list(depths(PARENTS, 5)) == [0, 1, 1, 2, 0]
    assert list(depths(None, 3)) == [0, 1, 2]


@pytest.mark.parametrize("rows", [[], [0], [0, 1], [0, 1, 3], [0, 2], [4]], ids=str)
def test_a_root_path(rows: list[int]) -> None:
    check_root_path(PARENTS, rows)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([1], r"Rows \[1\] are no root path: the parent of row 1 is 0, not -1"),
        ([0, 3], "the parent of row 3 is 1, not 0"),
        ([0, 4], "the parent of row 4 is -1, not 0"),
        ([5], "Row 5 cannot be committed; the cache's last forward left 5 tentative rows"),
        ([-1], "Row -1 cannot be committed"),
    ],
    ids=str,
)
def test_no_root_path(rows: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_root_path(PARENTS, rows)

"""What every backend asks of a segment: whether it makes sense, how deep its nodes lie, which of them see which.

history - 0 - 2 - 5        parents  -1 -1  0  0  1  2
        \\   \\ 3            depths    0  0  1  1  1  2
         1 - 4             node 5 sees the history and 0, 2, 5
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from runtime.backends.base import Segment, TargetInfo


def check_segment(segment: Segment, vocab_size: int) -> None:
    """ValueError for empty, out-of-vocabulary, ill-parented or over-asking segments."""
    size = len(segment.token_ids)
    if not size:
        raise ValueError(f"The segment of cache {segment.cache} is empty; give it at least one token.")
    low, high = min(segment.token_ids), max(segment.token_ids)
    if low < 0 or high >= vocab_size:
        bad = low if low < 0 else high
        raise ValueError(f"Token id {bad} is not in this model's vocabulary; ids run from 0 to {vocab_size - 1}.")
    if not 0 <= segment.num_logits <= size:
        raise ValueError(f"num_logits is {segment.num_logits}; a segment of {size} tokens has logits for 0 to {size} rows.")
    if segment.parents is None:
        return
    if len(segment.parents) != size:
        raise ValueError(f"{len(segment.parents)} parents were given for {size} tokens; give one each.")
    for node, parent in enumerate(segment.parents):
        if not -1 <= parent < node:
            raise ValueError(f"The parent of node {node} is {parent}; it must be -1 or an earlier node.")


def check_root_path(parents: Sequence[int], rows: Sequence[int]) -> None:
    """ValueError unless `rows` lead from the history down through the last forward's nodes, parent by parent."""
    previous = -1
    for row in rows:
        if not 0 <= row < len(parents):
            raise ValueError(f"Row {row} cannot be committed; the cache's last forward left {len(parents)} tentative rows.")
        if parents[row] != previous:
            raise ValueError(f"Rows {list(rows)} are no root path: the parent of row {row} is {parents[row]}, not {previous}.")
        previous = row


def depths(parents: Sequence[int] | None, size: int) -> Sequence[int]:
    """Of each node below the history, [size]: 0 for a root."""
    if parents is None:
        return range(size)
    found: list[int] = []
    for parent in parents:
        found.append(found[parent] + 1 if parent >= 0 else 0)
    return found


def ancestry(parents: Sequence[int] | None, size: int) -> torch.Tensor:
    """bool [size, size]: which nodes each node sees, its ancestors and itself."""
    if parents is None:
        return torch.ones(size, size, dtype=torch.bool).tril_()
    sees = torch.eye(size, dtype=torch.bool)
    for node, parent in enumerate(parents):
        if parent >= 0:
            sees[node] |= sees[parent]
    return sees


def check_batch(segments: Sequence[Segment], length_of: Callable[[int], int], info: TargetInfo) -> None:
    """ValueError for segments that make no sense, for a cache that occurs twice, and beyond the model's positions."""
    seen: set[int] = set()
    for segment in segments:
        length = length_of(segment.cache)
        if segment.cache in seen:
            raise ValueError(f"Cache {segment.cache} occurs twice in one forward; give each sequence one segment.")
        seen.add(segment.cache)
        check_segment(segment, info.vocab_size)
        end = length + max(depths(segment.parents, len(segment.token_ids))) + 1
        if end > info.max_positions:
            raise ValueError(f"Cache {segment.cache} would reach {end} tokens; this model takes {info.max_positions}.")

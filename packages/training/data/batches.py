"""Rows to packed batches: which positions are supervised, to which depth, and where everything lies.

Position p pairs aux[p] with the embedding of x[p+1] and drafts x[p+2], x[p+3], ... Of a turn x[g0 .. g1] (all generated):

    p        g0-1   g0    ...   g1-2   g1-1         p+1 is the first generated token at p = g0-1, the last prompt position:
    sees     x[g0]  x[g0+1]     x[g1-1]             the first place where serving drafts, so it is supervised.
    depth 0  x[g0+1] ...        x[g1]  (none)       Depth k of p is supervised when x[p+1 .. p+2+k] lie in the turn:
    depths   g1-g0  ...   2     1      0            g1 - p - 1 depths; nothing past the end of a turn, nothing past the row.

Rows are packed along one axis without padding, each cut after its last supervised position (nothing looks further right).
Knows no network and no store. Shapes: the legend of runtime/types.py; T packed context positions, P supervised positions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from runtime.features.row import FeatureRow
from training.learning.attention import Packing


@dataclass(frozen=True)
class TrainingRow:
    """A row with its name; `sample_id` keys what is remembered about it."""

    sample_id: str
    features: FeatureRow

    @property
    def num_tokens(self) -> int:
        return self.features.num_tokens


def turns(generated: torch.Tensor) -> list[tuple[int, int]]:
    """First and last index of each run of generated tokens."""
    edges = torch.diff(
        generated.to(torch.int8), prepend=torch.zeros(1, dtype=torch.int8), append=torch.zeros(1, dtype=torch.int8)
    )
    starts, stops = (edges == 1).nonzero().flatten(), (edges == -1).nonzero().flatten()
    return [(int(start), int(stop) - 1) for start, stop in zip(starts, stops, strict=True)]


def supervised(generated: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions p with at least one supervised depth, ascending, and the number of depths of each."""
    positions: list[torch.Tensor] = []
    depths: list[torch.Tensor] = []
    for first, last in turns(generated):
        start = max(first - 1, 0)
        at = torch.arange(start, max(last - 1, start))
        positions.append(at)
        depths.append(last - 1 - at)
    if not positions:
        return torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int64)
    return torch.cat(positions), torch.cat(depths)


@dataclass(frozen=True)
class Batch:
    """Rows packed along one axis, on the device where they are trained."""

    aux: torch.Tensor  # [T, 3*Ht] float32
    next_ids: torch.Tensor  # int64 [T] x[p+1]
    positions: torch.Tensor  # int64 [T] p
    row_offsets: list[int]  # [R+1] into T
    query_at: torch.Tensor  # int64 [P] where each supervised position lies in T
    query_offsets: list[int]  # [R+1] into P
    depths: torch.Tensor  # int64 [P] supervised depths
    chain_ids: torch.Tensor  # int64 [P, L] x[p+2+k], -1 where depth k is not supervised
    last: torch.Tensor  # [P, Ht] float32, last[p+1]: its head predicts x[p+2]
    sample_ids: list[str]  # [R]

    @property
    def num_supervised(self) -> int:
        return int(self.query_at.shape[0])

    def packing(self) -> Packing:
        return Packing(self.row_offsets, self.query_offsets, self.query_at)


def pack(rows: Sequence[TrainingRow], num_depths: int, device: torch.device | None = None) -> Batch:
    """One batch of these rows, in order, for up to num_depths depths. Rows without a supervised position contribute nothing."""
    parts: list[tuple[torch.Tensor, ...]] = []
    row_offsets, query_offsets = [0], [0]
    for row in rows:
        features = row.features
        at, depths = supervised(features.generated)
        length = int(at[-1]) + 1 if len(at) else 0
        future = at[:, None] + 2 + torch.arange(num_depths)  # [P, L] index of x[p+2+k]
        inside = torch.arange(num_depths) < depths[:, None]
        chain = torch.where(inside, features.token_ids[future.clamp(max=features.num_tokens - 1)], -1)
        parts.append(
            (
                features.hidden.aux[:length].float(),
                features.token_ids[1 : length + 1],
                torch.arange(length),
                at + row_offsets[-1],
                depths,
                chain,
                features.hidden.last[at + 1].float(),
            )
        )
        row_offsets.append(row_offsets[-1] + length)
        query_offsets.append(query_offsets[-1] + len(at))
    aux, next_ids, positions, query_at, depths, chain, last = (
        torch.cat(column).to(device) for column in zip(*parts, strict=True)
    )
    ids = [row.sample_id for row in rows]
    return Batch(aux, next_ids, positions, row_offsets, query_at, query_offsets, depths, chain, last, ids)


def group_by_tokens(
    rows: Sequence[TrainingRow], max_tokens: int, max_rows: int | None = None
) -> Iterator[list[TrainingRow]]:
    """Consecutive groups of at most max_tokens tokens and max_rows rows; a longer row is a group of its own."""
    group: list[TrainingRow] = []
    num_tokens = 0
    for row in rows:
        if group and (num_tokens + row.num_tokens > max_tokens or len(group) == max_rows):
            yield group
            group, num_tokens = [], 0
        group.append(row)
        num_tokens += row.num_tokens
    if group:
        yield group

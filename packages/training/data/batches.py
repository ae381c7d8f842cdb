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
from typing import TypeVar

import numpy as np
import torch

from runtime.features.row import FeatureRow
from training.learning.attention import Packing, Spans
from training.learning.pairs import Pairs

Row = TypeVar("Row")


@dataclass(frozen=True)
class TrainingRow:
    """A row with its name; `sample_id` keys what is remembered about it."""

    sample_id: str
    features: FeatureRow

    @property
    def num_tokens(self) -> int:
        return self.features.num_tokens


def supervised(generated: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions p with at least one supervised depth, ascending, and the number of depths of each."""
    depths = _supervised_depths(generated.cpu().numpy(), np.array([len(generated)]))
    positions = np.flatnonzero(depths)
    return torch.from_numpy(positions), torch.from_numpy(depths[positions])


def _supervised_depths(generated: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """int64 [S]: supervised depths of every position of rows that lie side by side. generated: bool [S]. lengths: int64 [R]."""
    follows = np.roll(generated, -1)  # x[p+1] exists and is generated
    follows[lengths.cumsum() - 1] = False
    at = np.arange(len(generated))
    ends_turn = np.where(generated & ~follows, at, len(generated))
    last = np.roll(np.minimum.accumulate(ends_turn[::-1])[::-1], -1)  # where the turn of x[p+1] ends
    return np.where(follows, last - 1 - at, 0)


@dataclass(frozen=True)
class Batch:
    """Rows packed along one axis, on the device where they are trained."""

    aux: torch.Tensor  # [T, 3*Ht] as stored on a device, float32 on a CPU
    next_ids: torch.Tensor  # int64 [T] x[p+1]
    positions: torch.Tensor  # int64 [T] p
    row_offsets: list[int]  # [R+1] into T
    query_at: torch.Tensor  # int64 [P] where each supervised position lies in T
    query_offsets: list[int]  # [R+1] into P
    context_at: torch.Tensor  # int64 [T-P] where the others lie
    place: torch.Tensor  # int64 [T] where each position lies in those two, the others first
    depths: torch.Tensor  # int64 [P] supervised depths
    keeps: list[torch.Tensor]  # for depths 1, 2, ...: int64 [P_k] which positions of the depth before go on
    pairs: Pairs
    chain_ids: torch.Tensor  # int64 [P, L] x[p+2+k], -1 where depth k is not supervised
    last: torch.Tensor  # [P, Ht] last[p+1], as aux: its head predicts x[p+2]
    spans: Spans
    sample_ids: list[str]  # [R]

    @property
    def num_supervised(self) -> int:
        return int(self.query_at.shape[0])

    def packing(self) -> Packing:
        return Packing(self.row_offsets, self.query_at, self.spans)


def pack(rows: Sequence[TrainingRow], num_depths: int, device: torch.device | None = None) -> Batch:
    """One batch of these rows, in order, for up to num_depths depths. Rows without a supervised position contribute nothing.

    Masks and tokens are read on the CPU, by NumPy: many small operations, each too short to be worth a pool of threads. To the
    device go one block of indices and the states, and nothing waits for either.
    """
    device = device or torch.device("cpu")
    features = [row.features for row in rows]
    lengths = np.array([row.num_tokens for row in rows])
    starts = _offsets(lengths)  # [R+1] into S, the tokens of all rows side by side
    ids = torch.cat([each.token_ids for each in features]).cpu().numpy()  # [S]
    depths = _supervised_depths(torch.cat([each.generated for each in features]).cpu().numpy(), lengths)  # [S]
    at = np.flatnonzero(depths)  # [P] into S
    query_offsets = np.searchsorted(at, starts)  # [R+1]
    last_of_row = np.append(at, 0)[query_offsets[1:] - 1]  # [R]
    cuts = np.where(np.diff(query_offsets) > 0, last_of_row + 1 - starts[:-1], 0)  # [R] context positions of each row
    row_offsets = _offsets(cuts)  # [R+1] into T
    positions = np.arange(row_offsets[-1]) - row_offsets[:-1].repeat(cuts)  # [T]
    context = positions + starts[:-1].repeat(cuts)  # [T] into S
    is_query = depths[context] > 0
    query_at, context_at, depths = np.flatnonzero(is_query), np.flatnonzero(~is_query), depths[at]
    place = np.empty_like(context)
    place[context_at], place[query_at] = np.arange(len(context_at)), np.arange(len(context_at), len(context))
    future = np.minimum(at[:, None] + 2 + np.arange(num_depths), len(ids) - 1)  # [P, L] index of x[p+2+k]
    alive = [np.flatnonzero(depths > k) for k in range(num_depths)]  # [P_k] into P
    spans, pairs = Spans.between(query_at, query_offsets, row_offsets), Pairs.of(alive, len(at))
    host = {
        "next_ids": ids[context + 1],
        "positions": positions,
        "query_at": query_at,
        "context_at": context_at,
        "place": place,
        "depths": depths,
        "chain_ids": np.where(np.arange(num_depths) < depths[:, None], ids[future], -1),
    }
    keeps = [np.flatnonzero(depths[alive[k - 1]] > k) for k in range(1, num_depths) if len(alive[k])]
    parts = [*host.values(), *keeps, *(each.numpy() for each in (*spans.tensors, *pairs.tensors))]
    moved = iter(_to_device(parts, device))
    last, aux = _last_states(features, at, starts), [each.hidden.aux[:cut] for each, cut in zip(features, cuts, strict=True)]
    return Batch(
        **{name: next(moved) for name in host},
        aux=_states_to_device(torch.cat(aux), device),
        last=_states_to_device(last, device),
        keeps=[next(moved) for _ in keeps],
        spans=spans.moved(next(moved), next(moved), next(moved)),
        pairs=pairs.moved(next(moved), next(moved), next(moved)),
        row_offsets=row_offsets.tolist(),
        query_offsets=query_offsets.tolist(),
        sample_ids=[row.sample_id for row in rows],
    )


def _offsets(counts: np.ndarray) -> np.ndarray:
    return np.concatenate([np.zeros(1, dtype=np.int64), counts.cumsum()])


def _last_states(features: Sequence[FeatureRow], at: np.ndarray, starts: np.ndarray) -> torch.Tensor:
    """[P, Ht] last[p+1] of the supervised positions: each turn is one slice of its row. at: [P] and starts: [R+1] into S."""
    first = np.flatnonzero(np.diff(at, prepend=-2) != 1)  # [turns] into P
    rows = np.searchsorted(starts, at[first], side="right") - 1
    begins = at[first] + 1 - starts[rows]
    ends = begins + np.diff(np.append(first, len(at)))
    turns = zip(rows.tolist(), begins.tolist(), ends.tolist(), strict=True)
    return torch.cat([features[0].hidden.last[:0], *(features[row].hidden.last[begin:end] for row, begin, end in turns)])


def _to_device(arrays: Sequence[np.ndarray], device: torch.device) -> list[torch.Tensor]:
    """These int64 arrays there, moved as one block that nobody waits for."""
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    sizes = [array.size for array in arrays]
    block = torch.empty(sum(sizes), dtype=torch.int64, pin_memory=True)
    np.concatenate([array.ravel() for array in arrays], out=block.numpy())
    parts = block.to(device, non_blocking=True).split(sizes)  # type: ignore[no-untyped-call]
    return [part.view(array.shape) for part, array in zip(parts, arrays, strict=True)]


def _states_to_device(states: torch.Tensor, device: torch.device) -> torch.Tensor:
    """States there: on a CPU in float32, elsewhere as they are stored."""
    if device.type == "cpu":
        return states.to(device, torch.float32)
    return states if states.device.type == device.type else states.pin_memory().to(device, non_blocking=True)


def group_by_tokens(rows: Sequence[TrainingRow], max_tokens: int) -> Iterator[list[TrainingRow]]:
    """Consecutive groups of at most max_tokens tokens; a longer row is a group of its own."""
    return cut_by_tokens(rows, [row.num_tokens for row in rows], max_tokens)


def cut_by_tokens(rows: Sequence[Row], lengths: Sequence[int], max_tokens: int) -> Iterator[list[Row]]:
    """The same of whatever stands for rows of these lengths."""
    group: list[Row] = []
    num_tokens = 0
    for row, length in zip(rows, lengths, strict=True):
        if group and num_tokens + length > max_tokens:
            yield group
            group, num_tokens = [], 0
        group.append(row)
        num_tokens += length
    if group:
        yield group

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

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

import torch

from runtime.features.row import FeatureRow
from training.learning.attention import Packing, Spans

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
    depths = supervised_depths(generated, torch.tensor([len(generated)]))
    positions = depths.nonzero().flatten()
    return positions, depths[positions]


def supervised_depths(generated: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """int64 [S]: supervised depths of every position of rows that lie side by side. generated: bool [S]. lengths: int64 [R]."""
    ends_row = torch.zeros(len(generated), dtype=torch.bool)
    ends_row[lengths.cumsum(0) - 1] = True
    follows = generated.roll(-1) & ~ends_row  # x[p+1] exists and is generated
    at = torch.arange(len(generated))
    ends_turn = torch.where(generated & ~follows, at, len(generated))
    last = ends_turn.flip(0).cummin(0).values.flip(0).roll(-1)  # where the turn of x[p+1] ends
    return torch.where(follows, last - 1 - at, 0)


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
    depths: torch.Tensor  # int64 [P] supervised depths
    host_depths: torch.Tensor  # the same on the CPU: who needs to know how many there are asks no device
    keeps: list[torch.Tensor]  # for depths 1, 2, ...: int64 [P_k] which positions of the depth before go on
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

    Masks and tokens are read on the CPU; to the device go one block of indices and the states, and nothing waits for either.
    """
    device = device or torch.device("cpu")
    features = [row.features for row in rows]
    lengths = torch.tensor([row.num_tokens for row in rows])
    starts = _offsets(lengths)  # [R+1] into S, the tokens of all rows side by side
    ids = torch.cat([each.token_ids for each in features]).cpu()  # [S]
    depths = supervised_depths(torch.cat([each.generated for each in features]).cpu(), lengths)  # [S]
    at = depths.nonzero().flatten()  # [P] into S
    query_offsets = torch.searchsorted(at, starts)  # [R+1]
    last_of_row = torch.cat([at, starts[:1]])[query_offsets[1:] - 1]  # [R]
    cuts = torch.where(query_offsets.diff() > 0, last_of_row + 1 - starts[:-1], 0)  # [R] context positions of each row
    row_offsets = _offsets(cuts)  # [R+1] into T
    context = torch.arange(int(row_offsets[-1])) + (starts - row_offsets)[:-1].repeat_interleave(cuts)  # [T] into S
    is_query = depths[context] > 0
    query_at, depths = is_query.nonzero().flatten(), depths[at]  # [P]
    future = at[:, None] + 2 + torch.arange(num_depths)  # [P, L] index of x[p+2+k]
    host = {
        "next_ids": ids[context + 1],
        "positions": context - starts[:-1].repeat_interleave(cuts),
        "query_at": query_at,
        "context_at": (~is_query).nonzero().flatten(),
        "depths": depths,
        "chain_ids": torch.where(torch.arange(num_depths) < depths[:, None], ids[future.clamp(max=len(ids) - 1)], -1),
    }
    keeps = _going_on(depths, num_depths)
    spans = Spans.between(query_at, query_offsets, row_offsets)
    moved = _to_device([*host.values(), *keeps, spans.slots, spans.query_offsets, spans.key_offsets], device)
    places = [
        at[slice(*span)] + 1 - start for span, start in zip(pairwise(query_offsets.tolist()), starts.tolist(), strict=False)
    ]
    last = [_states_at(each.hidden.last, place) for each, place in zip(features, places, strict=True)]
    aux = [each.hidden.aux[:cut] for each, cut in zip(features, cuts.tolist(), strict=True)]
    return Batch(
        **dict(zip(host, moved, strict=False)),
        aux=_states_to_device(torch.cat(aux), device),
        last=_states_to_device(torch.cat(last), device),
        host_depths=depths,
        keeps=moved[len(host) : -3],
        spans=dataclasses.replace(spans, slots=moved[-3], query_offsets=moved[-2].int(), key_offsets=moved[-1].int()),
        row_offsets=row_offsets.tolist(),
        query_offsets=query_offsets.tolist(),
        sample_ids=[row.sample_id for row in rows],
    )


def _offsets(counts: torch.Tensor) -> torch.Tensor:
    return torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])


def _going_on(depths: torch.Tensor, num_depths: int) -> list[torch.Tensor]:
    """For depths 1, 2, ..., as far as there are any: which positions of the depth before are supervised there too."""
    keeps: list[torch.Tensor] = []
    for k in range(1, num_depths):
        is_alive = depths > k
        if not is_alive.any():
            break
        keeps.append(is_alive.nonzero().flatten())
        depths = depths[is_alive]
    return keeps


def _states_at(states: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """states[places], by a slice where a row has one turn."""
    if len(places) and int(places[-1]) - int(places[0]) + 1 == len(places):
        return states[int(places[0]) : int(places[-1]) + 1]
    return states[places.to(states.device)]


def _to_device(tensors: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """These int64 tensors there, moved as one block that nobody waits for."""
    if device.type == "cpu":
        return list(tensors)
    block = torch.cat([tensor.flatten() for tensor in tensors]).pin_memory().to(device, non_blocking=True)
    parts = block.split([tensor.numel() for tensor in tensors])  # type: ignore[no-untyped-call]
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


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

"""The supervised pairs (p, k) of a batch, sorted by the teacher that teaches them: depth k of position i by position i + k.

All that the loss wants to know about them follows from how many depths each position has, so it is computed on the CPU with the
batch, and no device is asked. Shapes: P supervised positions, N pairs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch


@dataclass(frozen=True)
class Pairs:
    """In the order of their teachers, and of their depths where those are the same."""

    at: torch.Tensor  # int64 [N] where each lies among all pairs as they are unrolled, depth by depth
    rows: torch.Tensor  # int64 [N] supervised position
    depths: torch.Tensor  # int64 [N] k
    offsets: list[int]  # [P+1] into N: where the pairs of each teacher begin
    num_drafted: list[int]  # [L] pairs of each depth

    @staticmethod
    def of(alive: Sequence[np.ndarray], num_positions: int) -> Pairs:
        """alive: for each of the L depths, int64 [P_k] which of the num_positions positions are supervised there, ascending."""
        num_drafted = [len(rows) for rows in alive]
        rows, depths = np.concatenate(alive), np.arange(len(alive)).repeat(num_drafted)  # as they are unrolled
        teachers = rows + depths
        table = np.full((num_positions, len(alive)), -1)
        table[teachers, depths] = np.arange(len(rows))
        at = table[table >= 0]
        offsets = [0, *np.bincount(teachers, minlength=num_positions).cumsum().tolist()]
        in_order = torch.from_numpy(rows[at]), torch.from_numpy(depths[at])
        return Pairs(torch.from_numpy(at), *in_order, offsets, num_drafted)

    @property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.at, self.rows, self.depths

    def moved(self, at: torch.Tensor, rows: torch.Tensor, depths: torch.Tensor) -> Pairs:
        """The same, with its tensors elsewhere."""
        return dataclasses.replace(self, at=at, rows=rows, depths=depths)

    def blocks(self, num_teachers: int) -> list[slice]:
        """The pairs of so many teachers at a time."""
        bounds = [*self.offsets[:-1:num_teachers], self.offsets[-1]]
        return [slice(start, stop) for start, stop in pairwise(bounds)]

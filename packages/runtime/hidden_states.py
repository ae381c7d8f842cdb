"""HiddenStates: what a target forward leaves behind for drafting and for training. The record both programs share.

One internal convention for layer ids: a layer id means "the residual stream after decoder layer id" (0-based).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


def default_aux_layer_ids(num_layers: int) -> tuple[int, int, int]:
    """Low, mid and high auxiliary layers of an n-layer target: [1, n//2 - 1, n - 4], clamped for very small models."""
    low, mid, high = 1, num_layers // 2 - 1, num_layers - 4
    if low < mid < high:
        return (low, mid, high)
    return (0, max((num_layers - 1) // 2, 0), num_layers - 1)


@dataclass(frozen=True)
class HiddenStates:
    """States of consecutive positions of one sequence, in the target's dtype, on any device."""

    aux: torch.Tensor  # [S, 3*Ht] residual stream after the three auxiliary layers: low, mid, high
    last: torch.Tensor  # [S, Ht] after the final norm, the input of lm_head

    def __len__(self) -> int:
        return int(self.aux.shape[0])

    def __getitem__(self, rows: slice | torch.Tensor) -> HiddenStates:
        return HiddenStates(self.aux[rows], self.last[rows])

    @staticmethod
    def concat(parts: Sequence[HiddenStates]) -> HiddenStates:
        """One record of all parts, in order. At least one part."""
        return HiddenStates(torch.cat([part.aux for part in parts]), torch.cat([part.last for part in parts]))

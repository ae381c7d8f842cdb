"""K/V of one sequence in an EAGLE3 draft network: contiguous, growing, with room behind for a draft that is never counted.

row      0 ... length-1           | length        | length+1 ...
         positions that count     | the last row  | the draft's nodes, level by level
"""

from __future__ import annotations

from bisect import bisect_left

import torch
import torch.nn.functional as F

MIN_CAPACITY_ROWS = 128


class SequenceKV:
    """A row per position seen. Gaps between positions are fine: what is not there is not attended to."""

    def __init__(self, num_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
        self._positions: list[int] = []  # ascending, of the rows that count
        self._keys = torch.empty(num_heads, MIN_CAPACITY_ROWS, head_dim, dtype=dtype, device=device)  # [kv_heads, capacity, D]
        self._values = torch.empty_like(self._keys)

    def truncate(self, position: int) -> None:
        """Forget rows at this position and behind."""
        del self._positions[bisect_left(self._positions, position) :]

    def append(self, first: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Keep rows k, v [m, kv_heads, D] of positions first .. first+m-1."""
        self._write(k, v, 0)
        self._positions += range(first, first + len(k))

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ahead: int, sees: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Write rows k, v [m, kv_heads, D] `ahead` places behind those that count; q [m, heads, D] -> [m, heads, D].

        sees: bool [m, r], which of the last r rows each query attends to; all do to the rows before. None: to all rows.
        """
        end = self._write(k, v, ahead)
        num_rows, num_heads = q.shape[:2]
        num_kv_heads, head_dim = k.shape[1:]
        mask = None
        if sees is not None:
            mask = torch.cat([sees.new_ones(num_rows, end - sees.shape[1]), sees], dim=1).repeat(num_heads // num_kv_heads, 1)
        # The heads that share keys become rows of one attention problem: grouped-query attention without a copy of K/V.
        rows = q.transpose(0, 1).reshape(1, num_kv_heads, -1, head_dim)
        out = F.scaled_dot_product_attention(rows, self._keys[None, :, :end], self._values[None, :, :end], attn_mask=mask)
        return out.reshape(num_heads, num_rows, head_dim).transpose(0, 1)

    def keep_row_ahead(self, position: int) -> None:
        """Let the first row behind those that count be one of them; the rest of the draft is thereby dropped."""
        self._positions.append(position)

    def _write(self, k: torch.Tensor, v: torch.Tensor, ahead: int) -> int:
        start = len(self._positions) + ahead
        end = start + len(k)
        if end > self._keys.shape[1]:
            self._keys, self._values = _grown(self._keys, end), _grown(self._values, end)
        self._keys[:, start:end] = k.transpose(0, 1)
        self._values[:, start:end] = v.transpose(0, 1)
        return end


def _grown(old: torch.Tensor, num_rows: int) -> torch.Tensor:
    """The same rows [kv_heads, capacity, D] with room for num_rows, and for as many again as there were."""
    capacity = old.shape[1]
    new = old.new_empty(old.shape[0], max(2 * capacity, num_rows), old.shape[2])
    new[:, :capacity] = old
    return new

"""Training-time test: the drafter unrolled on its own states over a packed batch, as serving would run it.

Depth 0 reads the target's true features. Depth k reads the state that depth k-1 left at the same position, sees the true
features' keys up to p and its own keys of depths 1..k at p, and stands at rotary position p + k:

    keys seen by (p, k):   K0[0] ... K0[p]   K1[p] ... Kk[p]

Keys of depth 0 are needed at every position, queries only where a draft is supervised, and later depths only where the
earlier one still is; nothing else is computed, and nothing is approximated by that. What has a gradient is gathered by
`index_select`, whose backward is one addition, where that of an index in brackets sorts on a device. Training takes the
supervised depths, evaluation lets positions go whose draft missed. Shapes: the legend of runtime/types.py; P_k positions alive
at depth k.
"""

from __future__ import annotations

import torch

from runtime.eagle3.model import Eagle3Model
from training.data.batches import Batch
from training.learning.loss import Depth


class Unroll:
    """The chain of a batch, one depth a call: `first`, then `deeper` as often as wanted, each on a subset of the one before."""

    def __init__(self, model: Eagle3Model, batch: Batch) -> None:
        self.model = model
        self.batch = batch
        self.rows = torch.arange(batch.num_supervised, device=batch.query_at.device)  # [P_k] which supervised positions are alive
        self._h = batch.aux.new_empty(0)  # [P_k, H] recycled state
        self._positions = batch.positions[batch.query_at]  # [P_k] rotary position p + k
        self._packing = batch.packing()
        self._keys = self._values = batch.aux.new_empty(0)  # [T, kv_heads, D] of depth 0
        self._diagonal = batch.aux.new_empty(0)  # [2, k, P_k, kv_heads, D] keys and values of depths 1..k

    def first(self) -> torch.Tensor:
        """Depth 0. Returns the states [P, H]."""
        batch, model = self.batch, self.model
        h = model.project(batch.aux)  # [T, H]
        context = batch.context_at
        context_keys, context_values = model.keys_values(
            batch.next_ids[context], h.index_select(0, context), batch.positions[context]
        )

        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            self._keys = torch.cat([context_keys, k]).index_select(0, batch.place)
            self._values = torch.cat([context_values, v]).index_select(0, batch.place)
            self._diagonal = k.new_empty(2, 0, *k.shape)
            return self._packing.attend(q, self._keys, self._values, self._diagonal)

        ids = batch.next_ids[batch.query_at]
        self._h = model.layer(ids, h.index_select(0, batch.query_at), self._positions, attend)
        return self._h

    def deeper(self, keep: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        """The next depth, only at the alive positions `keep` (int64, ascending). token_ids: what was drafted there before
        (target ids). Returns the states [len(keep), H]."""
        self._packing = self._packing.select(keep)
        self.rows = self.rows[keep]
        self._positions = self._positions[keep] + 1
        before = self._diagonal.index_select(2, keep)

        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            self._diagonal = torch.cat([before, torch.stack([k, v])[:, None]], dim=1)
            return self._packing.attend(q, self._keys, self._values, self._diagonal)

        self._h = self.model.layer(token_ids, self._h.index_select(0, keep), self._positions, attend)
        return self._h

    def head_input(self, states: torch.Tensor) -> torch.Tensor:
        """What lm_head reads of states [..., H]."""
        return states if self.model.config.norm_output else self.model.norm(states)


def unroll(model: Eagle3Model, batch: Batch) -> list[Depth]:
    """All supervised depths of a batch on the row's own tokens (teacher forced)."""
    chain = Unroll(model, batch)
    depths = [Depth(chain.head_input(chain.first()), chain.rows)]
    for k, keep in enumerate(batch.keeps, start=1):
        states = chain.deeper(keep, batch.chain_ids[chain.rows[keep], k - 1])
        depths.append(Depth(chain.head_input(states), chain.rows))
    return depths

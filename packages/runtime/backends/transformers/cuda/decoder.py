"""A whole step of greedy decoding on the device: catch up, draft, verify, accept. The host reads one small tensor.

    catch up  the drafter's K/V of the rows that the last step accepted, whose states the pool has
    draft     a chain: each token goes from the draft head straight into the next row of the batch
    verify    one forward of the target over the pending token and the chain
    accept    the longest prefix that the target picks itself, and one token more; lengths and pending tokens move on

The launches of a step of S sequences and a chain of k are one CUDA graph. K/V of accepted tokens lies where it belongs
already, since a chain is written behind the committed tokens in order. Depth 0 is plain decoding.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from runtime.backends.transformers.cuda import drafting, launch
from runtime.backends.transformers.cuda.blocks import BLOCK_TOKENS, Table
from runtime.backends.transformers.cuda.draft_network import DraftNetwork, can_fuse
from runtime.backends.transformers.cuda.launch import NO_WINDOW, Buffers, Head, Rows, next_power_of_2
from runtime.backends.transformers.cuda.pool import TABLE_ROWS
from runtime.backends.transformers.cuda.target import MAX_SEQUENCES, CudaTarget, bucket
from runtime.eagle3.model import Eagle3Model

PRIME_ROWS = 1024  # of the drafter's K/V computed at once where it has much to catch up
AHEAD_TOKENS = 64  # blocks are taken for so many tokens at once, so that tables seldom change


@dataclass(eq=False)
class _Sequence:
    """What the device knows of one sequence. Valid for as long as the table says the same."""

    table: Table
    row: int
    length: int
    fresh: int  # tokens behind the last committed rows that lie in the device's state, the pending one included
    primed: int  # the drafter has K/V of so many positions


class FusedDecoder:
    """Steps of a `CudaTarget`'s sequences, with a drafter or without. One thread at a time, the target's."""

    def __init__(self, target: CudaTarget, max_depth: int) -> None:
        self._target = target
        self._recent = max_depth + 1
        self._network: DraftNetwork | None = None
        device = target.device
        self._state = torch.zeros(TABLE_ROWS, drafting.RECENT + self._recent, dtype=torch.int32, device=device)
        self._table_rows = torch.zeros(MAX_SEQUENCES, dtype=torch.int32, device=device)
        self._result = torch.zeros(MAX_SEQUENCES * (max_depth + 2), dtype=torch.int32, device=device)
        self._host_result = torch.zeros(self._result.shape, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._sequences: dict[int, _Sequence] = {}
        self._seated: list[int] = []  # what _table_rows holds
        self._plans: dict[tuple[int, int], _Plan] = {}
        self._target_head = Head(target.lm_head, MAX_SEQUENCES * self._recent)
        self._buffers = Buffers(MAX_SEQUENCES * self._recent, target.network.geometry, target.embedding.dtype, device)

    @property
    def max_depth(self) -> int:
        return self._recent - 1

    def load_drafter(self, model: Eagle3Model) -> bool:
        """Draft with this network from the next step on. False, and no change, if the kernels cannot run it."""
        target = self._target
        if self._network is None:
            if model.config.hidden_size != target.info.hidden_size or not can_fuse(model):
                return False
            self._network = DraftNetwork(model, target.embedding.dtype, target.device)
            g = self._network.geometry
            self._draft_keys = target.pool.add_plane(g.kv_heads, g.head_dim)
            self._draft_values = target.pool.add_plane(g.kv_heads, g.head_dim)
            self._draft_buffers = Buffers(MAX_SEQUENCES * self._recent, g, target.embedding.dtype, target.device)
            self._draft_q = torch.empty(MAX_SEQUENCES, g.heads * g.head_dim, dtype=target.embedding.dtype, device=target.device)
            self._draft_head = Head(self._network.head, MAX_SEQUENCES, self._network.ids_of)
        elif not self._network.fits(model):
            return False
        else:
            self._network.load(model)
        for sequence in self._sequences.values():
            sequence.primed = 0  # what the other one left means nothing to this one
        return True

    def leave(self, cache: int) -> None:
        """Forget a sequence: its next step begins anew. Blocks taken ahead are freed. Also for one never seen."""
        if sequence := self._sequences.pop(cache, None):
            self._target.pool.blocks.trim(sequence.table)

    @torch.inference_mode()
    def step(self, caches: Sequence[int], histories: Sequence[Sequence[int]], depth: int) -> list[list[int]]:
        """One step of each sequence; its new tokens, at least one, the last of which is pending. -1: no logit was finite.

        histories[i] are all its tokens, the pending one last, which is the only one without K/V. At most MAX_SEQUENCES, and
        none may come closer than `depth` tokens to the model's last position. K/V of all new tokens but the last is committed.
        """
        pool = self._target.pool
        sequences = [self._enter(cache, history) for cache, history in zip(caches, histories, strict=True)]
        tables = [sequence.table for sequence in sequences]
        if any(len(table.blocks) * BLOCK_TOKENS < table.length + depth + 1 for table in tables):
            pool.reserve(tables, [depth + 1 + AHEAD_TOKENS] * len(tables))
        elif any(table.row is None or table.may_share or table.first_stale < len(table.blocks) for table in tables):
            pool.reserve(tables, [depth + 1] * len(tables))
        for sequence, history in zip(sequences, histories, strict=True):
            self._bring_up(sequence, history, depth)
        rows = [sequence.row for sequence in sequences]
        num = bucket(len(rows))
        if rows != self._seated[: len(rows)] or any(self._seated[len(rows) : num]) or len(self._seated) < num:
            self._seated = rows + [0] * (MAX_SEQUENCES - len(rows))
            self._table_rows.copy_(torch.tensor(self._seated, dtype=torch.int32), non_blocking=True)
        self._target.graphs.run(("step", num, depth), lambda: self._launch(num, depth))
        tokens = self._read(num, depth)[: len(rows)]
        for sequence, new in zip(sequences, tokens, strict=True):
            sequence.primed = sequence.length if depth else sequence.primed
            sequence.length += len(new)
            sequence.fresh = len(new)
            pool.advance(sequence.table, len(new), keep_tail=True)
        return tokens

    # --- between host and device ---

    def _enter(self, cache: int, history: Sequence[int]) -> _Sequence:
        table = self._target.pool[cache]
        assert len(history) == table.length + 1, "only the pending token may lack K/V"
        sequence = self._sequences.get(cache)
        if sequence is None or sequence.table is not table:
            sequence = self._sequences[cache] = _Sequence(table, row=-1, length=-1, fresh=0, primed=0)
        return sequence

    def _bring_up(self, sequence: _Sequence, history: Sequence[int], depth: int) -> None:
        """Write the device's state where it does not hold, and let the drafter catch up where it is far behind."""
        table = sequence.table
        assert table.row is not None
        is_known = sequence.row == table.row and sequence.length == table.length
        if is_known and (not depth or sequence.primed >= table.length - sequence.fresh):
            return
        if not is_known:  # what the drafter has of a row depends on the token behind it, which a truncation may have changed
            sequence.primed = min(sequence.primed, table.length - 1, max(sequence.length - 1, 0))
        sequence.row, sequence.length, sequence.fresh = table.row, table.length, 1
        window = NO_WINDOW if table.policy.window is None else table.policy.window
        state = torch.tensor([table.length, 1, table.policy.sink, window, history[-1]], dtype=torch.int32)
        self._state[table.row, : len(state)].copy_(state, non_blocking=True)
        if depth:
            for first in range(sequence.primed, table.length - 1, PRIME_ROWS):
                self._prime(table, history, first, min(first + PRIME_ROWS, table.length - 1))
            sequence.primed = table.length - 1

    def _prime(self, table: Table, history: Sequence[int], first: int, end: int) -> None:
        """The drafter's K/V of committed positions first .. end-1. Those that the cache dropped go to the dead block."""
        network, device = self._network, self._target.device
        assert network is not None
        positions = np.arange(first, end, dtype=np.int32)
        slots = np.array(table.blocks, dtype=np.int32)[positions // BLOCK_TOKENS] * BLOCK_TOKENS
        slots = np.where(slots > 0, slots + positions % BLOCK_TOKENS, 0).astype(np.int32)
        ids = np.array(history[first + 1 : end + 1], dtype=np.int32)
        packed = torch.from_numpy(np.stack([ids, positions, slots])).to(device)
        nobody = self._table_rows[:0]
        rows = Rows(*packed, self._target.pool.device_table, *[nobody] * 6, max_size=0)
        g = network.geometry
        h = torch.empty(end - first, g.hidden, dtype=network.fc.dtype, device=device)
        q = torch.empty(end - first, g.heads * g.head_dim, dtype=network.fc.dtype, device=device)
        self._catch_up(network, rows, h, q)

    def _read(self, num: int, depth: int) -> list[list[int]]:
        """Wait for the step and read what it emitted."""
        size = num * (depth + 2)
        self._host_result[:size].copy_(self._result[:size], non_blocking=True)
        if self._target.device.type == "cuda":
            torch.cuda.current_stream().synchronize()
        return [row[1 : 1 + row[0]] for row in self._host_result[:size].view(num, depth + 2).tolist()]

    # --- the launches of one step ---

    def _launch(self, num: int, depth: int) -> None:
        target, table = self._target, self._target.pool.device_table
        plan = self._plans.setdefault((num, depth), _Plan(num, depth, self._recent, table, self._table_rows[:num]))
        width = next_power_of_2(self._recent)
        drafting.plan_kernel[(num,)](
            self._table_rows, self._state, self._state.stride(0), table, table.stride(0), plan.verify.sinks, plan.verify.windows,
            plan.new.ids, plan.new.positions, plan.new.slots, plan.last_rows, plan.draft_positions, plan.draft_slots,
            plan.verify.ids, plan.verify.positions, plan.verify.slots, plan.verify.lengths, plan.live, plan.verify.sizes,
            NUM=num, DEPTH=depth, R=self._recent, RP=width, BLOCK=BLOCK_TOKENS, num_warps=1,
        )  # fmt: skip
        if depth:
            self._draft(plan, num, depth)
        target.run_layers(plan.verify, self._buffers)
        last = self._buffers.hidden[: num * (depth + 1), 3 * target.info.hidden_size :]
        self._target_head.best(last, plan.picked)
        drafting.accept_kernel[(num,)](
            self._table_rows, self._state, self._state.stride(0), plan.verify.ids, plan.picked, self._result, DEPTH=depth,
            RP=width, num_warps=1,
        )  # fmt: skip

    def _draft(self, plan: _Plan, num: int, depth: int) -> None:
        network, buffers = self._network, self._draft_buffers
        assert network is not None
        g, layer = network.geometry, network.layer
        num_new = num * self._recent
        self._catch_up(network, plan.new, buffers.x[:num_new], buffers.q[:num_new])
        h, q = buffers.aux[0][:num], self._draft_q[:num]
        torch.index_select(buffers.x, 0, plan.last_rows, out=h)
        torch.index_select(buffers.q, 0, plan.last_rows, out=q)
        ids = plan.verify.ids.view(num, depth + 1)
        for k in range(depth):
            rows = plan.draft(k, ids[:, k])
            if k:
                launch.qkv(
                    layer, g, rows, h, q, self._draft_keys, self._draft_values, (network.cos, network.sin),
                    self._target.embedding,
                )  # fmt: skip
            splits = launch.attend(layer, g, rows, buffers, self._draft_keys, self._draft_values, q)
            launch.project_attention(layer, g, buffers, splits, h, buffers.mid[:num])
            launch.mlp(layer, g, buffers.act, buffers.mid[:num], h)
            self._draft_head.best(h, ids[:, k + 1], network.norm, g.eps, fallback=0)

    def _catch_up(self, network: DraftNetwork, rows: Rows, h: torch.Tensor, q: torch.Tensor) -> None:
        """h of these rows from the states in their slots; their keys and values; their queries, of which few are used."""
        launch.linear(self._target.pool.states, network.fc, h, rows_of=rows.slots)
        launch.qkv(
            network.layer, network.geometry, rows, h, q, self._draft_keys, self._draft_values, (network.cos, network.sin),
            self._target.embedding,
        )  # fmt: skip


class _Plan:
    """Which rows a step of `num` sequences and a chain of `depth` has; `plan_kernel` fills it in."""

    def __init__(self, num: int, depth: int, recent: int, table: torch.Tensor, table_rows: torch.Tensor) -> None:
        def make(*shape: int) -> torch.Tensor:
            return torch.zeros(*shape, dtype=torch.int32, device=table.device)

        self.live, self.last_rows = make(num), make(num)  # 1, or 0 for nobody; the row of `new` to draft from
        self.draft_positions, self.draft_slots = make(max(depth, 1), num), make(max(depth, 1), num)
        self.picked = make(num * (depth + 1))
        self._order = torch.arange(num, dtype=torch.int32, device=table.device)
        lengths, sizes, sinks, windows = (make(num) for _ in range(4))
        by_sequence = {"table": table, "table_rows": table_rows, "lengths": lengths, "sinks": sinks, "windows": windows}
        rows = num * (depth + 1)
        starts = self._order * (depth + 1)
        self.verify = Rows(
            make(rows), make(rows), make(rows), starts=starts, sizes=sizes, max_size=depth + 1, **by_sequence
        )  # [num, depth + 1]: the pending token and the chain
        self.new = dataclasses.replace(self.verify, ids=make(num * recent), positions=make(num * recent), slots=make(num * recent))

    def draft(self, k: int, ids: torch.Tensor) -> Rows:
        """The rows of depth k, one a sequence: it sees what lies before its own position, and itself."""
        positions = self.draft_positions[k]
        return dataclasses.replace(
            self.verify, ids=ids, positions=positions, slots=self.draft_slots[k], starts=self._order, sizes=self.live,
            lengths=positions, max_size=1,
        )  # fmt: skip

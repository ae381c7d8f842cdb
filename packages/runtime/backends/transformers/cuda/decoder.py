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
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from weakref import WeakKeyDictionary

import numpy as np
import torch

from runtime.backends.base import Segment
from runtime.backends.transformers.cuda import drafting, launch
from runtime.backends.transformers.cuda.blocks import BLOCK_TOKENS, Table
from runtime.backends.transformers.cuda.draft_network import DraftNetwork, can_fuse
from runtime.backends.transformers.cuda.launch import NO_WINDOW, SEQUENCE_FIELDS, Buffers, Head, Rows, next_power_of_2
from runtime.backends.transformers.cuda.pool import TABLE_ROWS
from runtime.backends.transformers.cuda.target import MAX_SEQUENCES, CudaTarget, Graphs, bucket
from runtime.eagle3.model import Eagle3Model
from runtime.hidden_states import HiddenStates

WARM_UP_ROUNDS = 4  # the first of which captures
PRIME_ROWS = 1024  # of the drafter's K/V computed at once where it has much to catch up
AHEAD_TOKENS = 64  # blocks are taken for so many tokens at once, so that tables seldom change


@dataclass(eq=False)
class _Sequence:
    """What the device knows of one sequence. Valid for as long as the table says the same."""

    row: int = -1  # of the table
    length: int = -1
    fresh: int = 0  # tokens behind the last committed rows that lie in the device's state, the pending one included
    primed: int = 0  # the drafter has K/V of so many positions


@dataclass(frozen=True)
class _Flight:
    """A step that was launched and not collected yet."""

    tables: list[Table]
    sequences: list[_Sequence]
    num: int
    depth: int


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
        self._sequences: WeakKeyDictionary[Table, _Sequence] = WeakKeyDictionary()
        self._seats = [0] * MAX_SEQUENCES  # what _table_rows holds
        self._graphs = Graphs(device)
        self._arrival = torch.cuda.Event() if device.type == "cuda" else None  # type: ignore[no-untyped-call]  # of the result on the host
        self._flight: _Flight | None = None
        self._plans: dict[tuple[int, int], _Plan] = {}
        self._target_head = Head(target.lm_head, MAX_SEQUENCES * self._recent)
        self._buffers = Buffers(MAX_SEQUENCES * self._recent, target.network.geometry, target.embedding.dtype, device)

    @property
    def max_sequences(self) -> int:
        return MAX_SEQUENCES

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
        """Forget a sequence: its next step begins anew. Blocks taken ahead are freed. Also for one that was never here."""
        table = self._target.pool[cache]
        if self._sequences.pop(table, None):
            self._target.pool.blocks.trim(table)

    def can_continue(self, cache: int, depth: int) -> bool:
        """Whether the device has all that another step of this sequence needs, its pending token too."""
        table = self._target.pool[cache]
        sequence = self._sequences.get(table)
        return sequence is not None and self._is_ready(table, sequence, depth)

    @torch.inference_mode()
    def launch(self, caches: Sequence[int], histories: Sequence[Sequence[int]], depth: int) -> bool:
        """Begin a step of these sequences; `collect` ends it, and comes before the next. False: some had to be brought up first.

        histories[i] are all its tokens, the pending one last, which is the only one without K/V; nobody looks at those of a
        sequence that `can_continue`. At most `max_sequences`, and none may come closer than `depth` tokens to the model's last
        position.
        """
        pool = self._target.pool
        tables = [pool[cache] for cache in caches]
        if any(len(table.blocks) * BLOCK_TOKENS < table.length + depth + 1 for table in tables):
            pool.reserve(tables, [depth + 1 + AHEAD_TOKENS] * len(tables))
        elif any(table.row is None or table.may_share or table.first_stale < len(table.blocks) for table in tables):
            pool.reserve(tables, [depth + 1] * len(tables))
        sequences = [self._sequences.setdefault(table, _Sequence()) for table in tables]
        behind = [
            (table, sequence, history)
            for table, sequence, history in zip(tables, sequences, histories, strict=True)
            if not self._is_ready(table, sequence, depth)
        ]
        if behind:
            self._bring_up(behind, depth)
        num = bucket(len(tables))
        self._start([sequence.row for sequence in sequences], num, depth)
        self._flight = _Flight(tables, sequences, num, depth)
        return not behind

    def collect(self, still_wanted: Sequence[bool]) -> tuple[list[list[int]], HiddenStates]:
        """Wait for the step that was launched: new tokens of each sequence, at least one, the last of which is pending.

        K/V of all new tokens but the last is committed then. -1 stands where no logit was finite. The states are those of the
        rows that were verified, aux [n, depth + 1, 3H] and last [n, depth + 1, H]. What is no longer wanted changes nothing.
        """
        assert self._flight is not None
        flight, self._flight = self._flight, None
        num, depth = flight.num, flight.depth
        hidden = self._buffers.hidden[: num * (depth + 1)].clone().view(num, depth + 1, -1)
        tokens = self._wait(len(flight.tables), num, depth)
        for table, sequence, new, is_wanted in zip(flight.tables, flight.sequences, tokens, still_wanted, strict=True):
            if not is_wanted:
                sequence.length = -1  # the device went on alone
                continue
            sequence.primed = sequence.length if depth else sequence.primed
            sequence.length += len(new)
            sequence.fresh = len(new)
            self._target.pool.advance(table, len(new), keep_tail=True)
        split = 3 * self._target.info.hidden_size
        return tokens, HiddenStates(hidden[:, :, :split], hidden[:, :, split:])

    def warm_up(self, num_sequences: int) -> dict[tuple[int, int], float]:
        """Capture all steps of up to so many sequences, that none has to wait for it; seconds of each by number and depth.

        Forwards of prompts are compiled too.
        """
        self._warm_up_prompts()
        seconds = {}
        for num in sorted({bucket(n) for n in range(1, min(num_sequences, MAX_SEQUENCES) + 1)}):
            for depth in range(1 if self._network is None else self.max_depth + 1):
                taken = []
                for _ in range(WARM_UP_ROUNDS):
                    started = time.perf_counter()
                    self._start([], num, depth)
                    self._wait(0, num, depth)
                    taken.append(time.perf_counter() - started)
                seconds[num, depth] = min(taken)
        return seconds

    @torch.inference_mode()
    def _warm_up_prompts(self) -> None:
        target = self._target
        for size in (40, 100, 300):
            size = min(size, target.info.max_positions - self._recent - 1)
            history = [0] * (size + 1)
            cache = target.new_cache()
            target.forward([Segment(cache, history[:size])])
            target.commit(cache, range(size))
            if self._network is not None:
                self.launch([cache], [history], 1)
                self.collect([False])
            target.forward([Segment(cache, [0])])
            target.drop(cache)

    # --- between host and device ---

    def _is_ready(self, table: Table, sequence: _Sequence, depth: int) -> bool:
        """Whether the device's state holds, and the drafter is no further behind than one step."""
        holds = sequence.row == table.row and sequence.length == table.length
        return holds and (not depth or sequence.primed >= table.length - sequence.fresh)

    def _bring_up(self, behind: Sequence[tuple[Table, _Sequence, Sequence[int]]], depth: int) -> None:
        """Write the device's state where it does not hold, and let the drafter catch up where it is far behind."""
        to_prime: list[np.ndarray] = []  # ids, positions and slots of rows
        for table, sequence, history in behind:
            assert table.row is not None
            assert len(history) == table.length + 1, "only the pending token may lack K/V"
            if sequence.row != table.row or sequence.length != table.length:
                # What the drafter has of a row depends on the token behind it, which a truncation may have changed.
                sequence.primed = min(sequence.primed, max(table.length - 1, 0), max(sequence.length - 1, 0))
            sequence.row, sequence.length, sequence.fresh = table.row, table.length, 1
            window = NO_WINDOW if table.policy.window is None else table.policy.window
            state = torch.tensor([table.length, 1, table.policy.sink, window, history[-1]], dtype=torch.int32)
            self._state[table.row, : len(state)].copy_(state, non_blocking=True)
            if depth:
                to_prime.append(_rows_of(table, history, sequence.primed, table.length - 1))
                sequence.primed = table.length - 1
        if to_prime:
            rows = np.concatenate(to_prime, axis=1)
            for first in range(0, rows.shape[1], PRIME_ROWS):
                self._prime(rows[:, first : first + PRIME_ROWS])

    def _prime(self, packed: np.ndarray) -> None:
        """The drafter's K/V of committed rows, ids, positions and slots int32 [3, n]."""
        network, device = self._network, self._target.device
        assert network is not None
        ids, positions, slots = torch.from_numpy(np.ascontiguousarray(packed)).to(device)
        nobody = dict.fromkeys(SEQUENCE_FIELDS, self._table_rows[:0])
        rows = Rows(ids, positions, slots, self._target.pool.device_table, **nobody, max_size=0)
        buffers = Buffers(packed.shape[1], network.geometry, network.fc.dtype, device)
        self._catch_up(network, rows, buffers.x, buffers)

    def _start(self, rows: list[int], num: int, depth: int) -> None:
        """A step of these rows of the table, and of nobody in the places up to `num`; its result comes to the host."""
        seats = rows + [0] * (num - len(rows))
        if seats != self._seats[:num]:
            self._seats = seats + [0] * (MAX_SEQUENCES - num)
            self._table_rows.copy_(torch.tensor(self._seats, dtype=torch.int32), non_blocking=True)
        self._graphs.run((num, depth), partial(self._launch, num, depth))
        size = num * (depth + 2)
        self._host_result[:size].copy_(self._result[:size], non_blocking=True)
        if self._arrival is not None:
            self._arrival.record()

    def _wait(self, num_rows: int, num: int, depth: int) -> list[list[int]]:
        """What the step emitted, row by row."""
        if self._arrival is not None:
            self._arrival.synchronize()
        size = num * (depth + 2)
        return [row[1 : 1 + row[0]] for row in self._host_result[:size].view(num, depth + 2)[:num_rows].tolist()]

    # --- the launches of one step ---

    def _launch(self, num: int, depth: int) -> None:
        target, table = self._target, self._target.pool.device_table
        plan = self._plans.setdefault((num, depth), _Plan(num, depth, self._recent, table, self._table_rows[:num]))
        width = next_power_of_2(self._recent)
        drafting.plan_kernel[(num,)](
            self._table_rows, self._state, self._state.stride(0), table, table.stride(0), plan.verify.sinks, plan.verify.windows,
            plan.new.ids, plan.new.positions, plan.new.slots, plan.last_rows, plan.draft_positions, plan.draft_slots,
            plan.verify.ids, plan.verify.positions, plan.verify.slots, plan.verify.lengths, plan.live, plan.verify.sizes,
            num, DEPTH=depth, R=self._recent, RP=width, BLOCK=BLOCK_TOKENS, num_warps=1,
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
        self._catch_up(network, plan.new, buffers.x[:num_new], buffers)
        h, q = buffers.aux[0][:num], self._draft_q[:num]
        torch.index_select(buffers.x, 0, plan.last_rows, out=h)
        torch.index_select(buffers.q, 0, plan.last_rows, out=q)
        ids = plan.verify.ids.view(num, depth + 1)
        for k in range(depth):
            rows = plan.draft(k, ids[:, k])
            if k:
                launch.qkv(
                    layer, g, rows, buffers, q, self._draft_keys, self._draft_values, (network.cos, network.sin),
                    self._target.embedding,
                )  # fmt: skip
            launch.attend(layer, g, rows, buffers, self._draft_keys, self._draft_values, q)
            launch.linear(
                buffers.o[:num], layer.out, buffers.mid[:num], residual=h, gain=layer.mlp_norm, buffers=buffers
            )  # fmt: skip
            launch.mlp(layer, g, buffers, h, layer.input_norm)
            self._draft_head.best(h, ids[:, k + 1], network.norm, g.eps, fallback=0)

    def _catch_up(self, network: DraftNetwork, rows: Rows, h: torch.Tensor, buffers: Buffers) -> None:
        """h of these rows from the states in their slots; their keys and values; their queries, of which few are used."""
        layer, n = network.layer, rows.num_rows
        launch.linear(
            self._target.pool.states, network.fc, h, rows_of=rows.slots, gain=layer.input_norm, buffers=buffers
        )  # fmt: skip
        launch.qkv(
            layer, network.geometry, rows, buffers, buffers.q[:n], self._draft_keys, self._draft_values,
            (network.cos, network.sin), self._target.embedding,
        )  # fmt: skip


def _rows_of(table: Table, history: Sequence[int], first: int, end: int) -> np.ndarray:
    """What the drafter needs of committed positions first .. end-1: the token behind each, the position and the slot, int32
    [3, end - first]. Those that the cache dropped go to the dead block."""
    positions = np.arange(first, end, dtype=np.int32)
    slots = np.array(table.blocks, dtype=np.int32)[positions // BLOCK_TOKENS] * BLOCK_TOKENS
    slots = np.where(slots > 0, slots + positions % BLOCK_TOKENS, 0).astype(np.int32)
    return np.stack([np.array(history[first + 1 : end + 1], dtype=np.int32), positions, slots])


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
        self.new = dataclasses.replace(
            self.verify, ids=make(num * recent), positions=make(num * recent), slots=make(num * recent)
        )

    def draft(self, k: int, ids: torch.Tensor) -> Rows:
        """The rows of depth k, one a sequence: it sees what lies before its own position, and itself."""
        positions = self.draft_positions[k]
        return dataclasses.replace(
            self.verify, ids=ids, positions=positions, slots=self.draft_slots[k], starts=self._order, sizes=self.live,
            lengths=positions, max_size=1,
        )  # fmt: skip

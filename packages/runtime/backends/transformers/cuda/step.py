"""The launches of one step of S sequences and a chain of k, all on the device, and the buffers that they share.

    catch up  the drafter's K/V of the rows that the last step accepted, whose states the pool has
    draft     a chain: each token goes from the draft head straight into the next row of the batch
    verify    one forward of the target over the pending token and the chain
    accept    the longest prefix that the target picks itself, and one token more; lengths and pending tokens move on

K/V of accepted tokens lies where it belongs already, since a chain is written behind the committed tokens in order. Depth 0 is
plain decoding. Greedy steps look at the best token of each row only; those with a sampled sequence need all logits.
"""

from __future__ import annotations

import dataclasses
from enum import Flag, auto

import torch

from runtime.backends.transformers.cuda import drafting, launch, sampling
from runtime.backends.transformers.cuda.blocks import BLOCK_TOKENS
from runtime.backends.transformers.cuda.draft_network import DraftNetwork, can_fuse
from runtime.backends.transformers.cuda.launch import SEQUENCE_FIELDS, Buffers, Head, Rows, next_power_of_2
from runtime.backends.transformers.cuda.target import CudaTarget
from runtime.backends.transformers.cuda.truncation import keep_best
from runtime.eagle3.model import Eagle3Model

MAX_DRAFTING = 128  # sequences of a step with drafts
PRIME_ROWS = 1024  # of the drafter's K/V computed at once where it has much to catch up
MAX_JOINING = 64  # sequences that the device hears of at once


class Picks(Flag):
    """How the tokens of a step are picked: all that any of its sequences needs."""

    BEST = 0
    SAMPLED = auto()
    TRUNCATED = auto()  # by top_k, top_p or min_p
    CERTAIN = auto()  # sampled behind drafts that are certain


class Step:
    def __init__(self, target: CudaTarget, max_depth: int, max_sequences: int) -> None:
        self._target = target
        self.recent = max_depth + 1
        self.max_rows = max(max_sequences, min(max_sequences, MAX_DRAFTING) * self.recent)
        self.network: DraftNetwork | None = None
        device, num_seats = target.device, len(target.pool.device_table)
        self.state = torch.zeros(num_seats, drafting.RECENT + self.recent, dtype=torch.int32, device=device)
        self.seats = sampling.Seats(num_seats, device)
        self.table_rows = torch.zeros(max_sequences, dtype=torch.int32, device=device)
        self.result = torch.zeros(max(2 * max_sequences, self.max_rows + MAX_DRAFTING), dtype=torch.int32, device=device)
        self._joining = torch.zeros(MAX_JOINING * (1 + drafting.KNOWN) + 3 * PRIME_ROWS, dtype=torch.int32, device=device)
        self.buffers = Buffers(self.max_rows, target.network.geometry, target.embedding.dtype, device)
        self._head = Head(target.lm_head, self.max_rows)
        self._plans: dict[tuple[int, int], _Plan] = {}

    def load(self, model: Eagle3Model) -> bool:
        """Draft with this network from the next step on. False, and no change, if the kernels cannot run it."""
        target = self._target
        if self.network is not None:
            if not self.network.fits(model):
                return False
            self.network.load(model)
            return True
        if model.config.hidden_size != target.info.hidden_size or not can_fuse(model):
            return False
        dtype, device = target.embedding.dtype, target.device
        self.network = DraftNetwork(model, dtype, device)
        g, num = self.network.geometry, min(len(self.table_rows), MAX_DRAFTING)
        self._draft_keys = target.pool.add_plane(g.kv_heads, g.head_dim)
        self._draft_values = target.pool.add_plane(g.kv_heads, g.head_dim)
        self._draft_buffers = Buffers(num * self.recent, g, dtype, device)
        self._prime_buffers = Buffers(PRIME_ROWS, g, dtype, device)
        self._draft_q = torch.empty(num, g.heads * g.head_dim, dtype=dtype, device=device)
        self._draft_head = Head(self.network.head, num, self.network.ids_of)
        return True

    def run(self, num: int, depth: int, picks: Picks) -> None:
        """For whoever sits in the first `num` of `table_rows`; what it emits comes to lie in `result`, [num, depth + 2]."""
        target, table = self._target, self._target.pool.device_table
        if (plan := self._plans.get((num, depth))) is None:  # made by the first run: in a graph its zeros would be set each time
            plan = self._plans[num, depth] = _Plan(num, depth, self.recent, table, self.table_rows[:num])
        width = next_power_of_2(self.recent)
        drafting.plan_kernel[(num,)](
            self.table_rows, self.state, self.state.stride(0), table, table.stride(0), plan.verify.sinks, plan.verify.windows,
            plan.new.ids, plan.new.positions, plan.new.slots, plan.last_rows, plan.draft_positions, plan.draft_slots,
            plan.verify.ids, plan.verify.positions, plan.verify.slots, plan.verify.lengths, plan.live, plan.verify.sizes,
            num, DEPTH=depth, R=self.recent, RP=width, BLOCK=BLOCK_TOKENS, num_warps=1,
        )  # fmt: skip
        draws = _Draws(self, num, depth) if picks else None
        drawn = self._draft(plan, num, depth, draws) if depth else []
        target.run_layers(plan.verify, self.buffers)
        last = self.buffers.hidden[: num * (depth + 1), 3 * target.info.hidden_size :]
        if draws is None:
            self._head.best(last, plan.picked)
        else:
            self._judge(plan, draws, drawn, last, picks)
        drafting.accept_kernel[(num,)](
            self.table_rows, self.state, self.state.stride(0), plan.verify.ids, plan.picked, self.result, DEPTH=depth,
            RP=width, num_warps=1,
        )  # fmt: skip

    def _draft(self, plan: _Plan, num: int, depth: int, draws: _Draws | None) -> list[sampling.Drawn]:
        """The chain, into the rows to verify; what its tokens were drawn from, where any were."""
        network, buffers = self.network, self._draft_buffers
        assert network is not None
        g, layer = network.geometry, network.layer
        num_new = num * self.recent
        self.catch_up(plan.new, buffers.x[:num_new], buffers)
        h, q = buffers.aux[0][:num], self._draft_q[:num]
        torch.index_select(buffers.x, 0, plan.last_rows, out=h)
        torch.index_select(buffers.q, 0, plan.last_rows, out=q)
        ids = plan.verify.ids.view(num, depth + 1)
        drawn = []
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
            if draws is None:
                self._draft_head.best(h, ids[:, k + 1], network.norm, g.eps, fallback=0)
            else:
                logits = torch.empty(num, len(network.head), dtype=torch.float32, device=h.device)
                self._draft_head.logits(h, logits, network.norm, g.eps)
                drawn.append(sampling.draw(logits, draws.settings, draws.uniforms[:, k, 0]))
                ids[:, k + 1].copy_(network.ids_of[drawn[-1].index])
        return drawn

    def _judge(self, plan: _Plan, draws: _Draws, drawn: list[sampling.Drawn], last: torch.Tensor, picks: Picks) -> None:
        num, depth = len(draws.uniforms), draws.uniforms.shape[1] - 1
        logits = torch.empty(num * (depth + 1), self._target.info.vocab_size, dtype=torch.float32, device=last.device)
        self._head.logits(last, logits)
        drafted = plan.verify.ids.view(num, depth + 1)[:, 1:].long()
        ids_of = None if self.network is None else self.network.ids_of
        truncate = keep_best if Picks.TRUNCATED in picks else None
        picked = sampling.judge(
            logits.view(num, depth + 1, -1), draws.settings, draws.uniforms[:, :, 1], drafted, drawn, ids_of, truncate,
            has_certain=Picks.CERTAIN in picks,
        )  # fmt: skip
        plan.picked.copy_(picked.flatten())

    def catch_up(self, rows: Rows, h: torch.Tensor, buffers: Buffers) -> None:
        """h of these rows from the states in their slots; their keys and values; their queries, of which few are used."""
        network = self.network
        assert network is not None
        layer, n = network.layer, rows.num_rows
        launch.linear(
            self._target.pool.states, network.fc, h, rows_of=rows.slots, gain=layer.input_norm, buffers=buffers
        )  # fmt: skip
        launch.qkv(
            layer, network.geometry, rows, buffers, buffers.q[:n], self._draft_keys, self._draft_values,
            (network.cos, network.sin), self._target.embedding,
        )  # fmt: skip

    def joining(self, num_rows: int) -> torch.Tensor:
        """Where what `join` looks at lies, int32 in one piece, since each copy to the device takes its time: `MAX_JOINING` rows
        of the table (0: nobody), as many states, and ids, positions and slots of so many rows."""
        return self._joining[: MAX_JOINING * (1 + drafting.KNOWN) + 3 * num_rows]

    def join(self, num_rows: int) -> None:
        """Sequences whose state the device does not have; and the drafter's K/V of committed rows, at most `PRIME_ROWS`, of which
        those in slot 0 are nobody's."""
        parts = [MAX_JOINING, MAX_JOINING * drafting.KNOWN, 3 * num_rows]
        seats, states, to_prime = torch.split(self.joining(num_rows), parts)
        self.state[:, : drafting.KNOWN].index_copy_(0, seats.long(), states.view(MAX_JOINING, drafting.KNOWN))
        if not num_rows:
            return
        ids, positions, slots = to_prime.view(3, num_rows)
        nobody = dict.fromkeys(SEQUENCE_FIELDS, self.table_rows[:0])
        rows = Rows(ids, positions, slots, self._target.pool.device_table, **nobody, max_size=0)
        self.catch_up(rows, self._prime_buffers.x[:num_rows], self._prime_buffers)


class _Draws:
    """Parameters and numbers of a step's sequences."""

    def __init__(self, step: Step, num: int, depth: int) -> None:
        seats = step.table_rows[:num].long()
        self.settings = step.seats.settings(seats)
        self.uniforms = step.seats.uniforms(seats, step.state[seats, drafting.PLACE].long(), depth)


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

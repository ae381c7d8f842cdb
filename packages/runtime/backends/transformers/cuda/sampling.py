"""Sampling inside a step on the device: each sequence by its own parameters and its own random numbers, a greedy one beside it.

    drawn     numbers of places p .. p+63 | p+64 .. p+127      a ring of each sequence, filled before the device comes there
    draft     a chain's tokens, drawn from q; or the likeliest ones, where they are to be certain
    judge     what the target makes of them: exactly the rules of `speculation.accept`, for all sequences at once

Torch operations without a look by the host, so they stand in a CUDA graph and run on a CPU as well; only `truncate`, which
excludes what top_k and top_p exclude, is a kernel's. Symbols: S sequences, D depth, V vocabulary, Vd the draft network's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from runtime.backends.transformers.cuda.sending import Sender
from runtime.speculation.accept import BELOW_ONE
from runtime.speculation.sampling import LOWEST_TEMPERATURE, Sampled, Uniforms, pick
from runtime.types import SamplingParams

BLOCK_PLACES = Uniforms.BLOCK  # that are drawn and brought to the device at once
RING_PLACES = 2 * BLOCK_PLACES  # a block is overwritten when all of the next one's numbers are still ahead
TruncateRows = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], None]  # rows, limits, normalizers


def truncates(params: SamplingParams) -> bool:
    return params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0


@dataclass(frozen=True)
class Settings:
    """Of S sequences, float64 [S] each. Of a greedy one: temperature 0."""

    temperature: torch.Tensor
    draft_temperature: torch.Tensor  # 0: its drafts are certain
    top_k: torch.Tensor  # infinite: off
    log_min_p: torch.Tensor  # -inf: off
    top_p: torch.Tensor  # infinite: off

    @property
    def is_greedy(self) -> torch.Tensor:
        return self.temperature <= 0.0


class Seats:
    """Parameters and numbers of whoever sits in a row of the block table: greedy, unless said otherwise. Row 0 is nobody's."""

    def __init__(self, num_rows: int, device: torch.device) -> None:
        self._params = torch.tensor([_params_of(None)] * num_rows, dtype=torch.float64, device=device)
        self._uniforms = torch.zeros(num_rows, RING_PLACES, 2, dtype=torch.float64, device=device)
        self._sampling: set[int] = set()  # rows that are not greedy
        self._sender = Sender(device)

    def take(self, rows: Sequence[int], sampled: Sequence[Sampled | None]) -> None:
        """Whoever sits there from now on."""
        changed = {row: one for row, one in zip(rows, sampled, strict=True) if one is not None or row in self._sampling}
        if not changed:
            return
        self._sampling -= changed.keys()
        self._sampling |= {row for row, one in changed.items() if one is not None}
        values = np.array([_params_of(one) for one in changed.values()], dtype=np.float64)
        self._params[self._index(list(changed))] = self._sender.send(values)

    def fill(self, rows: Sequence[int], blocks: Sequence[int], sampled: Sequence[Sampled]) -> None:
        """Numbers of places 64 * block and so on, for each of these rows."""
        numbers = torch.stack([one.uniforms.at(b * BLOCK_PLACES, BLOCK_PLACES) for b, one in zip(blocks, sampled, strict=True)])
        halves = self._uniforms.view(len(self._uniforms), 2, BLOCK_PLACES, 2)
        halves[self._index(rows), self._index([block % 2 for block in blocks])] = self._sender.send(numbers.numpy())

    def settings(self, rows: torch.Tensor) -> Settings:
        """Of these rows, int64 [S]."""
        return Settings(*self._params[rows].unbind(1))

    def uniforms(self, rows: torch.Tensor, places: torch.Tensor, depth: int) -> torch.Tensor:
        """Numbers of places[s] .. places[s] + depth: float64 [S, depth + 1, 2], to draft with and to judge with."""
        at = (places[:, None] + torch.arange(depth + 1, device=places.device)) % RING_PLACES
        return self._uniforms[rows[:, None], at]

    def _index(self, values: Sequence[int]) -> torch.Tensor:
        return self._sender.send(np.array(values, dtype=np.int64))


def _params_of(sampled: Sampled | None) -> tuple[float, ...]:
    """As `Settings` has them."""
    if sampled is None:
        return (0.0, 0.0, math.inf, -math.inf, math.inf)
    params = sampled.params
    temperature = max(params.temperature, LOWEST_TEMPERATURE)
    return (
        temperature,
        temperature if params.seed is None else 0.0,
        params.top_k if params.top_k else math.inf,
        math.log(params.min_p) if params.min_p > 0.0 else -math.inf,
        params.top_p if params.top_p < 1.0 else math.inf,
    )


@dataclass(frozen=True)
class Drawn:
    """One level of a chain: where in the draft vocabulary its tokens are, int64 [S], and what they were drawn from [S, Vd]."""

    index: torch.Tensor
    q: torch.Tensor


def draw(logits: torch.Tensor, settings: Settings, uniforms: torch.Tensor) -> Drawn:
    """A token behind each sequence, from draft logits float32 [S, Vd] and numbers float64 [S]; the likeliest where it is to be
    certain. What a broken network says of a row is as good as any other guess: all tokens alike."""
    is_certain = settings.draft_temperature <= 0.0
    q = (logits / _divisor(settings.draft_temperature)).softmax(dim=-1)
    is_usable = torch.isfinite(q.sum(dim=-1, keepdim=True))
    q = torch.where(is_usable, q, 1.0 / q.shape[-1])
    return Drawn(torch.where(is_certain, logits.argmax(dim=-1), pick(q, uniforms)), q)


def judge(
    logits: torch.Tensor,  # float32 [S, D + 1, V] of the target, ours to change
    settings: Settings,
    uniforms: torch.Tensor,  # float64 [S, D + 1]
    drafted: torch.Tensor,  # int64 [S, D]: target ids
    drawn: Sequence[Drawn],  # of each level
    ids_of: torch.Tensor | None,  # int64 [Vd]: target ids of the draft vocabulary
    truncate: TruncateRows | None,  # None: nobody has top_k, top_p or min_p
    has_certain: bool = True,  # False: of those that sample, nobody's drafts are certain
) -> torch.Tensor:
    """What comes at each place, int64 [S, D + 1], -1 where no logit is finite. It counts up to the first place that differs from
    the chain, that one included; what stands behind it means nothing."""
    best, best_ids = logits.max(dim=-1)  # [S, D + 1], lowest id on ties
    probs, picked = _probs(logits, best, settings, truncate), best_ids
    if has_certain or not drawn:  # one draw for each place, which chains that were drawn do without
        picked = pick(probs.flatten(0, 1), uniforms.flatten()).view(best_ids.shape)
    if drawn:
        assert ids_of is not None
        is_certain = settings.draft_temperature <= 0.0
        picked = torch.where(is_certain[:, None], picked, _reject(probs, picked, uniforms, drafted, drawn, ids_of))
    picked = torch.where(settings.is_greedy[:, None], best_ids, picked)
    return torch.where(torch.isfinite(best), picked, -1)


def _divisor(temperature: torch.Tensor) -> torch.Tensor:
    """float32 [S, 1], 1 where it is 0."""
    return torch.where(temperature > 0.0, temperature, 1.0).float()[:, None]


def _probs(logits: torch.Tensor, best: torch.Tensor, settings: Settings, truncate: TruncateRows | None) -> torch.Tensor:
    """What to sample from, float32 [S, D + 1, V]."""
    rows = logits.sub_(best[..., None]).div_(_divisor(settings.temperature)[:, None]).flatten(0, 1)
    per_row = logits.shape[1]
    if truncate is not None:
        truncate(rows, settings.top_k.repeat_interleave(per_row, output_size=len(rows)), None)
        log_min_p = settings.log_min_p.float().repeat_interleave(per_row, output_size=len(rows))
        rows.masked_fill_(rows < log_min_p[:, None], -math.inf)
        truncate(rows, settings.top_p.repeat_interleave(per_row, output_size=len(rows)), rows.logsumexp(dim=-1))
    return rows.softmax(dim=-1).view(logits.shape)


def _reject(
    probs: torch.Tensor,
    picked: torch.Tensor,
    uniforms: torch.Tensor,
    drafted: torch.Tensor,
    drawn: Sequence[Drawn],
    ids_of: torch.Tensor,
) -> torch.Tensor:
    """Of chains that were sampled, [S, D + 1]: the tokens that are accepted, and behind them one from what p leaves over q.

    accept with probability min(1, p / q), else p <- norm(max(p - q, 0)); a number that failed to accept is, scaled to the part
    of [0, 1) where it fell, a fresh number
    """
    num, depth = drafted.shape
    rows = torch.arange(num, device=probs.device)
    total = probs.sum(dim=-1, dtype=torch.float64)  # [S, D + 1]
    q = torch.stack([level.q for level in drawn], dim=1)  # [S, D, Vd]
    index = torch.stack([level.index for level in drawn], dim=1)  # [S, D]
    q_total = q.sum(dim=-1, dtype=torch.float64)
    p_token = probs[:, :depth].gather(-1, drafted[..., None])[..., 0].double() / total[:, :depth]
    q_token = q.gather(-1, index[..., None])[..., 0].double() / q_total
    chance = (p_token / q_token).clamp(max=1.0)  # [S, D]
    num_accepted = (uniforms[:, :depth] < chance).long().cumprod(dim=1).sum(dim=1)  # [S]
    is_all = num_accepted == depth
    level = num_accepted.clamp(max=depth - 1)  # that was rejected
    p = probs[rows, num_accepted].double()  # [S, V]
    weights = q[rows, level].double() / q_total[rows, level][:, None]
    left = (p / total[rows, num_accepted][:, None]).index_add_(1, ids_of, weights, alpha=-1.0).clamp_(min=0.0)
    # A rejection means p(token) < q(token), so some mass is left; only rounding, where p == q, can hide it. Then p is the answer.
    left = torch.where((is_all | ~(left.sum(dim=-1) > 0.0))[:, None], p, left)
    # What was rejected has no mass left; in that one case it must not have any either, since the token would count as accepted.
    refused = drafted[rows, level][:, None]
    left.scatter_(1, refused, torch.where(is_all[:, None], left.gather(1, refused), 0.0))
    number, missed = uniforms[rows, num_accepted], chance[rows, level]
    number = torch.where(is_all, number, ((number - missed) / (1.0 - missed)).clamp(max=BELOW_ONE))
    place = torch.arange(depth + 1, device=probs.device)
    corrected = torch.where(place == num_accepted[:, None], pick(left, number)[:, None], picked)
    chain = torch.cat([drafted, drafted[:, :1]], dim=1)  # as long as a row of places
    return torch.where(place < num_accepted[:, None], chain, corrected)

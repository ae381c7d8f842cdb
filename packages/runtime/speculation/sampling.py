"""From raw logits to the distribution that a request asked for, at every node of a draft, and the numbers that decide.

Pure mathematics on torch tensors, on any device; no model, no engine. The steps, in this order, each skipped when its
setting is off:

1. repetition penalty, over prompt + generated tokens: l / r where l > 0, else l * r
2. presence and frequency penalty, over generated tokens only: l - presence * [count > 0] - frequency * count
3. logit bias, and the grammar: what may not come next is excluded
4. temperature (0 ends here: the answer is the argmax, lowest id on ties)
5. top_k: the k best
6. min_p: those at least min_p times as likely as the best
7. top_p: the smallest set of best tokens whose mass reaches top_p

Steps 5 and 7 keep exactly as many tokens as they say: where the last place is tied, the lowest ids get it, as in greedy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from runtime.errors import ModelError
from runtime.speculation.grammar import GrammarState
from runtime.types import SamplingParams, TokenLogprob

LOWEST_TEMPERATURE = 1e-30  # below it a division would overflow float32; already far beyond greedy
FOLD = 0x9E3779B9  # odd, so that no upper bit of a seed is lost
NUCLEUS_PROBE = 1024  # top_p looks at this many best tokens before it sorts a whole vocabulary


@dataclass(frozen=True)
class TokenCounts:
    """What the penalties look at. Without a row axis it holds for every row of the logits."""

    seen: torch.Tensor  # bool [V] or [R, V]: in the prompt or generated
    generated: torch.Tensor  # float32 [V] or [R, V]: how often generated

    @staticmethod
    def of_prompt(token_ids: Sequence[int], vocab_size: int, device: torch.device | str) -> TokenCounts:
        seen = torch.zeros(vocab_size, dtype=torch.bool)
        seen[torch.tensor(token_ids, dtype=torch.int64)] = True
        return TokenCounts(seen.to(device), torch.zeros(vocab_size, device=device))

    def add(self, token_id: int) -> None:
        """Count one generated token, in every row."""
        self.seen[..., token_id] = True
        self.generated[..., token_id] += 1

    def along(self, paths: Sequence[Sequence[int]]) -> TokenCounts:
        """A copy with a row for each path, whose tokens it has counted on top. Nothing here changes."""
        rows = TokenCounts(self.seen.repeat(len(paths), 1), self.generated.repeat(len(paths), 1))
        for row, path in enumerate(paths):
            for token_id in path:
                TokenCounts(rows.seen[row], rows.generated[row]).add(token_id)
        return rows


def new_generator(seed: int | None) -> torch.Generator:
    """One request's own stream of random numbers, on the CPU wherever the model runs. None: a random seed."""
    generator = torch.Generator()
    if seed is None:
        generator.seed()
    else:  # the CPU generator looks at 32 bits only: fold the upper ones in
        generator.manual_seed((seed ^ (seed >> 32) * FOLD) & 0xFFFFFFFF)
    return generator


class Uniforms:
    """One request's random numbers: two in [0, 1) for each place of its output, one to draft a token and one to judge it.

    They depend on the seed and the place alone. A place that is drafted for in several steps sees the same numbers again,
    which is exact: whether the output reaches it never depends on what was drafted there before.
    """

    BLOCK = 64  # places drawn at a time: a constant, so that the stream is always cut alike

    def __init__(self, seed: int | None) -> None:
        self._generator = new_generator(seed)
        self._drawn = torch.empty(0, 2, dtype=torch.float64)

    def at(self, place: int, num_places: int) -> torch.Tensor:
        """Numbers of places `place` .. place + num_places - 1: float64 [num_places, 2], to draft with and to judge with."""
        while len(self._drawn) < place + num_places:
            more = torch.rand(self.BLOCK, 2, generator=self._generator, dtype=torch.float64)
            self._drawn = torch.cat([self._drawn, more])
        return self._drawn[place : place + num_places]


@dataclass(frozen=True)
class Sampled:
    """A sampled request where it stands: what comes at `place` of its output is next."""

    params: SamplingParams
    uniforms: Uniforms
    place: int


def process_logits(
    logits: torch.Tensor,
    params: SamplingParams,
    counts: TokenCounts | None = None,
    allowed: Sequence[torch.Tensor | None] | None = None,
) -> torch.Tensor:
    """Apply `params` to raw logits [V] or [R, V], float32; a new tensor, -inf where a token is excluded.

    At temperature > 0 the result is shifted so that each row's best is 0. `counts` may be None when no penalty is set.
    `allowed`: of each row bool [V], what the grammar lets through; None: everything.
    ModelError if a row holds NaN or has no finite best.
    """
    rows = logits.reshape(-1, logits.shape[-1]).to(torch.float32, copy=True)  # [R, V], ours from here on
    if has_penalties(params):
        assert counts is not None, "penalties need the token counts"
        _penalize(rows, params, counts)
    if params.logit_bias:
        rows[:, list(params.logit_bias)] += torch.tensor(list(params.logit_bias.values()), device=rows.device)
    for row, mask in enumerate(allowed or ()):
        if mask is not None:
            rows[row].masked_fill_(~mask.to(rows.device), -math.inf)
    best = rows.amax(dim=-1, keepdim=True)  # [R, 1]
    require_finite(best.flatten().tolist())
    if not params.is_greedy:
        rows.sub_(best).div_(max(params.temperature, LOWEST_TEMPERATURE))
        _truncate(rows, params)
    return rows.view(logits.shape)


def has_penalties(params: SamplingParams) -> bool:
    return params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0


def require_finite(best_logits: Sequence[float]) -> None:
    """Refuse rows whose best logit is NaN or infinite: no token may be picked from them."""
    for row, best in enumerate(best_logits):
        if not math.isfinite(best):
            raise ModelError(
                f"The target's logits are unusable: the best of row {row} is {best}. No token was emitted; check the model's "
                "weights, or try dtype float32."
            )


def _penalize(rows: torch.Tensor, params: SamplingParams, counts: TokenCounts) -> None:
    penalty = params.repetition_penalty
    if penalty != 1.0:
        penalized = torch.where(rows > 0, rows / penalty, rows * penalty)
        rows.copy_(torch.where(counts.seen, penalized, rows))
    if params.presence_penalty != 0.0:
        rows.sub_((counts.generated > 0) * params.presence_penalty)
    if params.frequency_penalty != 0.0:
        rows.sub_(counts.generated * params.frequency_penalty)


def _truncate(rows: torch.Tensor, params: SamplingParams) -> None:
    """top_k, min_p and top_p, in place, on rows [R, V] whose best is 0."""
    if 0 < params.top_k < rows.shape[-1]:
        lowest = rows.topk(params.top_k, dim=-1).values[:, -1:]  # [R, 1]
        _keep_best(rows, torch.full_like(lowest, params.top_k, dtype=torch.int64), lowest)
    if params.min_p > 0.0:
        rows.masked_fill_(rows < math.log(params.min_p), -math.inf)
    if params.top_p < 1.0:
        _keep_best(rows, *_nucleus(rows, params.top_p))


def _nucleus(rows: torch.Tensor, top_p: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Per row the size of the nucleus and the logit of its last token, both [R, 1]."""
    normalizer = rows.logsumexp(dim=-1, keepdim=True)
    size = min(NUCLEUS_PROBE, rows.shape[-1])
    while True:
        ordered = rows.topk(size, dim=-1).values  # [R, size] descending
        mass = (ordered - normalizer).exp().cumsum(dim=-1, dtype=torch.float64)
        if size == rows.shape[-1] or bool((mass[:, -1] >= top_p).all()):
            break
        size = rows.shape[-1]
    num_kept = ((mass < top_p).sum(dim=-1, keepdim=True) + 1).clamp_(max=size)  # [R, 1]
    return num_kept, ordered.gather(-1, num_kept - 1)


def _keep_best(rows: torch.Tensor, num_kept: torch.Tensor, lowest: torch.Tensor) -> None:
    """Exclude all but the num_kept [R, 1] best of each row, whose last has logit `lowest` [R, 1]; lowest ids win ties."""
    above, tied = rows > lowest, rows == lowest
    room = num_kept - above.sum(dim=-1, keepdim=True)
    rows.masked_fill_(~(above | (tied & (tied.cumsum(dim=-1) <= room))), -math.inf)


def pick(weights: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """One index per row [R] of non-negative weights [R, N], drawn in proportion to them by inverse CDF.

    uniforms: float64 [R] in [0, 1), as drawn on the CPU; number r decides row r alone, whatever its neighbours. An index
    without weight is never picked; each row must have some (a row of NaN gives an index that means nothing).
    """
    mass = weights.cumsum(dim=-1, dtype=torch.float64)  # [R, N]
    # A float64 below 1 times the total stays below the total, so some mass always exceeds the draw.
    draw = uniforms.to(weights.device).unsqueeze(-1) * mass[:, -1:]
    index = torch.searchsorted(mass, draw, right=True)  # the first whose mass exceeds the draw
    return index.clamp_(max=weights.shape[-1] - 1).squeeze(-1)


def token_logprobs(logits: torch.Tensor, token_ids: Sequence[int], top: int = 0) -> list[TokenLogprob]:
    """The target's own view of each row's token: from raw logits [R, V], no processing shows. `top` alternatives, best first."""
    normalizer = logits.logsumexp(dim=-1, keepdim=True)  # [R, 1]
    ids = torch.tensor(token_ids, dtype=torch.int64, device=logits.device).unsqueeze(-1)  # [R, 1]
    chosen = (logits.gather(-1, ids) - normalizer).squeeze(-1).tolist()
    best = logits.topk(min(top, logits.shape[-1]), dim=-1)  # [R, top]
    best_ids, best_logprobs = best.indices.tolist(), (best.values - normalizer).tolist()
    return [
        TokenLogprob(token_id, logprob, tuple(zip(row_ids, row_logprobs, strict=True)))
        for token_id, logprob, row_ids, row_logprobs in zip(token_ids, chosen, best_ids, best_logprobs, strict=True)
    ]


class Processor:
    """One request's sampling: its parameters and the statistics of its tokens. Advance it by every token that is kept."""

    def __init__(
        self,
        params: SamplingParams,
        prompt_token_ids: Sequence[int],
        vocab_size: int,
        device: torch.device | str = "cpu",
        grammar: GrammarState | None = None,
    ) -> None:
        self.params = params
        self.grammar = grammar
        self._counts = TokenCounts.of_prompt(prompt_token_ids, vocab_size, device) if has_penalties(params) else None
        self.is_plain = self._counts is None and not params.logit_bias and grammar is None  # the raw logits decide

    def advance(self, token_id: int) -> None:
        """Count one token that became part of the output."""
        if self._counts is not None:
            self._counts.add(token_id)
        if self.grammar is not None:
            self.grammar.advance(token_id)

    def logits(self, logits: torch.Tensor, paths: Sequence[Sequence[int]] = ()) -> torch.Tensor:
        """Processed logits of raw rows [R, V]; row i is conditioned on paths[i], tentatively kept tokens. No paths: on none."""
        paths = paths or [()] * len(logits)
        counts = None if self._counts is None else self._counts.along(paths)
        allowed = None if self.grammar is None else [self.grammar.allowed(path) for path in paths]
        return process_logits(logits, self.params, counts, allowed)

    def probs(self, logits: torch.Tensor, paths: Sequence[Sequence[int]] = ()) -> torch.Tensor:
        """The distributions [R, V] to sample from (temperature > 0); rows as in `logits`."""
        assert not self.params.is_greedy, "a greedy request has no distribution; use argmax"
        return self.logits(logits, paths).softmax(dim=-1)

    def argmax(self, logits: torch.Tensor, paths: Sequence[Sequence[int]] = ()) -> list[int]:
        """The best token of each row (temperature 0), lowest id on ties; rows as in `logits`."""
        rows = logits if self.is_plain else self.logits(logits, paths)
        best, token_ids = rows.max(dim=-1)
        require_finite(best.tolist())
        return [int(token_id) for token_id in token_ids.tolist()]

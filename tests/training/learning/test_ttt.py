"""The unrolled chain against an oracle that really runs it, one token at a time, with a list for a cache."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
import torch

from runtime.eagle3.model import Eagle3Model
from training.data.batches import Batch, TrainingRow, pack
from training.learning.attention import Packing, Spans
from training.learning.loss import Lesson, carrying, chain_loss
from training.learning.objective import Aim
from training.learning.ttt import unroll

HT, V, VD = 16, 40, 24
L = 4
PATTERNS = ("pppggggg", "pgggpppgggggg", "ppppppgg", "pppppp", "ggggg", "pppg")


def attend_over(keys: list[torch.Tensor], values: list[torch.Tensor], q: torch.Tensor) -> torch.Tensor:
    """Softmax attention of one query [1, heads, D] over lists of [1, kv, D]."""
    k, v = torch.cat(keys), torch.cat(values)  # [S, kv, D]
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,shd->qhs", q, k) / q.shape[-1] ** 0.5
    return torch.einsum("qhs,shd->qhd", scores.softmax(-1), v)


def oracle_states(model: Eagle3Model, row: TrainingRow, num_depths: int) -> dict[tuple[int, int], torch.Tensor]:
    """(p, k) -> state [H] for each supervised pair of a row, computed as a server would: prime to p, then draft k times."""
    features = row.features
    x, aux, generated = features.token_ids, features.hidden.aux.to(model.fc.weight.dtype), features.generated.tolist()
    n = len(aux)
    states: dict[tuple[int, int], torch.Tensor] = {}
    for p in range(n):
        if not supervised(generated, p, 0):
            continue
        keys: list[torch.Tensor] = []
        values: list[torch.Tensor] = []

        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, keys: list = keys, values: list = values) -> torch.Tensor:
            keys.append(k)
            values.append(v)
            return attend_over(keys, values, q)

        h = torch.empty(0)
        for j in range(p + 1):
            h = model.layer(x[j + 1 : j + 2], model.project(aux[j : j + 1]), torch.tensor([j]), attend)
        states[p, 0] = h[0]
        for k in range(1, num_depths):
            if not supervised(generated, p, k):
                break
            h = model.layer(x[p + 1 + k : p + 2 + k], h, torch.tensor([p + k]), attend)
            states[p, k] = h[0]
    return states


def supervised(generated: list[bool], p: int, k: int) -> bool:
    """x[p+1 .. p+2+k] all exist and are generated."""
    return p + 2 + k < len(generated) and all(generated[p + 1 : p + 3 + k])


def head_rows(model: Eagle3Model) -> torch.Tensor:
    return torch.randn(V, HT, generator=torch.Generator().manual_seed(7), dtype=model.fc.weight.dtype)


def oracle_loss(model: Eagle3Model, rows: list[TrainingRow], lm_head: torch.Tensor, num_depths: int) -> torch.Tensor:
    """sum_k 0.8^k * mean over the pairs (p, k) whose greedy target token can be drafted of the soft cross-entropy."""
    terms: list[list[torch.Tensor]] = [[] for _ in range(num_depths)]
    ids = model.vocabulary.target_ids
    for row in rows:
        last = row.features.hidden.last.to(lm_head.dtype)
        for (p, k), state in oracle_states(model, row, num_depths).items():
            z = lm_head @ last[p + 1 + k]
            if int(z.argmax()) in ids.tolist():
                terms[k].append(-(z[ids].softmax(-1) * model.draft_logits(state).log_softmax(-1)).sum())
    return sum((0.8**k * torch.stack(term).mean() for k, term in enumerate(terms) if term), torch.zeros(()))


def batch_loss(model: Eagle3Model, batch: Batch, lm_head: torch.Tensor) -> torch.Tensor:
    ids = model.vocabulary.target_ids
    last = batch.last.to(lm_head.dtype)
    logits = last @ lm_head.T
    covered = model.vocabulary.t2d[logits.argmax(-1)]
    labels = torch.where(batch.chain_ids < 0, -1, model.vocabulary.to_draft[batch.chain_ids.clamp(min=0)])
    batch = dataclasses.replace(batch, aux=batch.aux.to(lm_head.dtype))
    carries = carrying(batch.depths, covered, L)
    weights = 0.8 ** torch.arange(L, dtype=torch.float64) / carries.sum(0).clamp(min=1)
    lesson = Lesson(lm_head[ids], last, logits.logsumexp(-1), covered, labels, batch.pairs)
    return chain_loss(unroll(model, batch), model.lm_head.weight, lesson, carries, weights, Aim()).loss


@pytest.mark.parametrize("config", [{}, {"fc_norm": True}, {"norm_output": True}, {"norm_before_residual": True}])
def test_unroll_agrees_with_the_chain_run_token_by_token(make_model: Callable, make_row: Callable, config: dict) -> None:
    model = make_model(**config)
    rows = [make_row(pattern, seed) for seed, pattern in enumerate(PATTERNS)]
    batch = pack(rows, L)
    batch = dataclasses.replace(batch, aux=batch.aux.double())
    depths = unroll(model, batch)
    expected = {
        (row.sample_id, *pair): model.lm_head.weight @ (state if model.config.norm_output else model.norm(state))
        for row in rows
        for pair, state in oracle_states(model, row, L).items()
    }
    row_of = torch.bucketize(batch.query_at, torch.tensor(batch.row_offsets), right=True) - 1
    seen = {}
    for k, depth in enumerate(depths):
        for state, at in zip(depth.states, depth.rows, strict=True):
            r = int(row_of[at])
            seen[rows[r].sample_id, int(batch.query_at[at]) - batch.row_offsets[r], k] = model.lm_head.weight @ state
    assert seen.keys() == expected.keys()
    assert len(seen) > 20
    for pair, logits in seen.items():
        torch.testing.assert_close(logits, expected[pair], rtol=0, atol=1e-9)


def test_loss_and_gradients_agree_with_the_oracle(make_model: Callable, make_row: Callable) -> None:
    rows = [make_row(pattern, seed) for seed, pattern in enumerate(PATTERNS)]
    model, reference = make_model(), make_model()
    lm_head = head_rows(model)
    loss, expected = batch_loss(model, pack(rows, L), lm_head), oracle_loss(reference, rows, lm_head, L)
    torch.testing.assert_close(loss, expected, rtol=0, atol=1e-9)
    loss.backward()
    expected.backward()
    for (name, parameter), other in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert parameter.grad is not None
        assert other.grad is not None
        assert parameter.grad.abs().max() > 0, name
        torch.testing.assert_close(parameter.grad, other.grad, rtol=0, atol=1e-9, msg=name)


def test_single_precision_stays_within_1e_5_of_the_oracle(make_model: Callable, make_row: Callable) -> None:
    rows = [make_row("p" * 20 + "g" * 20, seed) for seed in range(2)]
    model, reference = make_model(dtype=torch.float32), make_model(dtype=torch.float32)
    lm_head = head_rows(model)
    loss, expected = batch_loss(model, pack(rows, L), lm_head), oracle_loss(reference, rows, lm_head, L)
    loss.backward()
    expected.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
    for parameter, other in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, other.grad, rtol=1e-5, atol=1e-5)


def test_long_rows_are_attended_in_blocks(make_model: Callable, make_row: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [make_row("pppggggggggg", 0), make_row("pggggpgggggg", 1)]
    model = make_model()
    lm_head = head_rows(model)
    whole = batch_loss(model, pack(rows, L), lm_head)
    whole_grad = torch.autograd.grad(whole, model.midlayer.self_attn.k_proj.weight)[0]
    monkeypatch.setattr("training.learning.attention.QUERY_BLOCK", 3)
    monkeypatch.setattr("training.learning.loss.TEACHER_BLOCK", 4)
    blocks = batch_loss(model, pack(rows, L), lm_head)
    torch.testing.assert_close(blocks, whole, rtol=0, atol=1e-10)
    grad = torch.autograd.grad(blocks, model.midlayer.self_attn.k_proj.weight)[0]
    torch.testing.assert_close(grad, whole_grad, rtol=0, atol=1e-10)


def test_long_rows_side_by_side_know_nothing_of_each_other(make_model: Callable, make_row: Callable) -> None:
    """Rows of many blocks, several turns: states are those of a row alone, and no gradient crosses over."""
    model = make_model()
    rows = [make_row("p" * 300 + "g" * 400, 0), make_row("pp" + "g" * 290 + "p" * 30 + "g" * 310, 1), make_row("g" * 500, 2)]
    batch = pack(rows, 3)
    batch = dataclasses.replace(batch, aux=batch.aux.double().requires_grad_())
    depths = unroll(model, batch)
    offsets, start = batch.query_offsets, batch.row_offsets
    for r, row in enumerate(rows):
        alone = pack([row], 3)
        alone = dataclasses.replace(alone, aux=alone.aux.double())
        for k, depth in enumerate(unroll(model, alone)):
            mine = (depths[k].rows >= offsets[r]) & (depths[k].rows < offsets[r + 1])
            torch.testing.assert_close(depths[k].states[mine], depth.states, rtol=0, atol=1e-12)
    mine = [(depth.rows >= offsets[1]) & (depth.rows < offsets[2]) for depth in depths]
    [gradient] = torch.autograd.grad(sum(depth.states[each].sum() for depth, each in zip(depths, mine, strict=True)), batch.aux)
    assert not gradient[: start[1]].any()
    assert not gradient[start[2] :].any()
    assert gradient[start[1] : start[2]].abs().amax(-1).min() > 0


def test_attention_gradients_are_those_of_finite_differences() -> None:
    generator = torch.Generator().manual_seed(3)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64, requires_grad=True)

    offsets, query_at = np.array([0, 4, 7]), np.array([1, 3, 5, 6])
    spans = Spans.between(query_at, np.array([0, 2, 4]), offsets)
    packing = Packing(offsets.tolist(), torch.from_numpy(query_at), spans)
    inputs = (random(4, 4, 3), random(7, 2, 3), random(7, 2, 3), random(2, 4, 2, 3), random(2, 4, 2, 3))

    def attend(q: torch.Tensor, k0: torch.Tensor, v0: torch.Tensor, kd: torch.Tensor, vd: torch.Tensor) -> torch.Tensor:
        return packing.attend(q, k0, v0, torch.stack([kd, vd]))

    assert torch.autograd.gradcheck(attend, inputs)

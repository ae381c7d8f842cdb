"""Which positions are supervised, and where the gradient goes: in at the first drafting position, nowhere past a turn."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from runtime.features.row import FeatureRow
from training.data.batches import TrainingRow, cut_by_tokens, group_by_tokens, pack, supervised
from training.learning.loss import Lesson, carrying, chain_loss
from training.learning.objective import Aim
from training.learning.ttt import unroll

L = 3


@given(st.lists(st.booleans(), min_size=1, max_size=30))
def test_supervision_is_the_rule_of_the_recipe(generated: list[bool]) -> None:
    """(p, k) is supervised exactly when x[p+1 .. p+2+k] exist and are generated."""
    mask = torch.tensor(generated)
    positions, depths = supervised(mask)
    expected = {}
    for p in range(len(generated) - 1):
        k = 0
        while p + 2 + k < len(generated) and all(generated[p + 1 : p + 3 + k]):
            k += 1
        if k:
            expected[p] = k
    assert dict(zip(positions.tolist(), depths.tolist(), strict=True)) == expected
    assert positions.tolist() == sorted(expected)


def test_groups_are_filled_in_order_and_a_longer_row_stands_alone(make_row: Callable) -> None:
    assert list(cut_by_tokens("abcdefg", [4, 5, 1, 11, 3, 7, 1], 10)) == [["a", "b", "c"], ["d"], ["e", "f"], ["g"]]
    assert list(cut_by_tokens([], [], 10)) == []
    rows = [make_row("p" * length, 0) for length in (4, 5, 2)]
    assert list(group_by_tokens(rows, 10)) == [rows[:2], rows[2:]]


def test_batch_lays_rows_side_by_side(make_row: Callable) -> None:
    rows = [make_row("ppggg", 0), make_row("ppp", 1), make_row("pggggp", 2)]
    batch = pack(rows, L)
    x0, x2 = rows[0].features.token_ids.tolist(), rows[2].features.token_ids.tolist()
    assert batch.row_offsets == [0, 3, 3, 6]
    assert batch.query_offsets == [0, 2, 2, 5]
    assert batch.query_at.tolist() == [1, 2, 3, 4, 5]
    assert batch.positions.tolist() == [0, 1, 2, 0, 1, 2]
    assert batch.next_ids.tolist() == [*x0[1:4], *x2[1:4]]
    assert batch.depths.tolist() == [2, 1, 3, 2, 1]
    assert batch.chain_ids.tolist() == [
        [x0[3], x0[4], -1],
        [x0[4], -1, -1],
        [x2[2], x2[3], x2[4]],
        [x2[3], x2[4], -1],
        [x2[4], -1, -1],
    ]
    assert torch.equal(batch.last[:2], rows[0].features.hidden.last[[2, 3]].float())
    assert torch.equal(batch.aux[3:], rows[2].features.hidden.aux[:3].float())


def part(row: TrainingRow, tokens: slice) -> TrainingRow:
    """A row of some of a row's tokens."""
    ids, generated, hidden = row.features.token_ids[tokens], row.features.generated[tokens], row.features.hidden[tokens]
    return TrainingRow(row.sample_id, FeatureRow(ids, generated, hidden[: len(ids) - 1]))


def tail(row: TrainingRow, num_tokens: int) -> TrainingRow:
    return part(row, slice(row.num_tokens - num_tokens, row.num_tokens))


@dataclasses.dataclass
class Outcome:
    loss: torch.Tensor
    sums: list[float]
    num_pairs: list[int]


@pytest.fixture
def loss_of(make_model: Callable) -> Callable:
    """Rows -> (loss, gradient of aux, model) with every position's greedy token in reach of the drafter."""
    model = make_model()
    teacher_head = torch.randn(24, 16, generator=torch.Generator().manual_seed(5), dtype=torch.float64)

    def compute(rows: list) -> tuple:
        model.zero_grad()
        batch = pack(rows, L)
        batch = dataclasses.replace(batch, aux=batch.aux.double().requires_grad_(), last=batch.last.double())
        labels = torch.where(batch.chain_ids < 0, -1, model.vocabulary.to_draft[batch.chain_ids.clamp(min=0)])
        covered, log_z = torch.ones(batch.num_supervised, dtype=torch.bool), batch.last.new_zeros(batch.num_supervised)
        lesson = Lesson(teacher_head, batch.last, log_z, covered, labels, batch.pairs)
        carries = carrying(batch.depths, covered, L)
        num_pairs = carries.sum(0)
        weights = 0.8 ** torch.arange(L, dtype=torch.float64) / num_pairs.clamp(min=1)
        result = chain_loss(unroll(model, batch), model.lm_head.weight, lesson, carries, weights, Aim())
        result.loss.backward()
        return Outcome(result.loss.detach(), result.sums.tolist(), num_pairs.tolist()), batch.aux.grad, batch, model

    return compute


def test_first_drafting_position_gets_a_gradient(make_row: Callable, loss_of: Callable) -> None:
    """A turn of two tokens is supervised at one place: the last prompt position."""
    result, gradient, batch, model = loss_of([make_row("ppppgg")])
    assert result.num_pairs == [1, 0, 0]
    assert batch.query_at.tolist() == [3]
    assert gradient[3].abs().min() > 0
    assert model.lm_head.weight.grad.abs().max() > 0


def test_nothing_past_the_end_of_a_turn_gets_a_gradient(make_row: Callable, loss_of: Callable) -> None:
    """Cut the row right after the turn, or let other text follow: the same loss, and no state behind the turn is read."""
    row = make_row("ppggggppppp")
    cut = part(row, slice(6))
    result, gradient, batch, _ = loss_of([row])
    assert batch.positions.tolist() == [0, 1, 2, 3]
    assert gradient.abs().amax(-1).min() > 0
    assert torch.equal(result.loss, loss_of([cut])[0].loss)


def test_a_turn_does_not_supervise_into_the_next(make_row: Callable, loss_of: Callable) -> None:
    """Two turns: the positions between them see the first as context and draft only the second."""
    result, _, batch, _ = loss_of([make_row("ppgggpgggg")])
    assert batch.query_at.tolist() == [1, 2, 5, 6, 7]
    assert batch.depths.tolist() == [2, 1, 3, 2, 1]
    assert result.num_pairs == [5, 3, 1]


def test_loss_does_not_depend_on_how_rows_are_batched(make_row: Callable, loss_of: Callable) -> None:
    """Per depth, a batch's loss is the mean over its pairs: rows weigh by their pairs, in any order and company."""
    rows = [make_row("pggggggg", 0), make_row("ppppppppppppggg", 1), make_row("pppp", 2), make_row("pgggpgggg", 3)]
    alone = [loss_of([row])[0] for row in rows]
    together = loss_of(rows)[0]
    for k in range(L):
        assert together.num_pairs[k] == sum(result.num_pairs[k] for result in alone)
        assert together.sums[k] == pytest.approx(sum(result.sums[k] for result in alone), abs=1e-12)
    value = float(together.loss)
    means = [loss / count for loss, count in zip(together.sums, together.num_pairs, strict=True)]
    assert value == pytest.approx(sum(0.8**k * mean for k, mean in enumerate(means)), abs=1e-12)
    assert float(loss_of(rows[::-1])[0].loss.detach()) == pytest.approx(value, abs=1e-12)


def test_loss_does_not_depend_on_the_length_of_the_prompt(make_row: Callable, loss_of: Callable) -> None:
    """With attention silenced a prompt has no influence of its own: what is left is the normalisation."""
    long = make_row("p" * 400 + "g" * 6)
    model = loss_of([long])[3]
    model.midlayer.self_attn.o_proj.weight.data.zero_()
    expected, got = loss_of([long])[0], loss_of([tail(long, 10)])[0]
    assert expected.num_pairs == got.num_pairs == [5, 4, 3]
    assert float(got.loss.detach()) == pytest.approx(float(expected.loss.detach()), abs=1e-12)


def test_tokens_out_of_reach_carry_no_loss_and_count_as_missed(make_row: Callable, make_model: Callable) -> None:
    model, rows = make_model(), [make_row("pp" + "g" * 8)]
    batch = pack(rows, L)
    batch = dataclasses.replace(batch, aux=batch.aux.double(), last=batch.last.double())
    covered = torch.tensor([True, False, True, True, False, True, True])
    teacher_head = torch.randn(24, 16, dtype=torch.float64)
    depths = unroll(model, batch)
    greedy = torch.full((7, L), -1)
    for k, depth in enumerate(depths):
        greedy[depth.rows, k] = (depth.states @ model.lm_head.weight.T).argmax(-1)
    carries = carrying(batch.depths, covered, L)
    assert carries.sum(0).tolist() == [5, 4, 4]
    lesson = Lesson(teacher_head, batch.last, batch.last.new_zeros(7), covered, greedy, batch.pairs)
    result = chain_loss(depths, model.lm_head.weight, lesson, carries, torch.ones(L), Aim())
    for k, depth in enumerate(depths):  # every draft is right here, so hits show exactly who was in reach
        assert torch.equal(result.hits[depth.rows, k], covered[depth.rows + k])


def test_a_batch_without_supervision_has_no_loss_and_no_gradient(make_row: Callable, loss_of: Callable) -> None:
    result, _, batch, model = loss_of([make_row("pppp"), make_row("ppg")])
    assert batch.num_supervised == 0
    assert float(result.loss.detach()) == 0.0
    assert all(parameter.grad is None or not parameter.grad.any() for parameter in model.parameters())

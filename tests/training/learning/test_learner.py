"""One learner: its bits survive export, import and restore; conditioning is exact; warm-up and clipping do what they say."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from runtime.eagle3 import version_id
from runtime.hidden_states import HiddenStates
from training.config import Objective
from training.learning.learner import Learner, conditioning
from training.learning.start import continue_from, from_scratch


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_export_and_import_are_bit_identical(state, tmp_path: Path) -> None:
    """Export, start another learner there, export again: the same bytes, whatever the conditioning's scale is."""
    config = state.config().trainer
    learner = from_scratch(state.target, config, state.rows(range(6)))
    for _ in range(3):
        learner.step(state.rows(range(6)))
    learner.export(tmp_path / "a")
    again = continue_from(tmp_path / "a", state.target, config, state.rows(range(6, 12), salt=3))
    again.export(tmp_path / "b")
    assert version_id(tmp_path / "a") == version_id(tmp_path / "b")
    scale = again.tensors()["scale"]
    assert scale.min() < 0.01
    assert scale.max() > 10.0
    assert torch.equal(torch.frexp(scale)[0], torch.full_like(scale, 0.5))  # powers of two, so exact


def test_learner_restores_to_the_same_bits(state) -> None:
    config = state.config().trainer
    learner = from_scratch(state.target, config, state.rows(range(6)))
    learner.step(state.rows(range(6)))
    again = Learner.restore(learner.tensors(), learner.state(), state.target, config)
    assert same(learner.tensors(), again.tensors())
    assert learner.step(state.rows(range(6, 9))).loss == again.step(state.rows(range(6, 9))).loss
    assert same(learner.tensors(), again.tensors())


def test_conditioning_is_the_power_of_two_nearest_to_one_over_rms(state) -> None:
    rows = state.rows(range(4))
    aux = torch.cat([row.features.hidden.aux for row in rows])
    scaled = aux * conditioning(from_scratch(state.target, state.config().trainer, rows).served(), rows)
    rms = scaled.square().mean(0).sqrt()
    assert rms.min() > 2**-0.51
    assert rms.max() < 2**0.51


def test_conditioning_of_a_silent_channel_is_bounded(state) -> None:
    rows = state.rows(range(2))
    silent = [
        dataclasses.replace(
            row,
            features=dataclasses.replace(
                row.features, hidden=HiddenStates(row.features.hidden.aux * 0.0, row.features.hidden.last)
            ),
        )
        for row in rows
    ]
    assert conditioning(from_scratch(state.target, state.config().trainer, rows).served(), silent).isfinite().all()


def test_first_step_of_a_warm_up_is_small(state) -> None:
    """Adam's first step moves every weight by the rate, whatever the gradient: 1/10 of it with a warm-up of 10."""
    for warmup_steps, expected in ((10, 1e-4), (0, 1e-3)):
        config = state.config(trainer__warmup_steps=warmup_steps, trainer__learning_rate=1e-3).trainer
        learner = from_scratch(state.target, config, state.rows(range(4)))
        before = learner.tensors()["model.lm_head.weight"].clone()
        learner.step(state.rows(range(4)))
        moved = (learner.tensors()["model.lm_head.weight"] - before).abs()
        assert float(moved.max()) == pytest.approx(expected, rel=0.01)


def test_gradients_that_are_not_finite_change_nothing(state) -> None:
    rows = state.rows(range(4))
    learner = from_scratch(state.target, state.config().trainer, rows)
    learner.step(rows)
    before = {name: tensor.clone() for name, tensor in learner.tensors().items()}
    broken = dataclasses.replace(rows[0].features.hidden, aux=rows[0].features.hidden.aux * float("inf"))
    bad = dataclasses.replace(rows[0], features=dataclasses.replace(rows[0].features, hidden=broken))
    result = learner.step([bad])
    assert not torch.isfinite(torch.tensor(result.grad_norm))
    assert same(before, learner.tensors())
    assert torch.isfinite(torch.tensor(learner.step(rows).loss))


def test_what_is_done_meanwhile_comes_behind_the_step_and_before_its_figures(state) -> None:
    rows = state.rows(range(2))
    learner, alone = (from_scratch(state.target, state.config().trainer, rows) for _ in range(2))
    seen: list[tuple[int, bool]] = []
    before = learner.served().fc.weight.clone()

    def look() -> None:
        seen.append((learner.num_steps, torch.equal(learner.served().fc.weight, before)))

    result, expected = learner.step(rows, rows, meanwhile=look), alone.step(rows, rows)
    assert seen == [(1, False)]
    assert (result.loss, result.grad_norm, result.num_drafted) == (expected.loss, expected.grad_norm, expected.num_drafted)


def test_counts_of_a_step_are_positions_and_chains(state) -> None:
    rows = state.rows(range(2), num_prompt=6, num_generated=8)
    learner = from_scratch(state.target, state.config(trainer__learning_rate=3e-3).trainer, rows)
    for _ in range(60):
        result = learner.step(rows)
    assert result.num_supervised == 2 * 7
    assert result.num_drafted == [2 * depths for depths in (7, 6, 5, 4, 3)]
    assert result.num_accepted == result.num_drafted  # learned by heart
    assert result.num_tokens == 2 * 14
    assert len(result.depth_losses) == 5
    assert len(result.depth_acceptance) == 5
    assert min(result.depth_acceptance) > 0.9  # the target is sure of each token, and so is the drafter by now


@pytest.mark.parametrize("objective", list(Objective))
def test_every_objective_leads_to_acceptance(state, objective: Objective) -> None:
    rows = state.rows(range(2), num_prompt=6, num_generated=8)
    learner = from_scratch(state.target, state.config(trainer__learning_rate=3e-3, trainer__objective=objective).trainer, rows)
    first, *_, last = [learner.step(rows) for _ in range(60)]
    assert max(first.depth_acceptance) < 0.7
    assert min(last.depth_acceptance) > 0.9
    assert last.num_accepted == last.num_drafted


def test_a_depth_that_weighs_nothing_is_not_learned(state) -> None:
    """Gradients are those of the depths that weigh, whatever the others lose."""
    rows = state.rows(range(2), num_prompt=6, num_generated=8)
    settings = {"trainer__learning_rate": 3e-3, "trainer__clip_norm": 1e9}
    shallow = from_scratch(state.target, state.config(trainer__ttt_steps=1, **settings).trainer, rows)
    weights = [1.0, 0.0, 0.0, 0.0, 0.0]
    deep = from_scratch(state.target, state.config(trainer__depth_weights=weights, **settings).trainer, rows)
    a, b = shallow.step(rows), deep.step(rows)
    assert b.loss == pytest.approx(a.loss, rel=1e-5)
    assert b.grad_norm == pytest.approx(a.grad_norm, rel=1e-4)
    assert len(b.depth_losses) == 5
    assert min(b.depth_losses) > 0

"""A hedge: each head is the learner of its own rate, the best on held-out rows is what goes out, and all of them resume."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from runtime.eagle3 import Eagle3Model, version_id
from runtime.errors import ConfigError
from training.app import run
from training.learning import checkpoint
from training.learning.hedge import Hedge, restore
from training.learning.start import from_scratch

FACTORS = [0.5, 1.0, 2.0]


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def weights(model: Eagle3Model) -> dict[str, torch.Tensor]:
    return dict(model.state_dict())


@pytest.fixture
def hedge(state) -> Hedge:
    config = state.config(trainer__hedge=FACTORS, trainer__learning_rate=1e-3).trainer
    made = from_scratch(state.target, config, state.rows(range(6)))
    assert isinstance(made, Hedge)
    return made


def test_each_head_is_the_learner_of_its_rate(state, hedge: Hedge) -> None:
    alone = []
    for factor in FACTORS:
        config = state.config(trainer__learning_rate=1e-3 * factor).trainer
        alone.append(from_scratch(state.target, config, state.rows(range(6))))
    for step in range(3):
        rows = state.rows(range(step, step + 4))
        results = [learner.step(rows) for learner in alone]
        done: list[int] = []
        result = hedge.step(rows, meanwhile=lambda done=done: done.append(hedge.num_steps))
        assert done == [step + 1], "once, behind all heads"
        assert (result.loss, result.grad_norm) == (results[1].loss, results[1].grad_norm), "that of factor 1 is told"
    models = []
    for leading in range(3):
        hedge.leading = leading
        models.append(weights(hedge.served()))
    assert [same(model, weights(learner.served())) for model, learner in zip(models, alone, strict=True)] == [True] * 3


def test_the_best_head_leads_until_another_one_is_better(hedge: Hedge, state) -> None:
    hedge.step(state.rows(range(4)))
    served = []
    for leading in range(3):
        hedge.leading = leading
        served.append(weights(hedge.served()))

    def score_by(scores: list[float | None]):
        def score(model: Eagle3Model) -> float | None:
            return scores[[same(weights(model), each) for each in served].index(True)]

        return score

    for scores, best in (
        ([1.0, 2.0, 3.0], 2),
        ([1.0, 3.0, 3.0], 2),  # no reason to change
        ([4.0, 3.0, 3.0], 0),
        ([None, None, None], 0),
        ([float("nan"), 3.0, 2.0], 1),
    ):
        assert same(weights(hedge.candidate(score_by(scores))), served[best])
        assert hedge.leading == best
    assert hedge.learning_rate == pytest.approx(1e-3)


def test_all_heads_resume(state, hedge: Hedge) -> None:
    hedge.step(state.rows(range(4)))
    hedge.leading = 2
    again = restore(hedge.tensors(), hedge.state(), state.target, state.config(trainer__hedge=FACTORS).trainer)
    assert isinstance(again, Hedge)
    assert (again.leading, again.learning_rate, again.num_steps) == (2, 2e-3, 1)
    for each in (hedge, again):
        each.step(state.rows(range(4, 8)))
    assert same(hedge.tensors(), again.tensors())


def test_a_run_publishes_its_best_head_and_keeps_its_factors(state) -> None:
    state.add(range(200, 208), split="heldout")
    state.add(range(16))
    settings = {
        "trainer__hedge": [0.001, 1.0],
        "trainer__learning_rate": 3e-3,
        "trainer__evaluate_every_steps": 40,
        "data__passes": 50,
    }
    assert run(state.config(**settings, trainer__max_steps=40)) == 0
    [published] = state.events("published")
    tensors, remembered = checkpoint.load(Path(state.ledger.latest_checkpoint("default").path))
    assert remembered["learner"]["leading"] == 1
    config = state.config(**settings)
    learner = restore(tensors, remembered["learner"], state.target, config.trainer)
    learner._heads[1].export(state.root / "again")
    assert version_id(state.root / "again") == published["version"]
    with pytest.raises(ConfigError, match=r"trainer\.hedge is None, but run 'default' began with \[0\.001, 1\.0\]"):
        run(state.config(trainer__max_steps=50))

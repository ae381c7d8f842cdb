"""The gate's expectation for sampled traffic against an engine that samples it."""

from __future__ import annotations

import threading
from dataclasses import replace
from functools import partial

import pytest
import torch

from runtime.backends import load_target
from runtime.config import BackendConfig, ModelConfig, SessionsConfig, SpeculationConfig, SpeculationMode, TreeShape
from runtime.drafters.base import DraftRequest
from runtime.drafters.eagle3 import Eagle3Drafter
from runtime.eagle3 import Eagle3Model
from runtime.engine.local import LocalEngine
from runtime.features.sampling import labelled, sampling_of
from runtime.hidden_states import HiddenStates
from runtime.models import Tokenizer
from runtime.speculation.sampling import process_logits
from runtime.types import Done, Event, Failed, SamplingParams, SessionOptions, SpeculationStats, Switch
from training.data.batches import TrainingRow, pack
from training.interleaved.producer import TurnBox, row_of
from training.judging.simulation import Counts, TargetView, accept_chances, depth_acceptance, evaluate, total
from training.learning.start import from_scratch

D = 3


def serve(state, model: Eagle3Model, params: SamplingParams, num_turns: int) -> tuple[list[TrainingRow], list[SpeculationStats]]:
    """The turns of an engine that speculates with this drafter, as rows, and what it counted of each."""
    target = load_target(BackendConfig(num_threads=1), ModelConfig(name=str(state.model.path)), state.model)
    speculation = SpeculationConfig(SpeculationMode.FIXED, TreeShape.CHAIN, max_draft_tokens=D)
    turns, ended = TurnBox(), threading.Semaphore(0)
    counted: dict[str, SpeculationStats] = {}
    sessions = SessionsConfig(max_batch_sessions=16)
    engine = LocalEngine(target, Eagle3Drafter(model, "test"), Tokenizer.load(state.model.path), speculation, sessions, turns)

    def listen(session: str, event: Event) -> None:
        if isinstance(event, Done):
            counted[session] = event.speculation
        if isinstance(event, Done | Failed):
            ended.release()

    engine.start()
    names = []
    for number in range(num_turns):
        session = engine.create_session(SessionOptions(capture=Switch.ON, eos_token_ids=())).session_id
        engine.append(session, [3 + number, 40 + number % 7, 9])
        engine.generate(session, params, on_event=partial(listen, session))
        names.append(session)
    for _ in names:
        assert ended.acquire(timeout=60)
    engine.stop()
    rows = []
    for name in names:
        turn = turns.fetch(name)
        assert turn is not None
        row = row_of(turn)
        assert row is not None
        rows.append(TrainingRow(name, row))
    return rows, [counted[name] for name in names]


@pytest.fixture
def drafter(state) -> Eagle3Model:
    """Half-learned on what the target samples, so that some drafts are taken and some are not."""
    config = state.config(trainer__draft_vocab_size=state.target.vocab_size // 2, trainer__learning_rate=3e-3).trainer
    rows, _ = serve(state, from_scratch(state.target, config, state.rows(range(8))).served(), SamplingParams(max_tokens=40), 8)
    learner = from_scratch(state.target, config, rows)
    for _ in range(30):
        learner.step(rows)
    return learner.served()


def deviations(served: list[SpeculationStats], expected: list[Counts]) -> float:
    """How many standard errors what was accepted lies from what was expected."""
    differences = torch.tensor([a.num_accepted - b.num_accepted for a, b in zip(served, expected, strict=True)])
    return float(differences.sum() / differences.square().sum().sqrt())


@pytest.mark.parametrize(
    "params",
    [SamplingParams(temperature=1.0, max_tokens=60), SamplingParams(temperature=0.6, top_p=0.8, max_tokens=60)],
    ids=["temperature", "nucleus"],
)
def test_the_expectation_is_what_a_server_counts(state, drafter: Eagle3Model, params: SamplingParams) -> None:
    rows, served = serve(state, drafter, params, 32)
    expected = evaluate(drafter, rows, D, TargetView(state.target.lm_head))
    there, here = SpeculationStats.total(served), total(expected)
    assert there.num_accepted > 60
    assert abs(deviations(served, expected)) < 4
    assert here.mean_acceptance_length == pytest.approx(there.mean_acceptance_length, abs=0.05)
    assert here.num_steps + here.num_accepted == pytest.approx(there.num_steps + there.num_accepted, rel=2e-3)  # the tokens
    assert depth_acceptance(here)[0] == pytest.approx(there.accepted_per_position[0] / there.drafted_per_position[0], abs=0.04)


def test_a_draft_is_taken_by_what_both_give_the_token_that_was_said(state, drafter: Eagle3Model) -> None:
    """The first draft of each step, from the distribution that the serving drafter samples it from."""
    params = SamplingParams(temperature=2.0)
    sure = state.row(3)
    unsure = HiddenStates(sure.hidden.aux, torch.randn(sure.hidden.last.shape, generator=torch.Generator().manual_seed(0)))
    row = TrainingRow("row", replace(sure, hidden=unsure, labels=labelled({}, params)))
    x, hidden = row.features.token_ids.tolist(), row.features.hidden
    p = process_logits(hidden.last.float() @ state.target.lm_head.float().T, params).softmax(-1)  # [n, V]
    batch = pack([row], 1)
    chances = accept_chances(drafter, [row], batch, TargetView(state.target.lm_head))
    serving = Eagle3Drafter(drafter, "test")
    for place, at in enumerate(batch.query_at.tolist()):
        numbers = torch.full((1,), 0.5, dtype=torch.float64)
        state_of_one = serving.new_state()
        request = DraftRequest(state_of_one, 0, hidden.aux[: at + 1].float(), x[: at + 2], 1, temperature=2.0, uniforms=numbers)
        [draft] = serving.propose([request])
        assert draft.probs is not None
        q = torch.zeros(p.shape[-1]).index_add_(0, draft.probs[0].token_ids, draft.probs[0].probs)
        said = x[at + 2]
        assert float(chances[place, 0]) == pytest.approx(min(1.0, float(q[said] / p[at + 1, said])), rel=1e-3)
    assert float(chances.max()) > 0


def test_a_seed_makes_drafts_certain_here_and_there(state, drafter: Eagle3Model) -> None:
    rows, served = serve(state, drafter, SamplingParams(temperature=1.0, seed=5, max_tokens=40), 8)
    assert all(sampling_of(row.features.labels) is None for row in rows)
    expected = evaluate(drafter, rows, D, TargetView(state.target.lm_head))
    assert [each.num_accepted for each in expected] == [each.num_accepted for each in served]

"""The gate: what is better beyond chance goes out with its figures, everything else stays in."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from runtime.eagle3 import load, version_id
from runtime.features.sampling import labelled
from runtime.registry import Registry, VersionState
from runtime.types import SamplingParams, SpeculationStats
from training.app import run
from training.judging.config import GateConfig
from training.judging.gate import NGRAM, Baseline, Gate, lower_bound
from training.judging.simulation import evaluate
from training.learning.learner import Learner
from training.learning.start import from_scratch, row_check


def stats(num_steps: int, num_accepted: int) -> SpeculationStats:
    return SpeculationStats(num_steps=num_steps, num_accepted=num_accepted)


def bound(candidate: list[SpeculationStats], baseline: list[SpeculationStats]) -> float:
    return lower_bound(candidate, baseline, confidence=0.95, resamples=2000, seed=0)


def test_lower_bound_needs_a_difference_beyond_chance() -> None:
    steady = [stats(40 + i % 3, 60) for i in range(20)]
    better = [stats(40 + i % 3, 66) for i in range(20)]
    assert 0.05 < bound(better, steady) < 6 / 40
    assert bound(steady, better) < 0
    assert bound(steady, steady) == 0.0  # a tie is not better
    noisy = [stats(40, 60 + (60 if i % 2 else -55)) for i in range(20)]  # better on average, by luck of half the rows
    assert sum(each.num_accepted for each in noisy) > sum(each.num_accepted for each in steady)
    assert bound(noisy, steady) < 0


def test_lower_bound_keeps_pairs_together() -> None:
    """Rows differ wildly, but each is a little better with the candidate: pairing sees it, independent sets would not."""
    baseline = [stats(50, 10 * i) for i in range(12)]
    candidate = [stats(50, 10 * i + 2) for i in range(12)]
    assert bound(candidate, baseline) == pytest.approx(2 / 50)
    shuffled = [candidate[(i * 5 + 1) % 12] for i in range(12)]
    assert bound(shuffled, baseline) < 0


def test_lower_bound_agrees_with_its_definition() -> None:
    """Normal theory for a mean of paired differences with equal steps."""
    generator = torch.Generator().manual_seed(0)
    gains = torch.randint(-3, 9, (60,), generator=generator).tolist()
    got = bound([stats(40, 50 + gain) for gain in gains], [stats(40, 50) for _ in gains])
    mean, deviation = torch.tensor(gains).float().mean() / 40, torch.tensor(gains).float().std() / 40
    assert got == pytest.approx(float(mean - 1.645 * deviation / 60**0.5), abs=0.006)


# --- the gate on a real registry ---


@pytest.fixture
def learner(state) -> Learner:
    """Half-learned on the rule of the traffic."""
    learner = from_scratch(state.target, state.config(trainer__learning_rate=3e-3).trainer, state.rows(range(12)))
    improve(learner, state, 14)
    return learner


def improve(learner: Learner, state, num_steps: int) -> None:
    for _ in range(num_steps):
        learner.step(state.rows(range(12)))


def make_gate(state, start: Baseline | None = None, **config: object) -> tuple[Gate, Registry]:
    registry = Registry(state.root / "registry")
    gate = Gate(
        GateConfig(**({"min_heldout_rows": 4} | config)),
        state.store,
        state.ledger,
        registry,
        check=row_check(state.target),
        embedding=state.target.embedding,
        lm_head=state.target.lm_head,
        target_fingerprint=state.target.fingerprint,
        start=start or Baseline(NGRAM, None),
        seed=0,
    )
    return gate, registry


def export(learner: Learner, path: Path) -> Path:
    learner.export(path)
    return path


def test_better_goes_out_worse_and_equal_do_not(state, learner: Learner, tmp_path: Path) -> None:
    state.add(range(40, 52), split="heldout")
    gate, registry = make_gate(state)
    first = export(learner, tmp_path / "first")
    verdict = gate.judge(first)
    assert verdict.is_better
    assert verdict.baseline.version == NGRAM
    version = gate.publish(first, verdict, 14, before=lambda: None)
    registry.activate(version)

    tie = gate.judge(first)
    assert tie.baseline.version == version
    assert (tie.is_better, tie.metrics["lower_bound"]) == (False, 0.0)

    worse = from_scratch(state.target, state.config().trainer, state.rows(range(12)))
    assert not gate.judge(export(worse, tmp_path / "worse")).is_better

    improve(learner, state, 40)
    second = export(learner, tmp_path / "second")
    verdict = gate.judge(second)
    assert verdict.is_better
    manifest = registry.get(gate.publish(second, verdict, 54, before=lambda: None)).manifest
    assert manifest.parent == version
    assert manifest.step == 54
    assert manifest.target_fingerprint == state.target.fingerprint
    assert manifest.vocabulary_hash == learner.vocabulary.hash
    assert manifest.metrics["heldout_rows"] == 12
    assert (
        manifest.metrics["acceptance_length"] > manifest.metrics["baseline_acceptance_length"] + manifest.metrics["lower_bound"]
    )
    assert manifest.metrics["lower_bound"] > 0
    assert 0 < manifest.metrics["acceptance_at_4"] < manifest.metrics["acceptance_at_0"] <= 1


def test_what_the_registry_hands_out_is_what_was_judged(state, learner: Learner, tmp_path: Path) -> None:
    state.add(range(40, 46), split="heldout")
    gate, registry = make_gate(state)
    candidate = export(learner, tmp_path / "candidate")
    version = gate.publish(candidate, gate.judge(candidate), 1, before=lambda: None)
    assert version == version_id(registry.path(version)) == version_id(candidate)
    mine, theirs = learner.served().bfloat16(), load(registry.path(version), state.target.embedding, dtype=torch.bfloat16)
    assert all(torch.equal(tensor, theirs.state_dict()[name]) for name, tensor in mine.state_dict().items())


def test_too_few_heldout_rows_decide_nothing(state, learner: Learner, tmp_path: Path) -> None:
    state.add(range(40, 43), split="heldout")
    state.ledger.commit(state.store.put(state.meta("foreign", target_fingerprint="0" * 16), state.row(1)), "heldout")
    gate, _ = make_gate(state)
    assert gate.judge(export(learner, tmp_path / "candidate")) is None
    state.add(range(43, 44), split="heldout")
    assert gate.judge(tmp_path / "candidate").metrics["heldout_rows"] == 4


def test_rows_that_cannot_be_used_take_no_place_among_the_heldout(
    state, learner: Learner, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The newest ones are another target's, damaged, or not finite: the gate judges by those before them, and says so once."""
    state.add(range(40, 46), split="heldout")
    broken = state.row(1)
    broken.hidden.last[0, 0] = float("inf")
    rows = {"inf": broken, "damaged": state.row(2), "foreign-0": state.row(3), "foreign-1": state.row(4)}
    for name, row in rows.items():
        fingerprint = {"target_fingerprint": "0" * 16} if name.startswith("foreign") else {}
        state.ledger.commit(state.store.put(state.meta(name, **fingerprint), row), "heldout")
    next((state.root / "features" / "rows").glob("damaged.*")).write_bytes(b"nothing")
    gate, _ = make_gate(state, max_heldout_rows=5)
    for _ in range(2):
        assert gate.judge(export(learner, tmp_path / "candidate")).metrics["heldout_rows"] == 5
    told = [record.getMessage() for record in caplog.records if "passed over" in record.getMessage()]
    assert len(told) == len(rows)


def test_baseline_is_what_is_served_or_about_to_be(state, learner: Learner, tmp_path: Path) -> None:
    state.add(range(40, 46), split="heldout")
    start = export(learner, tmp_path / "start")
    gate, registry = make_gate(state, start=Baseline(version_id(start), start))
    assert gate.baseline().directory == start
    improve(learner, state, 30)
    candidate = export(learner, tmp_path / "candidate")
    version = gate.publish(candidate, gate.judge(candidate), 1, before=lambda: None)
    assert registry.get(version).manifest.parent == version_id(start)
    assert gate.baseline().version == version  # staged: the server will most likely take it
    assert gate.is_undecided()
    registry.set_state(version, VersionState.REJECTED, "SHAPE: no")
    assert gate.baseline().directory == start
    assert not gate.is_undecided()
    other = registry.publish(start, parent=None, step=0, target_fingerprint=state.target.fingerprint, metrics={})
    registry.activate(other)
    assert gate.baseline() == Baseline(other, registry.path(other))


def test_what_went_live_while_a_candidate_was_judged_is_not_replaced(
    state, learner: Learner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state.add(range(40, 46), split="heldout")
    gate, registry = make_gate(state)
    other = export(learner, tmp_path / "other")
    version = registry.publish(other, parent=None, step=0, target_fingerprint=state.target.fingerprint, metrics={})

    def slow(*arguments: object) -> object:
        registry.activate(version)
        return evaluate(*arguments)

    monkeypatch.setattr("training.judging.gate.evaluate", slow)
    verdict = gate.judge(export(learner, tmp_path / "candidate"))
    assert not verdict.is_better
    assert verdict.reason.endswith("another version went live meanwhile")


def test_unreadable_baseline_gives_way_to_ngram_lookup(state, learner: Learner, tmp_path: Path) -> None:
    state.add(range(40, 46), split="heldout")
    gate, _ = make_gate(state, start=Baseline("gone", tmp_path / "gone"))
    verdict = gate.judge(export(learner, tmp_path / "candidate"))
    assert (verdict.baseline.version, verdict.is_better) == (NGRAM, True)


# --- slices ---


def add_slice(state, name: str, salt: int, seeds: range) -> None:
    """Held-out rows of a slice whose text follows a rule of its own."""
    for seed in seeds:
        row = replace(state.row(seed, salt=salt), labels={"slice": name})
        state.ledger.commit(state.store.put(state.meta(f"{name}-{seed}"), row), "heldout")


def teach(learner: Learner, state, salt: int, num_steps: int) -> None:
    for _ in range(num_steps):
        learner.step(state.rows(range(12), salt=salt))


def test_what_forgets_a_slice_is_kept_back(state, tmp_path: Path) -> None:
    add_slice(state, "old", 3, range(40, 46))
    add_slice(state, "new", 0, range(40, 52))
    config = state.config(trainer__learning_rate=3e-3).trainer
    learner = from_scratch(state.target, config, state.rows(range(12)) + state.rows(range(12), salt=3))
    teach(learner, state, 3, 40)
    start = export(learner, tmp_path / "start")
    teach(learner, state, 0, 60)  # and nothing of the old rule any more
    candidate = export(learner, tmp_path / "candidate")

    served = Baseline(version_id(start), start)
    verdict = make_gate(state, start=served)[0].judge(candidate)
    old = {key: verdict.metrics[f"slice/old/{key}"] for key in ("rows", "acceptance_length", "baseline_acceptance_length")}
    assert old["rows"] == 6
    assert old["acceptance_length"] < 0.97 * old["baseline_acceptance_length"]
    assert verdict.metrics["slice/new/acceptance_length"] > verdict.metrics["slice/new/baseline_acceptance_length"]
    assert verdict.metrics["lower_bound"] > 0, "over all it is better"
    assert not verdict.is_better
    assert "loses more than 3.0% on slices: 'old'" in verdict.reason

    assert make_gate(state, start=served, max_slice_loss=1.0)[0].judge(candidate).is_better
    few = make_gate(state, start=served, min_heldout_rows=7)[0].judge(candidate)
    assert few.is_better, "6 rows of the old slice are too few to say anything"
    assert "slice/old/rows" not in few.metrics


def test_slices_have_as_many_of_the_judges_as_others(state, tmp_path: Path, learner: Learner) -> None:
    """A slice that came last does not push the others out."""
    add_slice(state, "old", 0, range(40, 44))
    add_slice(state, "new", 0, range(44, 60))
    gate, _ = make_gate(state, max_heldout_rows=8, min_heldout_rows=4)
    metrics = gate.judge(export(learner, tmp_path / "candidate")).metrics
    assert (metrics["slice/old/rows"], metrics["slice/new/rows"], metrics["heldout_rows"]) == (4, 4, 8)


def test_sampled_rows_are_judged_by_what_is_expected(state, tmp_path: Path, learner: Learner) -> None:
    """The same rows, said to be sampled by a target that is sure of them: a drafter that is less sure gets less."""
    candidate, lengths = export(learner, tmp_path / "candidate"), []
    for labels in ({}, labelled({}, SamplingParams())):
        for seed in range(40, 48):
            row = replace(state.row(seed), labels=labels)
            state.ledger.commit(state.store.put(state.meta(f"row-{seed}-{len(labels)}"), row), "heldout")
        lengths.append(make_gate(state, max_heldout_rows=8)[0].judge(candidate).metrics["acceptance_length"])
    assert 1 < lengths[1] < lengths[0]


# --- whole runs ---


def serve(registry: Registry, stop: threading.Event, refuse: bool) -> None:
    """The server's part: activate what is staged, or reject it."""
    while not stop.wait(0.02):
        for record in registry.versions():
            if record.state is VersionState.STAGED:
                if refuse:
                    registry.set_state(record.version, VersionState.REJECTED, "ROPE: not this one")
                else:
                    registry.activate(record.version)


@pytest.mark.parametrize("refuse", [False, True])
def test_a_run_publishes_and_tells_what_became_of_it(state, refuse: bool) -> None:
    state.add(range(12))
    state.add(range(40, 48), split="heldout")
    registry, stop = Registry(state.root / "registry"), threading.Event()
    server = threading.Thread(target=serve, args=(registry, stop, refuse))
    server.start()
    quick = {"data__passes": 60, "trainer__learning_rate": 3e-3, "registry__poll_s": 0.01}
    run(state.config(trainer__max_steps=60, trainer__evaluate_every_steps=20, trainer__settle_s=5.0, **quick))
    stop.set()
    server.join()
    published = state.events("published")
    assert published
    record = registry.get(published[-1]["version"])
    told = {(event["version"], event["state"], event["reason"]) for event in state.events("version")}
    if refuse:
        assert registry.active() is None
        assert (record.version, "rejected", "ROPE: not this one") in told
    else:
        assert registry.active() == record.version
        assert (record.version, "active", "") in told
    judged = [event["step"] for event in state.events("judged")]
    assert judged == [20, 40, 60]
    saved = {event["step"] for event in state.events("saved")}
    assert {event["step"] for event in published} <= saved  # what is public was safe first


def test_a_second_run_continues_from_the_published_weights(state) -> None:
    state.add(range(12))
    state.add(range(40, 48), split="heldout")
    quick = {"data__passes": 60, "trainer__learning_rate": 3e-3}
    run(state.config(trainer__max_steps=15, **quick))
    registry = Registry(state.root / "registry")
    [first] = registry.versions()
    registry.activate(first.version)
    state.add(range(60, 72))
    run(state.config(trainer__run_id="next", trainer__init="auto", trainer__max_steps=25, **quick))
    versions = {record.version: record for record in registry.versions()}
    assert len(versions) == 2
    second = next(record for version, record in versions.items() if version != first.version)
    assert second.manifest.parent == first.version
    assert second.manifest.vocabulary_hash == first.manifest.vocabulary_hash
    assert second.manifest.metrics["baseline_acceptance_length"] == first.manifest.metrics["acceptance_length"]
    [began] = state.events("began", "next")
    assert first.version in began["how"]


def test_a_closed_gate_publishes_nothing(state) -> None:
    state.add(range(12))
    state.add(range(40, 48), split="heldout")
    run(state.config(trainer__max_steps=30, trainer__gate__enabled=False, data__passes=60, trainer__learning_rate=3e-3))
    assert [event["is_better"] for event in state.events("judged")] == [True]
    assert Registry(state.root / "registry").versions() == []


def test_metrics_are_strict_json(state) -> None:
    state.add(range(8))
    run(state.config(trainer__max_steps=3))
    lines = (state.root / "training" / "default" / "metrics.jsonl").read_text().splitlines()
    for line in lines:
        json.loads(line, parse_constant=pytest.fail)
    assert [json.loads(line)["event"] for line in lines] == ["began", "step", "step", "step", "saved"]

"""kill -9 at any instant: no row is lost, none is trained twice into the weights that survive."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

from runtime.registry import Registry


def test_killed_at_any_instant_no_row_is_lost_or_counted_twice(state, nursery) -> None:
    """Every step saves, judges and often publishes, so kills hit all of it; rows keep coming in between."""
    state.add(range(200, 206), split="heldout")
    names = state.add(range(8))
    quick = {
        "trainer__checkpoint_every_steps": 2,
        "trainer__evaluate_every_steps": 5,
        "trainer__learning_rate": 3e-3,
        "data__passes": 2,
        "data__batch_rows": 2,
        "data__lease_timeout_s": 600.0,  # rows come back because the run recovers them, not because time passes
    }
    chance = random.Random(7)
    saved_steps: list[int] = []
    for kill in range(5):
        names += state.add(range(8 + 4 * kill, 12 + 4 * kill))
        known = num_steps_told(state)
        pid = nursery.start(state.config(**quick))
        wait_for_step(state, known)
        time.sleep(chance.uniform(0.0, 0.4))
        os.kill(pid, signal.SIGKILL)
        assert nursery.result() == -signal.SIGKILL
        latest = state.ledger.latest_checkpoint("default")
        saved_steps.append(latest.step if latest else 0)
        consumed = state.ledger.consumption("default")
        assert set(consumed.values()) <= {1}
        held = state.ledger.status()
        assert held["leased"] + held["pending"] + held["durable"] == len(names)
        assert held["durable"] == len(consumed)
    assert saved_steps == sorted(saved_steps)
    assert saved_steps[-1] > 0
    nursery.start(state.config(**quick, trainer__idle_timeout_s=0.5))
    assert nursery.result() == 0
    assert state.ledger.consumption("default") == dict.fromkeys(names, 1)
    assert state.ledger.status()["durable"] == len(names)
    run_dir = state.root / "training" / "default"
    assert len(list((run_dir / "checkpoints").iterdir())) <= 2
    assert not list(run_dir.glob(".tmp-*"))
    assert all(record.manifest is not None for record in Registry(state.root / "registry").versions())


def num_steps_told(state) -> int:
    metrics = state.root / "training" / "default" / "metrics.jsonl"
    return metrics.read_text().count('"event": "step"') if metrics.exists() else 0


def wait_for_step(state, known: int) -> None:
    """Until a step beyond the known ones is told, so that a kill hits a trainer at work."""
    deadline = time.monotonic() + 60
    while num_steps_told(state) <= known:
        assert time.monotonic() < deadline, "no step in a minute"
        time.sleep(0.005)


def test_rows_of_a_dead_run_come_back_to_another_one(state, nursery) -> None:
    """Another run takes over what the dead one leased, once the leases run out; what was durable stays the dead run's."""
    names = state.add(range(12))
    pid = nursery.start(state.config(data__lease_timeout_s=1.0, trainer__checkpoint_every_steps=1, data__batch_rows=2))
    wait_for_step(state, 0)
    os.kill(pid, signal.SIGKILL)
    assert nursery.result() == -signal.SIGKILL
    before = state.ledger.consumption("default")
    nursery.start(state.config(trainer__run_id="other", trainer__idle_timeout_s=2.0, data__lease_timeout_s=1.0))
    assert nursery.result() == 0
    after = state.ledger.consumption("other")
    assert before | after == dict.fromkeys(names, 1)
    assert not before.keys() & after.keys()


def test_the_door_starts_a_run_and_a_signal_ends_it(state) -> None:
    """`python -m training` as a user starts it: SIGTERM, exit code 0, everything saved."""
    state.add(range(8))
    command = [sys.executable, "-m", "training", "trainer=scratch", f"model.name={state.model.path}", f"state_dir={state.root}"]
    settings = ["trainer.vocabulary_tokens=40", "data.batch_rows=4", "data.fill_wait_s=0.1", "trainer.num_threads=1"]
    with subprocess.Popen([*command, *settings], stderr=subprocess.PIPE, text=True) as process:
        wait_for_step(state, 0)
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 0, said
    assert "SIGTERM: stopping after this step" in said
    assert f"rows from {Path(state.root) / 'features'}, run in {Path(state.root) / 'training' / 'default'}" in said
    assert "training begins from scratch" in said
    counts = state.ledger.status()
    assert counts["durable"] > 0
    assert (counts["leased"], counts["durable"] + counts["pending"]) == (0, 8)
    assert (Path(state.root) / "training" / "default" / "progress.png").is_file()


def test_the_door_refuses_with_one_sentence(state) -> None:
    command = [sys.executable, "-m", "training", f"state_dir={state.root}", "model.name=/nowhere/model"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert "There is no directory /nowhere/model" in result.stderr
    assert "Traceback" not in result.stderr

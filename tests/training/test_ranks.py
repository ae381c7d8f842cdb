"""Several processes that train one run: what they learn, who holds which rows, and how they end together."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from runtime.errors import ConfigError
from runtime.registry import Registry
from training.app import run
from training.config import Mode, Parallel
from training.learning import checkpoint

BOTH = pytest.mark.parametrize("parallel", [Parallel.DDP, Parallel.FSDP], ids=lambda kind: kind.value)


def tensors_of(state, run_id: str = "default") -> dict[str, torch.Tensor]:
    return checkpoint.load(Path(state.ledger.latest_checkpoint(run_id).path))[0]


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def told(state, kind: str, name: str) -> list[float]:
    return [entry[name] for entry in state.events(kind)]


def another(state, tmp_path: Path):
    return type(state)(tmp_path / "other", state.model, state.target)


@BOTH
def test_two_processes_learn_what_one_does(state, nursery, tmp_path: Path, parallel: Parallel) -> None:
    """Rows of uneven lengths, an average of the weights, and a micro-batch more on one rank than on the other now and then."""
    alone, pair = state, another(state, tmp_path)
    for each in (alone, pair):
        each.add(range(7), num_generated=9)
        each.add(range(7, 14), num_generated=30)
    settings = {"mode": Mode.OFFLINE, "trainer__max_steps": 6, "trainer__ema_decay": 0.9, "trainer__parallel": parallel}
    settings["trainer__vocabulary_tokens"] = 10_000  # all rows are looked at before the first step
    assert run(alone.config(**settings, data__batch_rows=4, data__max_batch_tokens=60 * 4)) == 0
    two = pair.config(**settings, data__batch_rows=1, trainer__accumulation=2, data__max_batch_tokens=60)
    nursery.start_ranks(two, two)
    assert nursery.results() == [0, 0], nursery.said.read_text()
    for figure in ("loss", "grad_norm", "num_tokens", "num_rows"):
        assert told(pair, "step", figure) == pytest.approx(told(alone, "step", figure), rel=1e-4)
    expected, found = tensors_of(alone), tensors_of(pair)
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-3, atol=1e-4, msg=lambda text, name=name: f"{name}: {text}")


@BOTH
def test_resumed_by_as_many_processes_the_bits_are_the_same(state, nursery, tmp_path: Path, parallel: Parallel) -> None:
    through, halves = state, another(state, tmp_path)
    for each in (through, halves):
        each.add(range(11))
    settings = {"mode": Mode.OFFLINE, "data__batch_rows": 2, "trainer__parallel": parallel, "trainer__ema_decay": 0.9}
    for each, stops in ((through, [7]), (halves, [3, 7])):
        for stop in stops:
            config = each.config(**settings, trainer__max_steps=stop)
            nursery.start_ranks(config, config)
            assert nursery.results() == [0, 0], nursery.said.read_text()
    assert same(tensors_of(through), tensors_of(halves))
    assert told(through, "step", "loss") == told(halves, "step", "loss")


def test_the_number_of_processes_may_change_from_run_to_run(state, nursery) -> None:
    """Two, one, two again: one history of weights, and every row in it once."""
    names = []
    for size, kind in ((2, Parallel.FSDP), (1, Parallel.AUTO), (2, Parallel.DDP)):
        names += state.add(range(len(names), len(names) + 9))
        step = state.events("step")[-1]["step"] if names[9:] else 0
        config = state.config(trainer__max_steps=step + 2, data__batch_rows=4 // size, trainer__parallel=kind)
        nursery.start_ranks(*[config] * size)
        assert nursery.results() == [0] * size, nursery.said.read_text()
        assert state.ledger.status()["leased"] == 0
    config = state.config(trainer__idle_timeout_s=1.0, data__batch_rows=2)
    nursery.start_ranks(config, config)
    assert nursery.results() == [0, 0], nursery.said.read_text()
    assert state.ledger.consumption("default") == dict.fromkeys(names, 1)
    assert [step["step"] for step in state.events("step")] == list(range(1, len(state.events("step")) + 1))
    assert state.events("step")[-1]["rows_admitted"] == len(names)


@BOTH
def test_a_process_without_rows_takes_part_all_the_same(state, nursery, parallel: Parallel) -> None:
    names = state.add(range(3), num_generated=40)
    settings = {"trainer__parallel": parallel, "data__batch_rows": 2, "data__passes": 1}
    config = state.config(**settings, trainer__idle_timeout_s=0.5)
    nursery.start_ranks(config, config, config)
    assert nursery.results() == [0, 0, 0], nursery.said.read_text()
    assert state.ledger.consumption("default") == dict.fromkeys(names, 1)
    assert state.ledger.status()["leased"] == 0


def test_a_better_drafter_is_judged_and_published_once(state, nursery) -> None:
    """The first process judges; all of them save before it publishes."""
    state.add(range(200, 208), split="heldout")
    state.add(range(16))
    quick = {"trainer__learning_rate": 3e-3, "trainer__evaluate_every_steps": 20, "data__passes": 30, "data__batch_rows": 2}
    config = state.config(**quick, trainer__max_steps=40, trainer__parallel=Parallel.FSDP)
    nursery.start_ranks(config, config)
    assert nursery.results() == [0, 0], nursery.said.read_text()
    published = told(state, "published", "version")
    assert published
    assert [record.version for record in Registry(state.root / "registry").versions()] == published
    assert len(told(state, "judged", "acceptance_length")) == 2


# --- ends ---


def wait_for_step(state, known: int) -> None:
    deadline = time.monotonic() + 60
    while num_steps(state) <= known:
        assert time.monotonic() < deadline, "no step in a minute"
        time.sleep(0.01)


def num_steps(state) -> int:
    metrics = state.root / "training" / "default" / "metrics.jsonl"
    return metrics.read_text().count('"event": "step"') if metrics.exists() else 0


@pytest.mark.parametrize("asked", [0, 1])
def test_a_signal_to_one_process_ends_all_of_them(state, nursery, asked: int) -> None:
    names = state.add(range(8))
    config = state.config(data__batch_rows=2, trainer__checkpoint_every_steps=1000)
    pids = nursery.start_ranks(config, config)
    wait_for_step(state, 0)
    os.kill(pids[asked], signal.SIGTERM)
    assert nursery.results() == [0, 0], nursery.said.read_text()
    counts = state.ledger.status()
    assert (counts["leased"], counts["pending"] + counts["durable"]) == (0, len(names))
    assert state.ledger.latest_checkpoint("default").step == state.events("step")[-1]["step"]


def test_processes_killed_at_any_instant_lose_no_row(state, nursery) -> None:
    """Now the first, now the second; the other one ends by itself, with a sentence, and soon."""
    names = []
    quick = {"trainer__checkpoint_every_steps": 2, "data__batch_rows": 2, "data__passes": 2, "data__lease_timeout_s": 600.0}
    for kill in range(4):
        names += state.add(range(8 * kill, 8 * kill + 8))
        known = num_steps(state)
        pids = nursery.start_ranks(state.config(**quick), state.config(**quick))
        wait_for_step(state, known)
        time.sleep(0.05 * kill)
        os.kill(pids[kill % 2], signal.SIGKILL)
        killed_at = time.monotonic()
        results = nursery.results()
        assert time.monotonic() - killed_at < 30.0
        assert sorted(results) == [-signal.SIGKILL, 1]
        said = nursery.said.read_text()
        assert said.count("RankLost: This run is trained by several processes, and") == kill + 1
        consumed = state.ledger.consumption("default")
        assert set(consumed.values()) <= {1}
        counts = state.ledger.status()
        assert counts["leased"] + counts["pending"] + counts["durable"] == len(names)
        assert counts["durable"] == len(consumed)
    assert run(state.config(**quick, trainer__idle_timeout_s=0.5)) == 0
    assert state.ledger.consumption("default") == dict.fromkeys(names, 1)


def test_what_one_process_raises_all_of_them_say(state, nursery) -> None:
    state.add(range(8))
    before = len(nursery.said.read_text())
    nursery.start_ranks(state.config(), state.config(model__name="/nowhere/model"))
    assert nursery.results() == [1, 1]
    said = nursery.said.read_text()[before:]
    assert "several processes, and rank 1 failed with ModelError: There is no directory /nowhere/model" in said
    assert state.ledger.status()["pending"] == 8


def test_processes_with_other_settings_are_refused(state, nursery) -> None:
    state.add(range(8))
    before = len(nursery.said.read_text())
    nursery.start_ranks(state.config(), state.config(trainer__clip_norm=0.25))
    assert nursery.results() == [1, 1]
    assert nursery.said.read_text()[before:].count("trainer.clip_norm is 0.5 on rank 0 and 0.25 on rank 1") >= 2
    assert state.ledger.status() == {"pending": 8, "leased": 0, "durable": 0, "failed": 0, "heldout": 0}


def test_a_step_that_its_store_can_never_hold_is_refused(state) -> None:
    with pytest.raises(ConfigError, match=r"A step of 1 processes, 512 batches each .* MiB; raise features\.budget_mib"):
        run(
            state.config(
                trainer__accumulation=512, data__max_batch_tokens=1 << 20, data__replay_rows=4096, features__budget_mib=64
            )
        )


def test_torchrun_starts_a_run_as_it_does_any_other(state) -> None:
    names = state.add(range(8))
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--master-port=0", "--standalone"]
    places = ["trainer=scratch", f"model.name={state.model.path}", f"state_dir={state.root}", "trainer.idle_timeout_s=1"]
    settings = ["trainer.vocabulary_tokens=40", "data.batch_rows=2", "data.fill_wait_s=0.1", "trainer.num_threads=1"]
    done = subprocess.run(
        [*command, "-m", "training", *places, *settings, "trainer.parallel=fsdp"],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("training begins from scratch") == 1, "the first process speaks for all"
    assert state.ledger.consumption("default") == dict.fromkeys(names, 1)

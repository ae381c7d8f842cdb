"""Runs: admitted once, resumed bit by bit, killed at any instant; ends, waits, and refusals."""

from __future__ import annotations

import fcntl
import os
import signal
import threading
from pathlib import Path

import pytest
import torch

from runtime.errors import ConfigError, SlipstreamError
from runtime.features.flow import Watermarks
from runtime.features.refs import SampleMeta
from training.app import run
from training.config import Mode, TrainingConfig
from training.learning import checkpoint


def train(config: TrainingConfig) -> None:
    assert run(config) == 0


def weights(state, run_id: str = "default") -> dict[str, torch.Tensor]:
    return checkpoint.load(Path(state.ledger.latest_checkpoint(run_id).path))[0]


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_each_row_is_admitted_once_and_replayed_up_to_its_passes(state) -> None:
    names = state.add(range(10))
    train(state.config(trainer__idle_timeout_s=0.6))
    assert state.ledger.consumption("default") == dict.fromkeys(names, 1)
    steps = state.events("step")
    assert sum(step["num_rows"] for step in steps) == 10 * 3
    assert [step["step"] for step in steps] == list(range(1, len(steps) + 1))
    assert [step["num_rows"] for step in steps[:5]] == [4, 4, 4, 4, 4]
    assert steps[-1]["rows_admitted"] == 10
    assert steps[-1]["rows_to_replay"] == 0
    assert steps[-1]["loss"] < steps[0]["loss"]
    assert (state.root / "training" / "default" / "progress.png").stat().st_size > 10_000
    assert (state.root / "training" / "default" / "provenance.json").is_file()


def test_rows_that_come_later_are_trained_too(state) -> None:
    state.add(range(4))
    config = state.config(trainer__idle_timeout_s=3.0, trainer__max_steps=6)
    thread = threading.Timer(1.0, lambda: state.add(range(4, 8)))
    thread.start()
    train(config)
    thread.join()
    assert len(state.ledger.consumption("default")) == 8
    assert state.events("step")[-1]["step"] == 6


def test_ten_steps_are_five_and_a_checkpoint_and_five(state, tmp_path: Path, tiny, target) -> None:
    """Bit for bit, moments included, in the same order of rows."""
    other = type(state)(tmp_path / "other", tiny, target)
    for each in (state, other):
        each.add(range(12))
    train(state.config(trainer__max_steps=10, data__passes=4))
    train(other.config(trainer__max_steps=5, data__passes=4))
    five = weights(other)
    train(other.config(trainer__max_steps=10, data__passes=4))
    ten = weights(other)
    assert same(weights(state), ten)
    assert not same(five, ten)
    assert [step["loss"] for step in other.events("step")] == [step["loss"] for step in state.events("step")]


def test_offline_epochs_resume_in_their_middle_and_consume_nothing(state, tmp_path: Path, tiny, target) -> None:
    other = type(state)(tmp_path / "other", tiny, target)
    for each in (state, other):
        each.add(range(7))
    settings = {"mode": Mode.OFFLINE, "data__passes": 4}
    train(state.config(**settings))
    train(other.config(**settings, trainer__max_steps=3))
    train(other.config(**settings))
    assert same(weights(state), weights(other))
    assert [step["num_rows"] for step in state.events("step")] == [4, 3] * 4
    assert state.ledger.status()["pending"] == 7
    assert state.ledger.consumption("default") == {}


def test_signal_ends_the_step_saves_and_returns(state) -> None:
    names = state.add(range(8))
    timer = threading.Timer(1.5, os.kill, (os.getpid(), signal.SIGTERM))
    timer.start()
    before = signal.getsignal(signal.SIGTERM)
    train(state.config(data__passes=3, trainer__checkpoint_every_steps=1000))
    timer.join()
    assert signal.getsignal(signal.SIGTERM) is before
    steps = state.events("step")
    assert steps
    assert state.ledger.latest_checkpoint("default").step == steps[-1]["step"]
    assert state.ledger.consumption("default") == dict.fromkeys(names, 1)
    assert state.ledger.status()["leased"] == 0


def test_rows_of_another_target_are_failed_with_a_reason(state) -> None:
    good = state.add(range(5))
    for name, change in {
        "foreign": {"target_fingerprint": "0" * 16},
        "layers": {"aux_layer_ids": (0, 1, 2)},
        "damaged": {},
        "short": {},
    }.items():
        meta: SampleMeta = state.meta(name, **change)
        shape = {"num_generated": 2, "num_prompt": 1} if name == "short" else {}
        row = state.row(50, **shape)
        if name == "short":
            row.generated[0:] = False
        state.ledger.commit(state.store.put(meta, row), "train")
    damaged = next((state.root / "features" / "rows").glob("damaged.*"))
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"!")
    train(state.config(trainer__idle_timeout_s=0.6))
    reasons = state.ledger.failures()
    assert reasons.keys() == {"foreign", "layers", "damaged", "short"}
    assert "0000000000000000" in reasons["foreign"]
    assert "[0, 1, 2]" in reasons["layers"]
    assert "damaged" in reasons["damaged"]
    assert "no position" in reasons["short"]
    assert state.ledger.consumption("default") == dict.fromkeys(good, 1)


def test_structural_settings_cannot_change_on_resume(state) -> None:
    state.add(range(8))
    train(state.config(trainer__max_steps=2))
    with pytest.raises(ConfigError, match=r"draft_vocab_size is 64, but run 'default' began with 128"):
        run(state.config(trainer__max_steps=4, trainer__draft_vocab_size=64))
    with pytest.raises(ConfigError, match=r"mode is 'offline'"):
        run(state.config(trainer__max_steps=4, mode=Mode.OFFLINE))
    train(state.config(trainer__max_steps=4, trainer__learning_rate=1e-4, trainer__ttt_steps=2))
    assert state.events("step")[-1]["step"] == 4


def test_two_trainers_on_one_run_are_refused(state) -> None:
    run_dir = state.root / "training" / "default"
    run_dir.mkdir(parents=True)
    with (run_dir / ".lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match="another process is training that run"):
            run(state.config())
    state.add(range(4))
    train(state.config(trainer__max_steps=1))


def test_the_number_of_trainers_may_change(state) -> None:
    """Two, one of which stopped in its middle, and then one: each row is in the weights of one of them, once."""
    names = state.add(range(24))
    for worker in ("0", "1"):
        train(state.config(trainer__worker=worker, trainer__max_steps=2, data__passes=1))
    train(state.config(trainer__idle_timeout_s=0.5, data__passes=1))
    shares = [state.ledger.consumption(name) for name in ("default@0", "default@1", "default")]
    assert [len(share) for share in shares] == [8, 8, 8]
    assert shares[0] | shares[1] | shares[2] == dict.fromkeys(names, 1)
    train(state.config(trainer__worker="1", trainer__max_steps=3, data__passes=2))
    assert "resumed at step 2" in state.events("began", "default@1")[-1]["how"]


def test_overfitting_a_few_rows_raises_acceptance(state) -> None:
    state.add(range(6))
    train(state.config(trainer__max_steps=80, data__passes=200, trainer__learning_rate=3e-3))
    steps = state.events("step")
    assert steps[0]["acceptance"][0] < 0.3
    assert min(steps[-1]["acceptance"]) > 0.9


def test_a_run_stopped_before_its_first_rows_leaves_nothing(state) -> None:
    train(state.config(trainer__idle_timeout_s=0.3))
    assert state.ledger.latest_checkpoint("default") is None


# --- places ---


def test_a_state_directory_may_be_named_relatively_and_may_move(state, monkeypatch: pytest.MonkeyPatch) -> None:
    state.add(range(8))
    monkeypatch.chdir(state.root.parent)
    train(state.config(trainer__max_steps=2, state_dir="state"))
    state.root.rename(state.root.parent / "moved")
    (state.root.parent / "elsewhere").mkdir()
    monkeypatch.chdir(state.root.parent / "elsewhere")
    train(state.config(trainer__max_steps=4, state_dir="../moved"))
    state.root = state.root.parent / "moved"
    assert [step["step"] for step in state.events("step")] == [1, 2, 3, 4]
    assert "resumed at step 2" in state.events("began")[-1]["how"]


@pytest.mark.parametrize("place", ["file", "checkpoints"])
def test_a_place_that_cannot_be_written_is_one_sentence_and_costs_no_row(state, place: str) -> None:
    names = state.add(range(8))
    if place == "file":
        (state.root / "file").write_text("")
        config = state.config(state_dir=str(state.root / "file"))
    else:
        (state.root / "training" / "default").mkdir(parents=True)
        (state.root / "training" / "default" / "checkpoints").write_text("")
        config = state.config()
    with pytest.raises(SlipstreamError, match=r"state_dir .* cannot be used .*; give a directory that can be written"):
        run(config)
    assert state.ledger.status()["pending"] == len(names)


def test_a_server_that_lets_fewer_rows_wait_than_a_step_takes_is_refused_at_start(state) -> None:
    names = state.add(range(3))
    state.ledger.set_watermarks(Watermarks(high_rows=16, low_rows=7, high_bytes=1 << 30, low_bytes=1 << 20))
    settings = {"data__batch_rows": 4, "trainer__accumulation": 2, "trainer__idle_timeout_s": 0.5}
    with pytest.raises(ConfigError, match=r"A step takes 8 rows .* lets 7 wait.*capture\.low_rows=8"):
        run(state.config(**settings))
    assert state.ledger.status()["pending"] == 3, "nothing was leased"
    state.ledger.set_watermarks(Watermarks(high_rows=16, low_rows=8, high_bytes=1 << 30, low_bytes=1 << 20))
    assert run(state.config(**settings)) == 0
    assert state.ledger.consumption("default") == dict.fromkeys(names, 1)


def test_a_run_from_scratch_does_not_wait_for_rows_that_the_server_sheds(state) -> None:
    names = state.add(range(3))
    state.ledger.set_watermarks(Watermarks(high_rows=16, low_rows=8, high_bytes=1 << 30, low_bytes=1 << 20))
    state.ledger.set_shedding(True)
    run(state.config(trainer__vocabulary_tokens=10**6, trainer__max_steps=2, trainer__max_time_s=60.0))
    assert state.ledger.consumption("default") == dict.fromkeys(names, 1)


def test_a_draft_vocabulary_beyond_the_targets_is_refused(state) -> None:
    with pytest.raises(ConfigError, match=r"trainer\.draft_vocab_size is 100000; it must be at most \d+, the vocabulary of"):
        run(state.config(trainer__draft_vocab_size=100_000))


def test_a_run_without_rows_says_so(state, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    train(state.config(trainer__max_time_s=0.1))
    assert "the run is over before there were rows to learn from" in caplog.text
    with pytest.raises(
        ConfigError, match=r"no rows with features to learn from; make some with mode=capture, or name .* data\.corpus"
    ):
        run(state.config(mode=Mode.OFFLINE))


def test_the_last_word_of_a_run_says_where_its_drafter_is(state, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    state.add(range(4))
    config = state.config(mode=Mode.OFFLINE, trainer__max_steps=2)
    train(config)
    assert "the run is over at step 2; it has published no version; mode=export export.drafter=default writes" in caplog.text
    train(config)
    assert "run default is at step 2, as before: raise data.passes, trainer.max_steps" in caplog.text
    assert "(trainer.init=default goes on from what it has learned)" in caplog.text

"""A run as a program: what it leaves when it ends, and when it breaks off; what it takes to get to work."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module
from typing import Any

import pytest

from runtime.errors import ConfigError, ModelError
from training.app import COMMANDS, run
from training.config import Mode
from training.reporting.config import TrackerKind

HEAVY = "{'transformers', 'tensorboard', 'mlflow', 'wandb', 'matplotlib', 'torch.distributed.tensor', 'sympy'}"


def test_a_run_that_breaks_off_leaves_its_picture(state: Any, caplog: pytest.LogCaptureFixture) -> None:
    state.add(range(8))
    run_dir = state.root / "training" / "default"
    assert run(state.config(mode=Mode.OFFLINE, trainer__max_steps=4, tracker__kind=TrackerKind.NONE)) == 0
    (run_dir / "progress.png").unlink()
    for path in (run_dir / "checkpoints").glob("*/state.safetensors"):
        path.write_bytes(b"nothing")
    caplog.set_level("INFO")
    with pytest.raises(ModelError, match="cannot be used"):
        run(state.config(mode=Mode.OFFLINE, trainer__max_steps=8, tracker__kind=TrackerKind.NONE))
    assert (run_dir / "progress.png").is_file()
    assert f"picture of the run: {run_dir / 'progress.png'}" in caplog.text


def test_figures_go_to_tensorboard_unless_told_otherwise(state: Any) -> None:
    state.add(range(8))
    assert run(state.config(mode=Mode.OFFLINE, trainer__max_steps=2)) == 0
    assert list((state.root / "training" / "default" / "tensorboard").glob("events.*"))


@pytest.mark.parametrize("device", ["meta", "cuda:99"])
def test_a_device_that_cannot_be_had_is_refused(state: Any, device: str) -> None:
    with pytest.raises(ConfigError, match=f"model.device is '{device}'"):
        run(state.config(mode=Mode.OFFLINE, model__device=device))


def test_a_trainer_that_starts_again_waits_for_nothing_it_does_not_use() -> None:
    code = f"import sys; import training.app; print(sorted({HEAVY} & sys.modules.keys()))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


@pytest.mark.parametrize("mode", [mode for mode in Mode if not mode.is_training])
def test_every_mode_that_is_no_training_run_has_a_command(mode: Mode) -> None:
    module, _, name = COMMANDS[mode].partition(":")
    assert callable(getattr(import_module(module), name))


INTERRUPTED = """
import os, signal, threading
from training.app import _stopping

stop = threading.Event()
before = signal.getsignal(signal.SIGTERM)
with _stopping([signal.SIGTERM], stop):
    with stop._cond:  # as `stop.wait` holds it for an instant
        os.kill(os.getpid(), signal.SIGTERM)
        assert signal.getsignal(signal.SIGTERM) == before, "a second one does what it usually does"
    assert stop.wait(10)
"""


def test_a_signal_while_the_event_is_in_use_is_heard_and_hangs_nothing() -> None:
    done = subprocess.run([sys.executable, "-c", INTERRUPTED], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr

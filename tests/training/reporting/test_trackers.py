"""Trackers get the figures of metrics.jsonl, through the real libraries, and whatever they do a run goes on."""

from __future__ import annotations

import io
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from runtime.errors import ConfigError
from training.learning.learner import StepResult
from training.reporting import trackers
from training.reporting.config import TrackerConfig, TrackerKind
from training.reporting.history import History
from training.reporting.progress import Progress
from training.reporting.trackers import Sink


def run(run_dir: Path, sink: Sink, steps: range) -> None:
    with Progress(run_dir, Console(file=io.StringIO()), tracker=sink) as progress:
        progress.began("somewhere", steps.start - 1)
        for step in steps:
            progress.stepped(StepResult(step, 8.0 / step, [1.5, 0.5], 10, [10, 8], [6, 2], 100, 0.4, 5e-4, 0.5), 4, {"rows": 3})


def tensorboard_scalars(run_dir: Path, name: str) -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run_dir / "tensorboard"))
    events.Reload()
    return [(event.step, round(event.value, 4)) for event in events.Scalars(name)]


def test_tensorboard_is_the_default_and_its_curves_go_on(tmp_path: Path) -> None:
    run(tmp_path, Sink(TrackerConfig(), tmp_path), range(1, 5))
    run(tmp_path, Sink(TrackerConfig(), tmp_path), range(3, 5))  # killed, and back to the checkpoint of step 2
    assert tensorboard_scalars(tmp_path, "train/loss") == [(1, 8.0), (2, 4.0), (3, 2.6667), (4, 2.0)]
    assert tensorboard_scalars(tmp_path, "train/acceptance_2")[0] == (1, 0.25)
    assert tensorboard_scalars(tmp_path, "train/learning_rate")[0] == (1, 0.0005)
    assert tensorboard_scalars(tmp_path, "train/tokens_per_s")[0] == (1, 200.0)


def test_wandb_offline(tmp_path: Path) -> None:
    run(tmp_path, Sink(TrackerConfig(kind=TrackerKind.WANDB, close_timeout_s=60), tmp_path), range(1, 5))
    [written] = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    assert b"train/acceptance_2" in written.read_bytes()


def test_mlflow_without_a_server(tmp_path: Path) -> None:
    from mlflow.tracking import MlflowClient

    for steps in (range(1, 3), range(3, 5)):
        run(tmp_path, Sink(TrackerConfig(kind=TrackerKind.MLFLOW, close_timeout_s=60), tmp_path), steps)
    client = MlflowClient(tracking_uri=(tmp_path / "mlruns").as_uri())
    [experiment] = [each for each in client.search_experiments() if each.name == "slipstream"]
    [again] = client.search_runs([experiment.experiment_id])
    history = client.get_metric_history(again.info.run_id, "train/loss")
    assert [(each.step, each.value) for each in history] == [(1, 8.0), (2, 4.0), (3, 8 / 3), (4, 2.0)]
    assert again.info.status == "FINISHED"
    sink = Sink(TrackerConfig(kind=TrackerKind.MLFLOW, close_timeout_s=60), tmp_path)
    sink.begin(4)
    sink.put({"heldout/slice/q&a/acceptance_length": 2.0}, 5)
    sink.close()
    assert client.get_metric_history(again.info.run_id, "heldout/slice/q_a/acceptance_length")[0].value == 2.0


TRACKED = """
import sys
from pathlib import Path
from training.reporting.config import TrackerConfig, TrackerKind
from training.reporting.trackers import Sink

sink = Sink(TrackerConfig(kind=TrackerKind(sys.argv[1]), close_timeout_s=60), Path(sys.argv[2]))
sink.begin(0)
sink.put({"train/loss": 1.0}, 1)
sink.close()
"""


@pytest.mark.parametrize("kind", ["tensorboard", "wandb", "mlflow"])
def test_nothing_leaves_the_machine(tmp_path: Path, kind: str) -> None:
    """Whoever asks the internet for anything asks this proxy first."""
    with socket.create_server(("127.0.0.1", 0)) as proxy:
        address = f"http://127.0.0.1:{proxy.getsockname()[1]}"
        proxies = dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"), address)
        env = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), **proxies}  # nothing says that this is a test
        tracked = subprocess.run([sys.executable, "-c", TRACKED, kind, str(tmp_path)], env=env, capture_output=True, text=True)
        assert (tracked.returncode, "tracker" in tracked.stderr) == (0, False), tracked.stderr
        proxy.setblocking(False)
        with pytest.raises(BlockingIOError):
            proxy.accept()


def test_none_leaves_nothing(tmp_path: Path) -> None:
    run(tmp_path, Sink(TrackerConfig(kind=TrackerKind.NONE), tmp_path), range(1, 3))
    assert [entry.name for entry in tmp_path.iterdir()] == ["metrics.jsonl"]


class Failing:
    def __init__(self, config: TrackerConfig, run_dir: Path, first_step: int) -> None:
        self.num_taken = 0

    def log(self, figures: trackers.Figures, step: int) -> None:
        self.num_taken += 1
        if self.num_taken == 2:
            raise RuntimeError("quota\nexceeded")

    def close(self) -> None:
        raise AssertionError("it gets nothing more")


def test_a_tracker_that_fails_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(trackers, "_TRACKERS", {TrackerKind.TENSORBOARD: Failing})
    run(tmp_path, Sink(TrackerConfig(), tmp_path), range(1, 100))
    assert len(History.read(tmp_path).steps) == 99
    assert [record.message for record in caplog.records if record.levelname == "WARNING"] == [
        "tracker tensorboard failed and gets no more figures: quota exceeded; metrics.jsonl has them"
    ]


class Hanging(Failing):
    end = threading.Event()

    def log(self, figures: trackers.Figures, step: int) -> None:
        self.end.wait()


@pytest.fixture
def hanging(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(trackers, "_TRACKERS", {TrackerKind.TENSORBOARD: Hanging})
    monkeypatch.setattr(trackers, "QUEUE_SIZE", 4)
    yield
    Hanging.end.set()


@pytest.mark.usefixtures("hanging")
def test_a_tracker_that_hangs_holds_nobody_up(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run(tmp_path, Sink(TrackerConfig(close_timeout_s=0.1), tmp_path), range(1, 20))
    assert len(History.read(tmp_path).steps) == 19
    assert "did not take all figures in time" in caplog.text


def test_a_package_that_is_not_here_is_named_before_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trackers, "_PACKAGES", {TrackerKind.WANDB: "a_package_of_nobody"})
    with pytest.raises(ConfigError, match=r"pip install 'slipstream\[a_package_of_nobody\]'"):
        Sink(TrackerConfig(kind=TrackerKind.WANDB), tmp_path)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"project": " "}, "tracker.project"),
        ({"uri": "http://tracker"}, "tracker.uri"),
        ({"kind": TrackerKind.MLFLOW, "uri": ""}, "tracker.uri"),
        ({"close_timeout_s": -1.0}, "tracker.close_timeout_s"),
    ],
)
def test_settings_are_checked(settings: dict, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        TrackerConfig(**settings)

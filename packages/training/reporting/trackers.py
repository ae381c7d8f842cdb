"""Trackers: TensorBoard, Weights & Biases, MLflow. Sinks for figures that metrics.jsonl has anyway.

A tracker is another's code, may ask a network, and may hang: it runs on a thread of its own behind a bounded queue. What it
raises is told once, and then it gets nothing more; training goes on whatever happens here. Knows no figure by name.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import math
import os
import queue
import re
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from runtime.config import require
from training.reporting.config import TrackerConfig, TrackerKind

logger = logging.getLogger(__name__)

IDENTITY_FILE = "tracker.json"  # by which a tracker knows a run again
QUEUE_SIZE = 4096  # figures of so many events may wait
_PACKAGES = {TrackerKind.TENSORBOARD: "tensorboard", TrackerKind.WANDB: "wandb", TrackerKind.MLFLOW: "mlflow"}

_NOT_MLFLOW = re.compile(r"[^\w\-. :/]")

Figures = Mapping[str, float]


class Tracker(Protocol):
    """Takes figures of steps in any order; the same step again replaces nothing that it cannot replace."""

    def log(self, figures: Figures, step: int) -> None: ...

    def close(self) -> None: ...


class TensorBoard:
    """Events in <run>/tensorboard. Steps from first_step on that were told before are taken back."""

    def __init__(self, config: TrackerConfig, run_dir: Path, first_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(run_dir / "tensorboard"), purge_step=first_step)

    def log(self, figures: Figures, step: int) -> None:
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class Wandb:
    """Offline in <run>/wandb (`wandb sync` sends it on), or to a server. Curves are over our own steps."""

    def __init__(self, config: TrackerConfig, run_dir: Path, first_step: int) -> None:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # which goes to its makers, offline too
        import wandb

        settings = wandb.Settings(
            console="off", silent=True, disable_git=True, **({"base_url": config.uri} if config.uri else {})
        )
        self._wandb = wandb
        self._run = wandb.init(
            project=config.project,
            name=run_dir.name,
            id=_identity(run_dir, "wandb", lambda: uuid.uuid4().hex),
            dir=str(run_dir),
            mode="online" if config.uri else "offline",
            resume="allow" if config.uri else None,
            settings=settings,
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, figures: Figures, step: int) -> None:
        self._run.log({**figures, "step": step})

    def close(self) -> None:
        self._run.finish()
        self._wandb.teardown()  # until then its process may not have written what it was given


class Mlflow:
    """Files in <run>/mlruns, or a tracking server."""

    def __init__(self, config: TrackerConfig, run_dir: Path, first_step: int) -> None:
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # without a server, files are what there is
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # which goes to its makers
        from mlflow.tracking import MlflowClient

        self._client = MlflowClient(tracking_uri=config.uri or (run_dir / "mlruns").absolute().as_uri())
        experiment = self._client.get_experiment_by_name(config.project)
        experiment_id = experiment.experiment_id if experiment else self._client.create_experiment(config.project)
        self._id = _identity(
            run_dir, "mlflow", lambda: str(self._client.create_run(experiment_id, run_name=run_dir.name).info.run_id)
        )
        self._client.update_run(self._id, status="RUNNING")

    def log(self, figures: Figures, step: int) -> None:
        from mlflow.entities import Metric

        now_ms = int(time.time() * 1000)
        names = {name: _NOT_MLFLOW.sub("_", name) for name in figures}  # slices of the traffic are named by others
        self._client.log_batch(self._id, metrics=[Metric(names[name], figures[name], now_ms, step) for name in figures])

    def close(self) -> None:
        self._client.set_terminated(self._id)


_TRACKERS: Mapping[TrackerKind, Callable[[TrackerConfig, Path, int], Tracker]] = {
    TrackerKind.TENSORBOARD: TensorBoard,
    TrackerKind.WANDB: Wandb,
    TrackerKind.MLFLOW: Mlflow,
}


class Sink:
    """Figures for the tracker that the settings name. Opened by the first `begin`."""

    def __init__(self, config: TrackerConfig, run_dir: Path) -> None:
        """ConfigError if the tracker's package is not installed."""
        self._config = config
        self._run_dir = run_dir
        self._queue: queue.Queue[tuple[Figures, int] | None] = queue.Queue(QUEUE_SIZE)
        self._thread: threading.Thread | None = None
        self._num_lost = 0
        package = _PACKAGES.get(config.kind)
        is_there = package is None or importlib.util.find_spec(package) is not None
        expected = f"one whose package is installed: pip install 'slipstream[{package}]', or use tracker=none"
        require(is_there, "tracker.kind", config.kind.value, expected)

    def begin(self, step: int) -> None:
        """The run begins, or goes on, behind this step."""
        if self._config.kind is not TrackerKind.NONE and self._thread is None:
            self._thread = threading.Thread(target=self._work, args=(step + 1,), name="tracker", daemon=True)
            self._thread.start()

    def put(self, figures: Mapping[str, Any], step: int) -> None:
        """What is a finite number among the figures. Never waits."""
        numbers = {name: float(value) for name, value in figures.items() if _is_number(value)}
        if self._thread is not None and numbers:
            try:
                self._queue.put_nowait((numbers, step))
            except queue.Full:
                self._num_lost += 1

    def close(self) -> None:
        """Wait a bounded time for what is in the queue."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        deadline = time.monotonic() + self._config.close_timeout_s
        try:
            self._queue.put(None, timeout=self._config.close_timeout_s)
            thread.join(max(deadline - time.monotonic(), 0.0))
        except queue.Full:
            self._num_lost += 1
        if thread.is_alive() or self._num_lost:
            logger.warning("tracker %s did not take all figures in time; metrics.jsonl has them", self._config.kind.value)

    def _work(self, first_step: int) -> None:
        tracker: Tracker | None = None
        try:
            tracker = _TRACKERS[self._config.kind](self._config, self._run_dir, first_step)
            while (item := self._queue.get()) is not None:
                tracker.log(*item)
            tracker.close()
        except Exception as error:  # a guest's code may raise anything, and training must go on
            told = " ".join(str(error).split()) or type(error).__name__
            logger.warning(
                "tracker %s failed and gets no more figures: %s; metrics.jsonl has them", self._config.kind.value, told
            )
            while self._queue.get() is not None:
                pass


def _identity(run_dir: Path, kind: str, make: Callable[[], str]) -> str:
    """The run's id at a tracker, made at its first beginning."""
    path = run_dir / IDENTITY_FILE
    known: dict[str, str] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    if kind not in known:
        known[kind] = make()
        path.write_text(json.dumps(known) + "\n", encoding="utf-8")
    return known[kind]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)

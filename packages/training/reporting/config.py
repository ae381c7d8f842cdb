"""Settings of what a run tells beside its own files. Imports no torch: the door reads it."""

from __future__ import annotations

from dataclasses import dataclass

from runtime.config import Choice, require


class TrackerKind(Choice):
    TENSORBOARD = "tensorboard"  # files in the run's directory
    WANDB = "wandb"  # the extra `wandb`
    MLFLOW = "mlflow"  # the extra `mlflow`
    NONE = "none"


@dataclass
class TrackerConfig:
    """Where figures go beside metrics.jsonl, which always has them all."""

    kind: TrackerKind = TrackerKind.TENSORBOARD
    project: str = "slipstream"  # wandb's project, mlflow's experiment
    uri: str | None = None  # address of a wandb or mlflow server; null: files in the run's directory, nothing leaves this machine
    close_timeout_s: float = 20.0  # how long the end of a run waits for figures that the tracker has not taken yet

    def __post_init__(self) -> None:
        require(bool(self.project.strip()), "tracker.project", self.project, "a name")
        has_server = self.kind in (TrackerKind.WANDB, TrackerKind.MLFLOW)
        ok = self.uri is None or (has_server and bool(self.uri.strip()))
        require(ok, "tracker.uri", self.uri, "the address of a server with tracker=wandb or tracker=mlflow, or null")
        ok = 0 <= self.close_timeout_s <= 600
        require(ok, "tracker.close_timeout_s", self.close_timeout_s, "between 0 and 600 seconds")

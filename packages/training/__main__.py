"""`python -m training`: the door. Settings come from configs/training.yaml, its groups, and the command line."""

from collections.abc import Sequence

from runtime.configuration import Job, main
from training.config import TrainingConfig


def run(config: TrainingConfig) -> int:
    from training.app import run  # here, so that --help and refused settings do not wait for torch

    return run(config)


def sweep(jobs: Sequence[Job[TrainingConfig]]) -> int:
    from training.sweep import sweep

    return sweep(jobs)


if __name__ == "__main__":
    main("training", TrainingConfig, run, sweep)

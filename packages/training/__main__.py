"""`python -m training`: the door. Settings come from configs/training.yaml, its groups, and the command line."""

import os

from runtime.configuration import main
from training.config import TrainingConfig


def run(config: TrainingConfig) -> int:
    # Before torch is imported. Threads that wait by spinning, OpenMP's default, bring every program on a shared core to a
    # crawl: beside a busy server a training step on two threads took 14 s with spinning and 1.6 s without.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from training.app import run  # here, so that --help and refused settings do not wait for torch

    return run(config)


if __name__ == "__main__":
    main("training", TrainingConfig, run)

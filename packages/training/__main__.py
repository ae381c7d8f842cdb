"""`python -m training [group=option ...] [setting=value ...]`: see --help."""

import os


def start() -> None:
    # Before torch is imported. Threads that wait by spinning, OpenMP's default, bring every program on a shared core to a
    # crawl: beside a busy server a training step on two threads took 14 s with spinning and 1.6 s without.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from runtime.configuration import main
    from training.app import run
    from training.config import TrainingConfig

    main("training", TrainingConfig, run)


if __name__ == "__main__":
    start()

"""`python -m serving`: the door. Settings come from configs/serving.yaml, its groups, and the command line."""

from runtime.configuration import main
from serving.config import ServingConfig


def run(config: ServingConfig) -> int:
    from serving.app import run  # here, so that --help and refused settings do not wait for torch

    return run(config)


if __name__ == "__main__":
    main("serving", ServingConfig, run)

"""`python -m serving`: the door. Settings come from configs/serving.yaml, its groups, and the command line."""

from runtime.configuration import main
from serving.app import run
from serving.config import ServingConfig

if __name__ == "__main__":
    main("serving", ServingConfig, run)

"""`python -m training [group=option ...] [setting=value ...]`: see --help."""

from runtime.configuration import main
from training.app import run
from training.config import TrainingConfig

if __name__ == "__main__":
    main("training", TrainingConfig, run)

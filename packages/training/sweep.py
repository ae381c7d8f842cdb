"""A sweep: `python -m training --multirun trainer.learning_rate=1e-3,5e-4`. Its runs are made one after the other, each under
an id of its own, and end in one comparison.

    <state_dir>/sweeps/<name>/{sweep.json, sweep.md, sweep.png}

The same command again resumes the same runs, as their ids come from what they differ in. A signal ends the run in hand and
the sweep with it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import re
import threading
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from rich.console import Console

from runtime.configuration import Job, told
from training.app import run, state_directory
from training.config import TrainingConfig
from training.reporting.comparison import Outcome, compare
from training.reporting.history import History
from training.reporting.origins import start_of

MAX_ID = 64
_NOT_IN_ID = re.compile(r"[^A-Za-z0-9._-]+")


def sweep(jobs: Sequence[Job[TrainingConfig]]) -> int:
    """The first exit status that is not 0. Commands that are no training runs are made in turn and not compared."""
    stop = threading.Event()
    codes: list[int] = []
    done: list[tuple[TrainingConfig, str, str]] = []
    planned = with_ids(jobs)
    for config, changed in planned:
        if stop.is_set():
            break
        codes.append(told(partial(run, stop=stop), config))
        ended = "refused or failed" if codes[-1] else "stopped" if stop.is_set() else "finished"
        done.append((config, changed, ended))
    trained = [each for each in done if each[0].mode.is_training]
    if len(trained) > 1 and int(os.environ.get("RANK", "0")) == 0:  # of the processes that torchrun starts, one tells
        first = planned[0][0]
        name = f"{jobs[0].config.trainer.run_id}-{_hash(' '.join(config.trainer.name for config, _ in planned))}"
        _compare(trained, state_directory(first) / "sweeps" / name)
    return next((code for code in codes if code), 0)


def with_ids(jobs: Sequence[Job[TrainingConfig]]) -> list[tuple[TrainingConfig, str]]:
    """Each job's settings, with a run id that no other job has, and what it differs in from the others."""
    common = set.intersection(*(set(job.overrides) for job in jobs))
    changed = [tuple(each for each in job.overrides if each not in common) for job in jobs]
    places = Counter((job.config.state_dir, job.config.trainer.name) for job in jobs)
    result = []
    for job, overrides in zip(jobs, changed, strict=True):
        config = job.config
        if config.mode.is_training and places[config.state_dir, config.trainer.name] > 1:
            run_id = _run_id(config.trainer.run_id, overrides)
            config = dataclasses.replace(config, trainer=dataclasses.replace(config.trainer, run_id=run_id))
        result.append((config, " ".join(overrides)))
    return result


def _run_id(base: str, overrides: Sequence[str]) -> str:
    """default-learning_rate_1e-3 for trainer.learning_rate=1e-3; where that is too long, its tail is a hash."""
    words = [_NOT_IN_ID.sub("_", each.partition("=")[0].rpartition(".")[2] + "_" + each.partition("=")[2]) for each in overrides]
    name = "-".join([base, *words])
    return name if len(name) <= MAX_ID else f"{name[: MAX_ID - 9]}-{_hash(name)}"


def _compare(done: Sequence[tuple[TrainingConfig, str, str]], directory: Path) -> None:
    runs = []
    for config, changed, ended in done:
        run_dir = state_directory(config) / "training" / config.trainer.name
        history = History.read(run_dir)
        runs.append((Outcome.of(config.trainer.name, history, changed, ended, start_of(run_dir)), history))
    console = Console(stderr=True)
    compare(runs, directory, console)
    console.print(f"written to {directory}: sweep.md, sweep.json, sweep.png", markup=False, highlight=False, soft_wrap=True)


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]

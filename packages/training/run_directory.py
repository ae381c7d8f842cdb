"""The directory of a run while one process trains it: its lock, and how it was before that process came.

A start that is refused before it trains leaves it as it was: a new run leaves no directory, and what a run of that name said of
itself stays. Knows no trainer: a start has begun when metrics.jsonl says so.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from runtime.errors import ConfigError
from runtime.files import hold, write_atomic
from training.reporting.history import BEGAN, METRICS_FILE
from training.reporting.plot import PLOT_FILE

logger = logging.getLogger(__name__)

LOCK = ".lock"
REWRITTEN = ("config.yaml", "provenance.json")  # by each start
ALWAYS = (LOCK, PLOT_FILE)  # may be new without harm


@contextmanager
def only_one(run_dir: Path, run_id: str) -> Iterator[None]:
    """One process per run; the lock goes with the process, however that ends. ConfigError if another one is there. If what is
    done here raises before training began, the directory is left as it was."""
    made = [path for path in (run_dir, *run_dir.parents) if not path.exists()]
    with _locked(run_dir, run_id):
        before = _Before.of(run_dir)
        try:
            yield
        except BaseException:
            try:
                if not before.has_begun_since(run_dir):
                    _undo(run_dir, made, before)
            except OSError as error:  # why it was refused matters more
                logger.warning("what a refused start left in %s is not removed: %s", run_dir, error)
            raise


@contextmanager
def _locked(run_dir: Path, run_id: str) -> Iterator[None]:
    while True:
        run_dir.mkdir(parents=True, exist_ok=True)
        try:
            file = hold(run_dir / LOCK)
        except FileNotFoundError:
            continue  # a refused start removed the directory meanwhile
        except BlockingIOError as error:
            raise ConfigError(
                f"trainer.run_id is {run_id!r}, and another process is training that run; stop it, or use another run_id."
            ) from error
        with file:
            if _is_at(file, run_dir / LOCK):
                yield
                return


def _is_at(file: TextIO, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


@dataclass(frozen=True)
class _Before:
    """What the directory held when a start came to it."""

    entries: frozenset[str]
    rewritten: dict[str, bytes]
    metrics_bytes: int  # whole lines

    @staticmethod
    def of(run_dir: Path) -> _Before:
        rewritten = {name: (run_dir / name).read_bytes() for name in REWRITTEN if (run_dir / name).is_file()}
        lines, end, _ = _metrics(run_dir).rpartition(b"\n")
        return _Before(frozenset(entry.name for entry in run_dir.iterdir()), rewritten, len(lines + end))

    def has_begun_since(self, run_dir: Path) -> bool:
        return BEGAN.encode() in _metrics(run_dir, self.metrics_bytes)


def _metrics(run_dir: Path, first: int = 0) -> bytes:
    path = run_dir / METRICS_FILE
    if not path.is_file():
        return b""
    with path.open("rb") as file:
        file.seek(first)
        return file.read()


def _undo(run_dir: Path, made: list[Path], before: _Before) -> None:
    if run_dir in made:
        shutil.rmtree(run_dir)
        with contextlib.suppress(OSError):  # not empty: of use to others
            for parent in made[1:]:
                parent.rmdir()
        return
    for entry in run_dir.iterdir():
        if entry.name not in before.entries and entry.name not in ALWAYS:
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
    for name, data in before.rewritten.items():
        write_atomic(run_dir / name, data)
    if METRICS_FILE in before.entries:
        os.truncate(run_dir / METRICS_FILE, before.metrics_bytes)

"""A tap into a small plane, and what its tests ask of it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from runtime.backends.base import TargetInfo
from runtime.config import CaptureConfig
from runtime.features import (
    CapturedTurn,
    FeatureRow,
    FeatureTap,
    Ledger,
    LocalDirectoryStore,
)

MakeTurn = Callable[..., CapturedTurn]
Plane = tuple[LocalDirectoryStore, Ledger]
CONFIG = CaptureConfig(heldout_fraction=0.0)


@contextmanager
def tapping(plane: Plane, info: TargetInfo, config: CaptureConfig = CONFIG, **options: Any) -> Iterator[FeatureTap]:
    tap = FeatureTap(*plane, config, run_id="server", target_info=info, **options)
    try:
        yield tap
    finally:
        tap.close()


def nonzero(tap: FeatureTap) -> dict[str, int]:
    return {outcome: count for outcome, count in tap.counters().items() if count}


def is_written(tap: FeatureTap, num_turns: int) -> bool:
    return tap.counters()["captured"] + tap.counters()["shed_budget"] == num_turns


def rows_of(plane: Plane) -> list[FeatureRow]:
    store, ledger = plane
    return [store.get(ref)[0] for ref in ledger.lease("reader", 99, 600)]


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


class Gate:
    """A redaction hook that holds the writer until it is opened."""

    def __init__(self) -> None:
        self.opened = threading.Event()
        self.entered = threading.Event()

    def __call__(self, token_ids: tuple[int, ...], text: str) -> bool:
        self.entered.set()
        assert self.opened.wait(30)
        return False

"""Progress of long work with a known end: a bar on a terminal, a plain line every few seconds elsewhere."""

from __future__ import annotations

import logging
import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

logger = logging.getLogger(__name__)

LOG_EVERY_S = 5.0


class Bar:
    def __init__(self, console: Console, what: str) -> None:
        """what: is counted, such as "answers"."""
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[said]}"),
        )
        self._what = what
        self._rich = Progress(*columns, console=console) if console.is_terminal else None
        self._task = self._rich.add_task(what, total=None, said="") if self._rich is not None else None
        self._began_at = self._logged_at = time.monotonic()
        self._first: int | None = None  # what was done when the first figure came, by somebody before

    def __enter__(self) -> Self:
        if self._rich is not None:
            self._rich.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._rich is not None:
            self._rich.stop()

    def show(self, done: int, total: int, said: str = "") -> None:
        """said: other figures of now."""
        self._first = done if self._first is None else self._first
        if self._rich is not None and self._task is not None:
            self._rich.update(self._task, completed=done, total=total, said=said)
        elif time.monotonic() - self._logged_at >= LOG_EVERY_S:
            self._logged_at = time.monotonic()
            left_s = (self._logged_at - self._began_at) / max(done - self._first, 1) * max(total - done, 0)
            logger.info("%s: %d of %d, about %.0f s left%s", self._what, done, total, left_s, f", {said}" if said else "")

"""What a demo shows while it runs: a live panel on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import time
from contextlib import ExitStack
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.table import Table

PLAIN_EVERY_S = 10.0


class Board:
    def __init__(self) -> None:
        self._console = Console(highlight=False)
        self._values: dict[str, str] = {}
        self._stage = ""
        self._printed_at = 0.0
        self._began_at = time.monotonic()
        self._exit = ExitStack()
        self._is_live = self._console.is_terminal

    def __enter__(self) -> Board:
        if self._is_live:
            self._exit.enter_context(Live(console=self._console, refresh_per_second=4, get_renderable=self._panel))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._exit.close()

    def stage(self, title: str) -> None:
        """A new part of the run, with figures of its own."""
        self._stage = title
        self._values.clear()
        self.say(title)

    def say(self, text: str) -> None:
        """Something that happened once."""
        self._console.print(f"{self._elapsed()}  {text}", markup=False, soft_wrap=True)

    def show(self, **values: object) -> None:
        """Figures of now; underscores become spaces."""
        self._values |= {name.replace("_", " "): str(value) for name, value in values.items()}
        if not self._is_live and time.monotonic() - self._printed_at >= PLAIN_EVERY_S:
            self._printed_at = time.monotonic()
            self.say("  " + ", ".join(f"{name} {value}" for name, value in self._values.items()))

    def _elapsed(self) -> str:
        minutes, seconds = divmod(int(time.monotonic() - self._began_at), 60)
        return f"{minutes:2d}:{seconds:02d}"

    def _panel(self) -> Table:
        table = Table(title=f"{self._elapsed()}  {self._stage}", show_header=False, title_justify="left")
        for name, value in self._values.items():
            table.add_row(name, value)
        return table

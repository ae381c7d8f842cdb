"""Progress of long work: a bar on a terminal, lines elsewhere, and an honest time left."""

from __future__ import annotations

import io
import logging

import pytest
from rich.console import Console

from training.reporting import bar
from training.reporting.bar import Bar


def test_lines_where_there_is_no_terminal(monkeypatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(bar, "LOG_EVERY_S", 0.0)
    now = [100.0]
    monkeypatch.setattr(bar.time, "monotonic", lambda: now[0])
    with caplog.at_level(logging.INFO), Bar(Console(file=io.StringIO()), "answers") as shown:
        now[0] += 10
        shown.show(50, 100)  # which somebody made before
        now[0] += 10
        shown.show(60, 100, "7 tokens/s")
    assert caplog.messages[-1] == "answers: 60 of 100, about 80 s left, 7 tokens/s"  # 10 in 20 s, and 40 to go


def test_a_bar_on_a_terminal() -> None:
    screen = io.StringIO()
    with Bar(Console(file=screen, force_terminal=True, width=120), "answers") as shown:
        shown.show(3, 12, "7 tokens/s")
    assert "answers" in screen.getvalue()
    assert "3/12" in screen.getvalue()
    assert "7 tokens/s" in screen.getvalue()

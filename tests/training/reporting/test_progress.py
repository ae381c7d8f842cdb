"""What a run tells, on a terminal and in files, and the picture drawn from it."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import pytest
from rich.console import Console

from runtime.registry import VersionState
from training.judging.gate import Published
from training.learning.learner import StepResult
from training.reporting import plot
from training.reporting.history import METRICS_FILE, History
from training.reporting.progress import Ends, Progress


def result(step: int, loss: float = 2.0) -> StepResult:
    return StepResult(step, loss, [1.5, 0.5], 10, [10, 8], [6, 2], 100, 0.4, 5e-4, 0.5)


def test_terminal_shows_a_panel_and_events_above_it(tmp_path: Path) -> None:
    screen = io.StringIO()
    with Progress(tmp_path, Console(file=screen, force_terminal=True, width=100)) as progress:
        progress.began("from [scratch]", 0)
        progress.stepped(result(7), 4, {"rows_waiting": 3})
        progress.decided(Published("abc", VersionState.REJECTED, "ROPE: no"))
    shown = screen.getvalue()
    assert "training begins from [scratch]" in shown
    assert "version abc is rejected: ROPE: no" in shown
    assert "0.600 0.250" in shown
    assert "rows waiting" in shown


def test_an_interleaved_run_shows_both_sides(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    screen = io.StringIO()
    with Progress(tmp_path, Console(file=screen, force_terminal=True, width=140)) as progress:
        progress.prompts(20, {"too_long": 3})
        progress.producing({"answers": "5 of 20", "drafter": "run@7"})
        progress.stepped(result(7), 4, {"rows_waiting": 3})
    assert "20 prompts, 3 left out: too long" in screen.getvalue()
    [row] = [line for line in screen.getvalue().splitlines()[-12:] if "5 of 20" in line]
    assert "step" in row, "side by side"
    caplog.set_level("INFO")
    with Progress(tmp_path, Console(file=io.StringIO())) as progress:
        progress.producing({"answers": "5 of 20"})
        progress.stepped(result(8), 4, {})
    assert "answers: answers 5 of 20" in caplog.text


def test_elsewhere_there_are_log_lines(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    with Progress(tmp_path, Console(file=io.StringIO())) as progress:
        progress._shown["rows waiting"] = "9"  # before the first step
        progress.stepped(result(1), 4, {"rows_waiting": 3})
        progress.stepped(result(2), 4, {"rows_waiting": 2})  # too soon for another line
        progress.not_judged(2, 3, 8)
        progress.ended("mine", 2, None, is_stopped=False, has_learned=True)
    assert [record.message for record in caplog.records] == [
        "step 1, loss 2.000, accepted by depth 0.600 0.250, learning rate 0.0005, tokens/s 200, rows waiting 3",
        "step 2: 3 held-out rows, too few to judge by (trainer.gate.min_heldout_rows is 8); more rows "
        "hold out more, and so does a larger capture.heldout_fraction (of a server), producer.heldout_fraction "
        "(mode=interleaved) or data.heldout_fraction (mode=offline)",
        "the run is over at step 2; it has published no version; mode=export export.drafter=mine writes what it has learned",
    ]


def test_epochs_and_a_wait_for_first_rows_are_told_in_words(tmp_path: Path) -> None:
    screen = io.StringIO()
    with Progress(tmp_path, Console(file=screen, force_terminal=True, width=100)) as progress:
        progress.gathering(12, 4096)
        progress.waiting({"rows_waiting": 3})
    assert re.search(r"generated tokens to begin with\W+12 of 4096", screen.getvalue())
    screen = io.StringIO()
    with Progress(tmp_path, Console(file=screen, force_terminal=True, width=100)) as progress:
        progress.gathering(12, 4096)
        progress.began("from scratch", 0)
        progress.stepped(result(7), 4, {"rows": 8, "epoch": 1, "step_of_epoch": 3, "steps_of_epoch": 4})
    last = screen.getvalue()
    assert re.search(r"epochs done\W+1\b", last)
    assert re.search(r"step of epoch\W+3 of 4", last)
    assert "to begin with" not in last


def test_numbers_that_are_none_are_null(tmp_path: Path) -> None:
    with Progress(tmp_path, Console(file=io.StringIO())) as progress:
        progress.stepped(result(1, loss=float("nan")), 4, {})
    [line] = (tmp_path / METRICS_FILE).read_text().splitlines()
    assert json.loads(line, parse_constant=pytest.fail)["loss"] is None
    assert plot.draw(tmp_path) == tmp_path / plot.PLOT_FILE


def test_what_a_crash_took_back_does_not_count(tmp_path: Path) -> None:
    for began, losses in ((0, [9.0, 8.0, 7.0]), (1, [6.0])):
        with Progress(tmp_path, Console(file=io.StringIO())) as progress:
            progress.began("again", began)
            for step, loss in enumerate(losses, began + 1):
                progress.stepped(result(step, loss), 4, {})
        with (tmp_path / METRICS_FILE).open("a") as file:
            file.write('{"event": "step", "step": 4, "lo')  # cut short by a kill
    history = History.read(tmp_path)
    assert {step: entry["loss"] for step, entry in history.steps.items()} == {1: 9.0, 2: 6.0}
    assert [entry["step"] for entry in history.began] == [0, 1]
    assert history.total("num_tokens") == 200
    assert history.total("num_rows", up_to=1) == 4
    assert history.last("loss") == 6.0
    assert (history.judged, history.published) == ({}, {})


def test_a_resumed_run_shows_the_loss_that_it_had(tmp_path: Path) -> None:
    with Progress(tmp_path, Console(file=io.StringIO())) as progress:
        progress.began("first", 0)
        for step in range(1, 50):
            progress.stepped(result(step, 2.0), 4, {})
    screen = io.StringIO()
    with Progress(tmp_path, Console(file=screen, force_terminal=True, width=100)) as progress:
        progress.began("resumed", 49)
        progress.stepped(result(50, 3.0), 4, {})
    assert "2.100" in screen.getvalue(), "smoothed over what went before"


def test_time_left_is_told_where_an_end_is_known(tmp_path: Path) -> None:
    def shown(ends: Ends | None, figures: dict[str, int]) -> str:
        screen = io.StringIO()
        with Progress(tmp_path, Console(file=screen, force_terminal=True, width=100), ends=ends) as progress:
            progress.began("again", 0)
            progress.stepped(result(1), 4, figures)
        return screen.getvalue()

    assert "time left" not in shown(None, {})
    assert "time left" in shown(Ends(max_steps=10), {})
    assert "time left" in shown(Ends(passes=2), {"rows": 8, "rows_trained": 4})
    assert re.search(r"time left\W+(1:39:5|1:40:0)", re.sub(r"\x1b\[[0-9;]*m", "", shown(Ends(max_time_s=6000.0), {})))


def test_time_left_passes_while_a_run_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    with Progress(tmp_path, Console(file=io.StringIO()), ends=Ends(max_time_s=100.0)) as progress:
        progress.began("again", 0)
        progress.stepped(result(1), 4, {})
        now += 60.0
        progress.waiting({"rows_waiting": 0})
        assert progress._shown["time left"] == "0:00:40"


def test_a_run_of_many_resumed_steps_is_drawn(tmp_path: Path) -> None:
    with Progress(tmp_path, Console(file=io.StringIO())) as progress:
        progress.began("first", 0)
        for step in range(1, 500):
            progress.stepped(result(step, 2.0 / step), 4, {})
        progress.began("resumed", 499)
    picture = plot.draw(tmp_path)
    assert picture is not None
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_run_without_a_verdict_says_so_in_its_picture(tmp_path: Path) -> None:
    from matplotlib.figure import Figure

    axes = Figure().subplots()
    plot._draw_verdicts(axes, History())
    assert [text.get_text() for text in axes.texts] == ["not judged on held-out rows yet"]
    assert list(axes.get_yticks()) == []


def test_nothing_to_draw(tmp_path: Path) -> None:
    assert plot.draw(tmp_path) is None

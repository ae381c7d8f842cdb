"""Command lines of the benchmarks: wrong values are refused in one sentence, and nothing but an earlier run is ever removed."""

from __future__ import annotations

from pathlib import Path

import demo
import engine
import faults
import load
import pytest
import training_speed
from command_line import fresh_directory, parser_of


@pytest.mark.parametrize("main", [demo.main, faults.main])
def test_a_directory_of_others_is_left_alone(main, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "thesis.tex").write_text("three years")
    monkeypatch.setattr("sys.argv", ["benchmark", "--out", str(tmp_path)])
    with pytest.raises(SystemExit, match="which holds other things than a run"):
        main()
    assert (tmp_path / "thesis.tex").read_text() == "three years"


def test_an_earlier_run_makes_room(tmp_path: Path) -> None:
    out = tmp_path / "deep" / "run"
    fresh_directory(out, "server.log")
    (out / "server.log").touch()
    (out / "state").mkdir()
    fresh_directory(out, "server.log")
    assert list(out.iterdir()) == []
    with pytest.raises(SystemExit, match="which is a file"):
        fresh_directory(Path(__file__), "server.log")


@pytest.mark.parametrize(
    ("parser", "words", "said"),
    [
        (load.arguments(), ["--concurrency", "0"], "'0' is no number of things; give a whole number from 1 on"),
        (load.arguments(), ["--prompts", "nowhere.jsonl"], "nowhere.jsonl cannot be read (No such file or directory)"),
        (engine.arguments(), [__file__], f"line 1 of {__file__} is "),
        (engine.arguments(), ["nowhere.jsonl"], "nowhere.jsonl cannot be read"),
        (demo.arguments(), ["--traffic-s", "nan"], "'nan' is no time; give a number above 0"),
        (faults.arguments(), ["--count", "-1"], "'-1' is no number of things"),
    ],
)
def test_a_wrong_value_is_named(parser, words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parser.parse_args(words)
    assert said in capsys.readouterr().err


def test_a_trainer_that_nobody_knows_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        training_speed.main(["--arms", "slipstream,nobody"])
    assert "'nobody' is no trainer that is known here; there are slipstream" in capsys.readouterr().err


def test_help_tells_defaults() -> None:
    parser = parser_of("What it is.")
    parser.add_argument("--rows", type=int, default=8, help="of a step")
    parser.add_argument("--all", action="store_true", help="everything")
    said = parser.format_help()
    assert "of a step (8)" in said
    assert "everything\n" in said

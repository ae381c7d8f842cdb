"""Directories made once: by two processes at once, by a process that is killed, and again after damage."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from runtime.errors import ModelError
from runtime.models.cache import RECORD_FILE, Recipe, made_once

MAKER = """
import sys, time
from pathlib import Path
from runtime.models.cache import Recipe, made_once

root, seconds = Path(sys.argv[1]), float(sys.argv[2])

def make(directory):
    with (root / "log").open("a") as log:
        log.write("made\\n")
    (directory / "first").write_text("first")
    time.sleep(seconds)
    (directory / "second").write_text("second")

made_once(root / "models" / "thing", Recipe("source 1", make))
"""


def start(root: Path, seconds: float) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", MAKER, str(root), str(seconds)])


class Maker:
    """A recipe that counts how often it was followed."""

    def __init__(self, source: str = "source 1") -> None:
        self.count = 0
        self.recipe = Recipe(source, self.make)

    def make(self, directory: Path) -> None:
        self.count += 1
        (directory / "first").write_text("first")
        (directory / "second").write_text("second")


def names(directory: Path) -> list[str]:
    return sorted(entry.name for entry in directory.iterdir())


def test_two_processes_at_once_make_it_once(tmp_path: Path) -> None:
    processes = [start(tmp_path, 0.3) for _ in range(2)]
    assert [process.wait() for process in processes] == [0, 0]
    assert (tmp_path / "log").read_text() == "made\n"
    assert names(tmp_path / "models" / "thing") == ["first", RECORD_FILE, "second"]


def test_a_killed_maker_leaves_nothing_to_be_taken_for_done(tmp_path: Path) -> None:
    process = start(tmp_path, 60)
    while not list((tmp_path / "models").glob(".tmp-*/first")):
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "models" / "thing").exists()
    maker = Maker()
    made_once(tmp_path / "models" / "thing", maker.recipe)
    assert maker.count == 1
    assert names(tmp_path / "models") == [".thing.lock", "thing"]  # what the dead one left is gone too


def test_what_is_there_is_used(tmp_path: Path) -> None:
    maker = Maker()
    for _ in range(3):
        assert made_once(tmp_path / "thing", maker.recipe) == tmp_path / "thing"
    assert maker.count == 1


def test_a_copied_directory_has_other_times_and_is_used_still(tmp_path: Path) -> None:
    maker = Maker()
    made_once(tmp_path / "thing", maker.recipe)
    os.utime(tmp_path / "thing" / "first", ns=(5, 5))
    made_once(tmp_path / "thing", maker.recipe)
    assert maker.count == 1


@pytest.mark.parametrize("damage", ["content", "cut", "missing", "record", "record's files", "record's entry", "no record"])
def test_a_damaged_one_is_made_again(tmp_path: Path, damage: str) -> None:
    maker = Maker()
    thing = made_once(tmp_path / "thing", maker.recipe)
    if damage == "content":
        (thing / "first").write_text("FIRST")  # the same size, another time
    elif damage == "cut":
        (thing / "first").write_text("fir")
    elif damage == "missing":
        (thing / "second").unlink()
    elif damage == "record":
        (thing / RECORD_FILE).write_text("{")
    elif damage in ("record's files", "record's entry"):
        files = [1] if damage == "record's files" else {"first": {"size": 5}}
        (thing / RECORD_FILE).write_text(json.dumps({"source": maker.recipe.source, "files": files}))
    else:
        (thing / RECORD_FILE).unlink()
    made_once(thing, maker.recipe)
    assert maker.count == 2
    assert (thing / "first").read_text() == "first"
    assert names(tmp_path) == [".thing.lock", "thing"]


def test_another_source_is_made_anew(tmp_path: Path) -> None:
    made_once(tmp_path / "thing", Maker().recipe)
    newer = Maker("source 2")
    made_once(tmp_path / "thing", newer.recipe)
    assert newer.count == 1


def test_a_file_in_the_way_is_replaced_and_a_failed_making_leaves_nothing(tmp_path: Path) -> None:
    def fail(directory: Path) -> None:
        (directory / "half").write_text("half")
        raise ModelError("No network.")

    with pytest.raises(ModelError, match="No network"):
        made_once(tmp_path / "thing", Recipe("source 1", fail))
    assert names(tmp_path) == [".thing.lock"]
    (tmp_path / "thing").write_text("a file")
    made_once(tmp_path / "thing", Maker().recipe)
    assert (tmp_path / "thing").is_dir()


def test_a_place_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "home").write_text("a file")
    with pytest.raises(ModelError, match="SLIPSTREAM_HOME"):
        made_once(tmp_path / "home" / "thing", Maker().recipe)

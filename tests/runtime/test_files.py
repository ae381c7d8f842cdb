"""Durable files: what readers see while writers write, fail or die."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from runtime.files import (
    dump_json,
    hold,
    locked,
    move_directory,
    remove_leftovers,
    sha256_of,
    temporary_directory,
    write_atomic,
)


def names(directory: Path) -> list[str]:
    return sorted(entry.name for entry in directory.iterdir())


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_a_file_is_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_atomic(path, b"old")
    with path.open("rb") as reader:
        write_atomic(path, b"newer")
        assert reader.read() == b"old"  # who had it open keeps what he had
    assert path.read_bytes() == b"newer"
    assert names(tmp_path) == ["file"]
    assert mode(path) == 0o644


def test_a_failed_write_leaves_the_old_content_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_atomic(path, b"old")
    with pytest.raises(TypeError):
        write_atomic(path, "text")  # type: ignore[arg-type]
    assert path.read_bytes() == b"old"
    assert names(tmp_path) == ["file"]


def test_readers_never_meet_a_part(tmp_path: Path) -> None:
    path = tmp_path / "file"
    contents = [bytes([letter]) * 100_000 for letter in b"ab"]
    write_atomic(path, contents[0])
    stop = threading.Event()

    def write() -> None:
        while not stop.is_set():
            for content in contents:
                write_atomic(path, content)

    writer = threading.Thread(target=write)
    writer.start()
    seen = {path.read_bytes() for _ in range(200)}
    stop.set()
    writer.join()
    assert seen <= set(contents)


def test_json_is_stable_and_strict() -> None:
    assert dump_json({"b": 1, "a": "ü"}) == dump_json({"a": "ü", "b": 1})
    with pytest.raises(ValueError, match="JSON compliant"):
        dump_json({"a": float("inf")})


def test_a_temporary_directory_goes_unless_it_was_moved(tmp_path: Path) -> None:
    with temporary_directory(tmp_path / "made" / "too") as directory:
        (directory / "file").write_text("x")
        assert directory.name.startswith(".tmp-")
    assert names(tmp_path / "made" / "too") == []
    with pytest.raises(RuntimeError), temporary_directory(tmp_path) as directory:
        raise RuntimeError
    with temporary_directory(tmp_path) as directory:
        (directory / "file").write_text("x")
        os.chmod(directory / "file", 0o600)
        move_directory(directory, tmp_path / "final")
    assert names(tmp_path) == ["final", "made"]
    assert (mode(tmp_path / "final"), mode(tmp_path / "final" / "file")) == (0o755, 0o644)


def test_a_directory_with_content_is_never_overwritten(tmp_path: Path) -> None:
    (tmp_path / "final").mkdir()
    (tmp_path / "final" / "mine").write_text("mine")
    with temporary_directory(tmp_path) as directory:
        (directory / "file").write_text("x")
        with pytest.raises(OSError, match="not empty"):
            move_directory(directory, tmp_path / "final")
    assert names(tmp_path / "final") == ["mine"]


def test_leftovers_are_removed_by_label(tmp_path: Path) -> None:
    for name in (".tmp-a-1", ".tmp-a-2", ".tmp-b-1", "a"):
        (tmp_path / name).mkdir()
    remove_leftovers(tmp_path, "a-")
    assert names(tmp_path) == [".tmp-b-1", "a"]
    remove_leftovers(tmp_path)
    assert names(tmp_path) == ["a"]


def test_the_lock_keeps_threads_and_processes_apart_and_dies_with_its_holder(tmp_path: Path) -> None:
    path = tmp_path / "deep" / ".lock"
    script = (
        "import sys, time; from pathlib import Path; from runtime.files import locked\n"
        "with locked(Path(sys.argv[1])):\n    print('held', flush=True)\n    time.sleep(60)"
    )
    entered = threading.Event()

    def enter() -> None:
        with locked(path):
            entered.set()

    with subprocess.Popen([sys.executable, "-c", script, str(path)], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        thread = threading.Thread(target=enter)
        thread.start()
        time.sleep(0.1)
        assert not entered.is_set()
        holder.kill()
    assert entered.wait(10)
    thread.join()
    with locked(path):
        entered.clear()
        thread = threading.Thread(target=enter)
        thread.start()
        assert not entered.wait(0.1)
    assert entered.wait(10)
    thread.join()


def test_a_held_file_is_refused_to_others_until_its_holder_is_done(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    path.write_text("kept\n")
    with hold(path) as held:
        for _ in range(2):
            with pytest.raises(BlockingIOError):
                hold(path)
        held.write("added\n")
    with hold(path):
        assert path.read_text() == "kept\nadded\n"
    script = "import sys; from pathlib import Path; from runtime.files import hold\nhold(Path(sys.argv[1]))"
    with hold(path):
        assert b"BlockingIOError" in subprocess.run([sys.executable, "-c", script, str(path)], capture_output=True).stderr


def test_hashes_of_files(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"abc")
    assert sha256_of(tmp_path / "file") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"

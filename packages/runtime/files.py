"""Durable files: atomic replacement, whole directories that appear at once, locks between processes, content hashes.

Knows nothing about models or drafters. POSIX only (Linux, macOS).
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

TEMPORARY_PREFIX = ".tmp-"  # names that no reader ever takes for finished work
FILE_MODE = 0o644  # temporary files and directories, and those of safetensors, are made private; finished ones are not


def write_atomic(path: Path, data: bytes) -> None:
    """Replace the file's content at once and durably: readers see the old bytes or the new ones, never a part."""
    descriptor, name = tempfile.mkstemp(prefix=TEMPORARY_PREFIX, dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            os.fchmod(descriptor, FILE_MODE)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    fsync_directory(path.parent)


def dump_json(value: Any) -> bytes:
    """Stable, readable JSON: the same value gives the same bytes."""
    return (json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n").encode()


def fsync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fsync_tree(directory: Path) -> None:
    """Flush every file of a flat directory, then its entries."""
    for entry in directory.iterdir():
        descriptor = os.open(entry, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    fsync_directory(directory)


@contextmanager
def temporary_directory(parent: Path, label: str = "") -> Iterator[Path]:
    """A directory beside the place where its content will be moved (same file system); gone at the end unless moved."""
    parent.mkdir(parents=True, exist_ok=True)
    path = Path(tempfile.mkdtemp(prefix=TEMPORARY_PREFIX + label, dir=parent))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def remove_leftovers(parent: Path, label: str = "") -> None:
    """Remove the temporary directories of makers that died. Only for the one who holds the lock under which they are made."""
    for leftover in parent.glob(f"{TEMPORARY_PREFIX}{label}*"):
        shutil.rmtree(leftover, ignore_errors=True)


def move_directory(source: Path, target: Path) -> None:
    """Make a finished directory visible under its final name, durably. OSError if a non-empty target is already there."""
    for entry in source.iterdir():
        os.chmod(entry, FILE_MODE)
    fsync_tree(source)
    os.chmod(source, 0o755)
    os.rename(source, target)
    fsync_directory(target.parent)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock between processes (and threads); the lock file stays. Released by the kernel if the holder dies."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def hold(path: Path) -> TextIO:
    """Open a file for appending and hold its lock without waiting for it, until it is closed or the process dies.
    BlockingIOError if somebody else holds it."""
    file = path.open("a", encoding="utf-8")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BaseException:
        file.close()
        raise
    return file


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

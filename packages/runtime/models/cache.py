"""Model directories that this program makes itself, once: made aside under a lock, checked, then moved into place.

A record beside the files holds what they were made from and their hashes. Sizes and times are compared at each use; where
they differ, the bytes are hashed, and a directory that is not what was recorded is made again. Knows no model.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runtime.errors import ModelError
from runtime.files import dump_json, locked, move_directory, remove_leftovers, sha256_of, temporary_directory, write_atomic
from runtime.models.fingerprint import read_json

RECORD_FILE = "made_from.json"


@dataclass(frozen=True)
class Recipe:
    """How to make a directory. `source` names what goes in: another source means another directory content."""

    source: str
    make: Callable[[Path], object]


def made_once(directory: Path, recipe: Recipe) -> Path:
    """The directory, made now if it is not there, is damaged, or was made from something else. Safe in several processes."""
    try:
        if _is_intact(directory, recipe.source):
            return directory
        with locked(directory.parent / f".{directory.name}.lock"):
            if not _is_intact(directory, recipe.source):  # another process may have made it meanwhile
                _make(directory, recipe)
    except OSError as error:
        raise ModelError(f"{directory} cannot be made or read ({error}); set SLIPSTREAM_HOME to a writable directory.") from error
    return directory


def _make(directory: Path, recipe: Recipe) -> None:
    parent, label = directory.parent, f"{directory.name}-"
    remove_leftovers(parent, label)
    with temporary_directory(parent, label) as made, temporary_directory(parent, label) as discarded:
        recipe.make(made)
        files = {file.name: _describe(file) for file in sorted(made.iterdir())}
        write_atomic(made / RECORD_FILE, dump_json({"source": recipe.source, "files": files}))
        if directory.exists() or directory.is_symlink():
            os.rename(directory, discarded / directory.name)
        move_directory(made, directory)


def _describe(file: Path) -> dict[str, Any]:
    stat = file.stat()
    return {"size": stat.st_size, "mtime_ns": stat.st_mtime_ns, "sha256": sha256_of(file)}


def _is_intact(directory: Path, source: str) -> bool:
    record_file = directory / RECORD_FILE
    if not record_file.is_file():
        return False
    try:
        record = read_json(record_file)
        return record["source"] == source and all(_is_as(directory / name, **entry) for name, entry in record["files"].items())
    except (ModelError, AttributeError, KeyError, TypeError):  # the record itself is damaged
        return False


def _is_as(file: Path, size: int, mtime_ns: int, sha256: str) -> bool:
    if not file.is_file() or file.stat().st_size != size:
        return False
    return file.stat().st_mtime_ns == mtime_ns or sha256_of(file) == sha256

"""Saved sessions by name, as directories under the server's state directory. What is in them is the engine's business."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from runtime.errors import InvalidRequest, SavedSessionRejected
from runtime.files import temporary_directory
from runtime.rpc.codec import SavedSession

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class SavedSessions:
    def __init__(self, root: Path) -> None:
        self._root = root
        self._being_written: set[str] = set()

    @contextmanager
    def new(self, name: str) -> Iterator[Path]:
        """Where to write a session of this name; nobody else gets the same place, or sees what is not finished.
        SavedSessionRejected(SAVED_EXISTS), also while the first of two saves is being written."""
        path = self._path(name)
        try:
            path.mkdir(parents=True)  # only one of several at once makes it, in this server or in another one
        except FileExistsError:
            raise SavedSessionRejected(
                "SAVED_EXISTS", f"A saved session {name!r} is there; delete it, or take another name."
            ) from None
        self._being_written.add(name)
        try:
            yield path
        except BaseException:
            shutil.rmtree(path, ignore_errors=True)  # half of it is nothing
            raise
        finally:
            self._being_written.discard(name)

    def existing(self, name: str) -> Path:
        """SavedSessionRejected(SAVED_NOT_FOUND) if there is none yet."""
        path = self._path(name)
        if name in self._being_written or not path.is_dir():
            raise SavedSessionRejected("SAVED_NOT_FOUND", f"There is no saved session {name!r}; list them and name one of them.")
        return path

    def describe(self, name: str) -> SavedSession:
        """Of one that is there, or has just been written."""
        path = self._path(name)
        num_bytes = sum(entry.stat().st_size for entry in path.iterdir())
        return SavedSession(name, num_bytes, path.stat().st_mtime)

    def list(self) -> list[SavedSession]:
        """By name."""
        if not self._root.is_dir():
            return []
        names = {entry.name for entry in self._root.iterdir() if _NAME.fullmatch(entry.name) and entry.is_dir()}
        return [self.describe(name) for name in sorted(names - self._being_written)]

    def delete(self, name: str) -> None:
        """Out of sight first: a server that dies meanwhile leaves no half of it under its name."""
        path = self.existing(name)
        with temporary_directory(self._root) as discarded:
            os.rename(path, discarded / name)

    def _path(self, name: str) -> Path:
        if not _NAME.fullmatch(name):
            raise InvalidRequest(
                "name",
                f"{name[:80]!r} is no name for a saved session; take 1 to 64 letters, digits, '.', '_' and '-', and begin "
                "with a letter or a digit.",
            )
        return self._root / name

"""Saved sessions by name, as directories under the server's state directory. What is in them is the engine's business.

A session is written aside and renamed, and renamed away before it is removed: under its name it is whole or not there. What
servers that died left aside, the next one to start removes. Methods may come from any thread. What the disk refuses is
SavedSessionRejected(SAVED_STORAGE), which names no path: callers are told of it, and the log has the cause.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from runtime.errors import InvalidRequest, SavedSessionRejected, SlipstreamError
from runtime.files import TEMPORARY_PREFIX, hold, locked, move_directory, temporary_directory
from runtime.rpc.codec import SavedSession

log = logging.getLogger(__name__)

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_LOCK = ".lock"
_FULL = (errno.ENOSPC, errno.EDQUOT)


class SavedSessions:
    def __init__(self, root: Path) -> None:
        self._root = root
        self._names = threading.Lock()
        self._being_written: set[str] = set()

    def remove_unfinished(self) -> None:
        """What servers left that died while they saved or deleted; what a living one writes stays."""
        if not self._root.is_dir():
            return
        try:
            with locked(self._root / _LOCK):
                for aside in self._root.glob(f"{TEMPORARY_PREFIX}*"):
                    with contextlib.suppress(BlockingIOError), hold(aside / _LOCK):
                        self._remove(aside)
        except OSError as error:  # a server can do without
            log.warning("what dead servers left in %s is not removed: %s", self._root, error)

    @staticmethod
    def _remove(aside: Path) -> None:
        names = ", ".join(entry.name for entry in aside.iterdir() if entry.name != _LOCK) or "of no name yet"
        shutil.rmtree(aside, ignore_errors=True)
        log.warning("saved session %s: a server died while it saved or deleted it; what was left is removed", names)

    def save(self, name: str, write: Callable[[Path], object]) -> SavedSession:
        """Have a session of this name written into a directory, which nobody sees before it is whole. SavedSessionRejected
        (SAVED_EXISTS), also while the first of two saves is being written. Blocks, and goes on if nobody waits any more."""
        path = self._path(name)
        with _disk(f"save {name!r}"), self._taken(name, path), self._aside() as aside:
            write(aside / name)
            saved = _described(aside / name)  # now: once it is in sight, somebody may delete it
            try:
                move_directory(aside / name, path)
            except OSError as error:
                if error.errno in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
                    raise _exists(name) from None  # a server beside this one was quicker
                if not (aside / name).exists():  # it is there, but might not outlast a power cut
                    os.rename(path, aside / name)
                raise
        return saved

    @contextmanager
    def _taken(self, name: str, path: Path) -> Iterator[None]:
        with self._names:
            if name in self._being_written or path.exists():
                raise _exists(name)
            self._being_written.add(name)
        try:
            yield
        finally:
            self._being_written.discard(name)

    @contextmanager
    def _aside(self) -> Iterator[Path]:
        """A directory of its own, which no server that starts meanwhile takes for one that a dead server left."""
        with ExitStack() as stack:
            with locked(self._root / _LOCK):
                aside = stack.enter_context(temporary_directory(self._root))
                stack.enter_context(hold(aside / _LOCK))
            yield aside

    def existing(self, name: str) -> Path:
        """SavedSessionRejected(SAVED_NOT_FOUND) if there is none yet."""
        path = self._path(name)
        with _disk(f"look for {name!r}"):
            if not path.is_dir():
                raise _not_found(name)
        return path

    def list(self) -> list[SavedSession]:
        """By name."""
        found: list[SavedSession] = []
        with _disk("list what is saved"):
            entries = self._root.iterdir() if self._root.is_dir() else ()
            for name in sorted(entry.name for entry in entries if _NAME.fullmatch(entry.name) and entry.is_dir()):
                with contextlib.suppress(FileNotFoundError):  # deleted meanwhile
                    found.append(_described(self._root / name))
        return found

    def delete(self, name: str) -> None:
        """Out of sight first: a server that dies meanwhile leaves no half of it under its name."""
        path = self.existing(name)
        with _disk(f"delete {name!r}"), self._aside() as aside:
            try:
                os.rename(path, aside / name)
            except FileNotFoundError:
                raise _not_found(name) from None  # of two that delete it the second one

    def _path(self, name: str) -> Path:
        if not _NAME.fullmatch(name):
            raise InvalidRequest(
                "name",
                f"{name[:80]!r} is no name for a saved session; take 1 to 64 letters, digits, '.', '_' and '-', and begin "
                "with a letter or a digit.",
            )
        return self._root / name


@contextmanager
def _disk(what: str) -> Iterator[None]:
    """What the disk refuses, in words for a caller, who neither knows the server's paths nor ought to."""
    try:
        yield
    except SlipstreamError:
        raise
    except OSError as error:
        log.error("saved sessions: cannot %s: %s", what, error)
        room, broken = "delete saved sessions that nobody needs, or have room made there", "whoever runs it finds more in its log"
        raise SavedSessionRejected(
            "SAVED_STORAGE",
            f"The server cannot {what}: its directory of saved sessions refuses ({error.strerror or type(error).__name__}). "
            f"Nothing has changed; {room if error.errno in _FULL else broken}.",
        ) from error


def _described(path: Path) -> SavedSession:
    num_bytes = sum(entry.stat().st_size for entry in path.iterdir())
    return SavedSession(path.name, num_bytes, path.stat().st_mtime)


def _exists(name: str) -> SavedSessionRejected:
    return SavedSessionRejected("SAVED_EXISTS", f"A saved session {name!r} is there; delete it, or take another name.")


def _not_found(name: str) -> SavedSessionRejected:
    return SavedSessionRejected("SAVED_NOT_FOUND", f"There is no saved session {name!r}; list them and name one of them.")

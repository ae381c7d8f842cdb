"""One SQLite file shared by several processes: what the ledger and the store's index stand on.

WAL mode, so readers never wait for a writer; a busy time-out, so writers queue. Within a process one connection writes and
one reads for all threads, each behind a lock: SQLite lets one writer through at a time anyway, and every statement here is
short. A Database must not cross a fork, and WAL needs a local disk. Knows nothing of what the tables mean.
"""

from __future__ import annotations

import sqlite3
import threading
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from runtime.errors import FeatureError, FeatureUnavailable

BUSY_TIMEOUT_S = 30.0
PASSING = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_LOCKED)


class Database:
    """`schema`: the statements that make an empty file usable, run once per file whoever comes first."""

    def __init__(
        self,
        path: Path,
        schema: Sequence[str],
        *,
        version: int,  # of the layout that the schema makes
        upgrades: Mapping[int, Sequence[str]] = MappingProxyType({}),  # an older version -> what makes a file of it this one
        synchronous: Literal["NORMAL", "FULL"],
    ) -> None:
        self.path = path
        self._lock, self._read_lock = threading.RLock(), threading.Lock()
        path.parent.mkdir(parents=True, exist_ok=True)
        connections = ExitStack()
        self._close = weakref.finalize(self, connections.close)
        self._close.atexit = False  # a daemon thread may still be in a statement then; the process's end closes the file
        try:
            self._connection, self._reader = (
                connections.enter_context(
                    closing(sqlite3.connect(path, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False))
                )
                for _ in range(2)
            )
            self._enter_wal()
            self._connection.execute(f"PRAGMA synchronous={synchronous}")
        except sqlite3.Error as error:
            self.close()
            raise self._explain(error) from error
        self.is_new = self._create(schema, version, upgrades)

    def _enter_wal(self) -> None:
        """Switch to WAL. SQLite does not wait by itself when two processes do this to a fresh file at once."""
        deadline = time.monotonic() + BUSY_TIMEOUT_S
        while True:
            try:
                self._connection.execute("PRAGMA journal_mode=WAL")
                return
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode != sqlite3.SQLITE_BUSY or time.monotonic() > deadline:
                    raise
                time.sleep(0.01)

    def _create(self, schema: Sequence[str], version: int, upgrades: Mapping[int, Sequence[str]]) -> bool:
        with self.transaction() as connection:
            [(found,)] = connection.execute("PRAGMA user_version").fetchall()
            if found == version:
                return False
            statements = schema if found == 0 else upgrades.get(found)
            if statements is None:
                raise FeatureError(
                    f"{self.path} has layout version {found}, this program writes {version}. Use another features.root."
                )
            for statement in statements:
                connection.execute(statement)
            connection.execute(f"PRAGMA user_version={version}")
            return bool(found == 0)

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """A write transaction: all or nothing. An SQLite error comes out as FeatureError, after the rollback."""
        with self._lock:
            try:
                self._connection.execute("BEGIN IMMEDIATE")
                yield self._connection
                self._connection.execute("COMMIT")
            except sqlite3.Error as error:
                self._rollback()
                raise self._explain(error) from error
            except BaseException:
                self._rollback()
                raise

    def read(self, sql: str, parameters: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """All rows of one query, of one moment; what a transaction in progress does is not seen, nor waited for."""
        with self._read_lock:
            try:
                return self._reader.execute(sql, parameters).fetchall()
            except sqlite3.Error as error:
                raise self._explain(error) from error

    def close(self) -> None:
        """Idempotent. Later calls raise FeatureError."""
        with self._lock, self._read_lock:
            self._close()

    def _rollback(self) -> None:
        if self._close.alive and self._connection.in_transaction:
            self._connection.execute("ROLLBACK")

    def _explain(self, error: sqlite3.Error) -> FeatureError:
        code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF  # of an extended code, its kind
        kind = FeatureUnavailable if code in PASSING else FeatureError
        return kind(f"{self.path} cannot be used: {error}. Check the disk, or point features.root elsewhere.")

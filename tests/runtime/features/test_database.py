"""One SQLite file under several threads and processes, and what is said when it cannot be used."""

from __future__ import annotations

import sqlite3
import threading
from pathlib import Path
from typing import Any

import pytest

from runtime.errors import FeatureError, FeatureUnavailable
from runtime.features.database import Database

SCHEMA = ("CREATE TABLE t(x INTEGER)", "INSERT INTO t VALUES (0)")


def test_schema_runs_once_and_wal_is_on(tmp_path: Path) -> None:
    first, second = (Database(tmp_path / "d.sqlite", SCHEMA, version=2, synchronous="NORMAL") for _ in range(2))
    assert (first.is_new, second.is_new) == (True, False)
    assert second.read("SELECT count(*) FROM t") == [(1,)]
    assert first.read("PRAGMA journal_mode") == [("wal",)]
    first.close()
    second.close()


def _execute(database: Database, *statements: str) -> None:
    with database.transaction() as connection:
        for statement in statements:
            connection.execute(statement)


def _set_and_stumble(database: Database) -> None:
    with database.transaction() as connection:
        connection.execute("UPDATE t SET x = 1")
        raise ZeroDivisionError


def test_transactions_are_all_or_nothing(tmp_path: Path) -> None:
    database = Database(tmp_path / "d.sqlite", SCHEMA, version=2, synchronous="NORMAL")
    with pytest.raises(ZeroDivisionError):
        _set_and_stumble(database)
    with pytest.raises(FeatureError, match="no such table"):
        _execute(database, "UPDATE t SET x = 1", "UPDATE missing SET x = 1")
    assert database.read("SELECT x FROM t") == [(0,)]
    _execute(database, "UPDATE t SET x = 1")
    assert database.read("SELECT x FROM t") == [(1,)]
    database.close()


def test_readers_do_not_wait_for_a_writer_of_their_own_process(tmp_path: Path) -> None:
    database = Database(tmp_path / "d.sqlite", SCHEMA, version=2, synchronous="NORMAL")
    seen: list[list[tuple[int]]] = []
    reader = threading.Thread(target=lambda: seen.append(database.read("SELECT x FROM t")))
    with database.transaction() as connection:
        connection.execute("UPDATE t SET x = 1")
        reader.start()
        reader.join(timeout=10)
        assert seen == [[(0,)]]
    assert database.read("SELECT x FROM t") == [(1,)]
    database.close()


def test_threads_share_one_connection(tmp_path: Path) -> None:
    database = Database(tmp_path / "d.sqlite", SCHEMA, version=2, synchronous="NORMAL")

    def add() -> None:
        for _ in range(50):
            with database.transaction() as connection:
                connection.execute("UPDATE t SET x = x + 1")

    threads = [threading.Thread(target=add) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert database.read("SELECT x FROM t") == [(200,)]
    database.close()


ADDER = """
import sys
from pathlib import Path
from runtime.features.database import Database
database = Database(Path(sys.argv[1]), ("CREATE TABLE t(x INTEGER)", "INSERT INTO t VALUES (0)"), version=2, synchronous="NORMAL")
for _ in range(50):
    with database.transaction() as connection:
        connection.execute("UPDATE t SET x = x + 1")
"""


def test_processes_that_open_a_fresh_file_at_once(tmp_path: Path, nursery: Any) -> None:
    for round_ in range(3):
        path = tmp_path / f"{round_}.sqlite"
        nursery.start(ADDER, *[[str(path)]] * 4)
        assert nursery.end() == [0, 0, 0, 0]
        database = Database(path, SCHEMA, version=2, synchronous="NORMAL")
        assert database.read("SELECT x FROM t") == [(200,)]
        database.close()


def test_a_file_that_is_no_database_is_named(tmp_path: Path) -> None:
    path = tmp_path / "d.sqlite"
    path.write_bytes(b"not a database" * 100)
    with pytest.raises(FeatureError, match=r"d\.sqlite cannot be used: file is not a database"):
        Database(path, SCHEMA, version=2, synchronous="FULL")


def test_another_layout_version_is_refused(tmp_path: Path) -> None:
    connection = sqlite3.connect(tmp_path / "d.sqlite")
    connection.execute("PRAGMA user_version=7")
    connection.close()
    with pytest.raises(FeatureError, match="layout version 7"):
        Database(tmp_path / "d.sqlite", SCHEMA, version=2, synchronous="FULL")


def test_an_older_layout_is_made_anew_in_place(tmp_path: Path) -> None:
    old = Database(tmp_path / "d.sqlite", SCHEMA, version=2, synchronous="FULL")
    old.close()
    upgrades = {2: ("ALTER TABLE t ADD COLUMN y INTEGER NOT NULL DEFAULT 7",)}
    for _ in range(2):
        new = Database(tmp_path / "d.sqlite", SCHEMA, version=3, upgrades=upgrades, synchronous="FULL")
        assert not new.is_new
        assert new.read("SELECT x, y FROM t") == [(0, 7)]
        new.close()
    with pytest.raises(FeatureError, match=r"layout version 3, this program writes 2\. Use another features\.root"):
        Database(tmp_path / "d.sqlite", SCHEMA, version=2, synchronous="FULL")


def test_a_closed_database_says_so(tmp_path: Path) -> None:
    database = Database(tmp_path / "d.sqlite", SCHEMA, version=2, synchronous="FULL")
    database.close()
    database.close()
    with pytest.raises(FeatureError, match="closed"):
        database.read("SELECT 1")
    with pytest.raises(FeatureError, match="closed"):
        _execute(database, "UPDATE t SET x = 1")


def test_a_file_that_another_process_writes_is_waited_for_and_named_in_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "d.sqlite"
    patient = Database(path, SCHEMA, version=2, synchronous="FULL")
    monkeypatch.setattr("runtime.features.database.BUSY_TIMEOUT_S", 0.1)
    hasty = Database(path, SCHEMA, version=2, synchronous="FULL")
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(FeatureUnavailable, match=r"d\.sqlite cannot be used: database is locked"), hasty.transaction():
        pass
    assert hasty.read("SELECT x FROM t") == [(0,)], "readers do not wait"
    written = threading.Event()

    def write() -> None:
        with patient.transaction() as connection:
            connection.execute("UPDATE t SET x = 1")
        written.set()

    writer = threading.Thread(target=write)
    writer.start()
    assert not written.wait(0.3)
    other.execute("COMMIT")
    writer.join(30)
    with hasty.transaction() as connection:
        connection.execute("UPDATE t SET x = x + 1")
    assert patient.read("SELECT x FROM t") == [(2,)]
    for each in (patient, hasty, other):
        each.close()

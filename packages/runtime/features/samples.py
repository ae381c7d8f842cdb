"""The tables behind the ledger, and the three ways in which a row enters or leaves them. Everything that is polled has an index.

`counts` is kept by triggers, so that nobody scans who asks how many rows, or bytes of features, there are. `tombstones`
remembers rows that were struck off for good: who offers one again is told that it is known.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Sequence
from enum import StrEnum

from runtime.features.refs import SampleRef, unit_hash


class SampleState(StrEnum):
    PENDING = "pending"
    LEASED = "leased"
    DURABLE = "durable"
    FAILED = "failed"
    HELDOUT = "heldout"


VERSION = 3
_COUNT = """UPDATE counts SET num_rows = num_rows {0} 1, num_bytes = num_bytes {0} {1}.num_bytes * {1}.has_features
    WHERE state = {1}.state"""
_TRIGGERS = (
    f"CREATE TRIGGER samples_in AFTER INSERT ON samples BEGIN {_COUNT.format('+', 'NEW')}; END",
    f"CREATE TRIGGER samples_out AFTER DELETE ON samples BEGIN {_COUNT.format('-', 'OLD')}; END",
    f"""CREATE TRIGGER samples_moved AFTER UPDATE OF state, num_bytes, has_features ON samples
        WHEN NEW.state <> OLD.state OR NEW.num_bytes <> OLD.num_bytes OR NEW.has_features <> OLD.has_features
        BEGIN {_COUNT.format("-", "OLD")}; {_COUNT.format("+", "NEW")}; END""",
)
_WATERMARKS = """CREATE TABLE watermarks(
    high_rows INTEGER NOT NULL, low_rows INTEGER NOT NULL, high_bytes INTEGER NOT NULL, low_bytes INTEGER NOT NULL,
    is_shedding INTEGER NOT NULL)"""
SCHEMA = (
    """CREATE TABLE samples(
        position INTEGER PRIMARY KEY AUTOINCREMENT, sample_id TEXT NOT NULL UNIQUE, generation INTEGER NOT NULL,
        num_bytes INTEGER NOT NULL, ref TEXT NOT NULL, slice TEXT NOT NULL, created_at REAL NOT NULL,
        state TEXT NOT NULL CHECK (state IN ('pending', 'leased', 'durable', 'failed', 'heldout')),
        has_features INTEGER NOT NULL DEFAULT 1, is_lost INTEGER NOT NULL DEFAULT 0, run_id TEXT, lease_expires_at REAL,
        attempts INTEGER NOT NULL DEFAULT 0, reason TEXT NOT NULL DEFAULT '', heldout_rank REAL)""",
    "CREATE INDEX samples_by_state ON samples(state, position)",
    "CREATE INDEX samples_by_run ON samples(run_id, state, position)",
    "CREATE INDEX samples_by_expiry ON samples(lease_expires_at) WHERE state = 'leased'",
    "CREATE INDEX samples_by_rank ON samples(slice, heldout_rank) WHERE state = 'heldout'",
    "CREATE INDEX samples_to_replay ON samples(position) WHERE state = 'durable' AND has_features",
    "CREATE INDEX samples_by_age ON samples(created_at) WHERE has_features",
    "CREATE TABLE counts(state TEXT PRIMARY KEY, num_rows INTEGER NOT NULL, num_bytes INTEGER NOT NULL DEFAULT 0)",
    "INSERT INTO counts(state, num_rows) VALUES ('pending', 0), ('leased', 0), ('durable', 0), ('failed', 0), ('heldout', 0)",
    *_TRIGGERS,
    "CREATE TABLE tombstones(sample_id TEXT PRIMARY KEY) WITHOUT ROWID",
    """CREATE TABLE checkpoints(checkpoint_id INTEGER PRIMARY KEY AUTOINCREMENT, run_id TEXT NOT NULL, path TEXT NOT NULL,
        step INTEGER NOT NULL, metrics TEXT NOT NULL, created_at REAL NOT NULL)""",
    "CREATE INDEX checkpoints_by_run ON checkpoints(run_id, checkpoint_id)",
    "CREATE TABLE consumption(sample_id TEXT NOT NULL, checkpoint_id INTEGER NOT NULL, run_id TEXT NOT NULL)",
    "CREATE INDEX consumption_by_run ON consumption(run_id, sample_id)",
    _WATERMARKS,
)
UPGRADES = {
    2: (  # counted no bytes
        "ALTER TABLE counts ADD COLUMN num_bytes INTEGER NOT NULL DEFAULT 0",
        *(f"DROP TRIGGER {name}" for name in ("samples_in", "samples_out", "samples_moved")),
        """UPDATE counts SET num_bytes =
            (SELECT coalesce(sum(num_bytes), 0) FROM samples WHERE samples.state = counts.state AND has_features)""",
        *_TRIGGERS,
        _WATERMARKS,
    ),
}
IDS = "(SELECT value FROM json_each(?))"


def insert(connection: sqlite3.Connection, ref: SampleRef, state: SampleState) -> bool:
    """Whether the row is new. Of a known one a newer generation replaces the reference, and brings it back if it failed
    because its features were gone."""
    if connection.execute("SELECT 1 FROM tombstones WHERE sample_id = ?", (ref.sample_id,)).fetchone():
        return False
    rank = unit_hash("heldout rank", ref.sample_id) if state is SampleState.HELDOUT else None
    values = (ref.sample_id, ref.generation, ref.num_bytes, ref.to_json(), ref.slice, ref.created_at, state.value, rank)
    added = connection.execute(
        """INSERT INTO samples(sample_id, generation, num_bytes, ref, slice, created_at, state, heldout_rank)
            VALUES (?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT(sample_id) DO NOTHING""",
        values,
    ).rowcount
    if not added:
        connection.execute(
            """UPDATE samples SET generation = ?, num_bytes = ?, ref = ?, has_features = (state <> 'failed' OR is_lost),
                state = iif(state <> 'failed' OR NOT is_lost, state, iif(heldout_rank IS NULL, 'pending', 'heldout')), is_lost = 0
                WHERE sample_id = ? AND generation < ?""",
            (ref.generation, ref.num_bytes, ref.to_json(), ref.sample_id, ref.generation),
        )
    return added > 0


def give_up(connection: sqlite3.Connection, sample_id: str, reason: str, *, is_lost: bool = False) -> None:
    """is_lost: nothing was wrong with the row but that its features are gone."""
    sql = """UPDATE samples SET state = 'failed', has_features = 0, is_lost = ?, run_id = NULL, lease_expires_at = NULL,
        reason = ? WHERE sample_id = ?"""
    connection.execute(sql, (is_lost, reason, sample_id))


def entomb(connection: sqlite3.Connection, sample_ids: Sequence[str]) -> None:
    """Strike rows off for good."""
    encoded = json.dumps(list(sample_ids))
    connection.execute(f"DELETE FROM samples WHERE sample_id IN {IDS}", (encoded,))
    connection.execute("INSERT OR IGNORE INTO tombstones SELECT value FROM json_each(?)", (encoded,))

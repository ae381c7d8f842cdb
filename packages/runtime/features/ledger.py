"""The ledger: what became of each training row. SQLite, shared by the server that commits rows and the trainers that lease.

::

    commit -> PENDING -> lease -> LEASED -> record_checkpoint -> DURABLE
                 ^------- expired, failed once, recover ---'  '-> fail -> FAILED (attempts used up, features gone or damaged)
    hold_out -> HELDOUT (never leased; a uniform reservoir of each slice)

A row becomes durable in the same transaction that records the checkpoint which holds its effect. So a trainer killed at
any instant loses no row, and no row counts twice in the weights that survive. Rows carry references only; what a feature
store is, the ledger knows as the question `exists(ref)`.
"""

from __future__ import annotations

import dataclasses
import json
import sqlite3
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from runtime.config import LONGEST_LEASE_S
from runtime.errors import LeaseLost
from runtime.features.database import Database
from runtime.features.flow import Watermarks
from runtime.features.refs import SampleRef, refuse_tensors
from runtime.features.samples import IDS, SCHEMA, UPGRADES, VERSION, SampleState, entomb, give_up, insert

Split = Literal["train", "heldout"]

OURS = "(run_id = ? OR (run_id > ? || '/' AND run_id < ? || '0'))"  # the run's and its members'; '0' comes after '/'


@dataclass(frozen=True)
class Checkpoint:
    """What the trainer recorded; the files at `path` are the trainer's own."""

    run_id: str
    path: str
    step: int
    metrics: Mapping[str, float]
    created_at: float  # Unix seconds


def member_of(run_id: str, rank: int) -> str:
    """The name under which one of several processes of a run leases: what is recorded or recovered for the run counts for it."""
    return f"{run_id}/{rank}"


def run_of(name: str) -> str:
    """The run that a name leases for: itself, or that of which it is a member."""
    return name.partition("/")[0]


class Ledger:
    """Any number of threads and processes may use one file at once. Each method is one transaction.

    Leases last up to LONGEST_LEASE_S by the machine's clock. One that ends later than that was given before the clock was set
    back, and counts as expired: a run that is alive sets it right with its next heartbeat, and one that is dead never would.
    """

    def __init__(
        self,
        path: Path,
        *,
        exists: Callable[[SampleRef], bool] = lambda ref: True,  # asked at lease time: are the features still there?
        max_attempts: int = 5,  # leases that may expire or fail before the row is given up
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._database = Database(Path(path), SCHEMA, version=VERSION, upgrades=UPGRADES, synchronous="FULL")
        self._exists = exists
        self._max_attempts = max_attempts
        self._clock = clock

    # --- the producer's side ---

    def commit(self, ref: SampleRef, split: Split) -> bool:
        """Enter a stored row. False if its sample_id is known; a newer generation then replaces the reference only."""
        refuse_tensors(ref)
        with self._database.transaction() as connection:
            return insert(connection, ref, SampleState.PENDING if split == "train" else SampleState.HELDOUT)

    def hold_out(self, ref: SampleRef, max_rows: int, max_bytes: int = sys.maxsize) -> tuple[bool, list[SampleRef]]:
        """Offer a stored row to the held-out reservoir of its slice. Together the reservoirs hold max_rows rows and max_bytes
        at most, shared as evenly as what was offered allows; each holds those of its slice whose ids hash lowest, so a uniform
        sample of all that were ever offered, whatever their order. A row that does not get in is committed for training.

        Returns whether the row is new, and the rows pushed out: they are struck off, since what was ever held out is never
        trained on, and the caller deletes their features.
        """
        refuse_tensors(ref)
        out: list[SampleRef] = []
        with self._database.transaction() as connection:
            is_new = insert(connection, ref, SampleState.HELDOUT)
            while surplus := _surplus(connection, max_rows, max_bytes):
                if is_new and surplus.sample_id == ref.sample_id:
                    sql = "UPDATE samples SET state = 'pending', heldout_rank = NULL WHERE sample_id = ?"
                    connection.execute(sql, (ref.sample_id,))
                else:
                    entomb(connection, [surplus.sample_id])
                    out.append(surplus)
        return is_new, out

    def known(self, sample_ids: Sequence[str]) -> set[str]:
        """Those of these rows that need not be produced: what a producer that starts again asks first. A row whose features
        are gone before a checkpoint held it is not among them; committed again, it takes its old place."""
        encoded = json.dumps(list(sample_ids))
        found = self._database.read(f"SELECT sample_id FROM tombstones WHERE sample_id IN {IDS}", (encoded,))
        known = {sample_id for (sample_id,) in found}
        sql = f"SELECT sample_id, state, is_lost, ref FROM samples WHERE sample_id IN {IDS}"
        for sample_id, state, is_lost, text in self._database.read(sql, (encoded,)):
            needs_features = state in (SampleState.PENDING, SampleState.HELDOUT)
            if not is_lost and (not needs_features or self._exists(SampleRef.from_json(text))):
                known.add(sample_id)
        return known

    # --- the trainer's side ---

    def lease(self, run_id: str, limit: int, timeout_s: float) -> list[SampleRef]:
        """Up to `limit` pending rows, oldest first, for this run alone until the time-out; `heartbeat` extends it.

        A row whose features are gone is failed here with a reason, and another one takes its place.
        """
        now = self._clock()
        if not self._has_work(now):
            return []
        leased: list[SampleRef] = []
        expiry = now + min(timeout_s, LONGEST_LEASE_S)
        with self._database.transaction() as connection:
            self._expire(connection, now)
            while len(leased) < limit:
                sql = "SELECT ref FROM samples WHERE state = 'pending' ORDER BY position LIMIT ?"
                refs = [SampleRef.from_json(text) for (text,) in connection.execute(sql, (limit - len(leased),))]
                if not refs:
                    break
                leased += [ref for ref in refs if self._take(connection, run_id, ref, expiry)]
        return leased

    def claim(self, run_id: str, sample_ids: Sequence[str], timeout_s: float) -> list[SampleRef]:
        """`lease` of exactly these rows, for who was told of them: those that are pending, oldest first."""
        with self._database.transaction() as connection:
            # +state: by its id each, never by way of all that is pending
            sql = f"SELECT ref FROM samples WHERE +state = 'pending' AND sample_id IN {IDS} ORDER BY position"
            refs = [SampleRef.from_json(text) for (text,) in connection.execute(sql, (json.dumps(list(sample_ids)),))]
            expiry = self._clock() + min(timeout_s, LONGEST_LEASE_S)
            return [ref for ref in refs if self._take(connection, run_id, ref, expiry)]

    def _take(self, connection: sqlite3.Connection, run_id: str, ref: SampleRef, expiry: float) -> bool:
        if not self._exists(ref):
            give_up(connection, ref.sample_id, f"its features ({ref.uri}) are gone or cut short", is_lost=True)
            return False
        sql = "UPDATE samples SET state = 'leased', run_id = ?, lease_expires_at = ?, attempts = attempts + 1 WHERE sample_id = ?"
        connection.execute(sql, (run_id, expiry, ref.sample_id))
        return True

    def leased(self, run_id: str) -> list[SampleRef]:
        """Rows that this run leases, oldest first."""
        sql = "SELECT ref FROM samples WHERE run_id = ? AND state = 'leased' ORDER BY position"
        return [SampleRef.from_json(text) for (text,) in self._database.read(sql, (run_id,))]

    def heartbeat(self, run_id: str, timeout_s: float) -> int:
        """Extend all leases of this run to now + timeout_s; returns how many it still has."""
        with self._database.transaction() as connection:
            sql = "UPDATE samples SET lease_expires_at = ? WHERE run_id = ? AND state = 'leased'"
            return connection.execute(sql, (self._clock() + min(timeout_s, LONGEST_LEASE_S), run_id)).rowcount

    def record_checkpoint(
        self,
        run_id: str,
        path: str | Path,
        step: int,
        trained_sample_ids: Iterable[str],
        *,
        metrics: Mapping[str, float] | None = None,
    ) -> Checkpoint:
        """Record a checkpoint whose files are already safe on disk, and make the rows in it durable: all or nothing.

        LeaseLost, with their ids, if this run and its members do not lease some of the rows any more: another run may be
        training on them, so these weights must not survive. A lease past its time-out that nobody took back still counts.
        """
        refuse_tensors(metrics)
        sample_ids = list(dict.fromkeys(trained_sample_ids))
        checkpoint = Checkpoint(run_id, str(path), step, dict(metrics or {}), self._clock())
        encoded = json.dumps(sample_ids)
        with self._database.transaction() as connection:
            sql = f"SELECT sample_id FROM samples WHERE {OURS} AND state = 'leased' AND sample_id IN {IDS}"
            mine = {sample_id for (sample_id,) in connection.execute(sql, (run_id, run_id, run_id, encoded))}
            lost = [sample_id for sample_id in sample_ids if sample_id not in mine]
            if lost:
                raise LeaseLost(run_id, lost)
            cursor = connection.execute(
                "INSERT INTO checkpoints(run_id, path, step, metrics, created_at) VALUES (?, ?, ?, ?, ?)",
                (run_id, checkpoint.path, step, json.dumps(dict(checkpoint.metrics)), checkpoint.created_at),
            )
            sql = f"UPDATE samples SET state = 'durable', run_id = ?, lease_expires_at = NULL WHERE sample_id IN {IDS}"
            connection.execute(sql, (run_id, encoded))
            connection.execute(
                "INSERT INTO consumption SELECT value, ?, ? FROM json_each(?)", (cursor.lastrowid, run_id, encoded)
            )
        return checkpoint

    def recorded(self, sample_ids: Iterable[str]) -> None:
        """Another process recorded a checkpoint that holds these rows, leased here by a member of its run: known already."""

    def latest_checkpoint(self, run_id: str) -> Checkpoint | None:
        sql = """SELECT run_id, path, step, metrics, created_at FROM checkpoints WHERE run_id = ?
            ORDER BY checkpoint_id DESC LIMIT 1"""
        for run, path, step, metrics, created_at in self._database.read(sql, (run_id,)):
            return Checkpoint(run, path, step, json.loads(metrics), created_at)
        return None

    def recover(self, run_id: str) -> int:
        """Give the rows that this run and its members lease, and that no checkpoint holds, back to the queue: at a restart, or at
        a stop. They keep their attempts: a restart is not the row's fault.
        """
        with self._database.transaction() as connection:
            sql = f"""UPDATE samples SET state = 'pending', run_id = NULL, lease_expires_at = NULL, attempts = attempts - 1
                WHERE {OURS} AND state = 'leased'"""
            return connection.execute(sql, (run_id, run_id, run_id)).rowcount

    def fail(self, run_id: str, sample_id: str, reason: str, retryable: bool) -> bool:
        """This run could not use a row of its own. Retryable: back to the queue until its attempts are used up. Else it is
        FAILED for good.

        A durable row stays durable and only loses its features. False, and nothing changed, if the row is not this run's.
        """
        with self._database.transaction() as connection:
            sql = "SELECT state, attempts, ref FROM samples WHERE sample_id = ? AND run_id = ? AND state IN ('leased', 'durable')"
            found = connection.execute(sql, (sample_id, run_id)).fetchone()
            if found is None:
                return False
            state, attempts, text = found
            if state == SampleState.DURABLE:
                connection.execute("UPDATE samples SET has_features = 0, reason = ? WHERE sample_id = ?", (reason, sample_id))
            elif not retryable or attempts >= self._max_attempts:
                give_up(connection, sample_id, reason, is_lost=not self._exists(SampleRef.from_json(text)))
            else:
                sql = """UPDATE samples SET state = 'pending', run_id = NULL, lease_expires_at = NULL, reason = ?
                    WHERE sample_id = ?"""
                connection.execute(sql, (reason, sample_id))
            return True

    # --- what is there ---

    def heldout(self, limit: int = -1) -> list[SampleRef]:
        """Held-out rows, newest first; all by default. One may be pushed out of the reservoir before its features are read."""
        sql = "SELECT ref FROM samples WHERE state = 'heldout' ORDER BY position DESC LIMIT ?"
        return [SampleRef.from_json(text) for (text,) in self._database.read(sql, (limit,))]

    def durable(self, run_id: str, limit: int) -> list[SampleRef]:
        """Rows that this run made durable and whose features are kept still, newest first: for replay."""
        sql = """SELECT ref FROM samples WHERE run_id = ? AND state = 'durable' AND has_features
            ORDER BY position DESC LIMIT ?"""
        return [SampleRef.from_json(text) for (text,) in self._database.read(sql, (run_id, limit))]

    def trainable(self) -> list[SampleRef]:
        """Rows for training whose features are kept, whoever has them or had them, oldest first: to be read, not consumed."""
        sql = """SELECT ref FROM samples WHERE state IN ('pending', 'leased', 'durable') AND has_features ORDER BY position"""
        return [SampleRef.from_json(text) for (text,) in self._database.read(sql)]

    def status(self) -> dict[str, int]:
        """Rows per state; every state is there. Constant time."""
        return dict(self._database.read("SELECT state, num_rows FROM counts"))

    def backlog(self) -> tuple[int, int]:
        """(rows, bytes of their features) that are for training and in no checkpoint yet. Constant time."""
        sql = "SELECT sum(num_rows), sum(num_bytes) FROM counts WHERE state IN ('pending', 'leased')"
        [(num_rows, num_bytes)] = self._database.read(sql)
        return num_rows, num_bytes

    def set_watermarks(self, marks: Watermarks) -> None:
        """Of the tap that fills this ledger from now on."""
        with self._database.transaction() as connection:
            connection.execute("DELETE FROM watermarks")
            connection.execute("INSERT INTO watermarks VALUES (?, ?, ?, ?, 0)", dataclasses.astuple(marks))

    def watermarks(self) -> Watermarks | None:
        """None: no tap has filled it yet."""
        found = self._database.read("SELECT high_rows, low_rows, high_bytes, low_bytes FROM watermarks")
        return Watermarks(*found[0]) if found else None

    def set_shedding(self, is_shedding: bool) -> None:
        with self._database.transaction() as connection:
            connection.execute("UPDATE watermarks SET is_shedding = ?", (is_shedding,))

    def is_shedding(self) -> bool:
        """The tap takes no row before trainers made some durable."""
        return any(is_shedding for (is_shedding,) in self._database.read("SELECT is_shedding FROM watermarks"))

    def failures(self) -> dict[str, str]:
        """Why each failed row failed, by sample id."""
        return dict(self._database.read("SELECT sample_id, reason FROM samples WHERE state = 'failed'"))

    def consumption(self, run_id: str) -> dict[str, int]:
        """How many times each row was made durable by this run: 1, if all is well."""
        return dict(self._database.read("SELECT sample_id, count(*) FROM consumption WHERE run_id = ? GROUP BY 1", (run_id,)))

    # --- keeping house ---

    def shed_durable(self, num_bytes: int) -> list[SampleRef]:
        """Take the oldest durable rows' features off the books until they make up num_bytes; the caller deletes them."""
        shed: list[tuple[str, str]] = []
        with self._database.transaction() as connection:
            sql = "SELECT sample_id, ref, num_bytes FROM samples WHERE state = 'durable' AND has_features ORDER BY position"
            for sample_id, text, size in connection.execute(sql):
                if num_bytes <= 0:
                    break
                shed.append((sample_id, text))
                num_bytes -= size
            return _off_the_books(connection, shed)

    def keep_newest_durable(self, max_rows: int) -> list[SampleRef]:
        """Take the features of all durable rows but the newest max_rows off the books; the caller deletes them."""
        with self._database.transaction() as connection:
            sql = """SELECT sample_id, ref FROM samples WHERE state = 'durable' AND has_features
                ORDER BY position DESC LIMIT -1 OFFSET ?"""
            return _off_the_books(connection, connection.execute(sql, (max_rows,)).fetchall())

    def expire(self, created_before: float) -> list[SampleRef]:
        """Take the features of all rows captured before that moment off the books, but of those that a trainer has in hand;
        the caller deletes them. Durable rows stay durable, held-out ones are struck off, pending ones fail with a reason."""
        with self._database.transaction() as connection:
            sql = "SELECT sample_id, ref, state FROM samples WHERE has_features AND created_at < ? AND state <> 'leased'"
            rows = connection.execute(sql, (created_before,)).fetchall()
            for sample_id, _, state in rows:
                if state == SampleState.PENDING:
                    give_up(connection, sample_id, "it grew too old before a trainer took it: see capture.max_age_s")
            refs = _off_the_books(connection, [row[:2] for row in rows])
            entomb(connection, [sample_id for sample_id, _, state in rows if state == SampleState.HELDOUT])
            return refs

    def needed(self) -> set[tuple[str, int]]:
        """(sample id, generation) of all rows whose features are on the books: what a store's gc must keep."""
        sql = "SELECT sample_id, generation FROM samples WHERE has_features"
        return {(sample_id, generation) for sample_id, generation in self._database.read(sql)}

    def forget(self, sample_ids: Sequence[str]) -> int:
        """Take rows out as if they had never come, except leased ones. Their features become garbage; consumption is still
        counted."""
        with self._database.transaction() as connection:
            sql = f"DELETE FROM samples WHERE state <> 'leased' AND sample_id IN {IDS}"
            return connection.execute(sql, (json.dumps(list(sample_ids)),)).rowcount

    def close(self) -> None:
        self._database.close()

    def _has_work(self, now: float) -> bool:
        """Whether a lease would find anything: a poll takes no write lock."""
        sql = """SELECT EXISTS(SELECT 1 FROM samples WHERE state = 'pending')
            OR EXISTS(SELECT 1 FROM samples WHERE state = 'leased' AND lease_expires_at <= ?)
            OR EXISTS(SELECT 1 FROM samples WHERE state = 'leased' AND lease_expires_at > ?)"""
        return bool(self._database.read(sql, (now, now + LONGEST_LEASE_S))[0][0])

    def _expire(self, connection: sqlite3.Connection, now: float) -> None:
        sql = """SELECT sample_id, attempts FROM samples WHERE state = 'leased' AND lease_expires_at <= ?
            UNION ALL SELECT sample_id, attempts FROM samples WHERE state = 'leased' AND lease_expires_at > ?"""
        for sample_id, attempts in connection.execute(sql, (now, now + LONGEST_LEASE_S)).fetchall():
            if attempts >= self._max_attempts:
                give_up(connection, sample_id, f"its lease expired or failed {attempts} times")
            else:
                sql = "UPDATE samples SET state = 'pending', run_id = NULL, lease_expires_at = NULL WHERE sample_id = ?"
                connection.execute(sql, (sample_id,))


def _off_the_books(connection: sqlite3.Connection, rows: Sequence[tuple[str, str]]) -> list[SampleRef]:
    """rows: (sample id, reference) each."""
    encoded = json.dumps([sample_id for sample_id, _ in rows])
    connection.execute(f"UPDATE samples SET has_features = 0 WHERE sample_id IN {IDS}", (encoded,))
    return [SampleRef.from_json(text) for _, text in rows]


def _surplus(connection: sqlite3.Connection, max_rows: int, max_bytes: int) -> SampleRef | None:
    """The row that the reservoirs must give up next, the highest of the largest slice; None if there are not too many."""
    sql = "SELECT count(*), slice, sum(num_bytes) FROM samples WHERE state = 'heldout' GROUP BY slice"
    sizes = connection.execute(sql).fetchall()
    if sum(size for size, _, _ in sizes) <= max_rows and sum(num_bytes for _, _, num_bytes in sizes) <= max_bytes:
        return None
    sql = "SELECT ref FROM samples WHERE state = 'heldout' AND slice = ? ORDER BY heldout_rank DESC LIMIT 1"
    return SampleRef.from_json(connection.execute(sql, (max(sizes)[1],)).fetchone()[0])

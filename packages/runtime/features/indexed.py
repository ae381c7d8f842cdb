"""What the stores that several processes share have in common: an index in SQLite over named blobs that lie elsewhere.

The index holds which generation of each row is current and the sum of all bytes, kept by triggers, so the budget is exact
across processes without walking anything. A put reserves its bytes before it writes; what a killed writer left, `gc` takes
back. The name of a blob holds its generation and checksum, so that damage is noticed. `Blobs` is where the bytes lie.
"""

from __future__ import annotations

import re
import time
import zlib
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

import safetensors
import safetensors.torch
import torch

from runtime.errors import FeatureBudgetExceeded, FeatureError
from runtime.features.database import Database
from runtime.features.refs import SampleMeta, SampleRef
from runtime.features.row import FeatureRow, specs_of
from runtime.features.store import Handle, Lease, StoreHealth, gone
from runtime.tensors import to_bytes

SCHEMA = (
    """CREATE TABLE objects(
        sample_id TEXT NOT NULL, generation INTEGER NOT NULL PRIMARY KEY, num_bytes INTEGER NOT NULL, name TEXT NOT NULL,
        state TEXT NOT NULL CHECK (state IN ('writing', 'present', 'stale')), held_at REAL NOT NULL)""",
    "CREATE INDEX objects_by_id ON objects(sample_id, state)",
    "CREATE INDEX objects_by_name ON objects(name)",
    "CREATE INDEX objects_by_state ON objects(state, held_at)",
    """CREATE TABLE usage(used_bytes INTEGER NOT NULL, num_objects INTEGER NOT NULL, last_generation INTEGER NOT NULL,
        store_id TEXT NOT NULL)""",
    "INSERT INTO usage VALUES (0, 0, 0, lower(hex(randomblob(8))))",
    """CREATE TRIGGER objects_in AFTER INSERT ON objects BEGIN
        UPDATE usage SET used_bytes = used_bytes + NEW.num_bytes, num_objects = num_objects + 1,
            last_generation = max(last_generation, NEW.generation); END""",
    """CREATE TRIGGER objects_out AFTER DELETE ON objects BEGIN
        UPDATE usage SET used_bytes = used_bytes - OLD.num_bytes, num_objects = num_objects - 1; END""",
)
NAME = re.compile(r"(?P<sample_id>[A-Za-z0-9_-]{1,128})\.(?P<generation>\d{1,18})\.(?P<checksum>[0-9a-f]{8})\.safetensors")
VERSION = 2
STALE_PER_PUT = 16  # released rows that a put tries to remove: more than one, so that they cannot pile up


class Blobs(Protocol):
    """Named bytes. Each method raises FeatureError, saying what to do, when the place behind it fails; reading and
    asking for a size FeatureUnavailable, since the blob may be whole."""

    @property
    def place(self) -> str:
        """For messages: "/var/lib/rows"."""
        ...

    def uri(self, name: str) -> str: ...

    def write(self, name: str, data: bytes) -> None:
        """Whole or not at all."""
        ...

    def read(self, name: str) -> bytes | None:
        """None: there is no such blob."""
        ...

    def size(self, name: str) -> int | None: ...

    def remove(self, name: str) -> bool:
        """True: it is gone, whoever removed it. False: it cannot go now, try again later."""
        ...

    def sweep(self, known: Collection[str], before: float) -> int:
        """Remove what lies here, is older than `before` (Unix seconds) and has none of the known names; returns how much."""
        ...

    def free_bytes(self) -> int | None:
        """Of the disk or memory behind it; None: not known."""
        ...

    def problem(self) -> str:
        """Why blobs cannot be written or read now; empty if all is well. Never raises."""
        ...


class IndexedStore:
    """A FeatureStore over blobs and an index beside them."""

    def __init__(
        self,
        index: Database,
        blobs: Blobs,
        budget_bytes: int,
        *,
        dtype: torch.dtype = torch.bfloat16,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.budget_bytes = budget_bytes
        self.dtype = dtype
        self._index = index
        self._blobs = blobs
        self._clock = clock

    # --- the producer's side ---

    def put(self, meta: SampleMeta, row: FeatureRow) -> SampleRef:
        self._remove_stale(STALE_PER_PUT)
        tensors = row.tensors(self.dtype)
        payload_bytes = sum(value.nbytes for value in tensors.values())
        if self.used_bytes() + payload_bytes > self.budget_bytes:  # saves the serialisation; _reserve is the exact check
            raise FeatureBudgetExceeded(payload_bytes, self.used_bytes(), self.budget_bytes)
        data = to_bytes(tensors)
        generation, name = self._reserve(meta.sample_id, data)
        try:
            self._blobs.write(name, data)
        except BaseException:
            with suppress(FeatureError):  # the place may be out of reach altogether: gc will
                self._remove([(generation, name)])
            raise
        self._publish(meta.sample_id, generation, name)
        return SampleRef(
            **asdict(meta),
            uri=self._blobs.uri(name),
            generation=generation,
            features=MappingProxyType(specs_of(tensors)),
            num_tokens=row.num_tokens,
            num_bytes=len(data),
            labels=MappingProxyType(dict(row.labels)),
        )

    def _reserve(self, sample_id: str, data: bytes) -> tuple[int, str]:
        """Take the bytes from the budget and a generation for them, before anything is written."""
        with self._index.transaction() as connection:
            [(used, last)] = connection.execute("SELECT used_bytes, last_generation FROM usage").fetchall()
            if used + len(data) > self.budget_bytes:
                raise FeatureBudgetExceeded(len(data), used, self.budget_bytes)
            name = f"{sample_id}.{last + 1}.{zlib.crc32(data):08x}.safetensors"
            values = (sample_id, last + 1, len(data), name, self._clock())
            connection.execute("INSERT INTO objects VALUES (?, ?, ?, ?, 'writing', ?)", values)
            return last + 1, name

    def _publish(self, sample_id: str, generation: int, name: str) -> None:
        """Make this generation the current one and remove those it replaces."""
        with self._index.transaction() as connection:
            changed = connection.execute("UPDATE objects SET state = 'present' WHERE generation = ?", (generation,)).rowcount
            connection.execute(
                """UPDATE objects SET state = 'stale' WHERE sample_id = ? AND state = 'present' AND generation <
                    (SELECT max(generation) FROM objects WHERE sample_id = ? AND state = 'present')""",
                (sample_id, sample_id),
            )
        if not changed:
            self._blobs.remove(name)
            raise FeatureError(f"{self._blobs.uri(name)} took so long to write that gc gave it up. Use a longer max_hold_age_s.")
        self._remove(
            self._index.read("SELECT generation, name FROM objects WHERE sample_id = ? AND state = 'stale'", (sample_id,))
        )

    def abort(self, sample_id: str) -> None:
        self._remove(self._index.read("SELECT generation, name FROM objects WHERE sample_id = ?", (sample_id,)))

    # --- the consumer's side ---

    def get(self, ref: SampleRef) -> tuple[FeatureRow, Lease]:
        name = self._name_of(ref)
        data = None if name is None else self._blobs.read(name)
        if name is None or data is None:
            raise gone(ref, self._blobs.place)
        if len(data) != ref.num_bytes or f"{zlib.crc32(data):08x}" != name.split(".")[-2]:
            raise FeatureError(f"{ref.uri} is damaged: {len(data)} bytes of {ref.num_bytes}, or another checksum. Fail this row.")
        try:
            tensors = safetensors.torch.load(data)
        except safetensors.SafetensorError as error:
            raise FeatureError(f"{ref.uri} is not a safetensors file: {error}. Fail this row.") from error
        if specs_of(tensors) != dict(ref.features):
            raise FeatureError(f"{ref.uri} holds other tensors than its reference says: {specs_of(tensors)}. Fail this row.")
        with self._index.transaction() as connection:
            connection.execute("UPDATE objects SET held_at = ? WHERE name = ?", (self._clock(), name))
        return FeatureRow.from_tensors(tensors, ref.labels), Lease(ref.sample_id, ref.generation, ref.uri)

    def exists(self, ref: SampleRef) -> bool:
        name = self._name_of(ref)
        return name is not None and self._blobs.size(name) == ref.num_bytes

    def release(self, handle: Handle) -> bool:
        name = self._name_of(handle)
        return name is not None and self._remove([(handle.generation, name)]) > 0

    def delete(self, refs: Iterable[SampleRef]) -> int:
        return sum(ref.num_bytes for ref in refs if self.release(ref))

    def _name_of(self, handle: Handle) -> str | None:
        """The blob of exactly this generation, by the index alone: a reference's uri is never used as a path."""
        sql = "SELECT name FROM objects WHERE generation = ? AND sample_id = ? AND state = 'present'"
        found = self._index.read(sql, (handle.generation, handle.sample_id))
        return str(found[0][0]) if found else None

    # --- keeping house ---

    def gc(self, max_hold_age_s: float, needed: Collection[tuple[str, int]] | None = None) -> int:
        """Take back: writes older than the age that never ended (a killed writer's), released and replaced generations that
        could not go at once, rows whose blob vanished, blobs that the index does not know, and, if `needed` (sample id,
        generation) is given, rows not in it that nobody put or got within the age. Younger ones may still be on their way.
        """
        before = self._clock() - max_hold_age_s
        doomed: list[tuple[int, str]] = []
        sql = "SELECT sample_id, generation, name, state, held_at < ? FROM objects"
        for sample_id, generation, name, state, is_old in self._index.read(sql, (before,)):
            is_unneeded = needed is not None and (sample_id, generation) not in needed
            is_lost = state == "present" and self._blobs.size(name) is None
            if state == "stale" or is_lost or (is_old and (state == "writing" or is_unneeded)):
                doomed.append((generation, name))
        num_removed = self._remove(doomed)
        known = {name for (name,) in self._index.read("SELECT name FROM objects")}
        return num_removed + self._blobs.sweep(known, before)

    def _remove(self, objects: Iterable[tuple[int, str]]) -> int:
        """Blob first, index after it: a crash between the two leaves too many bytes counted, never too few; gc puts it right.
        A blob that cannot go yet is stale: nobody finds it any more, its bytes count, and the next put or gc tries again.

        Returns how many rows this call took from sight.
        """
        num_taken = 0
        for generation, name in objects:
            is_gone = self._blobs.remove(name)
            with self._index.transaction() as connection:
                state = connection.execute("SELECT state FROM objects WHERE generation = ?", (generation,)).fetchone()
                if is_gone:
                    connection.execute("DELETE FROM objects WHERE generation = ?", (generation,))
                else:
                    connection.execute("UPDATE objects SET state = 'stale' WHERE generation = ?", (generation,))
            num_taken += state is not None and (is_gone or state != ("stale",))
        return num_taken

    def _remove_stale(self, limit: int) -> None:
        self._remove(
            self._index.read("SELECT generation, name FROM objects WHERE state = 'stale' ORDER BY held_at LIMIT ?", (limit,))
        )

    def free_bytes(self) -> int:
        return self.budget_bytes - self.used_bytes()

    def used_bytes(self) -> int:
        [(used,)] = self._index.read("SELECT used_bytes FROM usage")
        return int(used)

    def health(self) -> StoreHealth:
        [(used, num_rows)] = self._index.read("SELECT used_bytes, num_objects FROM usage")
        return StoreHealth(used, self.budget_bytes, num_rows, self._blobs.free_bytes(), self._blobs.problem())

    def close(self) -> None:
        self._index.close()


def open_index(root: Path) -> Database:
    return Database(Path(root) / "store.sqlite", SCHEMA, version=VERSION, synchronous="NORMAL")

"""Feature stores: where the tensors of training rows lie. `FeatureStore` is the protocol, `LocalDirectoryStore` the default.

The local store keeps one safetensors file per row under <root>/rows, written to a temporary name, synced, and renamed, so
a file is whole or not there. Several processes share a root: a small SQLite index beside the rows holds which
generation of each row is current and the sum of all bytes, kept by triggers, so the budget is exact across processes
without walking the directory. A put reserves its bytes before it writes; what a killed writer left, `gc` takes back. The
name of a file holds its generation and checksum, so a lost index is rebuilt from the directory, and damage is noticed.

Knows nothing of leases, splits or training: that is the ledger's.
"""

from __future__ import annotations

import os
import re
import shutil
import time
import zlib
from collections.abc import Callable, Collection, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

import safetensors
import safetensors.torch
import torch

from runtime.errors import FeatureBudgetExceeded, FeatureError, FeatureNotFound
from runtime.features.database import Database
from runtime.features.refs import SampleMeta, SampleRef
from runtime.features.row import FeatureRow, specs_of

SCHEMA = (
    """CREATE TABLE objects(
        sample_id TEXT NOT NULL, generation INTEGER NOT NULL PRIMARY KEY, num_bytes INTEGER NOT NULL, name TEXT NOT NULL,
        state TEXT NOT NULL CHECK (state IN ('writing', 'present', 'stale')), created_at REAL NOT NULL)""",
    "CREATE INDEX objects_by_id ON objects(sample_id, state)",
    "CREATE INDEX objects_by_state ON objects(state, created_at)",
    "CREATE TABLE usage(used_bytes INTEGER NOT NULL, num_objects INTEGER NOT NULL, last_generation INTEGER NOT NULL)",
    "INSERT INTO usage VALUES (0, 0, 0)",
    """CREATE TRIGGER objects_in AFTER INSERT ON objects BEGIN
        UPDATE usage SET used_bytes = used_bytes + NEW.num_bytes, num_objects = num_objects + 1,
            last_generation = max(last_generation, NEW.generation); END""",
    """CREATE TRIGGER objects_out AFTER DELETE ON objects BEGIN
        UPDATE usage SET used_bytes = used_bytes - OLD.num_bytes, num_objects = num_objects - 1; END""",
)
ROW_FILE = re.compile(r"(?P<sample_id>[A-Za-z0-9_-]{1,128})\.(?P<generation>\d{1,18})\.(?P<checksum>[0-9a-f]{8})\.safetensors")


@dataclass(frozen=True)
class StoreHealth:
    used_bytes: int
    budget_bytes: int
    num_rows: int
    free_disk_bytes: int


class FeatureStore(Protocol):
    """Tensors in, references out. Each put of an id makes a new generation; a ref of an older one is dead."""

    @property
    def budget_bytes(self) -> int: ...

    @property
    def dtype(self) -> torch.dtype:
        """What hidden states are stored in."""
        ...

    def put(self, meta: SampleMeta, row: FeatureRow) -> SampleRef:
        """Store the row. FeatureBudgetExceeded when it does not fit, FeatureError when it cannot be written: nothing stays."""
        ...

    def get(self, ref: SampleRef) -> FeatureRow:
        """The row, on the CPU. FeatureNotFound (a KeyError) when this generation is gone, FeatureError when it is damaged."""
        ...

    def exists(self, ref: SampleRef) -> bool:
        """Whether get would find a file of the right size. Cheap."""
        ...

    def release(self, ref: SampleRef) -> bool:
        """The consumer is done with this generation: its features go. Again, or with a stale ref: no-op, False."""
        ...

    def abort(self, sample_id: str) -> None:
        """The producer gives the sample up: every generation goes, half-written ones too. Idempotent."""
        ...

    def delete(self, refs: Iterable[SampleRef]) -> int:
        """Release many; returns the bytes that became free."""
        ...

    def gc(self, max_hold_age_s: float, needed: Collection[tuple[str, int]] | None = None) -> int:
        """Take back what nobody will release: see the implementation. Returns how many rows and files went."""
        ...

    def used_bytes(self) -> int: ...

    def health(self) -> StoreHealth: ...


class LocalDirectoryStore:
    """Rows of one root directory. Any number of threads and processes may use it at once."""

    def __init__(
        self,
        root: Path,
        budget_bytes: int,
        *,
        dtype: torch.dtype = torch.bfloat16,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.root = Path(root)
        self.budget_bytes = budget_bytes
        self.dtype = dtype
        self._clock = clock
        self._rows = self.root / "rows"
        try:
            self._rows.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise FeatureError(f"{self._rows} cannot be made: {error.strerror}. Point features.root elsewhere.") from error
        self._index = Database(self.root / "store.sqlite", SCHEMA, synchronous="NORMAL")
        if self._index.is_new:
            self._adopt()

    # --- the producer's side ---

    def put(self, meta: SampleMeta, row: FeatureRow) -> SampleRef:
        tensors = row.tensors(self.dtype)
        payload_bytes = sum(value.nbytes for value in tensors.values())
        if self.used_bytes() + payload_bytes > self.budget_bytes:  # saves the serialisation; _reserve is the exact check
            raise FeatureBudgetExceeded(payload_bytes, self.used_bytes(), self.budget_bytes)
        data = safetensors.torch.save(tensors)
        generation, name = self._reserve(meta.sample_id, data)
        try:
            self._write(name, data)
        except OSError as error:
            self._remove([(generation, name)])
            raise FeatureError(f"{self._rows / name} cannot be written: {error.strerror}. Check the disk.") from error
        self._publish(meta.sample_id, generation, name)
        return SampleRef(
            **asdict(meta),
            uri=f"rows/{name}",
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

    def _write(self, name: str, data: bytes) -> None:
        temporary = self._rows / f".{name}.tmp"
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, self._rows / name)
        directory = os.open(self._rows, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)

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
            _unlink(self._rows / name)
            raise FeatureError(f"{self._rows / name} took so long to write that gc gave it up. Use a longer max_hold_age_s.")
        self._remove(
            self._index.read("SELECT generation, name FROM objects WHERE sample_id = ? AND state = 'stale'", (sample_id,))
        )

    def abort(self, sample_id: str) -> None:
        self._remove(self._index.read("SELECT generation, name FROM objects WHERE sample_id = ?", (sample_id,)))

    # --- the consumer's side ---

    def get(self, ref: SampleRef) -> FeatureRow:
        name = self._name_of(ref)
        if name is None:
            raise self._gone(ref)
        path = self._rows / name
        try:
            data = path.read_bytes()
        except FileNotFoundError as error:
            raise self._gone(ref) from error
        except OSError as error:
            raise FeatureError(f"{path} cannot be read: {error.strerror}. Check the disk.") from error
        if len(data) != ref.num_bytes or f"{zlib.crc32(data):08x}" != name.split(".")[2]:
            raise FeatureError(f"{path} is damaged: {len(data)} bytes of {ref.num_bytes}, or another checksum. Fail this row.")
        try:
            tensors = safetensors.torch.load(data)
        except safetensors.SafetensorError as error:
            raise FeatureError(f"{path} is not a safetensors file: {error}. Fail this row.") from error
        if specs_of(tensors) != dict(ref.features):
            raise FeatureError(f"{path} holds other tensors than its reference says: {specs_of(tensors)}. Fail this row.")
        return FeatureRow.from_tensors(tensors, ref.labels)

    def exists(self, ref: SampleRef) -> bool:
        name = self._name_of(ref)
        try:
            return name is not None and (self._rows / name).stat().st_size == ref.num_bytes
        except FileNotFoundError:
            return False

    def release(self, ref: SampleRef) -> bool:
        name = self._name_of(ref)
        return name is not None and self._remove([(ref.generation, name)]) > 0

    def delete(self, refs: Iterable[SampleRef]) -> int:
        return sum(ref.num_bytes for ref in refs if self.release(ref))

    def _name_of(self, ref: SampleRef) -> str | None:
        """The file of exactly this generation, by the index alone: a ref's uri is never used as a path."""
        sql = "SELECT name FROM objects WHERE generation = ? AND sample_id = ? AND state = 'present'"
        found = self._index.read(sql, (ref.generation, ref.sample_id))
        return str(found[0][0]) if found else None

    def _gone(self, ref: SampleRef) -> FeatureNotFound:
        return FeatureNotFound(
            f"The features of {ref.sample_id} (generation {ref.generation}) are not in {self._rows} any more: "
            "they were released, replaced or shed. Skip this row."
        )

    # --- keeping house ---

    def gc(self, max_hold_age_s: float, needed: Collection[tuple[str, int]] | None = None) -> int:
        """Take back: writes older than the age that never ended (a killed writer's), replaced generations, rows whose file
        vanished, files of the directory that the index does not know, and, if `needed` (sample id, generation) is given,
        rows older than the age that are not in it. Younger things may still be on their way to the ledger.
        """
        before = self._clock() - max_hold_age_s
        num_removed = 0
        doomed: list[tuple[int, str]] = []
        sql = "SELECT sample_id, generation, name, state, created_at < ? FROM objects"
        for sample_id, generation, name, state, is_old in self._index.read(sql, (before,)):
            is_unneeded = needed is not None and (sample_id, generation) not in needed
            is_lost = state == "present" and not (self._rows / name).exists()
            if state == "stale" or is_lost or (is_old and (state == "writing" or is_unneeded)):
                doomed.append((generation, name))
        num_removed += self._remove(doomed)
        known = {name for (name,) in self._index.read("SELECT name FROM objects")}
        for entry in list(os.scandir(self._rows)):
            is_ours = entry.name.removeprefix(".").removesuffix(".tmp") in known
            if not is_ours and _age_below(entry, before):
                _unlink(Path(entry.path))
                num_removed += 1
        return num_removed

    def _remove(self, objects: Iterable[tuple[int, str]]) -> int:
        """File first, index after it: a crash between the two leaves too many bytes counted, never too few. gc puts it right."""
        num_removed = 0
        for generation, name in objects:
            _unlink(self._rows / f".{name}.tmp")
            _unlink(self._rows / name)
            with self._index.transaction() as connection:
                num_removed += connection.execute("DELETE FROM objects WHERE generation = ?", (generation,)).rowcount
        return num_removed

    def _adopt(self) -> None:
        """A fresh index over rows that are there already (the index was lost): enter them by their names."""
        with self._index.transaction() as connection:
            for path in self._rows.iterdir():
                match = ROW_FILE.fullmatch(path.name)
                if match:
                    values = (match["sample_id"], int(match["generation"]), path.stat().st_size, path.name, self._clock())
                    connection.execute("INSERT OR IGNORE INTO objects VALUES (?, ?, ?, ?, 'present', ?)", values)

    def used_bytes(self) -> int:
        [(used,)] = self._index.read("SELECT used_bytes FROM usage")
        return int(used)

    def health(self) -> StoreHealth:
        [(used, num_rows)] = self._index.read("SELECT used_bytes, num_objects FROM usage")
        return StoreHealth(used, self.budget_bytes, num_rows, shutil.disk_usage(self._rows).free)

    def close(self) -> None:
        self._index.close()


def _unlink(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise FeatureError(f"{path} cannot be deleted: {error.strerror}. Check its permissions and the disk.") from error


def _age_below(entry: os.DirEntry[str], before: float) -> bool:
    try:
        return entry.stat().st_mtime < before
    except FileNotFoundError:
        return False

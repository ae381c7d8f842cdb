"""Feature store of one directory, the default: a safetensors file per row under <root>/rows, the index beside them.

A file is written to a temporary name, synced, and renamed, so it is whole or not there. Its name holds generation and
checksum, so a lost index is rebuilt from the directory. Several processes may share a root, on a local disk.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Collection
from pathlib import Path

import torch

from runtime.config import FeaturesConfig
from runtime.errors import FeatureError, FeatureUnavailable
from runtime.features.indexed import NAME, IndexedStore, open_index


class Files:
    """Blobs as files of one directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.place = str(directory)

    def uri(self, name: str) -> str:
        return f"{self.directory.name}/{name}"

    def write(self, name: str, data: bytes) -> None:
        temporary = self._temporary(name)
        try:
            with open(temporary, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, self.directory / name)
            directory = os.open(self.directory, os.O_RDONLY)
            try:
                os.fsync(directory)
            finally:
                os.close(directory)
        except OSError as error:
            raise FeatureError(f"{self.directory / name} cannot be written: {error.strerror}. Check the disk.") from error

    def read(self, name: str) -> bytes | None:
        path = self.directory / name
        try:
            return path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise _unreadable(path, error) from error

    def size(self, name: str) -> int | None:
        path = self.directory / name
        try:
            return path.stat().st_size
        except FileNotFoundError:
            return None
        except OSError as error:
            raise _unreadable(path, error) from error

    def remove(self, name: str) -> bool:
        _unlink(self._temporary(name))
        _unlink(self.directory / name)
        return True

    def sweep(self, known: Collection[str], before: float) -> int:
        num_removed = 0
        for entry in list(os.scandir(self.directory)):
            is_known = entry.name.removeprefix(".").removesuffix(".tmp") in known
            if not is_known and _age_below(entry, before):
                _unlink(Path(entry.path))
                num_removed += 1
        return num_removed

    def free_bytes(self) -> int | None:
        return shutil.disk_usage(self.directory).free if self.directory.is_dir() else None

    def problem(self) -> str:
        return "" if os.access(self.directory, os.R_OK | os.W_OK | os.X_OK) else f"{self.directory} cannot be read and written"

    def _temporary(self, name: str) -> Path:
        return self.directory / f".{name}.tmp"


class LocalDirectoryStore(IndexedStore):
    def __init__(
        self,
        root: Path,
        budget_bytes: int,
        *,
        dtype: torch.dtype = torch.bfloat16,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.root = Path(root)
        rows = self.root / "rows"
        try:
            rows.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise FeatureError(f"{rows} cannot be made: {error.strerror}. Point features.root elsewhere.") from error
        super().__init__(open_index(self.root), Files(rows), budget_bytes, dtype=dtype, clock=clock)
        if self._index.is_new:
            self._adopt(rows)

    def _adopt(self, rows: Path) -> None:
        """A fresh index over rows that are there already (the index was lost): enter them by their names."""
        with self._index.transaction() as connection:
            for path in rows.iterdir():
                match = NAME.fullmatch(path.name)
                if match:
                    values = (match["sample_id"], int(match["generation"]), path.stat().st_size, path.name, self._clock())
                    connection.execute("INSERT OR IGNORE INTO objects VALUES (?, ?, ?, ?, 'present', ?)", values)


def open_store(config: FeaturesConfig, root: Path, dtype: torch.dtype) -> LocalDirectoryStore:
    return LocalDirectoryStore(root, config.budget_mib << 20, dtype=dtype)


def _unreadable(path: Path, error: OSError) -> FeatureUnavailable:
    return FeatureUnavailable(f"{path} cannot be read: {error.strerror}. Check the disk.")


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

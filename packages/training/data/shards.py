"""A directory of token rows: shards that appear whole, and a manifest that says what made them.

    <directory>/{manifest.json, shard-00000.safetensors, shard-00001.safetensors, ...}

A shard is complete by itself: killed between a shard and its manifest, a maker finds the shard and goes on behind it. The
manifest holds counts and hashes, and the `origin`: the settings that all rows of one directory share. Several directories, say
of several machines, are read as one where they were made with one model, and no row is in two of them. Knows no model.
"""

from __future__ import annotations

import glob
import json
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO

from safetensors import SafetensorError
from safetensors.torch import load, save

from runtime.errors import ConfigError, FeatureError
from runtime.files import TEMPORARY_PREFIX, dump_json, hold, sha256_of, write_atomic
from runtime.models import absolute
from training.data.tokens import Corpus, TokenRow, name_of

FORMAT = 1
MANIFEST = "manifest.json"
SHARD = re.compile(r"shard-(\d{5,})\.safetensors")
COUNTED = ("rows", "tokens", "generated_tokens")
SHARED = {  # in the origin, what directories that are read as one have in common
    "target_fingerprint": "model",
    "tokenizer_hash": "tokenizer",
    "vocabulary_hash": "vocabulary",
    "template_hash": "chat template",
}


class TokenShards:
    """Makes such a directory, or goes on with one. For one process at a time."""

    def __init__(
        self,
        directory: Path,
        origin: Mapping[str, Any],
        vocab_size: int,
        *,
        shard_tokens: int,  # a shard is written when it has so many,
        flush_every_s: float,  # and after so long
        counts: Callable[[], Mapping[str, Any]] = dict,  # what else the manifest is to say
    ) -> None:
        """ConfigError if the directory holds rows of another origin, is not a directory of rows, or cannot be written."""
        with _writing(directory):
            directory.mkdir(parents=True, exist_ok=True)
            self._lock = _hold(directory)
        self.directory = directory
        self._origin = json.loads(json.dumps(dict(origin)))
        self._vocab_size = vocab_size
        self._shard_tokens = shard_tokens
        self._flush_every_s = flush_every_s
        self._shards: list[dict[str, Any]] = []
        self._counts = counts
        self._known: set[str] = set()  # names of rows that are there
        self._rows: list[TokenRow] = []  # not written yet
        self._num_tokens = 0
        self._flushed_at = time.monotonic()
        try:
            with _writing(directory):
                self._go_on()
        except BaseException:
            self._lock.close()
            raise

    def _go_on(self) -> None:
        for leftover in self.directory.glob(f"{TEMPORARY_PREFIX}*"):
            leftover.unlink()
        files = sorted((path for path in self.directory.iterdir() if SHARD.fullmatch(path.name)), key=_number)
        manifest = read_manifest(self.directory) if (self.directory / MANIFEST).exists() else None
        if manifest is None and files:
            raise ConfigError(f"{self.directory} holds shards and no {MANIFEST}; give another directory.")
        if manifest is None or not (files or manifest["shards"]):  # no row yet, whatever another maker was about to make
            self._write_manifest()
        else:
            self._hold_against(manifest)
        for path in files:
            self._enter(path, read_shard(path))

    def _hold_against(self, manifest: Mapping[str, Any]) -> None:
        """ConfigError if rows that are there have another origin, or were changed. Rows of a missing shard are made again."""
        for shard in manifest["shards"]:
            if (self.directory / shard["file"]).exists():
                _check(self.directory, shard)
        before = manifest["origin"]
        for name in sorted(before.keys() | self._origin.keys()):
            if before.get(name) != self._origin.get(name):
                raise ConfigError(
                    f"{self.directory} holds rows made with {name} {before.get(name)!r}, and now it is "
                    f"{self._origin.get(name)!r}; keep what it was, or give another answers.directory (data.corpus adds up "
                    "several)."
                )

    def _enter(self, path: Path, corpus: Corpus) -> None:
        temperatures = Counter(f"{value:g}" for value in corpus.temperatures.tolist())
        self._shards.append(
            {
                "file": path.name,
                "sha256": sha256_of(path),
                "rows": len(corpus),
                "tokens": corpus.num_tokens,
                "generated_tokens": corpus.num_generated,
                "rows_by_temperature": dict(temperatures),
                "rows_by_slice": dict(Counter(label for _, _, label in corpus.labels)),
            }
        )
        self._known |= {name_of(source, part) for source, part, _ in corpus.labels}

    def is_known(self, name: str) -> bool:
        """Whether the row of this name was taken, now or by a maker before this one."""
        return name in self._known

    def add(self, rows: Sequence[TokenRow]) -> None:
        """Take rows of names that are not known yet; on disk with the next shard, all of them in the same."""
        for row in rows:
            assert row.name not in self._known, row.name
            self._known.add(row.name)
            self._num_tokens += len(row.token_ids)
        self._rows += rows
        if self._num_tokens >= self._shard_tokens or time.monotonic() - self._flushed_at >= self._flush_every_s:
            self.flush()

    def flush(self) -> None:
        """Everything is durable when this returns."""
        with _writing(self.directory):
            if self._rows:
                corpus = Corpus.of(self._rows, self._vocab_size)
                number = (
                    _number(Path(self._shards[-1]["file"])) + 1 if self._shards else 0
                )  # behind the last, if some are missing
                path = self.directory / f"shard-{number:05d}.safetensors"
                write_atomic(path, save(corpus.tensors()))
                self._enter(path, corpus)
                self._rows.clear()
                self._num_tokens = 0
            self._write_manifest()
        self._flushed_at = time.monotonic()

    def totals(self) -> dict[str, int]:
        return {name: sum(shard[name] for shard in self._shards) for name in COUNTED}

    def _write_manifest(self) -> None:
        manifest = {"format": FORMAT, "origin": self._origin, "totals": self.totals(), "shards": self._shards}
        write_atomic(self.directory / MANIFEST, dump_json({**manifest, "counts": dict(self._counts())}))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._lock.close()


@contextmanager
def _writing(directory: Path) -> Iterator[None]:
    """ConfigError, with the directory's name, for one that cannot be written."""
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"Rows cannot be written into {directory} ({error}); give another answers.directory, or make room. What is there is "
            "safe: the same command goes on from it."
        ) from error


def _hold(directory: Path) -> TextIO:
    try:
        return hold(directory / ".lock")
    except BlockingIOError as error:
        raise ConfigError(f"Another process is writing rows into {directory}; stop it, or give another directory.") from error


def directories_of(setting: str, given: str) -> list[Path]:
    """The directories of token rows that a setting means, by name: one, the directory above several, or a pattern. None: it
    means something else. ConfigError if it means such directories, and others."""
    path = absolute(setting, given)
    if (path / MANIFEST).is_file():
        return [path]
    if path.is_dir():
        if any(SHARD.fullmatch(each.name) for each in path.iterdir()):
            raise ConfigError(f"{setting} is {given!r}, which holds shards and no {MANIFEST}; complete it, or give another one.")
        found = [each for each in path.iterdir() if each.suffix == ".jsonl" or (each.is_dir() and each.name[0] != ".")]
    elif not path.exists() and glob.has_magic(given):
        found = [Path(name) for name in glob.glob(str(path))]
    else:
        return []
    directories = sorted(each for each in found if (each / MANIFEST).is_file())
    others = sorted(set(found) - set(directories))
    if directories and others:
        raise ConfigError(
            f"{setting} is {given!r}, which means directories of token rows, such as {directories[0]}, and also {others[0]}, "
            f"which has no {MANIFEST}; complete or move what is none, or give a pattern of those that are meant."
        )
    return [each for each in directories if read_manifest(each)["shards"]] or directories  # one without rows has no say


def read_manifest(directory: Path) -> dict[str, Any]:
    """ConfigError if it is damaged."""
    path = directory / MANIFEST
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read ({error}); give another directory.") from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise ConfigError(f"{path} is no manifest of format {FORMAT}; give another directory.")
    shards = manifest.get("shards")
    if not isinstance(manifest.get("origin"), dict) or not isinstance(shards, list) or not all(map(_names_a_shard, shards)):
        raise ConfigError(f"{path} does not say what made its rows, or which shards there are; give another directory.")
    return manifest


def described(directory: Path) -> dict[str, Any]:
    """What the manifest says of all its rows, and which directory it is. Null: it does not say."""
    manifest = read_manifest(directory)
    names = ("model", "target_fingerprint", "files", "answers")
    totals = {name: sum(shard.get(name) or 0 for shard in manifest["shards"]) for name in COUNTED}
    return {"directory": str(directory), **totals, **{name: manifest["origin"].get(name) for name in names}}


def _names_a_shard(entry: Any) -> bool:
    """A file of the directory itself, and its hash."""
    texts = (entry.get("file"), entry.get("sha256")) if isinstance(entry, dict) else (None, None)
    return all(isinstance(text, str) for text in texts) and SHARD.fullmatch(str(texts[0])) is not None


def _number(path: Path) -> int:
    match = SHARD.fullmatch(path.name)
    assert match is not None
    return int(match[1])


def _check(directory: Path, shard: Mapping[str, str]) -> Path:
    """Where the shard lies. ConfigError if it is missing or changed."""
    path = directory / shard["file"]
    if not path.is_file():
        raise ConfigError(f"Shard {path} is missing; restore it, or have the mode=capture that made it make its rows again.")
    if sha256_of(path) != shard["sha256"]:
        raise ConfigError(
            f"Shard {path} is not what its manifest says; restore it, or delete it and have the mode=capture that made it make "
            "its rows again."
        )
    return path


def read_shard(path: Path) -> Corpus:
    """ConfigError if it is damaged."""
    try:
        return Corpus.from_tensors(load(path.read_bytes()))
    except (OSError, SafetensorError, FeatureError) as error:
        raise ConfigError(f"Shard {path} cannot be used: {error}. Restore it, or make the directory anew.") from error


def read_together(directories: Sequence[Path]) -> list[Corpus]:
    """All shards of all directories, in order. ConfigError if the directories have not all that is SHARED in common, if two of
    them hold a row of one name, or for a shard that is missing or changed."""
    parts: list[Corpus] = []
    origins = [read_manifest(directory)["origin"] for directory in directories]
    for directory, origin in zip(directories, origins, strict=True):
        for name, told in SHARED.items():
            if origin.get(name) != origins[0].get(name):
                raise ConfigError(
                    f"The rows in {directories[0]} and {directory} were made with another {told} each ({name} "
                    f"{origins[0].get(name)!r} and {origin.get(name)!r}), so they cannot be added up; give one of the two, or "
                    "make its rows anew."
                )
    where: dict[str, Path] = {}
    for directory in directories:
        for part in read_shards(directory):
            for source, answer, _ in part.labels:
                name = name_of(source, answer)
                if where.setdefault(name, directory) != directory:
                    raise ConfigError(
                        f"{where[name]} and {directory} both hold a row of the name {name!r}, so they cannot be added up; give "
                        "one of the two, or capture with prompts whose ids differ."
                    )
            parts.append(part)
    return parts


def read_shards(directory: Path) -> Iterable[Corpus]:
    """The shards that the manifest names, each held against its hash. ConfigError for one that is missing or changed."""
    for shard in read_manifest(directory)["shards"]:
        yield read_shard(_check(directory, shard))

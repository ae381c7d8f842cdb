"""`Registry`: drafter versions in a directory that several processes share; the way from training back to serving.

::

    root/versions/<id>/{config.json, model.safetensors, manifest.json}   appears at once, never changes; id = content hash
    root/states/<id>.json                                                {state, reason}; absent: staged
    root/active.json                                                     {version}: the one pointer; which version is active
                                                                         is said here and nowhere else

Every change of a file is an atomic replacement, so readers need no lock; writers hold one. It moves files and keeps states:
whether a version may serve is `validate`'s judgement, and loading it is the server's business.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from runtime.eagle3.checkpoint import CONFIG_FILE, WEIGHTS_FILE, read_config, read_vocabulary, version_id
from runtime.eagle3.reasons import RejectReason, rejected
from runtime.errors import DrafterRejected
from runtime.files import dump_json, locked, move_directory, remove_leftovers, temporary_directory, write_atomic
from runtime.registry.manifest import MANIFEST_FILE, Manifest

_VERSION_ID = re.compile(r"[0-9a-f]{16}")


class VersionState(Enum):
    STAGED = "staged"  # published, not looked at yet
    VALIDATED = "validated"
    ACTIVE = "active"
    RETIRED = "retired"  # was active
    REJECTED = "rejected"  # must not serve
    ROLLED_BACK = "rolled_back"  # was active and did worse


_MAY_BE_ACTIVE = (VersionState.STAGED, VersionState.VALIDATED)
_STATES = {state.value: state for state in VersionState}


@dataclass(frozen=True)
class VersionRecord:
    version: str
    state: VersionState
    reason: str  # of a rejection or a roll-back: "<code>: <sentence>"
    manifest: Manifest | None  # None: unreadable, and the state is REJECTED
    path: Path


class Registry:
    def __init__(self, root: Path) -> None:
        self.root = root
        self._versions = root / "versions"
        self._states = root / "states"
        self._pointer = root / "active.json"
        self._make_places()

    @property
    def where(self) -> str:
        """Its place, for people."""
        return str(self.root)

    def _make_places(self) -> None:
        """At each use, so that a registry that somebody emptied or removed is an empty one, and goes on."""
        for directory in (self._versions, self._states):
            directory.mkdir(parents=True, exist_ok=True)

    def publish(
        self,
        checkpoint_dir: Path,
        *,
        parent: str | None,
        step: int,
        target_fingerprint: str,
        metrics: Mapping[str, float],
        notes: str = "",
    ) -> str:
        """Copy a checkpoint in as a new staged version and return its id. The same content again is the same version;
        for another target than before, it is staged anew, as the last publisher knows best what it is for.

        Until the last moment nothing is visible; a publisher that dies leaves a directory that no reader looks at and the
        next publisher removes.
        """
        with locked(self.root / ".publish.lock"):
            self._make_places()
            remove_leftovers(self._versions)
            with temporary_directory(self._versions) as copy:
                _copy(checkpoint_dir, copy)
                config = read_config(copy)
                if config.aux_layer_ids is None:
                    said = "names no auxiliary layers; a version must. Let python -m training mode=import stage it with them."
                    raise rejected(RejectReason.LAYER_IDS, f"{checkpoint_dir} {said}")
                version = version_id(copy)
                manifest = Manifest(
                    version=version,
                    parent=parent,
                    step=step,
                    target_fingerprint=target_fingerprint,
                    vocabulary_hash=read_vocabulary(copy).hash,
                    aux_layer_ids=config.aux_layer_ids,
                    dtype=config.dtype,
                    metrics=dict(metrics),
                    created_at=time.time(),
                    notes=notes,
                )
                (copy / MANIFEST_FILE).write_bytes(manifest.to_json())
                self._install(copy, manifest)
        return version

    def _install(self, copy: Path, manifest: Manifest) -> None:
        final = self._versions / manifest.version
        if final.exists():
            if _is_whole_for(final, manifest.target_fingerprint):
                return
            with temporary_directory(self._versions) as discarded:
                os.rename(final, discarded / manifest.version)
            self._write_state(manifest.version, VersionState.STAGED, "")
        move_directory(copy, final)

    def versions(self) -> list[VersionRecord]:
        """All versions, oldest first. A damaged one is listed as rejected, with its reason."""
        self._make_places()
        active = self.active()
        names = (entry.name for entry in self._versions.iterdir() if not entry.name.startswith("."))
        records = [self._record(name, active) for name in names]
        return sorted(records, key=lambda record: (record.manifest.created_at if record.manifest else 0.0, record.version))

    def get(self, version: str) -> VersionRecord:
        """DrafterRejected(UNKNOWN_VERSION) if it is not here."""
        self.path(version)
        return self._record(version, self.active())

    def path(self, version: str) -> Path:
        """The version's directory. DrafterRejected(UNKNOWN_VERSION) if there is none, or if this is no version id."""
        if not _VERSION_ID.fullmatch(version):
            raise rejected(
                RejectReason.UNKNOWN_VERSION, f"{version!r} is no version id; one is 16 hexadecimal digits, as the list shows."
            )
        path = self._versions / version
        if not path.is_dir():
            raise rejected(RejectReason.UNKNOWN_VERSION, f"There is no version {version} in {self.root}; list the versions.")
        return path

    def active(self) -> str | None:
        """The version that the pointer names; None before the first activation."""
        version = _read_json(self._pointer).get("version")
        is_here = isinstance(version, str) and _VERSION_ID.fullmatch(version) and (self._versions / version).is_dir()
        return version if is_here else None

    def activate(self, version: str) -> None:
        """Switch the pointer, durably, in one step; the version that was active becomes retired."""
        with self._writing():
            record = self.get(version)
            if record.state is VersionState.REJECTED:
                code, _, sentence = record.reason.partition(": ")
                raise DrafterRejected(code, f"Version {version} was rejected and cannot be activated: {sentence}")
            previous = self.active()
            if previous == version:
                return
            self._write_state(version, VersionState.VALIDATED, "")
            write_atomic(self._pointer, dump_json({"version": version}))
            if previous is not None:
                self._write_state(previous, VersionState.RETIRED, "")

    def set_state(self, version: str, state: VersionState, reason: str = "") -> None:
        """Note a version's state. ACTIVE is `activate`; retiring, rejecting or rolling back the active one leaves none active."""
        if state is VersionState.ACTIVE:
            return self.activate(version)
        with self._writing():
            self.path(version)
            self._write_state(version, state, reason)
            if state not in _MAY_BE_ACTIVE and self.active() == version:
                write_atomic(self._pointer, dump_json({"version": None}))
        return None

    def _writing(self) -> AbstractContextManager[None]:
        self._make_places()
        return locked(self.root / ".state.lock")

    def _write_state(self, version: str, state: VersionState, reason: str) -> None:
        write_atomic(self._states / f"{version}.json", dump_json({"state": state.value, "reason": reason}))

    def _record(self, version: str, active: str | None) -> VersionRecord:
        path = self._versions / version
        try:
            manifest = _inspect(path)
        except DrafterRejected as damage:
            return VersionRecord(version, VersionState.REJECTED, f"{damage.reason}: {damage}", None, path)
        noted = _read_json(self._states / f"{version}.json")
        state = VersionState.ACTIVE if version == active else _STATES.get(str(noted.get("state")), VersionState.STAGED)
        return VersionRecord(version, state, str(noted.get("reason", "")), manifest, path)


def _copy(checkpoint_dir: Path, directory: Path) -> None:
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        source = checkpoint_dir / name
        if not (os.path.isfile(source) and os.access(source, os.R_OK)):
            raise rejected(
                RejectReason.UNREADABLE, f"{checkpoint_dir} has no file {name} that can be read; it is no drafter checkpoint."
            )
        shutil.copyfile(source, directory / name)


def _inspect(path: Path) -> Manifest:
    """The manifest of a version's directory, if that is whole as far as can be seen without reading its weights."""
    if not _VERSION_ID.fullmatch(path.name):
        raise rejected(RejectReason.MANIFEST, f"{path} is not named by a version id; remove it.")
    manifest = Manifest.read(path)
    if manifest.version != path.name:
        raise rejected(RejectReason.HASH, f"{path} holds the manifest of version {manifest.version}; publish it again.")
    read_config(path)
    try:
        with safe_open(path / WEIGHTS_FILE, framework="pt"):  # holds the header against the file's size
            return manifest
    except (OSError, SafetensorError) as error:
        raise rejected(RejectReason.UNREADABLE, f"{path / WEIGHTS_FILE} cannot be read ({error}); publish it again.") from error


def _is_whole_for(path: Path, target_fingerprint: str) -> bool:
    try:
        manifest = _inspect(path)
        return manifest.version == version_id(path) and manifest.target_fingerprint == target_fingerprint
    except DrafterRejected:
        return False


def _read_json(path: Path) -> dict[str, Any]:
    """A state or the pointer; empty if there is none or it is damaged: then a version is staged, and none is active."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, IsADirectoryError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}

"""A server as the source: its training rows come over gRPC, and versions that pass the gate go back the same way.

    python -m training source=grpc://10.0.0.5:50051

grpcs:// is TLS. Checkpoints stay on this machine; which of them counts, the server's ledger says. A version is kept in the
registry here and staged on the server, which decides on it. What the server serves is the gate's baseline. A version of the
server that is wanted, for that or to begin with, and not here yet, is fetched.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import grpc

from runtime.drafters import embedded
from runtime.drafters.ngram import NgramDrafter
from runtime.drafters.none import NoDrafter
from runtime.eagle3.reasons import RejectReason, rejected
from runtime.errors import ConfigError, DrafterRejected, EngineUnavailable, SlipstreamError
from runtime.files import temporary_directory
from runtime.models import absolute
from runtime.registry import Registry, VersionRecord, VersionState
from runtime.registry.life import Origin
from runtime.rpc.connection import Tls
from runtime.rpc.drafters_client import DrafterClient
from runtime.rpc.features_client import PATIENT, FeatureClient
from training.config import RemoteConfig
from training.learning.target_weights import TargetWeights

logger = logging.getLogger(__name__)

SOURCE = re.compile(r"(?P<scheme>grpcs?)://(?P<address>[^/\s]+:\d{1,5})/?")
RETRY_S = 0.5
KINDS = (NgramDrafter.version, NoDrafter.version)  # what a server may serve besides versions


class Source:
    """Connections to one server: `rows` is its ledger and store, `versions` its registry."""

    def __init__(
        self, address: str, config: RemoteConfig, target: TargetWeights, registry: Registry, holder: str | None = None
    ) -> None:
        """address: grpc://HOST:PORT or grpcs://HOST:PORT. ConfigError if that, or a file of config, cannot be used, or if
        the server serves another model than this one; EngineUnavailable if it cannot be reached."""
        match = SOURCE.fullmatch(address)
        if match is None:
            raise ConfigError(f"source is {address!r}; it must be grpc://HOST:PORT or grpcs://HOST:PORT.")
        connection: dict[str, Any] = {
            "api_key": _read_key(config.api_key_file),
            "tls": _tls(config) if match["scheme"] == "grpcs" else None,
            "timeout_s": config.patience_s,
            "retry": PATIENT,
        }
        self.address = address
        self.rows = FeatureClient(match["address"], holder=holder, **connection)
        try:
            served = self.rows.target_fingerprint()
        except EngineUnavailable as error:
            self.rows.close()
            raise EngineUnavailable(
                f"source is {address!r}, which does not answer ({error}); start that server, or name another."
            ) from error
        if served != target.fingerprint:  # its rows would all be failed, one after the other
            raise ConfigError(
                f"The server at {match['address']} serves model {served}, and model.name is {target.name!r}, which is "
                f"{target.fingerprint}; name the server's model."
            )
        self._drafters = DrafterClient(match["address"], **connection)
        self.versions = ServerVersions(registry, self._drafters, target, config.patience_s, address)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.rows.close()
        self._drafters.close()


class ServerVersions:
    """Implements `Versions`: weights in a registry here, states as the server tells them."""

    def __init__(self, registry: Registry, server: DrafterClient, target: TargetWeights, patience_s: float, address: str) -> None:
        """address: the server's, for people."""
        self.root = registry.root
        self.where = f"{registry.where} or the server {address}"
        self._registry = registry
        self._server = server
        self._patience_s = patience_s
        self._unknown: str | None = None  # what the server serves and could not be fetched; told once
        directory = embedded.path_for(target.name)
        if directory is not None:
            whose = target.fingerprint
            registry.publish(directory, parent=None, step=0, target_fingerprint=whose, metrics={}, notes="embedded")

    def active(self) -> str | None:
        """What the server serves; fetched if it is not here yet. None: no version, or one that could not be fetched."""
        version = self._server.active_version()
        if version in KINDS or version == self._unknown:
            return None
        try:
            self._registry.path(version)
        except DrafterRejected:
            return self._fetched(version)
        return version

    def _fetched(self, version: str) -> str | None:
        """Every reason not to have it leaves a baseline to judge by: where the run began."""
        try:
            self._fetch(version)
        except (SlipstreamError, grpc.RpcError, OSError) as error:
            self._unknown = version
            logger.warning(
                "the server's drafter %s cannot be fetched (%s): candidates are compared to where the run began", version, error
            )
            return None
        return version

    def _fetch(self, version: str) -> None:
        with temporary_directory(self._registry.root) as directory:
            said = self._server.download(version, directory)
            self._registry.publish(
                directory,
                parent=said.parent,
                step=said.step,
                target_fingerprint=said.target_fingerprint,
                metrics=said.metrics,
                notes=said.notes,
            )
        logger.info("fetched the server's drafter %s", version)

    def path(self, version: str) -> Path:
        return self._registry.path(version)

    def get(self, version: str) -> VersionRecord:
        """Fetched if it is not whole here. DrafterRejected if neither side has it, or what the server has cannot be used."""
        try:
            here = self._registry.get(version)
        except DrafterRejected:
            here = None
        try:
            entry = self._server.get(version)
        except DrafterRejected as error:
            if here is None:
                said = f"There is no version {version} in {self.where}; name one that one of them lists."
                raise rejected(RejectReason.UNKNOWN_VERSION, said) from error
            gone = f"{RejectReason.UNKNOWN_VERSION.value}: the server does not have it"
            return replace(here, state=VersionState.REJECTED, reason=gone)
        if here is None or here.manifest is None:  # damaged
            try:
                self._fetch(version)
            except grpc.RpcError as error:
                raise EngineUnavailable(f"Version {version} cannot be fetched from the server ({error}); try again.") from error
            here = self._registry.get(version)
        return replace(here, state=entry.state, reason=entry.reason)

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
        origin = Origin(parent=parent, step=step, target_fingerprint=target_fingerprint, metrics=metrics, notes=notes)
        version = self._registry.publish(
            checkpoint_dir, parent=parent, step=step, target_fingerprint=target_fingerprint, metrics=metrics, notes=notes
        )
        deadline = time.monotonic() + self._patience_s
        while True:
            try:
                return self._server.upload(self._registry.path(version), origin).version
            except EngineUnavailable:  # the same content again is the same version
                if time.monotonic() >= deadline:
                    raise
            time.sleep(RETRY_S)


def _read_key(file: str | None) -> str:
    if file is None:
        return ""
    path = absolute("remote.api_key_file", file)
    try:
        key = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"remote.api_key_file is {file!r}, which cannot be read ({error}); give another file.") from error
    if not key or any(character.isspace() for character in key):
        raise ConfigError(f"remote.api_key_file is {file!r}, and holds no key; write the server's key into it, and nothing else.")
    return key


def _tls(config: RemoteConfig) -> Tls:
    files = {name: getattr(config, name) for name in ("ca", "certificate", "private_key")}
    paths = {name: None if file is None else absolute(f"remote.{name}", file) for name, file in files.items()}
    for name, path in paths.items():
        if path is not None and not path.is_file():
            raise ConfigError(f"remote.{name} is {str(path)!r}, which is no file; give a PEM file.")
    return Tls(**paths)

"""Between the messages of drafters.proto and what `runtime.registry` says of versions, in both directions."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType

from google.protobuf.timestamp_pb2 import Timestamp

from runtime.eagle3.checkpoint import CONFIG_FILE, WEIGHTS_FILE
from runtime.errors import InvalidRequest
from runtime.registry.life import DrafterEntry, EventKind, LifecycleEvent, Origin
from runtime.registry.store import VersionState
from runtime.rpc.v1 import drafters_pb2 as pb

CHUNK_BYTES = 2**20
_STATES: dict[VersionState, pb.DrafterState] = {
    VersionState.STAGED: pb.DRAFTER_STATE_STAGED,
    VersionState.VALIDATED: pb.DRAFTER_STATE_VALIDATED,
    VersionState.ACTIVE: pb.DRAFTER_STATE_ACTIVE,
    VersionState.RETIRED: pb.DRAFTER_STATE_RETIRED,
    VersionState.REJECTED: pb.DRAFTER_STATE_REJECTED,
    VersionState.ROLLED_BACK: pb.DRAFTER_STATE_ROLLED_BACK,
}
_KINDS: dict[EventKind, pb.LifecycleEvent.Kind] = {
    "validated": pb.LifecycleEvent.KIND_VALIDATED,
    "rejected": pb.LifecycleEvent.KIND_REJECTED,
    "activated": pb.LifecycleEvent.KIND_ACTIVATED,
    "failed": pb.LifecycleEvent.KIND_FAILED,
    "rolled_back": pb.LifecycleEvent.KIND_ROLLED_BACK,
}
_STATE_OF_MESSAGE = {message: state for state, message in _STATES.items()}
_KIND_OF_MESSAGE = {message: kind for kind, message in _KINDS.items()}


def drafter_message(entry: DrafterEntry) -> pb.Drafter:
    return pb.Drafter(
        version=entry.version,
        state=_STATES[entry.state],
        reason=entry.reason,
        is_active=entry.is_active,
        is_embedded=entry.is_embedded,
        parent=entry.parent,
        step=entry.step,
        metrics=dict(entry.metrics),
        created_at=None if entry.created_at is None else _timestamp(entry.created_at),
    )


def drafter_entry(message: pb.Drafter) -> DrafterEntry:
    return DrafterEntry(
        version=message.version,
        state=_STATE_OF_MESSAGE[message.state],
        reason=message.reason,
        is_active=message.is_active,
        is_embedded=message.is_embedded,
        parent=message.parent if message.HasField("parent") else None,
        step=message.step if message.HasField("step") else None,
        metrics=MappingProxyType(dict(message.metrics)),
        created_at=_seconds(message.created_at) if message.HasField("created_at") else None,
    )


def event_message(event: LifecycleEvent) -> pb.LifecycleEvent:
    return pb.LifecycleEvent(
        kind=_KINDS[event.kind],
        version=event.version,
        previous=event.previous,
        reason=event.reason,
        message=event.message,
        seconds=event.seconds,
        at=_timestamp(event.at),
    )


def event(message: pb.LifecycleEvent) -> LifecycleEvent:
    return LifecycleEvent(
        kind=_KIND_OF_MESSAGE[message.kind],
        version=message.version,
        previous=message.previous if message.HasField("previous") else None,
        reason=message.reason if message.HasField("reason") else None,
        message=message.message if message.HasField("message") else None,
        seconds=message.seconds if message.HasField("seconds") else None,
        at=_seconds(message.at),
    )


def origin(message: pb.StageRequest.Manifest, path: str) -> Origin:
    """path: where the message stands in the request. InvalidRequest for what no manifest can hold."""
    for name, value in message.metrics.items():
        if not math.isfinite(value):
            raise InvalidRequest(f"{path}.metrics", f"{path}.metrics[{name[:80]!r}] is {value}; a manifest holds finite numbers.")
    return Origin(
        parent=message.parent if message.HasField("parent") else None,
        step=message.step,
        target_fingerprint=message.target_fingerprint,
        metrics=MappingProxyType(dict(message.metrics)),
        notes=message.notes,
    )


def manifest_message(origin: Origin) -> pb.StageRequest.Manifest:
    return pb.StageRequest.Manifest(
        parent=origin.parent,
        step=origin.step,
        target_fingerprint=origin.target_fingerprint,
        metrics=dict(origin.metrics),
        notes=origin.notes,
    )


def upload_head(checkpoint_dir: Path, origin: Origin) -> pb.StageRequest.Upload:
    """What the bytes of this checkpoint are."""
    digest = hashlib.sha256()
    for chunk in chunks(checkpoint_dir):
        digest.update(chunk)
    return pb.StageRequest.Upload(
        config_bytes=(checkpoint_dir / CONFIG_FILE).stat().st_size,
        weights_bytes=(checkpoint_dir / WEIGHTS_FILE).stat().st_size,
        sha256=digest.hexdigest(),
        manifest=manifest_message(origin),
    )


def chunks(checkpoint_dir: Path) -> Iterator[bytes]:
    """All bytes of config.json, then of model.safetensors."""
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        with (checkpoint_dir / name).open("rb") as file:
            while chunk := file.read(CHUNK_BYTES):
                yield chunk


def chunk_of(message: pb.StageRequest) -> bytes:
    """The bytes of a message after the first one."""
    if message.WhichOneof("kind") != "chunk" or not message.chunk:
        raise InvalidRequest("chunk", "After `upload` come chunks that are not empty, and nothing else.")
    return message.chunk


def _timestamp(seconds: float) -> Timestamp:
    stamp = Timestamp()
    stamp.FromDatetime(datetime.fromtimestamp(seconds, UTC))
    return stamp


def _seconds(stamp: Timestamp) -> float:
    return stamp.ToDatetime(UTC).timestamp()

"""A synchronous client of `DrafterService`, for operators and for trainers on other machines.

with DrafterClient("127.0.0.1:50051", api_key=KEY) as client:
    entry = client.upload(Path("my-drafter"), Origin(parent=parent, step=1200, metrics={"acceptance_length": 2.7}))
    client.activate(entry.version)
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self, Unpack

from runtime.eagle3.checkpoint import CONFIG_FILE, WEIGHTS_FILE, version_id
from runtime.eagle3.reasons import RejectReason, rejected
from runtime.registry.life import DrafterEntry, LifecycleEvent, Origin
from runtime.rpc import drafters_codec as codec
from runtime.rpc.connection import Client, Options, own_errors
from runtime.rpc.v1 import drafters_pb2 as pb
from runtime.rpc.v1 import drafters_pb2_grpc

TRANSFER_TIMEOUT_S = 3600.0


class EventStream:
    """Events as they happen: iterate it. `cancel`, or leaving its `with` block, ends it."""

    def __init__(self, call: Any) -> None:
        self._call = call
        with own_errors():
            call.initial_metadata()  # from here on nothing is missed

    def __iter__(self) -> Iterator[LifecycleEvent]:
        with own_errors():
            for message in self._call:
                yield codec.event(message)

    def cancel(self) -> None:
        self._call.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.cancel()


class DrafterClient(Client):
    def __init__(self, address: str, **options: Unpack[Options]) -> None:
        super().__init__(address, **options)
        self._stub = drafters_pb2_grpc.DrafterServiceStub(self._channel)  # type: ignore[no-untyped-call]

    def upload(self, checkpoint_dir: Path, origin: Origin | None = None) -> DrafterEntry:
        """Stage a checkpoint of this machine. The same content twice is the same version."""
        head = pb.StageRequest(upload=codec.upload_head(checkpoint_dir, origin or Origin()))
        chunks = (pb.StageRequest(chunk=chunk) for chunk in codec.chunks(checkpoint_dir))
        with own_errors():
            reply = self._stub.Stage(
                itertools.chain([head], chunks), timeout=TRANSFER_TIMEOUT_S, metadata=self._connection.metadata
            )
        return codec.drafter_entry(reply)

    def download(self, version: str, directory: Path) -> Origin:
        """Write a version's config.json and model.safetensors into a directory of this machine; returns what its publisher
        said. DrafterRejected if the server does not have it, or if what came is not it."""
        request = pb.DownloadRequest(version=version)
        with own_errors():
            call = self._stub.Download(request, timeout=TRANSFER_TIMEOUT_S, metadata=self._connection.metadata)
            head = next(call).upload
            left = head.config_bytes
            with (directory / CONFIG_FILE).open("wb") as config, (directory / WEIGHTS_FILE).open("wb") as weights:
                for message in call:
                    config.write(message.chunk[:left])
                    weights.write(message.chunk[left:])
                    left -= min(left, len(message.chunk))
        if version_id(directory) != version:
            raise rejected(RejectReason.HASH, f"What came as version {version} is {version_id(directory)}; fetch it again.")
        return codec.origin(head.manifest, "upload.manifest")

    def stage_directory(self, path: Path, origin: Origin | None = None) -> DrafterEntry:
        """Stage a checkpoint of the server's machine, by its absolute path there."""
        directory = pb.StageRequest.Directory(path=str(path), manifest=codec.manifest_message(origin or Origin()))
        return self._stage(pb.StageRequest(directory=directory))

    def stage_again(self, version: str) -> DrafterEntry:
        """Have a version that the server knows looked at as if it were new."""
        return self._stage(pb.StageRequest(version=version))

    def _stage(self, request: pb.StageRequest) -> DrafterEntry:
        def stage(request: pb.StageRequest, **more: Any) -> Any:
            return self._stub.Stage(iter([request]), **more)

        return codec.drafter_entry(self._call(stage, request))

    def validate(self, version: str) -> DrafterEntry:
        """DrafterRejected says why it must not serve."""
        return codec.drafter_entry(self._call(self._stub.Validate, pb.ValidateRequest(version=version)))

    def activate(self, version: str) -> LifecycleEvent:
        return codec.event(self._call(self._stub.Activate, pb.ActivateRequest(version=version)))

    def rollback(self, reason: str = "") -> LifecycleEvent:
        """Not repeated by itself: a second one goes back further."""
        return codec.event(self._call(self._stub.Rollback, pb.RollbackRequest(reason=reason), is_safe=False))

    def list(self) -> list[DrafterEntry]:
        """Oldest first."""
        return [codec.drafter_entry(message) for message in self._call(self._stub.List, pb.ListRequest()).drafters]

    def active_version(self) -> str:
        """What serves: a version, or a kind ("ngram", "none")."""
        return str(self._call(self._stub.List, pb.ListRequest()).active_version)

    def get(self, version: str) -> DrafterEntry:
        return codec.drafter_entry(self._call(self._stub.Get, pb.GetRequest(version=version)))

    def watch(self, *, include_history: bool = False) -> EventStream:
        request = pb.WatchRequest(include_history=include_history)
        return EventStream(self._stub.Watch(request, metadata=self._connection.metadata))

"""`DrafterService` over the drafter life cycle: what operators and remote trainers do with versions. Knows messages only."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from pathlib import Path

from runtime.errors import CapacityExhausted, EngineUnavailable, InvalidRequest
from runtime.files import temporary_directory
from runtime.registry import DrafterEntry, LifecycleEvent
from runtime.rpc import drafters_codec as drafters
from runtime.rpc.v1 import drafters_pb2 as pb
from runtime.rpc.v1 import drafters_pb2_grpc
from serving.grpc_server import Context, GrpcServer, check, statuses
from serving.lifecycle import Lifecycle
from serving.uploads import Upload

SERVICE = pb.DESCRIPTOR.services_by_name["DrafterService"]

MAX_UNREAD_EVENTS = 1024


class DrafterServicer(drafters_pb2_grpc.DrafterServiceServicer):
    def __init__(self, lifecycle: Lifecycle, uploads: Path, stopping: asyncio.Event, *, max_upload_bytes: int) -> None:
        """uploads: a directory for what is coming in. stopping: set when the server begins to stop."""
        self._lifecycle = lifecycle
        self._uploads = uploads
        self._stopping = stopping
        self._max_upload_bytes = max_upload_bytes

    def register_at(self, server: GrpcServer) -> None:
        add = drafters_pb2_grpc.add_DrafterServiceServicer_to_server
        server.register(SERVICE, add, self, needs_admin=True)

    async def Stage(self, requests: AsyncIterator[pb.StageRequest], context: Context) -> pb.Drafter:
        async with statuses(context):
            messages = _checked(requests)
            first = await anext(messages, pb.StageRequest())
            kind = first.WhichOneof("kind")
            if kind == "upload":
                return drafters.drafter_message(await self._take(first.upload, messages))
            if await anext(messages, None) is not None:
                raise InvalidRequest("chunk", f"Nothing may come after the first message, which was {kind or 'empty'}.")
            if kind == "directory":
                origin = drafters.origin(first.directory.manifest, "directory.manifest")
                entry = await asyncio.to_thread(self._lifecycle.stage, _directory(first), origin)
            elif kind == "version":
                entry = await asyncio.to_thread(self._lifecycle.stage_again, first.version)
            else:
                raise InvalidRequest("upload", "The first message must be one of upload, directory and version.")
            return drafters.drafter_message(entry)

    async def _take(self, head: pb.StageRequest.Upload, messages: AsyncIterator[pb.StageRequest]) -> DrafterEntry:
        origin = drafters.origin(head.manifest, "upload.manifest")
        self._uploads.mkdir(parents=True, exist_ok=True)
        with temporary_directory(self._uploads) as directory:
            upload = Upload(
                directory,
                config_bytes=head.config_bytes,
                weights_bytes=head.weights_bytes,
                sha256=head.sha256,
                max_bytes=self._max_upload_bytes,
            )
            async for message in messages:
                await asyncio.to_thread(upload.write, drafters.chunk_of(message))
            upload.finish()
            return await asyncio.to_thread(self._lifecycle.stage, directory, origin)

    async def Validate(self, request: pb.ValidateRequest, context: Context) -> pb.Drafter:
        async with statuses(context, request):
            return drafters.drafter_message(await asyncio.to_thread(self._lifecycle.validate, request.version))

    async def Activate(self, request: pb.ActivateRequest, context: Context) -> pb.LifecycleEvent:
        async with statuses(context, request):
            return drafters.event_message(await asyncio.to_thread(self._lifecycle.activate, request.version))

    async def Rollback(self, request: pb.RollbackRequest, context: Context) -> pb.LifecycleEvent:
        async with statuses(context, request):
            return drafters.event_message(await asyncio.to_thread(self._lifecycle.rollback, request.reason))

    async def List(self, request: pb.ListRequest, context: Context) -> pb.ListResponse:
        async with statuses(context, request):
            entries = await asyncio.to_thread(self._lifecycle.entries)
            messages = [drafters.drafter_message(entry) for entry in entries]
            return pb.ListResponse(drafters=messages, active_version=self._lifecycle.active_version)

    async def Get(self, request: pb.GetRequest, context: Context) -> pb.Drafter:
        async with statuses(context, request):
            return drafters.drafter_message(await asyncio.to_thread(self._lifecycle.entry, request.version))

    async def Download(self, request: pb.DownloadRequest, context: Context) -> None:
        async with statuses(context, request):
            directory, origin = await asyncio.to_thread(self._lifecycle.checkpoint, request.version)
            head = await asyncio.to_thread(drafters.upload_head, directory, origin)
            await context.write(pb.DownloadResponse(upload=head))
            chunks = drafters.chunks(directory)
            while (chunk := await asyncio.to_thread(next, chunks, None)) is not None:
                await context.write(pb.DownloadResponse(chunk=chunk))

    async def Watch(self, request: pb.WatchRequest, context: Context) -> None:
        async with statuses(context, request):
            unread = _Unread()
            before, unlisten = self._lifecycle.listen(unread.put)
            try:
                await context.send_initial_metadata(())  # from here on nothing is missed
                for event in before if request.include_history else ():
                    await context.write(drafters.event_message(event))
                while True:
                    await context.write(drafters.event_message(await self._next(unread)))
            finally:
                unlisten()

    async def _next(self, unread: _Unread) -> LifecycleEvent:
        event = asyncio.ensure_future(unread.next())
        stopping = asyncio.ensure_future(self._stopping.wait())
        try:
            await asyncio.wait({event, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if not event.done():
                raise EngineUnavailable("The server is shutting down; watch another one, or this one when it is back.")
            return event.result()
        finally:
            event.cancel()
            stopping.cancel()


class _Unread:
    """Events on their way from the life cycle's threads to one watcher, on whose event loop this is made."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[LifecycleEvent] = asyncio.Queue(MAX_UNREAD_EVENTS)
        self._lost_some = False

    def put(self, event: LifecycleEvent) -> None:
        """From any thread."""
        with contextlib.suppress(RuntimeError):  # the loop is gone, and its watchers with it
            self._loop.call_soon_threadsafe(self._take, event)

    def _take(self, event: LifecycleEvent) -> None:
        try:
            self._events.put_nowait(event)
        except asyncio.QueueFull:
            self._lost_some = True

    async def next(self) -> LifecycleEvent:
        """CapacityExhausted if the watcher did not read fast enough to hear of all of them."""
        if self._lost_some:
            raise CapacityExhausted(f"More than {MAX_UNREAD_EVENTS} events were not read in time; watch again, and read faster.")
        return await self._events.get()


async def _checked(requests: AsyncIterator[pb.StageRequest]) -> AsyncIterator[pb.StageRequest]:
    async for request in requests:
        check(request)
        yield request


def _directory(request: pb.StageRequest) -> Path:
    path = request.directory.path
    if not (os.path.isabs(path) and os.path.isdir(path)):
        raise InvalidRequest("directory.path", f"{path[:200]!r} is no absolute path of a directory on this server.")
    return Path(path)

"""`FeatureService` over this server's ledger and store: how trainers on other machines take its rows. For admins.

A run has one holder, the process that called Recover last; who lost it is refused, so that a trainer believed dead records
nothing beside its successor. Members of a run (`run/1`) are as good as it, if they name its holder. Holders are remembered in
memory only: after a restart the first one heard of has the run. Ledger and store block for a moment (SQLite, files), so they
are asked on a thread. Knows messages only.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict
from typing import Any, TypeVar

from google.protobuf.message import Message

from runtime.config import LONGEST_LEASE_S
from runtime.errors import EngineUnavailable, FeatureError, FeatureUnavailable, InvalidRequest, RunTakenOver
from runtime.features.ledger import Checkpoint, Ledger, run_of
from runtime.features.refs import SampleRef
from runtime.features.store import FeatureStore
from runtime.rpc import features_codec as codec
from runtime.rpc.features_codec import MAX_ROWS_PER_CALL
from runtime.rpc.v1 import features_pb2 as pb
from runtime.rpc.v1 import features_pb2_grpc
from serving.grpc_server import Context, GrpcServer, statuses

SERVICE = pb.DESCRIPTOR.services_by_name["FeatureService"]

STOPPING = "The server is shutting down; ask again when it is back."

Result = TypeVar("Result")


class FeatureServicer(features_pb2_grpc.FeatureServiceServicer):
    def __init__(self, store: FeatureStore, ledger: Ledger, stopping: asyncio.Event, *, target_fingerprint: str) -> None:
        """stopping: set when the server begins to stop; store and ledger are closed some time after."""
        self._store = store
        self._ledger = ledger
        self._stopping = stopping
        self._target_fingerprint = target_fingerprint
        self._holders: dict[str, str] = {}  # run id -> process
        self._changing = threading.Lock()  # from the look at who holds a run to the end of what the holder asked for

    def register_at(self, server: GrpcServer) -> None:
        add = features_pb2_grpc.add_FeatureServiceServicer_to_server
        server.register(SERVICE, add, self, needs_admin=True)

    async def Recover(self, request: pb.RecoverRequest, context: Context) -> pb.RecoverResponse:
        async with self._answering(context, request):
            _check_named(request)
            return pb.RecoverResponse(num_rows=await self._ask(self._recover, request))

    def _recover(self, request: pb.RecoverRequest) -> int:
        with self._changing:
            if request.run_id == run_of(request.run_id):
                self._holders[request.run_id] = request.holder
            self._check_holder(request)
            return self._ledger.recover(request.run_id)

    async def Lease(self, request: pb.LeaseRequest, context: Context) -> pb.LeaseResponse:
        async with self._answering(context, request):
            _check_named(request)
            if not 1 <= request.limit <= MAX_ROWS_PER_CALL:
                raise InvalidRequest("limit", f"limit must lie in 1..{MAX_ROWS_PER_CALL}, got {request.limit}.")
            refs = await self._ask(self._for_holder, request, self._lease, request, _timeout_s(request))
            return pb.LeaseResponse(samples=map(codec.sample_message, refs))

    def _lease(self, request: pb.LeaseRequest, timeout_s: float) -> list[SampleRef]:
        refs: list[SampleRef] = []
        if request.HasField("known"):
            known = set(request.known.sample_ids)
            refs = [ref for ref in self._ledger.leased(request.run_id) if ref.sample_id not in known][: request.limit]
        if len(refs) < request.limit:
            refs += self._ledger.lease(request.run_id, request.limit - len(refs), timeout_s)
        return refs

    async def Fetch(self, request: pb.FetchRequest, context: Context) -> None:
        async with self._answering(context, request):
            row, _ = await self._ask(self._store.get, codec.sample_ref(request.sample))
            for chunk in await self._ask(lambda: list(codec.chunks(row))):
                await context.write(pb.FetchResponse(chunk=chunk))

    async def Ack(self, request: pb.AckRequest, context: Context) -> pb.AckResponse:
        async with self._answering(context, request):
            _check_named(request)
            if not request.path:
                raise InvalidRequest("path", "path is empty; say where the checkpoint lies.")
            recorded = await self._ask(self._for_holder, request, self._record, request)
            return pb.AckResponse(checkpoint=codec.checkpoint_message(recorded))

    def _record(self, request: pb.AckRequest) -> Checkpoint:
        latest = self._ledger.latest_checkpoint(request.run_id)
        if latest is not None and (latest.path, latest.step) == (request.path, request.step):
            return latest  # the reply was lost
        return self._ledger.record_checkpoint(
            request.run_id, request.path, request.step, request.sample_ids, metrics=dict(request.metrics)
        )

    async def Heartbeat(self, request: pb.HeartbeatRequest, context: Context) -> pb.HeartbeatResponse:
        async with self._answering(context, request):
            _check_named(request)
            asked = (request.run_id, _timeout_s(request))
            num_rows = await self._ask(self._for_holder, request, self._ledger.heartbeat, *asked)
            return pb.HeartbeatResponse(num_rows=num_rows)

    async def Fail(self, request: pb.FailRequest, context: Context) -> pb.FailResponse:
        async with self._answering(context, request):
            _check_named(request)
            asked = (request.run_id, request.sample_id, request.reason, request.is_retryable)
            return pb.FailResponse(is_new=await self._ask(self._for_holder, request, self._ledger.fail, *asked))

    async def GetCheckpoint(self, request: pb.GetCheckpointRequest, context: Context) -> pb.GetCheckpointResponse:
        async with self._answering(context, request):
            latest = await self._ask(self._ledger.latest_checkpoint, request.run_id)
            return pb.GetCheckpointResponse(checkpoint=None if latest is None else codec.checkpoint_message(latest))

    async def ListHeldout(self, request: pb.ListHeldoutRequest, context: Context) -> pb.ListHeldoutResponse:
        async with self._answering(context, request):
            refs = await self._ask(self._ledger.heldout, request.limit if request.HasField("limit") else -1)
            return pb.ListHeldoutResponse(samples=map(codec.sample_message, refs))

    async def ListDurable(self, request: pb.ListDurableRequest, context: Context) -> pb.ListDurableResponse:
        async with self._answering(context, request):
            refs = await self._ask(self._ledger.durable, request.run_id, request.limit)
            return pb.ListDurableResponse(samples=map(codec.sample_message, refs))

    async def Status(self, request: pb.StatusRequest, context: Context) -> pb.StatusResponse:
        async with self._answering(context, request):
            ledger = self._ledger
            counts, used, marks, is_shedding = await self._ask(
                lambda: (ledger.status(), self._store.used_bytes(), ledger.watermarks(), ledger.is_shedding())
            )
            return pb.StatusResponse(
                is_shedding=is_shedding,
                watermarks=None if marks is None else pb.StatusResponse.Watermarks(**asdict(marks)),
                num_rows=counts,
                used_bytes=used,
                budget_bytes=self._store.budget_bytes,
                target_fingerprint=self._target_fingerprint,
            )

    def _for_holder(self, request: Any, question: Callable[..., Result], *args: Any) -> Result:
        """On its thread, so also for a client that is gone meanwhile: else a process that has lost its run could take rows in its
        name afterwards, which the new one does not know of and keeps leased for ever."""
        with self._changing:
            self._check_holder(request)
            return question(*args)

    def _check_holder(self, request: Any) -> None:
        run_id = run_of(request.run_id)
        if self._holders.setdefault(run_id, request.holder) != request.holder:
            raise RunTakenOver(run_id)

    @asynccontextmanager
    async def _answering(self, context: Context, request: Message) -> AsyncIterator[None]:
        async with statuses(context, request):
            if self._stopping.is_set():
                raise EngineUnavailable(STOPPING)
            try:
                yield
            except FeatureError as error:
                if self._stopping.is_set():  # the ledger was closed under the call: nothing is wrong with the row
                    raise EngineUnavailable(STOPPING) from error
                if isinstance(error, FeatureUnavailable):  # nor is it here: a trainer waits, and asks again
                    raise EngineUnavailable(error.message) from error
                raise

    async def _ask(self, question: Callable[..., Result], *args: Any) -> Result:
        return await asyncio.to_thread(question, *args)


def _check_named(request: Any) -> None:
    for field in ("run_id", "holder"):
        if not getattr(request, field):
            raise InvalidRequest(field, f"{field} is empty; give one.")


def _timeout_s(request: Any) -> float:
    timeout_s = float(request.timeout_s)
    if not 0 < timeout_s <= LONGEST_LEASE_S:  # also refuses what is not a number
        raise InvalidRequest("timeout_s", f"timeout_s must lie above 0 and at most {LONGEST_LEASE_S:g}, got {timeout_s}.")
    return timeout_s

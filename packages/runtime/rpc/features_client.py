"""A synchronous client of `FeatureService`: for a trainer it is the ledger (`Leases`) and the store (`Rows`) of a server.

    with FeatureClient("10.0.0.5:50051", api_key=KEY) as rows:
        rows.recover("run")
        for ref in rows.lease("run", limit=8, timeout_s=120):
            row, _ = rows.get(ref)

What was leased is fetched ahead, a few rows at a time, so that `get` seldom waits. A server that cannot be reached is waited
for, as long as one call may take: a trainer outlives its server's restarts.
Whatever call is made again does no harm (see features.proto); after a lease whose reply may have been lost, the next one tells
what is known. One object belongs to one trainer process.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc

from runtime.errors import ConfigError, EngineUnavailable, FeatureError, RunTakenOver
from runtime.features.flow import Watermarks
from runtime.features.ledger import Checkpoint
from runtime.features.refs import SampleRef
from runtime.features.row import FeatureRow
from runtime.features.store import Lease
from runtime.rpc import features_codec as codec
from runtime.rpc.connection import Attempts, Client, Reply, Retry
from runtime.rpc.fetch_ahead import FetchAhead
from runtime.rpc.v1 import features_pb2 as pb
from runtime.rpc.v1 import features_pb2_grpc

logger = logging.getLogger(__name__)

PATIENT = Retry(max_attempts=1_000_000, first_s=0.05, max_s=1.0)  # the call's time-out ends it


class FeatureClient(Client):
    """Implements `Leases` and `Rows`."""

    def __init__(self, address: str, *, retry: Retry = PATIENT, holder: str | None = None, **connection: Any) -> None:
        """holder: shared by the processes that train one run together; None: of this client alone. connection: api_key, tls,
        timeout_s, as in `connection.Client`."""
        super().__init__(address, retry=retry, **connection)
        self._stub = features_pb2_grpc.FeatureServiceStub(self._channel)  # type: ignore[no-untyped-call]
        self._holder = holder or uuid.uuid4().hex
        self._held: set[str] = set()  # leased, and not in a checkpoint yet
        self._ahead = FetchAhead(self._try_to_fetch)
        self._is_unsure = False  # a lease's reply may have been lost
        self._is_answering = True  # the server, when it was last heard of
        self._is_given_up = False  # a call waited for it in vain: later ones try once
        self._is_taken_over = False  # another process trains the run now

    def close(self) -> None:
        self._ahead.close()
        super().close()

    # --- Leases ---

    def recover(self, run_id: str) -> int:
        """None from a process that lost its run before: what it leased is its successor's to give back."""
        if self._is_taken_over:
            return 0
        reply = self._call(self._stub.Recover, pb.RecoverRequest(run_id=run_id, holder=self._holder))
        self._held.clear()
        self._ahead.drop()
        return int(reply.num_rows)

    def lease(self, run_id: str, limit: int, timeout_s: float) -> list[SampleRef]:
        refs: list[SampleRef] = []
        while True:
            num_asked = min(limit - len(refs), codec.MAX_ROWS_PER_CALL)
            came = self._lease_some(run_id, num_asked, timeout_s)
            refs += came
            if len(came) < num_asked or len(refs) == limit:
                return refs

    def _lease_some(self, run_id: str, limit: int, timeout_s: float) -> list[SampleRef]:
        known = pb.LeaseRequest.Known(sample_ids=sorted(self._held)) if self._is_unsure else None
        request = pb.LeaseRequest(run_id=run_id, holder=self._holder, limit=limit, timeout_s=timeout_s, known=known)
        self._is_unsure = True
        reply = self._call(self._lease_once, request)
        self._is_unsure = False
        refs = [codec.sample_ref(message) for message in reply.samples]
        self._held |= {ref.sample_id for ref in refs}
        self._ahead.begin(refs)
        return refs

    def _lease_once(self, request: pb.LeaseRequest, **call: Any) -> pb.LeaseResponse:
        """An attempt; one that fails lets the next say what is known."""
        try:
            reply: pb.LeaseResponse = self._stub.Lease(request, **call)
        except grpc.RpcError:
            request.known.CopyFrom(pb.LeaseRequest.Known(sample_ids=sorted(self._held)))
            raise
        return reply

    def heartbeat(self, run_id: str, timeout_s: float) -> int:
        request = pb.HeartbeatRequest(run_id=run_id, holder=self._holder, timeout_s=timeout_s)
        return int(self._call(self._stub.Heartbeat, request).num_rows)

    def fail(self, run_id: str, sample_id: str, reason: str, retryable: bool) -> bool:
        request = pb.FailRequest(run_id=run_id, holder=self._holder, sample_id=sample_id, reason=reason, is_retryable=retryable)
        is_new = bool(self._call(self._stub.Fail, request).is_new)
        self._held.discard(sample_id)
        self._ahead.drop([sample_id])
        return is_new

    def record_checkpoint(
        self,
        run_id: str,
        path: str | Path,
        step: int,
        trained_sample_ids: Iterable[str],
        *,
        metrics: Mapping[str, float] | None = None,
    ) -> Checkpoint:
        sample_ids = list(dict.fromkeys(trained_sample_ids))
        request = pb.AckRequest(
            run_id=run_id, holder=self._holder, path=str(path), step=step, sample_ids=sample_ids, metrics=dict(metrics or {})
        )
        recorded = codec.checkpoint(self._call(self._stub.Ack, request).checkpoint)
        self._held.difference_update(sample_ids)
        self._ahead.drop(sample_ids)
        return recorded

    def recorded(self, sample_ids: Iterable[str]) -> None:
        self._held.difference_update(sample_ids)

    def latest_checkpoint(self, run_id: str) -> Checkpoint | None:
        reply = self._call(self._stub.GetCheckpoint, pb.GetCheckpointRequest(run_id=run_id))
        return codec.checkpoint(reply.checkpoint) if reply.HasField("checkpoint") else None

    def durable(self, run_id: str, limit: int) -> list[SampleRef]:
        reply = self._call(self._stub.ListDurable, pb.ListDurableRequest(run_id=run_id, limit=limit))
        return [codec.sample_ref(message) for message in reply.samples]

    def heldout(self, limit: int = -1) -> list[SampleRef]:
        request = pb.ListHeldoutRequest(limit=None if limit < 0 else limit)
        return [codec.sample_ref(message) for message in self._call(self._stub.ListHeldout, request).samples]

    def status(self) -> dict[str, int]:
        return {name: int(count) for name, count in self._call(self._stub.Status, pb.StatusRequest()).num_rows.items()}

    def budget_bytes(self) -> int:
        """Of the server's store of rows."""
        return int(self._call(self._stub.Status, pb.StatusRequest()).budget_bytes)

    def watermarks(self) -> Watermarks | None:
        status = self._call(self._stub.Status, pb.StatusRequest())
        if not status.HasField("watermarks"):
            return None
        marks = status.watermarks
        return Watermarks(marks.high_rows, marks.low_rows, marks.high_bytes, marks.low_bytes)

    def is_shedding(self) -> bool:
        return bool(self._call(self._stub.Status, pb.StatusRequest()).is_shedding)

    def free_bytes(self) -> int:
        """What is left of it."""
        status = self._call(self._stub.Status, pb.StatusRequest())
        return int(status.budget_bytes - status.used_bytes)

    def target_fingerprint(self) -> str:
        """Of the model that the server serves."""
        return str(self._call(self._stub.Status, pb.StatusRequest()).target_fingerprint)

    # --- Rows ---

    def get(self, ref: SampleRef) -> tuple[FeatureRow, Lease]:
        row = self._ahead.take(ref) or self._call(self._fetch, ref)
        return row, Lease(ref.sample_id, ref.generation, ref.uri)

    def _fetch(self, ref: SampleRef, **call: Any) -> FeatureRow:
        request = pb.FetchRequest(sample=codec.sample_message(ref))
        return codec.row(ref, (message.chunk for message in self._stub.Fetch(request, **call)))

    def _try_to_fetch(self, ref: SampleRef) -> FeatureRow | None:
        try:
            return self._fetch(ref, timeout=self._connection.timeout_s, metadata=self._connection.metadata)
        except (grpc.RpcError, FeatureError, ValueError):  # `get` asks again, and tells; ValueError: the channel was closed
            return None

    def _call(self, method: Callable[..., Reply], request: Any, *, is_safe: bool = True) -> Reply:
        """ConfigError from a server without rows; EngineUnavailable, whatever the reason, where there was no answer in time."""
        once = replace(self._connection, retry=Retry(max_attempts=1))
        attempts = Attempts(once if self._is_given_up else self._connection, is_safe=is_safe)
        while True:
            try:
                reply = method(request, timeout=attempts.timeout_s(), metadata=self._connection.metadata)
            except grpc.RpcError as error:
                wait_s = self._wait_after(error, attempts)
            else:
                self._is_answering, self._is_given_up = True, False
                return reply
            time.sleep(wait_s)

    def _wait_after(self, error: grpc.RpcError, attempts: Attempts) -> float:
        address = self._connection.address
        if error.code() is grpc.StatusCode.UNIMPLEMENTED:
            raise ConfigError(f"The server at {address} has no training rows to give; start it with capture=all.") from error
        try:
            wait_s = attempts.wait_after(error)
        except RunTakenOver:
            self._is_taken_over = True
            raise
        except EngineUnavailable:
            self._is_given_up = True
            raise
        except grpc.RpcError:
            self._is_given_up = True
            raise EngineUnavailable(f"The server at {address} gave no answer: {error.code().name}, {error.details()}.") from error
        if self._is_answering:
            self._is_answering = False
            logger.warning("the server at %s does not answer; waiting for it, up to %g s", address, self._connection.timeout_s)
        return wait_s

"""One gRPC port: the gate that every call passes, health, reflection, and the one place where errors become statuses.

Services are registered by whoever makes them. A client that cancels, or whose deadline passes, cancels the coroutine of its
call. All calls run on the event loop: however many there are, there are no more threads.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.message import DecodeError, Message
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health
from grpc_reflection.v1alpha import reflection
from grpc_status import rpc_status

from runtime.errors import InvalidRequest, SlipstreamError
from runtime.rpc import codec
from runtime.rpc.status import to_status
from serving import auth
from serving.auth import Key, Keys

log = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]

HEALTH = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
REFLECTION = reflection.SERVICE_NAME
REFLECTION_V1 = "grpc.reflection.v1.ServerReflection"  # tools ask for it first, and must hear that it is not here

# A client whose machine vanished without a word is found out within half a minute, and its generation stopped.
_KEEPALIVE = [("grpc.keepalive_time_ms", 20_000), ("grpc.keepalive_timeout_ms", 10_000)]


@asynccontextmanager
async def statuses(context: Context, request: Message | None = None) -> AsyncIterator[None]:
    """Check the request, and end the call with the status of any error."""
    try:
        if request is not None:
            check(request)
        yield
    except SlipstreamError as error:
        await context.abort_with_status(rpc_status.to_status(to_status(error)))
    except grpc.aio.InternalError as error:  # a message could not be sent: the client has left meanwhile
        raise asyncio.CancelledError from error
    except grpc.aio.BaseError:
        raise
    except Exception as error:  # whatever it is, the caller gets a documented status, and the log gets the cause
        log.exception("A gRPC call failed.")
        await context.abort_with_status(rpc_status.to_status(to_status(error)))


def check(request: Message | DecodeError) -> None:
    """Refuse what is no message, and fields that this server does not know."""
    if isinstance(request, DecodeError):
        raise InvalidRequest("request", f"The request is not a message of this call: {request}.")
    codec.refuse_unknown(request)


class Gate(grpc.aio.ServerInterceptor):
    """Lets a call pass if its key may make it."""

    def __init__(self, keys: Keys | None, *, open_probes: bool) -> None:
        self._keys = keys
        self._open = {HEALTH, REFLECTION, REFLECTION_V1} if open_probes else set()
        self._ours: set[str] = set()
        self._needs_admin: set[str] = set()

    def know(self, service: str, *, needs_admin: bool) -> None:
        """A service whose calls `check` their requests."""
        self._ours.add(service)
        if needs_admin:
            self._needs_admin.add(service)

    def key_of(self, context: Context) -> Key:
        """The caller of a call that passed."""
        return auth.authorize(self._keys, _authorization(context.invocation_metadata()), needs_admin=False)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        service = handler_call_details.method.split("/")[1]
        if service not in self._open:
            try:
                authorization = _authorization(handler_call_details.invocation_metadata)
                auth.authorize(self._keys, authorization, needs_admin=service in self._needs_admin)
            except SlipstreamError as error:
                return _refusal(error)
        handler = await continuation(handler_call_details)
        return _forgiving(handler) if handler is not None and service in self._ours else handler


def _authorization(metadata: Any) -> str | None:
    return next((value for key, value in metadata or () if key == "authorization"), None)


def _forgiving(handler: Any) -> grpc.RpcMethodHandler[Any, Any]:
    """The same handler; bytes that are no message reach it as the DecodeError that they gave, and not the caller as UNKNOWN."""
    read = handler.request_deserializer

    def deserialize(data: bytes) -> Message | DecodeError:
        try:
            message: Message = read(data)
        except DecodeError as error:
            return error
        return message

    forgiving: grpc.RpcMethodHandler[Any, Any] = handler._replace(request_deserializer=deserialize)
    return forgiving


def _refusal(error: SlipstreamError) -> grpc.RpcMethodHandler[Any, Any]:
    """A handler for any kind of call that only says no."""

    async def refuse(requests: AsyncIterator[bytes], context: Context) -> None:
        await context.abort_with_status(rpc_status.to_status(to_status(error)))

    return grpc.stream_stream_rpc_method_handler(refuse)


class _Health(health.HealthServicer):  # type: ignore[misc]
    """Watchers hear of the end and are let go; they do not hold up the server's."""

    def __init__(self, stopped: asyncio.Event) -> None:
        super().__init__()
        self._stopped = stopped

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: Context) -> None:
        watching = asyncio.ensure_future(super().Watch(request, context))
        stopped = asyncio.ensure_future(self._stopped.wait())
        try:
            await asyncio.wait({watching, stopped}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            watching.cancel()
            stopped.cancel()


class GrpcServer:
    """One port and its services: bind, then register, then start."""

    def __init__(self, keys: Keys | None, *, open_probes: bool, max_request_bytes: int, max_calls: int) -> None:
        # Without so_reuseport a second server on the same port fails instead of taking half of the calls.
        options = [("grpc.so_reuseport", 0), ("grpc.max_receive_message_length", max_request_bytes), *_KEEPALIVE]
        self.gate = Gate(keys, open_probes=open_probes)
        self.stopping = asyncio.Event()  # streams without an end of their own end when it is set
        self._stopped = asyncio.Event()
        self._server = grpc.aio.server(interceptors=[self.gate], options=options, maximum_concurrent_rpcs=max_calls)
        self._health = _Health(self._stopped)
        self._services: list[str] = []

    def bind(self, host: str, port: int, credentials: grpc.ServerCredentials | None) -> int:
        """Take the port, 0 for a free one; returns it. Calls wait until `start`. OSError if it cannot be had."""
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        try:
            if credentials is None:
                return self._server.add_insecure_port(address)
            return self._server.add_secure_port(address, credentials)
        except RuntimeError as error:
            raise OSError(str(error)) from error

    def register(
        self, service: ServiceDescriptor, add: Callable[[Any, grpc.aio.Server], None], servicer: Any, *, needs_admin: bool = False
    ) -> None:
        """Serve one service. add: the generated add_...Servicer_to_server."""
        add(servicer, self._server)
        self._services.append(service.full_name)
        self.gate.know(service.full_name, needs_admin=needs_admin)

    async def start(self) -> None:
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection((*self._services, HEALTH, REFLECTION), self._server)
        for service in self._services:
            await self._health.set(service, health_pb2.HealthCheckResponse.SERVING)
        await self._server.start()

    async def announce_failure(self) -> None:
        """Health says NOT_SERVING from now on, as the engine is gone; calls are answered."""
        await self._health.enter_graceful_shutdown()

    async def announce_stop(self) -> None:
        """Health says NOT_SERVING from now on; calls go on, but for those that only watch."""
        self.stopping.set()
        await self._health.enter_graceful_shutdown()

    async def stop(self, grace_s: float) -> None:
        self.stopping.set()
        self._stopped.set()
        await self._server.stop(grace_s)

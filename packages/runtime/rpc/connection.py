"""What every client of a server shares: where it is, who asks, how long to wait, and when a failed call may be made again.

A call is repeated only where that is safe: it reads, or its request id makes a second one do nothing; and only for errors
that waiting may cure, capacity (after the server's own RetryInfo) and a server that cannot be reached.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypedDict, TypeVar, Unpack

import grpc

from runtime.errors import CapacityExhausted, EngineUnavailable, SlipstreamError
from runtime.rpc.status import from_rpc_error

Reply = TypeVar("Reply")

_OPTIONS = [
    ("grpc.max_receive_message_length", -1),  # a server's replies are as large as its histories and rows
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2000),  # a server that was started again is found soon
]


@dataclass(frozen=True)
class Tls:
    """PEM files. Without `ca` the system's authorities count."""

    ca: Path | None = None  # who signed the server's certificate
    certificate: Path | None = None  # of the client, where the server asks for one
    private_key: Path | None = None

    def credentials(self) -> grpc.ChannelCredentials:
        ca, key, certificate = (path.read_bytes() if path else None for path in (self.ca, self.private_key, self.certificate))
        return grpc.ssl_channel_credentials(ca, key, certificate)


@dataclass(frozen=True)
class Retry:
    """Waits between attempts double from `first_s` to `max_s`, each shortened at random by up to half."""

    max_attempts: int = 4  # 1: no retries
    first_s: float = 0.1
    max_s: float = 5.0

    def wait_s(self, num_failed: int) -> float:
        return min(self.first_s * 2.0 ** min(num_failed - 1, 64), self.max_s) * random.uniform(0.5, 1.0)


@dataclass(frozen=True)
class Connection:
    """address: HOST:PORT. api_key: empty for a server without keys. tls: None for plain text. timeout_s: of one call, with
    all its attempts; None for no limit."""

    address: str
    api_key: str = ""
    tls: Tls | None = None
    timeout_s: float | None = 60.0
    retry: Retry = Retry()

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        return (("authorization", f"Bearer {self.api_key}"),) if self.api_key else ()

    def channel(self) -> grpc.Channel:
        if self.tls is None:
            return grpc.insecure_channel(self.address, _OPTIONS)
        return grpc.secure_channel(self.address, self.tls.credentials(), _OPTIONS)

    def async_channel(self) -> grpc.aio.Channel:
        if self.tls is None:
            return grpc.aio.insecure_channel(self.address, _OPTIONS)
        return grpc.aio.secure_channel(self.address, self.tls.credentials(), _OPTIONS)


class Options(TypedDict, total=False):
    """What clients take beside the address: the fields of `Connection`."""

    api_key: str
    tls: Tls | None
    timeout_s: float | None
    retry: Retry


class Attempts:
    """The attempts of one call."""

    def __init__(self, connection: Connection, *, is_safe: bool) -> None:
        """is_safe: a second call does no harm if the first one did its work and only its reply was lost."""
        self._retry = connection.retry
        self._deadline = None if connection.timeout_s is None else time.monotonic() + connection.timeout_s
        self._is_safe = is_safe
        self._num_failed = 0

    def timeout_s(self) -> float | None:
        return None if self._deadline is None else max(self._deadline - time.monotonic(), 0.001)

    def wait_after(self, error: grpc.RpcError) -> float:
        """Seconds to wait before the next attempt. Where there is none, raises the error, as one of ours if it is."""
        own = from_rpc_error(error)
        if own is None:
            raise error
        self._num_failed += 1
        wait_s = self._retry.wait_s(self._num_failed)
        if isinstance(own, CapacityExhausted):  # refused before anything changed
            wait_s = max(wait_s, own.retry_after_s)
        elif not (self._is_safe and isinstance(own, EngineUnavailable)):
            raise own from error
        is_late = self._deadline is not None and time.monotonic() + wait_s > self._deadline
        if self._num_failed >= self._retry.max_attempts or is_late:
            raise own from error
        return wait_s


@contextmanager
def own_errors() -> Iterator[None]:
    """Turn the server's statuses back into our exceptions; others (cancelled, deadline) pass as grpc.RpcError."""
    try:
        yield
    except grpc.RpcError as error:
        own: SlipstreamError | None = from_rpc_error(error)
        if own is None:
            raise
        raise own from error


class Client:
    """A channel and calls over it, for the clients of single services."""

    def __init__(self, address: str, **options: Unpack[Options]) -> None:
        self._connection = Connection(address, **options)
        self._channel = self._connection.channel()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        self._channel.close()

    def _call(self, method: Callable[..., Reply], request: Any, *, is_safe: bool = True) -> Reply:
        attempts = Attempts(self._connection, is_safe=is_safe)
        while True:
            try:
                return method(request, timeout=attempts.timeout_s(), metadata=self._connection.metadata)
            except grpc.RpcError as error:
                wait_s = attempts.wait_after(error)
            time.sleep(wait_s)

"""Feature store in a Mooncake pool, for many machines: bytes in the memory of the pool's members, the index on each machine.

    mooncake_master --rpc_port=50061 --enable_http_metadata_server=true --http_metadata_server_port=8080

Who puts a row keeps its index, counts it against its own budget, and pins it, so that the pool's own eviction never takes it.
Everybody else of the pool gets and releases it by its reference, whose uri holds the index's id, generation and checksum;
what others released, the owner's gc notices. Rows live as long as the member whose segment holds them: where they are to
outlive the server, let a `mooncake_client` of its own lend the memory, and leave features.mooncake.segment_mib at 0.
"""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Callable, Collection
from importlib import import_module
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, urlsplit

import torch

from runtime.config import FeaturesConfig, MooncakeConfig
from runtime.errors import ConfigError, FeatureError, FeatureUnavailable
from runtime.features.indexed import NAME, IndexedStore, open_index
from runtime.features.refs import SampleMeta, SampleRef
from runtime.features.row import FeatureRow
from runtime.features.store import Handle

SCHEME = "mooncake://"
KEY = re.compile(rf"(?P<store_id>[0-9a-f]{{16}})/{NAME.pattern}")
KNOCK_TIMEOUT_S = 5.0
LOCAL_BUFFER_BYTES = 256 << 20  # of each member, for what is in transit: the largest row that can be read

# Mooncake's answers, from its ErrorCode
NO_ROOM = -200
NOT_FOUND = -704
LEASED = -706  # somebody got it a moment ago
REPLICA_BUSY = -703  # it is being written still, or copied


class Pool:
    """Blobs as keys of a Mooncake pool, all of them below one prefix."""

    def __init__(self, client: Any, prefix: str) -> None:
        self._client = client
        self._pinned = _pinned()
        self._prefix = prefix
        self.place = "the Mooncake pool"

    def uri(self, name: str) -> str:
        return SCHEME + self._key(name)

    def write(self, name: str, data: bytes) -> None:
        code = self._client.put(self._key(name), data, self._pinned)
        if code == NO_ROOM:
            raise FeatureError(
                f"{self.place} has no room for {len(data)} bytes. Lend it more memory (features.mooncake.segment_mib, "
                "or another mooncake_client), or lower features.budget_mib to what it has."
            )
        if code:
            raise self._failure("put", name, code)

    def read(self, name: str) -> bytes | None:
        size = self.size(name)
        if size is None:
            return None
        if size > LOCAL_BUFFER_BYTES:
            raise FeatureError(f"{self.uri(name)} has {size} bytes, more than the {LOCAL_BUFFER_BYTES} of a transfer. Cut rows.")
        data: bytes = self._client.get(self._key(name))
        if not data and self.size(name) is not None:
            raise FeatureUnavailable(f"{self.uri(name)} cannot be read now: a member of {self.place} does not answer. Try again.")
        return data or None

    def size(self, name: str) -> int | None:
        answer: int = self._client.get_size(self._key(name))
        if answer == NOT_FOUND:
            return None
        if answer < 0:
            raise self._failure("get_size", name, answer)
        return answer

    def remove(self, name: str) -> bool:
        return self.try_to_remove(name) in (0, NOT_FOUND)

    def try_to_remove(self, name: str) -> int:
        """0, NOT_FOUND, or for not yet LEASED or REPLICA_BUSY. Asking for a key's size leases it too, so do not ask before."""
        code: int = self._client.remove(self._key(name))
        if code not in (0, NOT_FOUND, LEASED, REPLICA_BUSY):
            raise self._failure("remove", name, code)
        return code

    def sweep(self, known: Collection[str], before: float) -> int:
        return 0  # what no index knows is not ours to judge: it may be another machine's

    def free_bytes(self) -> int | None:
        return None  # the master knows, and its own metrics tell

    def problem(self) -> str:
        return "" if self._client.health_check() == 0 else f"{self.place} does not answer"

    def close(self) -> None:
        self._client.close()

    def _key(self, name: str) -> str:
        return name if KEY.fullmatch(name) else self._prefix + name

    def _failure(self, what: str, name: str, code: int) -> FeatureUnavailable:
        return FeatureUnavailable(
            f"{what} of {self.uri(name)} failed with Mooncake's code {code}. See that the pool's master and members run."
        )


class MooncakeStore(IndexedStore):
    """Rows that this index knows are held to its budget; rows of other indices are got and released by their references."""

    _blobs: Pool

    def __init__(
        self,
        root: Path,
        budget_bytes: int,
        client: Any,  # a MooncakeDistributedStore that has joined a pool; closed with the store
        *,
        dtype: torch.dtype = torch.bfloat16,
        clock: Callable[[], float] = time.time,
    ) -> None:
        index = open_index(root)
        [(store_id,)] = index.read("SELECT store_id FROM usage")
        pool = Pool(client, f"{store_id}/")
        super().__init__(index, pool, budget_bytes, dtype=dtype, clock=clock)
        self._store_id = store_id
        self._foreign_stale: set[str] = set()  # released here, and leased in the pool still

    def put(self, meta: SampleMeta, row: FeatureRow) -> SampleRef:
        self._retry_foreign()
        return super().put(meta, row)

    def release(self, handle: Handle) -> bool:
        self._retry_foreign()
        key = self._foreign_key(handle)
        if key is None:
            return super().release(handle)
        if key in self._foreign_stale:
            return False
        code = self._blobs.try_to_remove(key)
        if code in (LEASED, REPLICA_BUSY):
            self._foreign_stale.add(key)
        return code != NOT_FOUND

    def gc(self, max_hold_age_s: float, needed: Collection[tuple[str, int]] | None = None) -> int:
        return self._retry_foreign() + super().gc(max_hold_age_s, needed)

    def close(self) -> None:
        super().close()
        self._blobs.close()

    def _name_of(self, handle: Handle) -> str | None:
        key = self._foreign_key(handle)
        if key is None:
            return super()._name_of(handle)
        return None if key in self._foreign_stale else key

    def _foreign_key(self, handle: Handle) -> str | None:
        """The pool's key of a row that another index keeps, if its reference agrees with itself; None if it is our own."""
        match = KEY.fullmatch(handle.uri.removeprefix(SCHEME))
        if match is None or match["store_id"] == self._store_id:
            return None
        if (match["sample_id"], int(match["generation"])) != (handle.sample_id, handle.generation):
            return None  # our index will not know it either
        return match[0]

    def _retry_foreign(self) -> int:
        """What is not removed when this process ends is left to the gc of the index that it belongs to."""
        removed = {key for key in self._foreign_stale.copy() if self._blobs.remove(key)}
        self._foreign_stale -= removed
        return len(removed)


def open_store(config: FeaturesConfig, root: Path, dtype: torch.dtype) -> MooncakeStore:
    return MooncakeStore(root, config.budget_mib << 20, join(config.mooncake), dtype=dtype)


def _package() -> Any:
    try:
        return import_module("mooncake.store")
    except ImportError as error:
        raise ConfigError(
            f"features.store is 'mooncake', but its package cannot be loaded ({error}). Install the extra `mooncake`; on "
            "Debian also libibverbs1 and librdmacm1."
        ) from error


def _pinned() -> Any:
    config = _package().ReplicateConfig()
    config.replica_num = 1
    config.with_hard_pin = True
    return config


def join(config: MooncakeConfig) -> Any:
    """A client that is a member of the pool. ConfigError, saying which setting, if it cannot be one."""
    package = _package()
    _knock("features.mooncake.master", config.master, urlsplit(f"//{config.master}"))
    _knock("features.mooncake.metadata", config.metadata, urlsplit(config.metadata))
    client = package.MooncakeDistributedStore()
    code = client.setup(
        config.host,
        config.metadata,
        config.segment_mib << 20,
        LOCAL_BUFFER_BYTES,
        config.protocol.value,
        config.rdma_devices,
        config.master,
    )
    if code:
        raise ConfigError(
            f"features.mooncake.host is {config.host!r}, but joining the pool of {config.master} failed with Mooncake's code "
            f"{code}. Give an address of this machine, and see that the pool's other members reach it."
        )
    return client


def _knock(setting: str, value: str, address: SplitResult) -> None:
    """Mooncake itself tries for minutes before it gives up."""
    try:
        socket.create_connection((address.hostname or "", address.port or 80), timeout=KNOCK_TIMEOUT_S).close()
    except OSError as error:
        raise ConfigError(
            f"{setting} is {value!r}, but nothing answers there ({error}). Start mooncake_master with its metadata server."
        ) from error

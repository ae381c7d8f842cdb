"""Small real rows, references and turns for the tests of the feature plane."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from runtime.backends.base import TargetInfo
from runtime.config import FeaturesConfig, MooncakeConfig, StoreKind
from runtime.features import (
    CapturedTurn,
    FeatureRow,
    FeatureSpec,
    FeatureStore,
    Ledger,
    LocalDirectoryStore,
    SampleMeta,
    SampleRef,
)
from runtime.hidden_states import HiddenStates

HIDDEN_SIZE = 8


def plane_of(root: Path, budget_bytes: int) -> tuple[LocalDirectoryStore, Ledger]:
    """A plane whose budget is a few rows."""
    store = LocalDirectoryStore(root, budget_bytes)
    return store, Ledger(root / "ledger.sqlite", exists=store.exists)


def _hidden(num_positions: int, seed: int) -> HiddenStates:
    generator = torch.Generator().manual_seed(seed)
    aux = torch.randn(num_positions, 3 * HIDDEN_SIZE, generator=generator)
    return HiddenStates(aux, torch.randn(num_positions, HIDDEN_SIZE, generator=generator))


@pytest.fixture
def make_row() -> Callable[..., FeatureRow]:
    def make(num_tokens: int = 12, num_generated: int = 6, seed: int = 0) -> FeatureRow:
        generated = torch.arange(num_tokens) >= num_tokens - num_generated
        return FeatureRow(torch.arange(num_tokens), generated, _hidden(num_tokens - 1, seed), {"kind": "test"})

    return make


@pytest.fixture
def make_meta() -> Callable[..., SampleMeta]:
    def make(sample_id: str = "a") -> SampleMeta:
        return SampleMeta(
            sample_id=sample_id, run_id="server", source="session/s", target_fingerprint="fp", aux_layer_ids=(1, 2, 3)
        )

    return make


@pytest.fixture
def make_ref() -> Callable[..., SampleRef]:
    """A reference whose features exist nowhere: enough for the ledger."""

    def make(sample_id: str = "a", generation: int = 1, num_bytes: int = 100) -> SampleRef:
        return SampleRef(
            sample_id=sample_id,
            run_id="server",
            source="session/s",
            target_fingerprint="fp",
            aux_layer_ids=(1, 2, 3),
            uri=f"rows/{sample_id}",
            generation=generation,
            features={"aux": FeatureSpec((3, 24), "bfloat16")},
            num_tokens=4,
            num_bytes=num_bytes,
            labels={"kind": "test"},
        )

    return make


@pytest.fixture
def make_turn() -> Callable[..., CapturedTurn]:
    def make(
        session_id: str = "s", num_tokens: int = 40, num_generated: int = 20, num_parts: int = 3, seed: int = 0
    ) -> CapturedTurn:
        hidden = _hidden(num_tokens - 1, seed)
        edges = torch.linspace(0, num_tokens - 1, num_parts + 1).int().tolist()
        return CapturedTurn(
            session_id=session_id,
            token_ids=tuple(range(100, 100 + num_tokens)),
            generated=tuple(index >= num_tokens - num_generated for index in range(num_tokens)),
            hidden=tuple(hidden[low:high] for low, high in pairwise(edges)),
            labels={"kind": "test"},
            drafter_version="v0",
        )

    return make


@pytest.fixture
def target_info() -> TargetInfo:
    return TargetInfo("tiny", "fp", 320, HIDDEN_SIZE, 6, 2048, (1, 2, 3), (257,), "float32", "cpu")


@pytest.fixture
def make_plane() -> Callable[[Path, int], tuple[LocalDirectoryStore, Ledger]]:
    return plane_of


@pytest.fixture
def plane(tmp_path: Path) -> Iterator[tuple[LocalDirectoryStore, Ledger]]:
    store, ledger = plane_of(tmp_path / "features", 1 << 24)
    yield store, ledger
    store.close()
    ledger.close()


class Nursery:
    """Runs Python code in real processes that can be killed, without importing torch again for each.

    One process imports everything and forks a child per script; no thread runs in it, so the fork is clean.
    """

    _MOTHER = """
import json, os, sys
import runtime.features
for line in sys.stdin:
    code, *children = json.loads(line)
    pids = []
    begun, begin = os.pipe()  # a child says nothing before its pid was told
    for arguments in children:
        pids.append(os.fork())
        if pids[-1] == 0:
            os.close(begin)
            os.read(begun, 1)
            sys.argv[1:] = arguments
            exec(code, {"__name__": "__main__"})
            sys.stdout.flush()
            os._exit(0)
    print(*pids, flush=True)
    os.close(begin)
    os.close(begun)
    print(*(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids), flush=True)
"""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", self._MOTHER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._requests, self._replies = self._process.stdin, self._process.stdout

    def start(self, code: str, *children: list[str]) -> list[int]:
        """One child per list of arguments, all at once; returns their pids. `line` reads what they print before they end."""
        self._requests.write(json.dumps([code, *children]) + "\n")
        self._requests.flush()
        return [int(pid) for pid in self.line().split()]

    def line(self) -> str:
        return self._replies.readline().strip()

    def kill(self, pid: int) -> None:
        """SIGKILL in the middle of its work, and wait until it is gone."""
        os.kill(pid, signal.SIGKILL)
        assert self.end() == [-signal.SIGKILL]

    def end(self) -> list[int]:
        """Wait for all children; returns their exit statuses."""
        return [int(status) for status in self.line().split()]

    def close(self) -> None:
        self._requests.close()
        self._process.wait(10)
        self._replies.close()


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    nursery = Nursery()
    yield nursery
    nursery.close()


class MooncakePool:
    """A real mooncake_master on free ports, and stores that are members of its pool."""

    LEASE_MS = 100

    def __init__(self, log: Path) -> None:
        self._ports = [_free_port() for _ in range(3)]
        self._log = log
        self._members: dict[int, Any] = {}
        self._lenders: list[subprocess.Popen[bytes]] = []
        self.start_master()

    def start_master(self) -> None:
        rpc, http, metrics = self._ports
        command = [
            str(Path(sys.executable).with_name("mooncake_master")),
            f"--rpc_port={rpc}",
            "--enable_http_metadata_server=true",
            f"--http_metadata_server_port={http}",
            f"--metrics_port={metrics}",
            f"--default_kv_lease_ttl={self.LEASE_MS}",
        ]
        with self._log.open("wb") as output:
            self._master = subprocess.Popen(command, stdout=output, stderr=output)
        deadline = time.monotonic() + 30
        while any(not _answers(port) for port in (rpc, http)):
            assert self._master.poll() is None, self._log.read_text()
            assert time.monotonic() < deadline, self._log.read_text()
            time.sleep(0.02)

    def config(self, *, budget_mib: int = 4096, segment_mib: int = 16) -> FeaturesConfig:
        rpc, http, _ = self._ports
        pool = MooncakeConfig(f"127.0.0.1:{rpc}", f"http://127.0.0.1:{http}/metadata", segment_mib=segment_mib)
        return FeaturesConfig(store=StoreKind.MOONCAKE, budget_mib=budget_mib, mooncake=pool)

    def store(self, root: Path, budget_bytes: int, *, segment_mib: int = 64, **options: Any) -> FeatureStore:
        """Stores that lend as much share one member: each takes seconds to leave."""
        from runtime.features.mooncake import MooncakeStore, join

        if segment_mib not in self._members:
            self._members[segment_mib] = join(self.config(segment_mib=segment_mib).mooncake)
        return MooncakeStore(root, budget_bytes, _Shared(self._members[segment_mib]), **options)

    def lend(self, segment_mib: int) -> subprocess.Popen[bytes]:
        """A member of its own that only lends memory: a process that outlives those who put rows there."""
        rpc, http, _ = self._ports
        port = _free_port()
        command = [
            str(Path(sys.executable).with_name("mooncake_client")),
            f"--master_server_address=127.0.0.1:{rpc}",
            f"--metadata_server=http://127.0.0.1:{http}/metadata",
            "--host=127.0.0.1",
            f"--port={port}",
            f"--global_segment_size={segment_mib} MB",
        ]
        with self._log.with_name("member.log").open("wb") as output:
            self._lenders.append(subprocess.Popen(command, stdout=output, stderr=output))
        deadline = time.monotonic() + 30
        while not _answers(port):
            assert self._lenders[-1].poll() is None, self._log.with_name("member.log").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.02)
        return self._lenders[-1]

    def close(self) -> None:
        for lender in self._lenders:
            lender.kill()
            lender.wait()
        for member in self._members.values():
            member.close()
        self.kill_master()

    def kill_master(self) -> None:
        self._master.kill()
        self._master.wait()


class _Shared:
    """A member that the closing of one store leaves in the pool."""

    def __init__(self, member: Any) -> None:
        self._member = member

    def __getattr__(self, name: str) -> Any:
        return getattr(self._member, name)

    def close(self) -> None:
        pass


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def _answers(port: int) -> bool:
    with socket.socket() as caller:
        return caller.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture(scope="session")
def start_mooncake(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], MooncakePool]]:
    """Starts a pool; all of them end with the session."""
    reason = _why_no_mooncake()
    if reason:
        pytest.skip(reason)
    started: list[MooncakePool] = []

    def start() -> MooncakePool:
        started.append(MooncakePool(tmp_path_factory.mktemp("mooncake") / "master.log"))
        return started[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("runtime.features.mooncake.LOCAL_BUFFER_BYTES", 16 << 20)  # the rows here are small
        yield start
    for pool in started:
        pool.close()


def _why_no_mooncake() -> str:
    try:
        import_module("mooncake.store")
    except ImportError as error:
        return f"the Mooncake package cannot be loaded here: {error}"
    return ""


@pytest.fixture(scope="session")
def mooncake_pool(start_mooncake: Callable[[], MooncakePool]) -> MooncakePool:
    return start_mooncake()

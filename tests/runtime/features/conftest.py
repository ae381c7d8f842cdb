"""Small real rows, references and turns for the tests of the feature plane."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from runtime.backends.base import TargetInfo
from runtime.features import (
    CapturedTurn,
    FeatureRow,
    FeatureSpec,
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
    for arguments in children:
        pids.append(os.fork())
        if pids[-1] == 0:
            sys.argv[1:] = arguments
            exec(code, {"__name__": "__main__"})
            sys.stdout.flush()
            os._exit(0)
    print(*pids, flush=True)
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

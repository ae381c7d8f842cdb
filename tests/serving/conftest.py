"""A real server on free ports with the tiny model, in this process, and the real clients that talk to it.

Its target is the real one behind `Throttle`, which can be told to be slow or to fail: what a big model or a broken device
does. One server serves all tests that need no settings of their own.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from openai import OpenAI

import serving.assembly
from runtime.backends import load_target
from runtime.backends.base import Segment, SegmentOutput, Target
from runtime.config import BackendConfig, CaptureConfig, ModelConfig, RegistryConfig, SpeculationConfig, SpeculationMode
from runtime.eagle3 import DraftVocabulary, Eagle3Config, Eagle3Model, save
from runtime.errors import SessionNotFound
from runtime.models import resolve
from runtime.rpc.client import RuntimeClient
from serving.app import Ready, Server
from serving.assembly import Parts
from serving.config import ServerConfig, ServingConfig

START_TIMEOUT_S = 60.0


class Throttle:
    """The real target; forwards can be made slow, or to fail."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self.delay_s = 0.0
        self.fails = False
        self.num_forwards = 0
        self.num_inside = 0  # forwards under way
        self.max_inside = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)

    def forward(self, segments: Sequence[Segment]) -> list[SegmentOutput]:
        self.num_forwards += 1
        self.num_inside += 1
        self.max_inside = max(self.max_inside, self.num_inside)
        try:
            time.sleep(self.delay_s)
            if self.fails:
                raise RuntimeError("the device is gone")
            return self._target.forward(segments)
        finally:
            self.num_inside -= 1


@dataclass
class Running:
    """A server at work."""

    server: Server
    parts: Parts
    ready: Ready
    target: Throttle
    loop: asyncio.AbstractEventLoop
    ended: Future[None]

    @property
    def config(self) -> ServingConfig:
        return self.server.config

    def stop(self) -> None:
        """Begin to stop, as a signal does."""
        self.loop.call_soon_threadsafe(self.server.stop)

    def client(self) -> RuntimeClient:
        return RuntimeClient(self.ready.grpc, timeout_s=30)

    def openai(self) -> OpenAI:
        return OpenAI(base_url=f"{self.ready.http}/v1", api_key="none", max_retries=0, timeout=30)

    def wait_until_idle(self, within_s: float = 5.0) -> None:
        """Every permit is back and no session is at work."""
        sessions = self.parts.engine.list_sessions
        wait_for(
            lambda: self.server.admission.num_running == 0 and all(session.state == "idle" for session in sessions()), within_s
        )


def wait_for(condition: Callable[[], bool], within_s: float = 10.0) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, f"not true within {within_s} s"
        time.sleep(0.005)


def start(config: ServingConfig) -> Running:
    """Start a server in a thread of its own. What it raises at start is raised here."""
    started: Future[Running] = Future()
    ended: Future[None] = Future()
    throttles: list[Throttle] = []

    def throttled(*args: Any) -> Any:
        throttles.append(Throttle(load_target(*args)))
        return throttles[0]

    async def serve() -> None:
        server = Server(config)
        loop = asyncio.get_running_loop()
        await server.serve(lambda parts, ready: started.set_result(Running(server, parts, ready, throttles[0], loop, ended)))

    def run() -> None:
        try:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(serving.assembly, "load_target", throttled)
                asyncio.run(serve())
            ended.set_result(None)
        except BaseException as error:
            (ended if started.done() else started).set_exception(error)

    threading.Thread(target=run, name="server-under-test", daemon=True).start()
    return started.result(timeout=START_TIMEOUT_S)


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where these tests keep the tiny model, made once."""
    return tmp_path_factory.mktemp("home")


@contextmanager
def at_home(path: Path) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLIPSTREAM_HOME", str(path))
        yield


@pytest.fixture(autouse=True)
def own_home(home: Path) -> Iterator[None]:
    with at_home(home):
        yield


def make_config(state_dir: Path, **groups: Any) -> ServingConfig:
    defaults: dict[str, Any] = {
        "model": ModelConfig(name="tiny", device="cpu"),
        "backend": BackendConfig(num_threads=1),
        "server": ServerConfig(http_port=0, grpc_port=0, shutdown_grace_s=0.5),
        "capture": CaptureConfig(min_generated_tokens=4),
        "registry": RegistryConfig(poll_s=0.05),
        "speculation": SpeculationConfig(mode=SpeculationMode.FIXED),  # whatever else this machine does meanwhile
    }
    return ServingConfig(state_dir=str(state_dir), **(defaults | groups))


StartServer = Callable[..., Running]


@pytest.fixture
def start_server(tmp_path: Path) -> Iterator[StartServer]:
    """Servers with settings of their own: start_server(admission=AdmissionConfig(...))."""
    running: list[Running] = []

    def make(**groups: Any) -> Running:
        running.append(start(make_config(tmp_path / f"state{len(running)}", **groups)))
        return running[-1]

    yield make
    for one in running:
        if not one.ended.done():
            one.stop()
        one.ended.result(timeout=30)


@pytest.fixture(scope="session")
def shared_server(home: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with at_home(home):
        running = start(make_config(tmp_path_factory.mktemp("state")))
    yield running
    running.stop()
    running.ended.result(timeout=30)


@pytest.fixture
def running(shared_server: Running) -> Iterator[Running]:
    """The shared server. Each test finds it idle and healthy, and must leave it so."""
    yield shared_server
    shared_server.target.delay_s = 0.0
    shared_server.target.fails = False
    with shared_server.client() as client:
        for session in client.list_sessions():
            with contextlib.suppress(SessionNotFound):  # one whose request is just ending closes itself
                client.close_session(session.session_id)
    shared_server.wait_until_idle()


@pytest.fixture
def openai(running: Running) -> Iterator[OpenAI]:
    with running.openai() as client:
        yield client


@pytest.fixture
def client(running: Running) -> Iterator[RuntimeClient]:
    with running.client() as client:
        yield client


def random_drafter(seed: int, directory: Path) -> Path:
    """A random EAGLE3 drafter for the tiny model, in this directory."""
    target_config = json.loads((resolve("tiny").path / "config.json").read_text())
    config = Eagle3Config.for_target(target_config, draft_vocab_size=64)
    generator = torch.Generator().manual_seed(seed)
    counts = torch.rand(config.vocab_size, generator=generator)
    vocabulary = DraftVocabulary.from_token_counts((counts * 1000).long() + 1, 64)
    model = Eagle3Model(config, vocabulary, torch.zeros(config.vocab_size, config.hidden_size))
    model.init_from_target(torch.randn(config.vocab_size, config.hidden_size, generator=generator), None, generator)
    save(model, directory)
    return directory


MakeDrafter = Callable[[int], Path]


@pytest.fixture
def make_drafter(home: Path, tmp_path: Path) -> MakeDrafter:
    """make_drafter(seed): a random EAGLE3 drafter for the tiny model, on disk."""
    return lambda seed: random_drafter(seed, tmp_path / f"drafter{seed}")

"""The serving program: one asyncio loop for HTTP and gRPC, the engine on its own thread.

    python -m serving model=tiny server.http_port=0

Takes the ports first, then loads, then prints `ready http=http://HOST:PORT grpc=HOST:PORT` on stdout. SIGTERM or SIGINT:
health turns NOT_SERVING, no new generation is admitted, running ones may finish within server.shutdown_grace_s (a second
signal cuts that short), the rest end with UNAVAILABLE or an error event, what the tap holds is written, exit code 0.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import uvicorn
from fastapi import FastAPI

from runtime.errors import EngineUnavailable
from runtime.garbage import set_apart_what_is_loaded
from serving import tls
from serving.admission import Admission
from serving.assembly import Parts, assemble
from serving.auth import Keys
from serving.config import ServingConfig
from serving.drafter_servicer import DrafterServicer
from serving.features_service import FeatureServicer
from serving.generations import Generations, Observer
from serving.grpc_server import GrpcServer
from serving.http.app import create_app
from serving.http.openai import ServedModel
from serving.http.token_bytes import TokenBytes
from serving.metrics import ServerMetrics, Sources
from serving.ports import is_loopback, open_grpc, open_http
from serving.prompts import Prompts
from serving.saved_sessions import SavedSessions
from serving.servicers import RuntimeServicer
from serving.session_calls import SessionCalls
from serving.tracing import Tracing

log = logging.getLogger(__name__)

DRAIN_POLL_S = 0.05
ENGINE_POLL_S = 0.5  # how long health may not know that the engine failed
KEEP_ALIVE_S = 75  # longer than clients keep idle connections: who closes first must not be the one that is about to be asked
GOODBYE_S = 5.0  # for last events to reach their clients once the engine has stopped


State = Literal["serving", "stopping", "failed"]


@dataclass(frozen=True)
class Ready:
    """Where a server listens."""

    http: str  # URL
    grpc: str  # address


def run(config: ServingConfig) -> int:
    """The program: serve until a signal comes."""
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    asyncio.run(_serve_until_signal(config))
    return 0


async def _serve_until_signal(config: ServingConfig) -> None:
    server = Server(config)
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, server.stop)

    def announce(parts: Parts, ready: Ready) -> None:
        set_apart_what_is_loaded()
        print(summary(config, parts), file=sys.stderr, flush=True)
        print(f"ready http={ready.http} grpc={ready.grpc}", flush=True)

    await server.serve(announce)


def summary(config: ServingConfig, parts: Parts) -> str:
    """What a person wants to see first."""
    info, speculation = parts.engine.info, config.speculation
    capture = "off"
    if parts.capture is not None:
        used_mib = parts.capture.used_bytes() / 2**20
        capture = f"into {config.features_path} ({used_mib:.0f} of {config.features.budget_mib} MiB used)"
    most = speculation.max_draft_tokens
    depth = f"{speculation.mode.value}, up to {most} deep" if most else "which nothing is drafted with (speculation is off)"
    new = "go live by themselves" if config.registry.auto_activate else "wait for POST /v1/drafters/{version}/activate"
    lines = {
        "model": f"{info.name}, {info.num_layers} layers, {info.dtype} on {info.device}, context {info.max_positions}",
        "drafter": f"{parts.engine.drafter_version}, {depth}",
        "capture": capture,
        "registry": f"{config.registry_path}; new versions {new}",
    }
    return "\n".join(["Slipstream serves", *(f"  {name:<9} {text}" for name, text in lines.items())])


class Server:
    """One server, from its ports to the last goodbye. Belongs to the event loop that makes it."""

    def __init__(self, config: ServingConfig) -> None:
        self.config = config
        self.run_id = f"serving-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
        self.metrics = ServerMetrics()
        self.admission = Admission(config.admission)
        self.keys = None if config.auth.keys_file is None else Keys.load(Path(config.auth.keys_file))
        tls.check(config.tls)
        self._stopping = asyncio.Event()
        self._hurry = asyncio.Event()

    def stop(self) -> None:
        """Begin to stop. Called again: wait for running generations no longer."""
        if self._stopping.is_set():
            self._hurry.set()
        self._stopping.set()

    async def serve(self, on_ready: Callable[[Parts, Ready], None]) -> None:
        """Serve until `stop`. ConfigError, ModelError or DrafterRejected if it cannot begin."""
        config = self.config.server
        grpc = GrpcServer(
            self.keys,
            open_probes=self.config.auth.open_probes,
            max_request_bytes=config.max_request_mib * 2**20,
            max_calls=config.max_calls,
        )
        with contextlib.closing(open_http(config)) as listener:
            grpc_port = open_grpc(grpc, config, self.config.tls)
            scheme = "http" if self.config.tls.certificate is None else "https"
            ready = Ready(f"{scheme}://{place(config.host, listener.getsockname()[1])}", place(config.host, grpc_port))
            self._warn_if_open()
            try:
                parts = await asyncio.to_thread(assemble, self.config, self.run_id, self.metrics.drafter_swap.observe)
                await self._serve(parts, grpc, listener, lambda: on_ready(parts, ready))
            finally:
                await grpc.stop(0)

    def _warn_if_open(self) -> None:
        if self.keys is None and not is_loopback(self.config.server.host):
            log.warning(
                "ANYBODY WHO REACHES %s MAY USE THIS SERVER, AND CHANGE ITS DRAFTERS: it has no keys and listens beyond this "
                "machine. Give it auth.keys_file=FILE, or server.host=127.0.0.1.",
                self.config.server.host,
            )

    async def _serve(self, parts: Parts, grpc: GrpcServer, listener: socket.socket, on_ready: Callable[[], None]) -> None:
        endpoint = self.config.tracing.endpoint
        tracing = None if endpoint is None else Tracing.to(endpoint, parts.resolved.name)
        observers: list[Callable[[], Observer]] = [self.metrics.new_request]
        if tracing is not None:
            observers.append(tracing.new_request)
        generations = Generations(parts.engine, self.admission, observers)
        divergences = parts.lifecycle.acceptance.divergences
        self.metrics.read_from(Sources(parts.engine, self.admission, parts.lifecycle.counts, parts.capture, divergences))
        prompts = Prompts(parts.tokenizer, parts.engine.info.max_positions)
        saved, ttl_s = SavedSessions(self.config.saved_sessions_path), self.config.sessions.ttl_s
        await asyncio.to_thread(saved.remove_unfinished)
        load, compile_grammar = parts.lifecycle.load, parts.engine.grammars.new_state
        calls = SessionCalls(
            parts.engine, generations, prompts, saved, load, compile_grammar=compile_grammar, default_ttl_s=ttl_s
        )
        self._register(parts, grpc, calls)
        app = self._app(parts, generations, prompts, calls)
        if tracing is not None:
            tracing.instrument(app)
        http = HttpServer(app, tls.uvicorn_settings(self.config.tls))
        parts.start()
        serving = asyncio.create_task(http.serve(sockets=[listener]))
        watching = asyncio.create_task(self._tell_when_engine_fails(parts, grpc))
        try:
            await grpc.start()
            await http.wait_until_started(serving)
            on_ready()
            await self._stopping.wait()
        finally:
            watching.cancel()
            await self._drain(grpc)
            await asyncio.to_thread(parts.stop)
            http.should_exit = True
            await asyncio.gather(serving, grpc.stop(GOODBYE_S))
            if tracing is not None:
                await asyncio.to_thread(tracing.stop)

    def _register(self, parts: Parts, grpc: GrpcServer, calls: SessionCalls) -> None:
        RuntimeServicer(calls, grpc.gate).register_at(grpc)
        uploads, max_bytes = self.config.state_path / "uploads", self.config.server.max_upload_mib * 2**20
        DrafterServicer(parts.lifecycle, uploads, grpc.stopping, max_upload_bytes=max_bytes).register_at(grpc)
        if parts.capture is not None:
            store, ledger, served = parts.capture.store, parts.capture.ledger, parts.engine.info.fingerprint
            FeatureServicer(store, ledger, grpc.stopping, target_fingerprint=served).register_at(grpc)

    async def _tell_when_engine_fails(self, parts: Parts, grpc: GrpcServer) -> None:
        while parts.engine.is_running:
            await asyncio.sleep(ENGINE_POLL_S)
        await grpc.announce_failure()

    async def _drain(self, grpc: GrpcServer) -> None:
        """Take nothing new and let what runs come to its end, as far as the grace period goes."""
        self._stopping.set()
        running, grace_s = self.admission.num_running, self.config.server.shutdown_grace_s
        log.info("Stopping. Requests that still run: %d; they have up to %g s, or until a second signal.", running, grace_s)
        self.admission.close()
        await grpc.announce_stop()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.config.server.shutdown_grace_s):
                while self.admission.num_running and not self._hurry.is_set():
                    await asyncio.sleep(DRAIN_POLL_S)

    def _app(self, parts: Parts, generations: Generations, prompts: Prompts, calls: SessionCalls) -> FastAPI:
        tokens = TokenBytes(parts.resolved.path / "tokenizer.json")
        model = ServedModel(parts.resolved.name, parts.engine.info, prompts, tokens, parts.engine.grammars)

        def state() -> State:
            if self._stopping.is_set():
                return "stopping"
            return "serving" if parts.engine.is_running else "failed"

        def describe() -> dict[str, object]:
            return {
                "model": model.name,
                "target_version": model.info.fingerprint,
                "drafter_version": parts.engine.drafter_version,
                "num_running": self.admission.num_running,
                "num_waiting": self.admission.num_waiting,
            }

        return create_app(
            model,
            generations,
            calls,
            parts.lifecycle,
            self.metrics,
            self.config.http,
            state=state,
            describe=describe,
            max_request_bytes=self.config.server.max_request_mib * 2**20,
            keys=self.keys,
            open_probes=self.config.auth.open_probes,
        )


class HttpServer(uvicorn.Server):
    """uvicorn on our event loop and socket; signals are the program's. tls: uvicorn's settings for it."""

    def __init__(self, app: FastAPI, tls: dict[str, Any]) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_graceful_shutdown=int(GOODBYE_S),
                timeout_keep_alive=KEEP_ALIVE_S,
                **tls,
            )
        )

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def wait_until_started(self, serving: asyncio.Task[None]) -> None:
        while not self.started:
            if serving.done():
                await serving
                raise EngineUnavailable("The HTTP server ended before it began.")
            await asyncio.sleep(0.01)


def place(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

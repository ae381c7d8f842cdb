"""The program as a process: it says when it is ready, refuses what it cannot do in a sentence, and stops when told."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest
from fastapi import FastAPI

from runtime.config import FeaturesConfig, RegistryConfig, SpeculationConfig
from runtime.errors import ConfigError
from serving.app import HttpServer, summary
from serving.config import ServerConfig, ServingConfig

from .conftest import StartServer, wait_for

READY = re.compile(r"ready http=(http://127\.0\.0\.1:\d+) grpc=(127\.0\.0\.1:\d+)\n")
PORTS = ["server.http_port=0", "server.grpc_port=0"]
ASK: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "ignore_eos": True}
COUNTED = """
import gc, sys, threading
from runtime.configuration import main
from serving.__main__ import run
from serving.config import ServingConfig

def tell():
    for _ in sys.stdin:
        print(len(gc.get_objects()), flush=True)

threading.Thread(target=tell, daemon=True).start()
main("serving", ServingConfig, run)
"""  # the program, which says how many objects a full collection would look at, as often as it is sent a line


class Program:
    """`python -m serving` with the tiny model, or another way to begin it."""

    def __init__(self, state_dir: Path, *overrides: str, begin: tuple[str, str] = ("-m", "serving")) -> None:
        command = [sys.executable, *begin, "model=tiny", f"state_dir={state_dir}", "backend.num_threads=1", *overrides]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)

    def ready(self) -> str:
        """Wait for the line; returns the URL."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        found = READY.fullmatch(line)
        assert found, line + self.end()[1]
        return found.group(1)

    def end(self) -> tuple[int, str]:
        """Exit code and what was said on stderr."""
        _, stderr = self.process.communicate(timeout=60)
        return self.process.returncode, stderr


@pytest.fixture
def programs() -> Iterator[list[Program]]:
    started: list[Program] = []
    yield started
    for program in started:
        program.process.kill()
        program.process.communicate()


def test_it_serves_until_a_signal_and_leaves_its_provenance(tmp_path: Path, programs: list[Program]) -> None:
    program = Program(tmp_path, *PORTS, "server.shutdown_grace_s=0.2")
    programs.append(program)
    url = program.ready()
    assert httpx.get(f"{url}/readyz").json() == {"status": "serving"}
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=ASK | {"stream": True}, timeout=30) as response:
        lines = response.iter_lines()
        next(lines)
        program.process.send_signal(signal.SIGTERM)
        last = [line for line in lines if line][-1]
    code, stderr = program.end()
    assert code == 0
    assert last == "data: [DONE]" or json.loads(last.removeprefix("data: "))["error"]["code"] == "engine_unavailable"
    assert "Traceback" not in stderr
    assert "tiny, 6 layers, float32 on cpu, context 2048" in stderr
    assert re.search(r"Stopping. Requests that still run: \d; they have up to 0.2 s, or until a second signal.", stderr)
    [run] = (tmp_path / "serving").iterdir()
    assert json.loads((run / "provenance.json").read_text())["versions"]["torch"]
    assert "tiny" in (run / "config.yaml").read_text()


def test_the_first_lines_say_what_is_drafted_with() -> None:
    info = SimpleNamespace(name="tiny", num_layers=6, dtype="float32", device="cpu", max_positions=2048)
    parts = cast(Any, SimpleNamespace(engine=SimpleNamespace(info=info, drafter_version="v7"), capture=None))
    assert "drafter   v7, adaptive, up to 5 deep" in summary(
        ServingConfig(speculation=SpeculationConfig(max_draft_tokens=5)), parts
    )
    off = ServingConfig(speculation=SpeculationConfig(max_draft_tokens=0))
    assert "drafter   v7, which nothing is drafted with (speculation is off)" in summary(off, parts)


def test_the_garbage_collector_does_not_look_at_what_was_loaded(tmp_path: Path, programs: list[Program]) -> None:
    """Which would stop all threads for a quarter of a second, again and again."""
    program = Program(tmp_path, *PORTS, begin=("-c", COUNTED))
    programs.append(program)
    url = program.ready()
    assert httpx.post(f"{url}/v1/chat/completions", json=ASK | {"max_tokens": 4}, timeout=30).status_code == 200
    assert program.process.stdin is not None
    assert program.process.stdout is not None
    program.process.stdin.write("\n")
    program.process.stdin.flush()
    assert int(program.process.stdout.readline()) < 100_000  # four times as many are there


def test_what_cannot_be_is_one_sentence_and_exit_code_2(tmp_path: Path, programs: list[Program]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        programs += [
            Program(tmp_path, f"server.http_port={port}", "server.grpc_port=0"),
            Program(tmp_path, *PORTS, "admission.polcy=reject"),
        ]
        outcomes = [program.end() for program in programs]
    for (code, stderr), said in zip(outcomes, (f"server.http_port is {port}", "admission.policy"), strict=True):
        assert code == 2, stderr
        assert said in stderr
        assert len(stderr.splitlines()) == 1, stderr


def test_a_second_server_on_the_same_ports_is_refused(start_server: StartServer) -> None:
    running = start_server()
    http_port, grpc_port = (int(place.rpartition(":")[2]) for place in (running.ready.http, running.ready.grpc))
    with pytest.raises(ConfigError, match=rf"server.http_port is {http_port}, and 127.0.0.1:{http_port} cannot be opened"):
        start_server(server=ServerConfig(http_port=http_port, grpc_port=0))
    with pytest.raises(ConfigError, match=rf"server.grpc_port is {grpc_port}, and 127.0.0.1:{grpc_port} cannot be opened"):
        start_server(server=ServerConfig(http_port=0, grpc_port=grpc_port))


@pytest.mark.parametrize(
    "bad",
    [
        {"http_port": -1},
        {"grpc_port": 70000},
        {"host": " "},
        {"shutdown_grace_s": -1.0},
        {"max_request_mib": 0},
        {"max_request_mib": 1025},
        {"max_upload_mib": 0},
        {"max_calls": 0},
    ],
)
def test_server_settings_out_of_range(bad: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"server.{next(iter(bad))}"):
        ServerConfig(**bad)


def test_places_that_nobody_named_are_refused() -> None:
    for make in (lambda: ServingConfig(state_dir=""), lambda: ServingConfig(features=FeaturesConfig(root=" "))):
        with pytest.raises(ConfigError, match="must be a directory, or null"):
            make()
    with pytest.raises(ConfigError, match=r"registry\.root is '~nobody-here/r', and there is no such home directory"):
        _ = ServingConfig(registry=RegistryConfig(root="~nobody-here/r")).registry_path


def test_the_two_surfaces_need_two_ports() -> None:
    with pytest.raises(ConfigError, match="another port"):
        ServerConfig(http_port=9000, grpc_port=9000)


def test_a_generation_that_ends_within_the_grace_is_whole(start_server: StartServer) -> None:
    running = start_server(server=ServerConfig(http_port=0, grpc_port=0, shutdown_grace_s=20))
    running.target.delay_s = 0.02
    answers: list[httpx.Response] = []
    url = f"{running.ready.http}/v1/chat/completions"
    asking = threading.Thread(target=lambda: answers.append(httpx.post(url, json=ASK | {"max_tokens": 30}, timeout=30)))
    asking.start()
    wait_for(lambda: running.server.admission.num_running == 1)
    running.stop()
    wait_for(lambda: httpx.get(f"{running.ready.http}/readyz").status_code == 503)
    assert httpx.get(f"{running.ready.http}/readyz").json() == {"status": "stopping"}
    refused = httpx.post(url, json=ASK, timeout=30)
    assert refused.status_code == 503
    assert refused.json()["error"]["code"] == "engine_unavailable"
    asking.join()
    running.ended.result(timeout=10)
    assert answers[0].json()["usage"]["completion_tokens"] == 30


def test_a_second_signal_does_not_wait(start_server: StartServer) -> None:
    running = start_server(server=ServerConfig(http_port=0, grpc_port=0, shutdown_grace_s=60))
    running.target.delay_s = 0.02
    url = f"{running.ready.http}/v1/chat/completions"
    with httpx.stream("POST", url, json=ASK | {"stream": True}, timeout=30) as response:
        lines = response.iter_lines()
        next(lines)
        running.stop()
        running.stop()
        stopped_at = time.monotonic()
        last = [line for line in lines if line][-1]
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "engine_unavailable"
    running.ended.result(timeout=10)
    assert time.monotonic() - stopped_at < 5


def test_idle_connections_are_closed_by_clients_first() -> None:
    """A server that closes one while a client sends on it resets the request."""
    kept_s = httpx.Limits().keepalive_expiry
    assert kept_s is not None
    assert HttpServer(FastAPI(), {}).config.timeout_keep_alive > 2 * kept_s


def test_health_says_what_is_served(start_server: StartServer) -> None:
    running = start_server()
    health = httpx.get(f"{running.ready.http}/healthz").json()
    assert health == {
        "status": "serving",
        "model": "tiny",
        "target_version": running.parts.engine.info.fingerprint,
        "drafter_version": "ngram",
        "num_running": 0,
        "num_waiting": 0,
    }
    running.parts.engine.stop()  # as when its loop failed
    assert httpx.get(f"{running.ready.http}/readyz").json() == {"status": "failed"}
    assert httpx.get(f"{running.ready.http}/livez").status_code == 200
    refused = httpx.post(f"{running.ready.http}/v1/chat/completions", json=ASK, timeout=30)
    assert refused.status_code == 503


def test_a_state_directory_that_cannot_be_written_is_one_sentence(tmp_path: Path, start_server: StartServer) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be used"):
        start_server(registry=RegistryConfig(root=str(tmp_path / "file" / "registry")))

"""A soak: many clients do everything at once to one server for a while; then nothing may be left of them.

Over gRPC they create, append, generate, cancel, run out of time, lose their connections, close in the middle of a turn, fork,
save, restore and close sessions at random; every eighth client chats over HTTP instead. Each holds what the server says against
a model of its own. A shorter round warms the server up; what the two rounds leave behind is compared. The exit code is 0 only if

    the clients saw what they expected     lengths, what is cached, repeated request ids, refusals, how streams end
    no session is left                     but those of nobody here; nor saved ones
    no K/V, no permit is left              the budget's use is what it was, nothing runs or waits
    no thread, no descriptor is left       (of a server that was started here)
    memory is flat                         (the same, and a round of five minutes or more)

    python benchmarks/soak.py --minutes 10
    python benchmarks/soak.py --model smollm2-135m --server admission.max_concurrent=8 --workers 16
    python benchmarks/soak.py --address 127.0.0.1:50051 --url http://127.0.0.1:8000 --minutes 1
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import machine
import psutil
from command_line import parser_of, positive, seconds
from console import Board
from programs import Program, ProgramFailed
from rich.console import Console
from rich.table import Table
from soak_chatter import Chatter
from soak_notes import Notes
from soak_worker import LABEL, MAX_HELD, SHORT_TTL_S, Worker

from runtime.errors import SessionNotFound, SlipstreamError
from runtime.rpc.aio import AsyncRuntimeClient

CHATTER_EVERY = 8
SESSIONS_EACH = MAX_HELD + 1  # one that was abandoned
WARM_UP_S = 30.0  # at most; a fifth of a short soak
SETTLE_S = 30.0  # for the last cancelled generations, the reaper, and closed connections
SAMPLE_S = 1.0
SPARE = 8  # threads and descriptors that pools may still open after the warm round; one leaked a call would be thousands
MIN_MEMORY_S = 300.0  # until then caches fill, up to what they may hold
MAX_GROWTH_BYTES = 1024.0  # for each operation of the second half; a session that is forgotten holds more
PRESSED = 0.9  # of the K/V budget: from here on, sessions at rest may lose theirs


@dataclass(frozen=True)
class Figures:
    """What a server holds at one time."""

    sessions: int = 0  # of ours
    saved: int = 0  # of ours
    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    threads: int | None = None  # None: not known
    descriptors: int | None = None
    resident_mib: float | None = None

    @property
    def is_at_rest(self) -> bool:
        return not (self.sessions or self.saved or self.running or self.waiting)


@dataclass(frozen=True)
class Sample:
    at: float  # seconds since the round began
    operations: int
    kv_usage: float
    resident_mib: float | None


class Server:
    """What can be asked of a server, and of its process where that is ours."""

    def __init__(self, address: str, url: str, pid: int | None) -> None:
        self.address, self.url = address, url
        self._process = None if pid is None else psutil.Process(pid)

    async def model(self) -> str:
        async with httpx.AsyncClient(base_url=self.url, timeout=60) as http:
            return str((await http.get("/v1/models")).json()["data"][0]["id"])

    async def settled(self, limit: Figures) -> Figures:
        """As soon as all is at rest, with about as many threads and descriptors as `limit` has; at the latest after SETTLE_S."""
        deadline = time.monotonic() + SETTLE_S
        while True:
            figures = await self._figures()
            if time.monotonic() > deadline or (figures.is_at_rest and _is_within(figures, limit)):
                return figures
            await asyncio.sleep(0.5)

    async def _figures(self) -> Figures:
        async with AsyncRuntimeClient(self.address, timeout_s=60) as client, self._http() as http:
            sessions = [one for one in await client.list_sessions() if one.options.client_label.startswith(LABEL)]
            saved = [one for one in await client.list_saved_sessions() if one.name.startswith(LABEL)]
            metrics, health = await self._metrics(http), (await http.get("/healthz")).json()
        running = max(health["num_running"], int(metrics["num_requests_running"]))
        waiting = max(health["num_waiting"], int(metrics["num_requests_waiting"]))
        figures = Figures(len(sessions), len(saved), running, waiting, metrics["kv_cache_usage_perc"])
        if self._process is None:
            return figures
        with self._process.oneshot():
            counts = {"threads": self._process.num_threads(), "descriptors": self._process.num_fds()}
            resident_mib = round(self._process.memory_info().rss / 2**20, 1)
        return replace(figures, **counts, resident_mib=resident_mib)

    def _http(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=self.url, timeout=60)

    async def _metrics(self, http: httpx.AsyncClient) -> dict[str, float]:
        text = (await http.get("/metrics")).text
        return {name: float(value) for name, value in re.findall(r"^slipstream:(\w+) (\S+)$", text, re.MULTILINE)}

    async def watch(self, samples: list[Sample], notes: Notes, board: Board) -> None:
        began = time.monotonic()
        async with self._http() as http:
            while True:
                metrics = await self._metrics(http)
                resident = None if self._process is None else self._process.memory_info().rss / 2**20
                operations = sum(notes.outcomes.values())
                samples.append(Sample(time.monotonic() - began, operations, metrics["kv_cache_usage_perc"], resident))
                board.show(
                    operations=operations,
                    faults=notes.num_faults,
                    sessions=int(metrics["session_active"]),
                    running=int(metrics["num_requests_running"]),
                    waiting=int(metrics["num_requests_waiting"]),
                    **({} if resident is None else {"MiB": round(resident)}),
                )
                await asyncio.sleep(SAMPLE_S)


def _is_within(figures: Figures, limit: Figures) -> bool:
    pairs = (figures.threads, limit.threads), (figures.descriptors, limit.descriptors)
    return all(now is None or most is None or now <= most + SPARE for now, most in pairs)


async def play(server: Server, num_workers: int, seconds: float, seed: str, notes: Notes, board: Board) -> list[Sample]:
    """One round of all clients. Those over gRPC close what they hold; the sessions of chats are closed here."""
    model, until = await server.model(), time.monotonic() + seconds
    workers: list[Worker] = []
    chatters: list[Chatter] = []
    for number in range(num_workers):
        rng = random.Random(f"{seed}:{number}")
        if number % CHATTER_EVERY == CHATTER_EVERY - 1:
            chatters.append(Chatter(number, rng, server.url, model, notes))
        else:
            workers.append(Worker(number, rng, server.address, notes))
    samples: list[Sample] = []
    watching = asyncio.create_task(server.watch(samples, notes, board))
    try:
        await asyncio.gather(*(client.run(until) for client in [*workers, *chatters]))
    finally:
        watching.cancel()
    async with AsyncRuntimeClient(server.address, timeout_s=60) as client:
        for session_id in set().union(*(chatter.sessions for chatter in chatters)):
            try:
                await client.close_session(session_id)
            except SessionNotFound as error:  # chats make room for each other; UNKNOWN: of that one long ago
                notes.hold(error.reason in ("EVICTED_LRU", "UNKNOWN"), f"the session of a chat: {error}")
    await asyncio.sleep(2 * SHORT_TTL_S)  # what was abandoned last
    return samples


async def soak(server: Server, options: argparse.Namespace, board: Board) -> dict[str, Any]:
    seconds, notes = options.minutes * 60, Notes()
    board.stage("warming up")
    await play(server, options.workers, min(WARM_UP_S, seconds / 5), f"{options.seed}:warm", notes, board)
    before = await server.settled(Figures())
    board.stage("soaking")
    samples = await play(server, options.workers, seconds, str(options.seed), notes, board)
    board.stage("settling")
    after = await server.settled(before)
    return {
        "held": judge(notes, before, after, samples),
        "before": vars(before),
        "after": vars(after),
        "operations": sum(notes.outcomes.values()),
        "outcomes": dict(sorted(notes.outcomes.items())),
        "turns_whose_kv_was_given_up": notes.num_given_up,
        "kv_usage_max": max(sample.kv_usage for sample in samples),
        "cancel_ms": spread_ms(notes.cancel_s),
        "resident_mib": memory(samples),
        "num_faults": notes.num_faults,
        "faults": notes.faults,
    }


# --- the verdict ---


def judge(notes: Notes, before: Figures, after: Figures, samples: Sequence[Sample]) -> dict[str, bool]:
    """What held, by its name. What is not known, or too short to say, is left out."""
    is_pressed = any(sample.kv_usage >= PRESSED for sample in samples)
    held = {
        "the clients saw what they expected": not notes.num_faults and (is_pressed or not notes.num_given_up),
        "no session is left": not (after.sessions or after.saved),
        "no K/V is left": after.kv_usage <= before.kv_usage,
        "no permit is left": not (after.running or after.waiting),
    }
    for name in ("threads", "descriptors"):
        first, last = getattr(before, name), getattr(after, name)
        if first is not None and last is not None:
            held[f"no {name.removesuffix('s')} is left"] = last <= first + SPARE
    growth = memory(samples)["bytes_per_operation"]
    if growth is not None and samples[-1].at >= MIN_MEMORY_S:
        held["memory is flat"] = growth <= MAX_GROWTH_BYTES
    return held


def memory(samples: Sequence[Sample]) -> dict[str, float | None]:
    """Resident MiB at both ends, the most of it, and two slopes of the second half: pools and caches fill in the first."""
    sizes = [sample.resident_mib for sample in samples if sample.resident_mib is not None]
    late = len(sizes) // 2
    if len(sizes) != len(samples) or len(sizes) - late < 2 or samples[late].operations == samples[-1].operations:
        return dict.fromkeys(("first", "last", "max", "mib_per_minute", "bytes_per_operation"))
    by_time, _ = statistics.linear_regression([sample.at for sample in samples[late:]], sizes[late:])
    by_work, _ = statistics.linear_regression([sample.operations for sample in samples[late:]], sizes[late:])
    figures = {"first": sizes[0], "last": sizes[-1], "max": max(sizes)}
    figures |= {"mib_per_minute": by_time * 60, "bytes_per_operation": by_work * 2**20}
    return {name: round(value, 2) for name, value in figures.items()}


def spread_ms(seconds: Sequence[float]) -> dict[str, float]:
    if not seconds:
        return {"count": 0}
    ordered = sorted(seconds)
    figures = {"p50": statistics.median(ordered), "p99": ordered[min(int(len(ordered) * 0.99), len(ordered) - 1)]}
    return {"count": len(ordered)} | {name: round(value * 1e3, 1) for name, value in (figures | {"max": ordered[-1]}).items()}


# --- the program ---


def show(result: dict[str, Any]) -> None:
    console = Console(highlight=False)
    table = Table("operation: how it ended", "times", title="Soak")
    for outcome, count in result["outcomes"].items():
        table.add_row(outcome, str(count))
    console.print(table)
    cancel, memory = result["cancel_ms"], result["resident_mib"]
    if cancel["count"]:
        console.print(
            f"From a cancelled call to a free session: {cancel['p50']} ms (median), {cancel['p99']} ms (99th percentile), "
            f"{cancel['max']} ms (at worst), of {cancel['count']}."
        )
    if memory["first"] is not None:
        console.print(
            f"Resident: {memory['first']} MiB at first, {memory['last']} MiB at last; in the second half "
            f"{memory['mib_per_minute']:+} MiB a minute, {memory['bytes_per_operation']:+} bytes an operation."
        )
    for name in ("resident_mib", "threads", "descriptors"):
        if result["after"][name] is not None:
            console.print(f"{name} at rest: {result['before'][name]} after the warm round, {result['after'][name]} at the end.")
    console.print("\n".join(f"- {name}: {value}" for name, value in result["machine"].items()))
    for what, is_held in result["held"].items():
        console.print(f"  {'held' if is_held else 'BROKEN'}: {what}")
    for fault in result["faults"]:
        print(f"fault: {fault}", file=sys.stderr)


def arguments() -> argparse.ArgumentParser:
    parser = parser_of(__doc__)
    parser.add_argument("--minutes", type=seconds, default=10.0, help="of the longer round")
    parser.add_argument("--workers", type=positive, default=64, help="clients at once")
    parser.add_argument("--seed", type=int, default=0, help="of what the clients do")
    parser.add_argument("--model", default="tiny", help="for the server that is started")
    parser.add_argument("--server", action="append", default=[], help="an override for it; repeat it")
    parser.add_argument("--address", help="gRPC address of a running server; one is started if left out")
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="with --address: that server's HTTP surface")
    parser.add_argument("--json", type=Path, help="write the result here too")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    options = arguments().parse_args(argv)
    began = time.monotonic()
    with Board() as board, tempfile.TemporaryDirectory() as scratch:
        program = None
        try:
            if options.address is None:
                board.stage("starting a server")
                ports = ["server.http_port=0", "server.grpc_port=0", f"state_dir={scratch}/state"]
                # Some wait for a permit; of the sessions only those of chats ever have to go, so that those reach a number.
                queue = ["admission.max_concurrent=24", f"sessions.max_sessions={SESSIONS_EACH * options.workers}"]
                overrides = [f"model={options.model}", *ports, *queue, *options.server]
                program = Program("serving", overrides, Path(scratch) / "server.log")
                url = program.wait_ready(600)
                server = Server(program.grpc, url, program.pid)
            else:
                server = Server(options.address, options.url, None)
            result = asyncio.run(soak(server, options, board))
            if program is not None:
                program.check()
        except (ProgramFailed, SlipstreamError, httpx.HTTPError) as error:
            print(f"soak: {error}", file=sys.stderr)
            return 1
        finally:
            if program is not None:
                program.stop()
    given = {name: str(value) if isinstance(value, Path) else value for name, value in vars(options).items()}
    result |= {"seconds": round(time.monotonic() - began, 1), "options": given, "machine": machine.describe()}
    show(result)
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=2) + "\n")
    return 0 if all(result["held"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())

"""Kills trainer, server and producer with SIGKILL at random points, hundreds of times, and asks the ledger what it cost.

    python benchmarks/faults.py --count 200

With the tiny model: a server whose tap captures what clients say all the while, a producer that commits rows of its own into
the same feature plane, and a trainer that takes both over gRPC (`--source directory`: from the files themselves). Each death
is followed by a new start; one in five may die again before it did anything. At the end, or after Ctrl-C, the trainer works off
what is left.
The exit code is 0 only if

    no row is lost               every row that was ever committed is durable or held out
    none counts twice            each is in the consumption once, and the last checkpoint admitted exactly as many
    serving is unbroken          no request failed but while the server itself was dead
    all resume within 10 s       from start to the first step, answer or row; the time to import is told beside it
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import machine
from fault_processes import Mother, Victim, lines_with
from rich.console import Console
from rich.table import Table

from runtime.errors import SlipstreamError
from runtime.features.ledger import Ledger
from runtime.rpc.client import RuntimeClient
from runtime.rpc.connection import Retry
from runtime.types import SamplingParams
from training.learning import checkpoint

RUN = "faults"
RESUME_LIMIT_S = 10.0
START_LIMIT_S = 120.0
PAUSE_S = 0.05  # of a client between two requests


def main() -> int:
    options = arguments().parse_args()
    shutil.rmtree(options.out, ignore_errors=True)
    options.out.mkdir(parents=True)
    began = time.monotonic()
    trial = Trial(options)
    signal.signal(signal.SIGINT, lambda number, frame: trial.enough())
    try:
        trial.play()
    finally:
        trial.close()
    result = trial.result() | {"seconds": round(time.monotonic() - began, 1), "machine": machine.describe()}
    (options.out / "faults.json").write_text(json.dumps(result, indent=2) + "\n")
    show(result)
    return 0 if all(result["held"].values()) else 1


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200, help="how many deaths")
    parser.add_argument("--seed", type=int, default=0, help="of the random points")
    parser.add_argument("--source", choices=("grpc", "directory"), default="grpc", help="how the trainer gets rows")
    parser.add_argument("--out", type=Path, default=Path("outputs/faults"), help="directory of the run; emptied first")
    return parser


@dataclass
class Client:
    """One client that asks again and again: when each request began and ended, and what went wrong."""

    address: str
    requests: list[tuple[float, float, str]] = field(default_factory=list)  # error: empty if none
    num_answers: int = 0

    def ask(self, stop: threading.Event) -> None:
        with RuntimeClient(self.address, timeout_s=30.0, retry=Retry(max_attempts=1)) as client:
            while not stop.wait(PAUSE_S):
                began, error = time.monotonic(), ""
                try:
                    session = client.create_session()
                    client.append(session.session_id, text=f"Request {len(self.requests)}, please.")
                    params = SamplingParams(max_tokens=12, ignore_eos=True)
                    for _ in client.generate(session.session_id, params, timeout_s=30.0):
                        pass
                    client.close_session(session.session_id)
                    self.num_answers += 1
                except (SlipstreamError, OSError) as failure:
                    error = f"{type(failure).__name__}: {failure}"
                self.requests.append((began, time.monotonic(), error))


class Trial:
    def __init__(self, options: argparse.Namespace) -> None:
        out = options.out.resolve()
        self._count = options.count
        self._random = random.Random(options.seed)
        self._server_state, self._said = out / "server", out / "produced.txt"
        port = _free_port()
        self._client = Client(f"127.0.0.1:{port}")
        self._mother = Mother()
        self._downtimes: list[tuple[float, float]] = []
        trainer_state = out / "trainer" if options.source == "grpc" else self._server_state
        self._run_dir = trainer_state / "training" / RUN
        source = f"grpc://127.0.0.1:{port}" if options.source == "grpc" else None

        def victim(name: str, program: str, settings: dict[str, Any], progress: Callable[[], int]) -> Victim:
            return Victim(name, self._mother, program, settings, out / f"{name}.log", progress)

        features = {"features": str(self._server_state / "features"), "said": str(self._said)}
        steps = lines_with(self._run_dir / "metrics.jsonl", '"event": "step"')
        self.server = victim("server", "serving", server(self._server_state, port), lambda: self._client.num_answers)
        self.trainer = victim("trainer", "training", trainer(trainer_state, source), steps)
        self.producer = victim("producer", "producer", features, lines_with(self._said, "produced-"))
        self.victims = (self.trainer, self.server, self.producer)
        self._is_enough, self._stop = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._client.ask, args=(self._stop,), daemon=True)

    # --- what happens ---

    def play(self) -> None:
        down_at = time.monotonic()
        self.server.start()
        self._thread.start()
        self.server.wait_at_work(START_LIMIT_S)
        self._downtimes.append((down_at, time.monotonic()))
        for victim in (self.producer, self.trainer):
            victim.start()
            victim.wait_at_work(START_LIMIT_S)
        for number in range(self._count):
            if self._is_enough.is_set():
                break
            self._strike(self.victims[number % len(self.victims)] if number < len(self.victims) else self._choose())
        self._work_off()

    def enough(self) -> None:
        """No more deaths than there were."""
        self._is_enough.set()

    def _choose(self) -> Victim:
        return self._random.choice(self.victims)

    def _strike(self, victim: Victim) -> None:
        time.sleep(self._random.uniform(0.0, 0.6))
        down_at = time.monotonic()
        victim.kill()
        victim.start()
        if self._random.random() < 0.2:  # it may die again before it did anything
            time.sleep(self._random.uniform(0.0, 0.6))
            victim.kill()
            victim.start()
        victim.resumes_s.append(victim.wait_at_work(START_LIMIT_S))
        if victim is self.server:
            self._downtimes.append((down_at, time.monotonic()))

    def _work_off(self) -> None:
        """No more rows; the trainer, started once more, trains what is left and ends by itself."""
        self.producer.end(signal.SIGKILL)
        self._stop.set()
        self._thread.join()
        self.trainer.end(signal.SIGTERM)
        if self.trainer.settings.get("source") is None:
            self.server.end(signal.SIGTERM)
        ending = self.trainer.settings["trainer"] | {"idle_timeout_s": 3.0}
        self.trainer.start(trainer=ending)
        self.trainer.wait_gone(START_LIMIT_S + self._count)

    def close(self) -> None:
        self._stop.set()
        for victim in self.victims:
            if victim.is_started:
                victim.end(signal.SIGKILL)
        self._mother.close()

    # --- what it cost ---

    def result(self) -> dict[str, Any]:
        ledger = Ledger(self._server_state / "features" / "ledger.sqlite")
        counts, consumption = ledger.status(), ledger.consumption(RUN)
        produced = set(self._said.read_text().split())
        forgotten = sorted(produced - ledger.known(sorted(produced)))
        latest = ledger.latest_checkpoint(RUN)
        assert latest is not None
        _, state = checkpoint.load(self._run_dir / "checkpoints" / Path(latest.path).name)
        lost = counts["pending"] + counts["leased"] + counts["failed"] + len(forgotten)
        twice = sum(count > 1 for count in consumption.values())
        admitted = state["stream"]["num_admitted"]
        failed = [request for request in self._client.requests if request[2]]
        failures = [error for began, ended, error in failed if not self._was_down(began, ended)]
        resumes = {victim.name: victim.resumes_s for victim in self.victims}
        slowest = max(max(times, default=0.0) for times in resumes.values())
        return {
            "held": {
                "no row is lost": lost == 0,
                "none counts twice": twice == 0 and admitted == len(consumption) == counts["durable"],
                "serving is unbroken": not failures,
                "all resume within 10 s": slowest <= RESUME_LIMIT_S,
            },
            "kills": {victim.name: victim.num_kills for victim in self.victims},
            "resume_s": {
                name: {"median": _median(times), "max": round(max(times, default=0.0), 2)} for name, times in resumes.items()
            },
            "imports_s": round(self._mother.imports_s, 2),
            "rows": counts,
            "rows_lost": lost,
            "rows_twice": twice,
            "rows_admitted_by_the_last_checkpoint": admitted,
            "rows_produced": len(produced),
            "steps": latest.step,
            "requests": len(self._client.requests),
            "requests_failed_while_the_server_was_dead": sum(bool(error) for _, _, error in self._client.requests)
            - len(failures),
            "requests_failed_otherwise": [error for _, _, error in failures],
        }

    def _was_down(self, began: float, ended: float) -> bool:
        return any(began <= up and ended >= down for down, up in self._downtimes)


def server(state_dir: Path, port: int) -> dict[str, Any]:
    return {
        "model": {"name": "tiny", "device": "cpu"},
        "backend": {"num_threads": 1},
        "server": {"http_port": 0, "grpc_port": port},
        "capture": {"min_generated_tokens": 4, "heldout_fraction": 0.1},
        "drafter": {"kind": "ngram"},
        "registry": {"poll_s": 0.1},
        "state_dir": str(state_dir),
    }


def trainer(state_dir: Path, source: str | None) -> dict[str, Any]:
    return {
        "model": {"name": "tiny", "device": "cpu"},
        "trainer": {
            "run_id": RUN,
            "init": "scratch",
            "vocabulary_tokens": 100,
            "num_threads": 1,
            "checkpoint_every_steps": 3,
            "evaluate_every_steps": 20,
            "settle_s": 0.0,
        },
        "data": {"batch_rows": 8, "passes": 2, "fill_wait_s": 0.2, "poll_s": 0.02, "lease_timeout_s": 600.0},
        "source": source,
        "state_dir": str(state_dir),
    }


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _median(times: list[float]) -> float:
    return round(sorted(times)[len(times) // 2], 2) if times else 0.0


def show(result: dict[str, Any]) -> None:
    table = Table("victim", "kills", "resumed after (median)", "at worst", title="Faults")
    for name, kills in result["kills"].items():
        times = result["resume_s"][name]
        table.add_row(name, str(kills), f"{times['median']:.2f} s", f"{times['max']:.2f} s")
    console = Console()
    console.print(table)
    rows = result["rows"]
    console.print(
        f"rows: {rows['durable']} durable, {rows['heldout']} held out; {result['rows_lost']} lost, {result['rows_twice']} twice; "
        f"{result['steps']} steps. Requests: {result['requests']}, failed while the server was dead "
        f"{result['requests_failed_while_the_server_was_dead']}, otherwise {len(result['requests_failed_otherwise'])}. "
        f"Imports, which a forked process is spared: {result['imports_s']} s."
    )
    for what, is_held in result["held"].items():
        console.print(f"  {'held' if is_held else 'BROKEN'}: {what}")


if __name__ == "__main__":
    sys.exit(main())

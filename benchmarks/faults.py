"""Kills trainers, server and producer with SIGKILL at random points, hundreds of times, and asks the ledger what it cost.

    python benchmarks/faults.py --count 200
    python benchmarks/faults.py --count 200 --trainers 2      two trainers of one run, which share the rows

With the tiny model: a server whose tap captures what clients say all the while, a producer that commits rows of its own into
the same feature plane, and trainers that take both over gRPC (`--source directory`: from the files themselves). Each death
is followed by a new start. One in eight takes the server and a trainer with it at once; one in five may die again before it did
anything; one in five starts again cold, by the command that users type. At the end, or after Ctrl-C, the trainers work off what
is left. The exit code is 0 only if

    no row is lost               every row that was ever committed is durable or held out
    none counts twice            each is in the consumption once, and the last checkpoints admitted exactly as many
    serving is unbroken          no request failed but while the server itself was dead
    all resume within 10 s       from start to the first step, answer or row, imports and all
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import signal
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import machine
from command_line import fresh_directory, parser_of, positive
from console import Board
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
COLD_EVERY = 5  # deaths
TOGETHER_EVERY = 8  # deaths
AGAIN_SHARE = 0.2  # of deaths: dies again at once


def main() -> int:
    options = arguments().parse_args()
    fresh_directory(options.out, "server.log")
    began = time.monotonic()
    with Board() as board:
        board.stage("Faults")
        trial = Trial(options, board)
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
    parser = parser_of(__doc__)
    parser.add_argument("--count", type=positive, default=200, help="how many deaths")
    parser.add_argument("--seed", type=int, default=0, help="of the random points")
    parser.add_argument("--trainers", type=int, choices=(1, 2, 3, 4), default=1, help="how many share the rows of the run")
    parser.add_argument("--source", choices=("grpc", "directory"), default="grpc", help="how the trainer gets rows")
    parser.add_argument("--out", type=Path, default=Path("outputs/faults"), help="the run; an earlier one there goes")
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
    def __init__(self, options: argparse.Namespace, board: Board) -> None:
        out = options.out.resolve()
        self._board = board
        self._count = options.count
        self._random = random.Random(options.seed)
        self._server_state, self._said = out / "server", out / "produced.txt"
        port = _free_port()
        self._client = Client(f"127.0.0.1:{port}")
        self._mother = Mother()
        self._downtimes: list[tuple[float, float]] = []
        source = f"grpc://127.0.0.1:{port}" if options.source == "grpc" else None

        def victim(name: str, program: str, settings: dict[str, Any], progress: Callable[[], int]) -> Victim:
            return Victim(name, self._mother, program, settings, out / f"{name}.log", progress)

        features = {"features": str(self._server_state / "features"), "said": str(self._said)}
        self.server = victim("server", "serving", server(self._server_state, port), lambda: self._client.num_answers)
        self.trainers: list[Victim] = []
        self._run_dirs: dict[str, Path] = {}  # by the name under which its trainer leases
        for number in range(options.trainers):
            worker = "" if options.trainers == 1 else str(number)
            name, run = f"trainer{worker}", f"{RUN}@{worker}" if worker else RUN
            state = out / name if options.source == "grpc" else self._server_state
            self._run_dirs[run] = state / "training" / run
            steps = lines_with(self._run_dirs[run] / "metrics.jsonl", '"event": "step"')
            self.trainers.append(victim(name, "training", trainer(state, source, worker), steps))
        self.producer = victim("producer", "producer", features, lines_with(self._said, "produced-"))
        self.victims = (*self.trainers, self.server, self.producer)
        self._is_enough, self._stop = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._client.ask, args=(self._stop,), daemon=True)

    # --- what happens ---

    def play(self) -> None:
        down_at = time.monotonic()
        self.server.start()
        self._thread.start()
        self.server.wait_at_work(START_LIMIT_S)
        self._downtimes.append((down_at, time.monotonic()))
        for victim in (self.producer, *self.trainers):
            victim.start()
            victim.wait_at_work(START_LIMIT_S)
        for number in itertools.count():
            num_deaths = sum(victim.num_kills for victim in self.victims)
            if self._is_enough.is_set() or (num_deaths >= self._count and number >= len(self.victims)):
                break
            self._board.show(deaths=f"{num_deaths} of {self._count}", answers=self._client.num_answers, **self._slowest())
            first = self.victims[number] if number < len(self.victims) else self._random.choice(self.victims)
            is_shared = number % TOGETHER_EVERY == TOGETHER_EVERY - 1
            together = [self.server, self._random.choice(self.trainers)] if is_shared else [first]
            self._strike(together, is_cold=number % COLD_EVERY == 0)
        self._board.say("no more deaths; the trainers work off what is left")
        self._work_off()

    def enough(self) -> None:
        """No more deaths than there were."""
        self._is_enough.set()

    def _slowest(self) -> dict[str, str]:
        times = [*itertools.chain(*(victim.resumes_s + victim.cold_resumes_s for victim in self.victims))]
        return {"slowest_to_resume": f"{max(times, default=0.0):.1f} s"}

    def _strike(self, victims: Sequence[Victim], *, is_cold: bool) -> None:
        """All of them at one random point."""
        time.sleep(self._random.uniform(0.0, 0.6))
        down_at = time.monotonic()
        for victim in victims:
            victim.kill()
        for victim in victims:
            victim.start(is_cold=is_cold)
        if self._random.random() < AGAIN_SHARE:
            time.sleep(self._random.uniform(0.0, 0.6))
            victims[0].kill()
            victims[0].start(is_cold=is_cold)
        for victim in victims:
            victim.resumed(START_LIMIT_S)
            if victim is self.server:
                self._downtimes.append((down_at, time.monotonic()))

    def _work_off(self) -> None:
        """No more rows; the trainers, started once more, train what is left and end by themselves."""
        self.producer.end(signal.SIGKILL)
        self._stop.set()
        self._thread.join()
        for trainer in self.trainers:
            trainer.end(signal.SIGTERM)
        if self.trainers[0].settings.get("source") is None:
            self.server.end(signal.SIGTERM)
        for trainer in self.trainers:
            trainer.start(trainer=trainer.settings["trainer"] | {"idle_timeout_s": 3.0})
        for trainer in self.trainers:
            trainer.wait_gone(START_LIMIT_S + self._count)

    def close(self) -> None:
        self._stop.set()
        for victim in self.victims:
            if victim.is_started:
                victim.end(signal.SIGKILL)
        self._mother.close()

    # --- what it cost ---

    def result(self) -> dict[str, Any]:
        ledger = Ledger(self._server_state / "features" / "ledger.sqlite")
        counts = ledger.status()
        times: Counter[str] = sum((Counter(ledger.consumption(run)) for run in self._run_dirs), Counter())
        produced = set(self._said.read_text().split())
        forgotten = sorted(produced - ledger.known(sorted(produced)))
        admitted, steps = 0, 0
        for run, run_dir in self._run_dirs.items():
            latest = ledger.latest_checkpoint(run)
            assert latest is not None
            _, state = checkpoint.load(run_dir / "checkpoints" / Path(latest.path).name)
            admitted += sum(stream["num_admitted"] for stream in state["streams"])
            steps += latest.step
        lost = counts["pending"] + counts["leased"] + counts["failed"] + len(forgotten)
        twice = sum(count > 1 for count in times.values())
        failed = [request for request in self._client.requests if request[2]]
        failures = [error for began, ended, error in failed if not self._was_down(began, ended)]
        slowest = max(max([*victim.resumes_s, *victim.cold_resumes_s], default=0.0) for victim in self.victims)
        return {
            "held": {
                "no row is lost": lost == 0,
                "none counts twice": twice == 0 and admitted == len(times) == counts["durable"],
                "serving is unbroken": not failures,
                "all resume within 10 s": slowest <= RESUME_LIMIT_S,
            },
            "kills": {victim.name: victim.num_kills for victim in self.victims},
            "resume_s": {victim.name: _summary(victim.cold_resumes_s) for victim in self.victims},
            "resume_without_imports_s": {victim.name: _summary(victim.resumes_s) for victim in self.victims},
            "rows": counts,
            "rows_lost": lost,
            "rows_twice": twice,
            "rows_admitted_by_the_last_checkpoints": admitted,
            "rows_produced": len(produced),
            "steps": steps,
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


def trainer(state_dir: Path, source: str | None, worker: str) -> dict[str, Any]:
    return {
        "model": {"name": "tiny", "device": "cpu"},
        "trainer": {
            "run_id": RUN,
            "worker": worker,
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


def _summary(times: list[float]) -> dict[str, float]:
    if not times:
        return {"count": 0, "median": 0.0, "max": 0.0}
    return {"count": len(times), "median": round(sorted(times)[len(times) // 2], 2), "max": round(max(times), 2)}


def show(result: dict[str, Any]) -> None:
    columns = ("victim", "kills", "started cold", "resumed after (median)", "at worst", "without imports", "at worst")
    table = Table(*columns, title="Faults")
    for name, kills in result["kills"].items():
        cold, forked = result["resume_s"][name], result["resume_without_imports_s"][name]
        times = [f"{each[which]:.2f} s" for each in (cold, forked) for which in ("median", "max")]
        table.add_row(name, str(kills), str(cold["count"]), *times)
    console = Console()
    console.print(table)
    rows = result["rows"]
    console.print(
        f"rows: {rows['durable']} durable, {rows['heldout']} held out; {result['rows_lost']} lost, {result['rows_twice']} twice; "
        f"{result['steps']} steps. Requests: {result['requests']}, failed while the server was dead "
        f"{result['requests_failed_while_the_server_was_dead']}, otherwise {len(result['requests_failed_otherwise'])}."
    )
    for what, is_held in result["held"].items():
        console.print(f"  {'held' if is_held else 'BROKEN'}: {what}")


if __name__ == "__main__":
    sys.exit(main())

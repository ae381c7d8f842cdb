"""The closed loop on this machine, for everybody to see: `make demo`.

Starts `python -m serving` and `python -m training` as two real processes and plays one narrow kind of chat traffic at the
server, several requests at once. Measures held-out prompts before the trainer starts and after it stopped, each with and
without speculation. Ends with report.md and acceptance.png in the output directory. The exit code is 0 only if a better
drafter went live through the gate, every request was answered, and speculation changed no output (near-ties of the two best
logits are listed). --from scratch begins without a trained drafter; it shows what a cold start reaches and has no bar.

    python benchmarks/demo.py --prompts FILE      # real passages (JSONL) instead of the invented ones
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import threading
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import evaluation
import httpx
import report
from client import Answer, Client, tokens_per_second
from command_line import fresh_directory, parser_of, positive, seconds
from console import Board
from programs import Program, ProgramFailed
from prompts import prompt_file
from report import Activation, Run
from traffic import Messages, load_passages, messages, passages

READY_TIMEOUT_S = 300.0  # the first start fetches and converts the model
POLL_S = 1.0
SETTLE_S = 5.0  # for a version published last
UNDECIDED = ("staged", "validated")


def main() -> int:
    options = arguments().parse_args()
    directory: Path = options.out
    fresh_directory(directory, "serving.log")
    began = time.monotonic()
    run, heldout, stream = prepare(options)
    server = Program("serving", server_overrides(options), directory / "serving.log")
    trainer: Program | None = None
    try:
        with Board() as board:
            board.stage("starting the server (its first start fetches and converts the model)")
            client = Client(server.wait_ready(READY_TIMEOUT_S), options.max_tokens)
            run.before = measure(board, "before: held-out prompts, no training yet", client, heldout)
            trainer = Program("training", trainer_overrides(options), directory / "training.log")
            Loop(options, run, board, client, server, trainer).play(stream)
            trainer.stop()
            note_activations(run, client.drafters(), board)
            run.after = measure(board, "after: the same prompts, the trainer stopped", client, heldout)
    except (ProgramFailed, httpx.HTTPError) as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    finally:
        if trainer is not None:
            trainer.stop()
        server.stop()
    run.seconds = time.monotonic() - began
    print(f"\n{report.write(run, directory).read_text()}")
    return 1 if run.verdict() else 0


def arguments() -> argparse.ArgumentParser:
    parser = parser_of(__doc__)
    parser.add_argument("--from", dest="start", choices=["embedded", "scratch"], default="embedded", help="the first drafter")
    parser.add_argument("--out", type=Path, default=Path("demo"), help="the run; an earlier one there goes")
    parser.add_argument("--prompts", type=prompt_file, help="JSONL with conversations or turns, instead of invented passages")
    parser.add_argument("--heldout", type=positive, default=32, help="prompts measured before and after")
    parser.add_argument("--requests", type=positive, default=144, help="at least so many requests of traffic")
    parser.add_argument("--concurrency", type=positive, default=4, help="requests at a time")
    parser.add_argument("--max-tokens", type=positive, default=96, help="of one answer")
    parser.add_argument("--traffic-s", type=seconds, default=240.0, help="play traffic at least so long")
    parser.add_argument("--limit-s", type=seconds, default=420.0, help="and at most so long, activation or not")
    parser.add_argument(
        "--set", dest="common", action="append", default=[], metavar="SETTING=VALUE", help="an override for both programs"
    )
    return parser


def prepare(options: argparse.Namespace) -> tuple[Run, list[Messages], Iterator[Messages]]:
    """An empty record, the held-out prompts, and the traffic; no passage is in both."""
    if options.prompts is None:
        source, texts = "invented news passages, people, places and numbers to be extracted as JSON", passages()
    else:
        found = load_passages(options.prompts)
        if len(found) < 2 * options.heldout:
            sys.exit(f"demo: {options.prompts} has {len(found)} passages; give at least {2 * options.heldout}.")
        source, texts = f"passages of {options.prompts.name}, to be extracted as JSON", endless(found, options.heldout)
    heldout = [messages(text) for text in islice(texts, options.heldout)]
    run = Run(options.start == "scratch", options.max_tokens, options.concurrency, source)
    return run, heldout, map(messages, texts)


def endless(texts: list[str], num_once: int) -> Iterator[str]:
    """All texts, and then again and again those after the first num_once."""
    yield from texts
    while True:
        yield from texts[num_once:]


def server_overrides(options: argparse.Namespace) -> list[str]:
    drafter = ["drafter=ngram"] if options.start == "scratch" else []
    ports = ["server.http_port=0", "server.grpc_port=0"]
    capture = ["capture.heldout_fraction=0.2"]  # a short run: the gate should soon have enough rows to judge by
    return [f"state_dir={options.out / 'state'}", *ports, *capture, *drafter, *options.common]


def trainer_overrides(options: argparse.Namespace) -> list[str]:
    start = ["trainer=scratch", "trainer.vocabulary_tokens=4096"] if options.start == "scratch" else []
    return [f"state_dir={options.out / 'state'}", "trainer.evaluate_every_s=45", *start, *options.common]


def measure(board: Board, title: str, client: Client, prompts: list[Messages]) -> evaluation.Evaluation:
    board.stage(title)
    result = evaluation.evaluate(client, prompts, lambda done: board.show(held_out=f"{done} of {len(prompts)}"))
    fast, plain = tokens_per_second(result.speculative), tokens_per_second(result.plain)
    board.say(
        f"acceptance length {result.acceptance_length:.3f}; {fast:.1f} tokens/s with speculation, {plain:.1f} without "
        f"(x {result.speedup:.2f}); {len(result.differences)} outputs differ"
    )
    return result


def note_activations(run: Run, drafters: dict[str, object], board: Board) -> None:
    """Take up what the server's history says that we have not noted yet."""
    history = drafters["history"]
    assert isinstance(history, list)
    activated = [event for event in history if event["event"] == "activated"]
    for event in activated[len(run.activations) :]:
        run.activations.append(Activation(event["version"], event["at"]))
        board.say(
            f"drafter {event['version']} is live (switched in {1000 * event['seconds']:.1f} ms, {event['previous']} before)"
        )


class Loop:
    """Traffic from several threads while the trainer learns from it."""

    def __init__(
        self, options: argparse.Namespace, run: Run, board: Board, client: Client, server: Program, trainer: Program
    ) -> None:
        self._options, self._run, self._board, self._client = options, run, board, client
        self._programs = (server, trainer)
        self._metrics = options.out / "state" / "training" / "default" / "metrics.jsonl"
        self._metrics_read = 0
        self._lock = threading.Lock()
        self._stop = threading.Event()

    def play(self, stream: Iterator[Messages]) -> None:
        """Until a new version went live and served for a while and the time is used, or the limit is reached."""
        self._board.stage("live traffic, and a trainer that learns from it")
        began = time.monotonic()
        workers = [threading.Thread(target=self._work, args=(stream,)) for _ in range(self._options.concurrency)]
        for worker in workers:
            worker.start()
        try:
            while not self._is_over(time.monotonic() - began):
                self._look()
                time.sleep(POLL_S)
        finally:
            self._stop.set()
            for worker in workers:
                worker.join()
        self._run.traffic_s = time.monotonic() - began
        self._settle()

    def _work(self, stream: Iterator[Messages]) -> None:
        while not self._stop.is_set():
            with self._lock:
                request = next(stream)
            try:
                answer: Answer | str = self._client.chat(request)
            except httpx.HTTPError as error:
                answer = str(error)
            with self._lock:
                if isinstance(answer, str):
                    self._run.failures.append(answer)
                else:
                    self._run.traffic.append(answer)

    def _is_over(self, seconds: float) -> bool:
        if seconds >= self._options.limit_s or self._run.failures:
            return True
        enough = len(self._run.traffic) >= self._options.requests and seconds >= self._options.traffic_s
        return enough and self._served_by_news() >= report.MOVING_REQUESTS

    def _served_by_news(self) -> int:
        """Requests since the first new version went live; the rest of the plot, so to say."""
        first = min((activation.at for activation in self._run.activations), default=math.inf)
        return sum(answer.at > first for answer in self._run.traffic)

    def _look(self) -> None:
        for program in self._programs:
            program.check()
        self._read_metrics()
        note_activations(self._run, self._client.drafters(), self._board)
        self._run.num_rows = self._client.num_captured()
        with self._lock:
            lengths = report.moving_lengths(self._run.traffic[-report.MOVING_REQUESTS :])
            served = len(self._run.traffic)
        self._board.show(
            requests=served, rows_tapped=self._run.num_rows, acceptance_length=f"{lengths[-1]:.2f}" if lengths else "-"
        )

    def _read_metrics(self) -> None:
        """What the trainer wrote since the last look; a line that is still being written waits."""
        if not self._metrics.exists():
            return
        with self._metrics.open() as file:
            file.seek(self._metrics_read)
            text = file.read()
        complete = text[: text.rfind("\n") + 1]
        self._metrics_read += len(complete.encode())
        for line in complete.splitlines():
            self._tell(json.loads(line))

    def _tell(self, event: dict[str, object]) -> None:
        match event["event"]:
            case "step":
                self._run.num_train_steps = int(str(event["step"]))
                self._board.show(training_step=event["step"], training_loss=f"{event['loss']:.3f}")
            case "judged":
                verdict = "better" if event["is_better"] else "not better: kept back"
                words = (
                    f"step {event['step']}: {event['acceptance_length']:.3f} on held-out rows against "
                    f"{event['baseline_acceptance_length']:.3f} of {event['baseline']}, {verdict}"
                )
                self._run.judged.append(words)
                self._board.say(f"gate: {words}")
            case "published":
                self._board.say(f"drafter {event['version']} is staged")

    def _settle(self) -> None:
        """Let the server decide on what was published last."""
        deadline = time.monotonic() + SETTLE_S
        while time.monotonic() < deadline and any(one["state"] in UNDECIDED for one in self._client.drafters()["data"]):
            time.sleep(POLL_S)
        self._read_metrics()


if __name__ == "__main__":
    sys.exit(main())

"""Load: how a server answers many clients at once: time to first token, gaps between tokens, throughput, an event loop awake.

Streams chats over HTTP with as many clients as you say, in the terms that serving benchmarks use (TTFT, TPOT, ITL, with means,
medians and 99th percentiles), while another program asks /livez all the time. It starts a server of its own, unless --url names
one; speculation is switched off for half of the requests with --compare, in turns, so that both halves see the same load.

    python benchmarks/load.py --prompts PROMPTS.jsonl --concurrency 8 --requests 64 --compare
    python benchmarks/load.py --server model=tiny --concurrency 200 --requests 1000 --long-prefills 2
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import machine
from command_line import parser_of, positive
from console import Board
from programs import Program, ProgramFailed
from prompts import load, prompt_file

PROBE = Path(__file__).with_name("liveness.py")
DEFAULT_PROMPTS = [
    "Why is the sky blue?",
    "Tell me a story of a river.",
    "Write a function that sorts a list.",
    "What is 12 * 7?",
]


@dataclass
class Answer:
    """The times of one streamed answer, all in seconds by time.perf_counter()."""

    speculates: bool
    asked_at: float
    token_times: list[float] = field(default_factory=list)  # of each chunk with text
    ended_at: float = 0.0
    num_prompt_tokens: int = 0
    num_tokens: int = 0
    error: str = ""

    @property
    def ttft_s(self) -> float:
        return self.token_times[0] - self.asked_at

    @property
    def tpot_s(self) -> float:
        """Per token after the first."""
        return (self.token_times[-1] - self.token_times[0]) / max(self.num_tokens - 1, 1)

    @property
    def gaps_s(self) -> list[float]:
        """Between chunks: a step may bring several tokens."""
        return [after - before for before, after in zip(self.token_times, self.token_times[1:], strict=False)]


async def ask(client: httpx.AsyncClient, model: str, prompt: str, max_tokens: int, speculates: bool) -> Answer:
    """One chat, streamed to its end. Whatever goes wrong is in `error`."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "speculation": {"enabled": speculates},
        "store": False,
    }
    answer = Answer(speculates, time.perf_counter())
    try:
        async with client.stream("POST", "/v1/chat/completions", json=body) as response:
            if response.status_code != 200:
                answer.error = f"{response.status_code}: {(await response.aread()).decode()[:200]}"
                return answer
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    take(answer, json.loads(line.removeprefix("data: ")))
            answer.ended_at = time.perf_counter()
            if not answer.error and not answer.num_tokens:
                answer.error = "the stream ended without its usage"
    except httpx.HTTPError as error:
        answer.error = f"{type(error).__name__}: {error}"
    return answer


def take(answer: Answer, chunk: dict[str, Any]) -> None:
    if "error" in chunk:
        answer.error = str(chunk["error"]["message"])
    if chunk.get("usage"):
        answer.num_prompt_tokens = chunk["usage"]["prompt_tokens"]
        answer.num_tokens = chunk["usage"]["completion_tokens"]
    if any(choice["delta"].get("content") for choice in chunk.get("choices", ())):
        answer.token_times.append(time.perf_counter())


@asynccontextmanager
async def probing(url: str, seconds: list[float]) -> AsyncIterator[None]:
    """Meanwhile /livez is asked all the time, by a program of its own; how long its answers took is in `seconds` afterwards."""
    pipe = asyncio.subprocess.PIPE
    probe = await asyncio.create_subprocess_exec(sys.executable, str(PROBE), url, stdin=pipe, stdout=pipe)
    try:
        assert probe.stdout is not None
        first = await probe.stdout.readline()  # it has begun
        yield
        rest, _ = await probe.communicate(b"")  # the end of its input, which ends it
        seconds += map(float, (first + rest).split())
        if probe.returncode:
            raise ProgramFailed(f"{PROBE.name} ended with code {probe.returncode}: /livez did not answer.")
    finally:
        if probe.returncode is None:
            probe.kill()
            await probe.wait()


async def prefill(client: httpx.AsyncClient, model: str, is_over: asyncio.Event) -> None:
    """Long prompts, one after the other, each a different one: nothing of it is cached."""
    number = 0
    while not is_over.is_set():
        number += 1
        await ask(client, model, f"{number} " + "a river " * 180, 2, speculates=True)


async def measure(url: str, options: argparse.Namespace, prompts: Sequence[str], board: Board) -> dict[str, Any]:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as client:
        model = (await client.get("/v1/models")).json()["data"][0]["id"]
        await ask(client, model, prompts[0], 8, True)  # the first forwards of a process are slower
        numbers = iter(range(options.requests))
        answers: list[Answer] = []
        probes: list[float] = []
        is_over = asyncio.Event()

        async def work() -> None:
            for number in numbers:
                speculates = not (options.compare and number % 2)
                prompt = prompts[number // (2 if options.compare else 1) % len(prompts)]
                answers.append(await ask(client, model, prompt, options.max_tokens, speculates))
                board.show(answers=f"{len(answers)} of {options.requests}", failed=sum(bool(one.error) for one in answers))

        async with probing(url, probes):
            beside = [asyncio.create_task(prefill(client, model, is_over)) for _ in range(options.long_prefills)]
            began = time.perf_counter()
            await asyncio.gather(*(work() for _ in range(options.concurrency)))
            duration_s = time.perf_counter() - began
            is_over.set()
            await asyncio.gather(*beside)
    arms = {"all": answers}
    if options.compare:
        arms |= {name: [one for one in answers if one.speculates is on] for name, on in (("speculative", True), ("plain", False))}
    return {
        "model": model,
        "duration_s": duration_s,
        "arms": {name: summary(group, duration_s) for name, group in arms.items()},
        "livez_ms": spread(probes) | {"max": max(probes, default=0.0) * 1e3},
        "errors": sorted({one.error for one in answers if one.error}),
    }


def spread(seconds: Sequence[float]) -> dict[str, float]:
    """Mean, median and 99th percentile, in milliseconds."""
    if not seconds:
        return {"mean": 0.0, "p50": 0.0, "p99": 0.0}
    ordered = sorted(seconds)
    p99 = ordered[min(int(len(ordered) * 0.99), len(ordered) - 1)]
    return {"mean": statistics.fmean(ordered) * 1e3, "p50": statistics.median(ordered) * 1e3, "p99": p99 * 1e3}


def summary(answers: Sequence[Answer], duration_s: float) -> dict[str, Any]:
    good = [one for one in answers if not one.error and one.token_times]
    return {
        "successful": len(good),
        "failed": sum(bool(one.error) for one in answers),
        "input_tokens": sum(one.num_prompt_tokens for one in good),
        "output_tokens": sum(one.num_tokens for one in good),
        "requests_per_s": len(good) / duration_s,
        "output_tokens_per_s": sum(one.num_tokens for one in good) / duration_s,
        "ttft_ms": spread([one.ttft_s for one in good]),
        "tpot_ms": spread([one.tpot_s for one in good]),
        "itl_ms": spread([gap for one in good for gap in one.gaps_s]),
    }


def show(result: dict[str, Any]) -> None:
    for name, arm in result["arms"].items():
        print(f"\n{f' Serving benchmark: {name} ':=^64}")
        rows: list[tuple[str, object]] = [
            ("Successful requests:", arm["successful"]),
            ("Failed requests:", arm["failed"]),
            ("Benchmark duration (s):", f"{result['duration_s']:.2f}"),
            ("Total input tokens:", arm["input_tokens"]),
            ("Total generated tokens:", arm["output_tokens"]),
            ("Request throughput (req/s):", f"{arm['requests_per_s']:.2f}"),
            ("Output token throughput (tok/s):", f"{arm['output_tokens_per_s']:.2f}"),
        ]
        for key, title in (("ttft_ms", "TTFT"), ("tpot_ms", "TPOT"), ("itl_ms", "ITL")):
            for kind, word in (("mean", "Mean"), ("p50", "Median"), ("p99", "P99")):
                rows.append((f"{word} {title} (ms):", f"{arm[key][kind]:.2f}"))
        for title, value in rows:
            print(f"{title:<40}{value:>24}")
    if "plain" in result["arms"]:
        plain, speculative = (result["arms"][name]["tpot_ms"]["mean"] for name in ("plain", "speculative"))
        print(f"\nTokens after the first leave {plain / max(speculative, 1e-9):.2f} times as fast with speculation as without.")
    livez = result["livez_ms"]
    print(
        f"\n/livez meanwhile: median {livez['p50']:.1f} ms, 99th percentile {livez['p99']:.1f} ms, longest {livez['max']:.1f} ms"
    )
    print("\n" + "\n".join(f"- {name}: {value}" for name, value in result["machine"].items()))
    for error in result["errors"]:
        print(f"failed: {error}", file=sys.stderr)


def read_prompts(path: Path | None) -> list[str]:
    return DEFAULT_PROMPTS if path is None else [prompt.text for prompt in load(path)]


def arguments() -> argparse.ArgumentParser:
    parser = parser_of(__doc__)
    parser.add_argument("--url", help="of a running server; one is started if left out")
    parser.add_argument("--server", action="append", default=[], help="an override for the server that is started; repeat it")
    parser.add_argument("--prompts", type=prompt_file, help="JSONL with turns or conversations; a few of our own if left out")
    parser.add_argument("--requests", type=positive, default=64, help="of all clients together")
    parser.add_argument("--concurrency", type=positive, default=8, help="clients at once")
    parser.add_argument("--max-tokens", type=positive, default=64, help="of an answer")
    parser.add_argument("--long-prefills", type=int, default=0, help="further clients that send one long prompt after the other")
    parser.add_argument("--compare", action="store_true", help="every other request without speculation")
    parser.add_argument("--json", type=Path, help="write the result here too")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    options = arguments().parse_args(argv)
    prompts = read_prompts(options.prompts)
    with Board() as board, tempfile.TemporaryDirectory() as scratch:
        board.stage("serving benchmark")
        server = None
        try:
            url = options.url
            if url is None:
                ports = ["server.http_port=0", "server.grpc_port=0", f"state_dir={scratch}/state", "capture=off"]
                room = [f"admission.max_concurrent={options.concurrency + options.long_prefills + 1}"]
                server = Program("serving", [*ports, *room, *options.server], Path(scratch) / "server.log")
                url = server.wait_ready(600)
            gc.collect()
            gc.freeze()  # else this program's own collections, of what it has imported, would be in every time it takes
            result = asyncio.run(measure(url, options, prompts, board))
        except (ProgramFailed, httpx.HTTPError) as error:
            print(f"load: {error if options.url is None else f'{options.url} does not answer: {error}'}", file=sys.stderr)
            return 1
        finally:
            if server is not None:
                server.stop()
    given = {name: str(value) if isinstance(value, Path) else value for name, value in vars(options).items()}
    result |= {"options": given, "machine": machine.describe()}
    show(result)
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=2) + "\n")
    return 1 if result["errors"] else 0


if __name__ == "__main__":
    sys.exit(main())

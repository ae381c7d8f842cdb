"""Microseconds of each product of a forward, and of its attention, by number of rows and tile: what `launch.tile` and
`launch.key_tile` of the CUDA kernels choose, beside what else they might.

One launch for each layer with that layer's own weights stands in a CUDA graph, so that weights come from the device's memory
as in a step and the host takes no part. All tiles of a row of the table are measured in turn, several times; medians.

    python benchmarks/cuda_tiles.py --rows 64 192 384 --out tiles.json
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import machine
import torch
from command_line import parser_of, positive
from engine import say
from engine_tables import table

from runtime.backends import load_target
from runtime.config import BackendConfig, ModelConfig
from runtime.errors import SlipstreamError
from runtime.models import resolve

PRODUCTS = {"qkv": "qkv", "out": "linear", "gate_up": "gate_up", "down": "linear", "head": "head"}  # and whose tile each has
POOL_MIB = 4096
SHOWN = 5  # of the best
NUM_HEADS = 4  # in a row: there is one in a forward, and a graph of one tells little


@dataclass(frozen=True)
class Job:
    kind: str  # of PRODUCTS, or "attention"
    rows: int
    size: int = 1  # rows of a sequence, for attention
    keys: int = 0

    @property
    def name(self) -> str:
        if self.kind == "attention":
            return f"attention, {self.rows // self.size} x {self.size}, {self.keys} keys"
        return f"{self.kind}, {self.rows} rows"


def candidates(job: Job) -> list[Any]:
    from runtime.backends.transformers.cuda.launch import MAX_PART_ROWS, KeyTile, Tile

    if job.kind == "attention":
        splits = [splits for splits in (1, 2, 4, 8, 16) if splits * job.rows <= MAX_PART_ROWS]
        return [KeyTile(num, bn, warps) for num in splits for bn in (32, 64, 128) for warps in (2, 4)]
    if job.kind == "head":
        return [Tile(bm, bn, 64, warps, 3) for bm in (16, 32, 64, 128) for bn in (64, 128) for warps in (4, 8)]
    wide = (16, 32) if job.kind == "qkv" else (16, 32, 64)
    high, stages = ((16, 32, 64, 128), (3, 5)) if job.kind == "gate_up" else ((16, 32, 64), (5,))
    every = [Tile(bm, bn, bk, 4, num) for bm in high for bn in wide for bk in (64, 128) for num in stages]
    return [tile for tile in every if tile.bm * tile.bn * tile.bk < 128 * 64 * 128]


class Kernels:
    """The model's weights and buffers that its kernels can run on, without sequences."""

    def __init__(self, model: str, most_rows: int) -> None:
        from runtime.backends.transformers.cuda.launch import Buffers, Head
        from runtime.backends.transformers.cuda.target import CudaTarget

        target = load_target(BackendConfig(kv_pool_mib=POOL_MIB), ModelConfig(model, device="cuda"), resolve(model))
        if not isinstance(target, CudaTarget):
            raise SystemExit(f"cuda_tiles: {model} is not run by the kernels; give a Llama-like model.")
        self.target, self.network = target, target.network
        self.buffers = Buffers(most_rows, self.network.geometry, self.network.embedding.dtype, target.device)
        b = self.buffers
        for part in (b.q, b.o, b.act, b.x, b.mid, b.scaled, b.hidden):
            part.normal_(0, 0.1)
        b.squares.fill_(1.0)
        self.head = Head(self.network.head, most_rows)

    def launches(self, job: Job, num_layers: int | None = None) -> Callable[[], int]:
        """What launches it once a layer, and says how often that was."""
        from runtime.backends.transformers.cuda import launch

        network, b, n = self.network, self.buffers, job.rows
        g, rows, layers = network.geometry, self._rows(job), network.layers[:num_layers]
        keys, values = self.target.pool.keys, self.target.pool.values

        def run() -> int:
            if job.kind == "head":
                for _ in range(NUM_HEADS):
                    self.head.best(b.hidden[:n, 3 * g.hidden :], rows.ids)
                return NUM_HEADS
            for i, layer in enumerate(layers):
                if job.kind == "qkv":
                    launch.qkv(layer, g, rows, b, b.q[:n], keys[i], values[i], (network.cos, network.sin))
                elif job.kind == "out":
                    launch.linear(b.o[:n], layer.out, b.mid[:n], residual=b.x[:n], gain=layer.mlp_norm, buffers=b)
                elif job.kind == "gate_up":
                    launch.gate_up(layer, g, b, n)
                elif job.kind == "down":
                    launch.linear(b.act[:n], layer.down, b.x[:n], residual=b.mid[:n], gain=layer.input_norm, buffers=b)
                else:
                    launch.attend(layer, g, rows, b, keys[i], values[i], b.q[:n])
            return len(layers)

        return run

    def _rows(self, job: Job) -> Any:
        from runtime.backends.transformers.cuda.blocks import BLOCK_TOKENS
        from runtime.backends.transformers.cuda.launch import NO_WINDOW, Rows

        pool, num = self.target.pool, job.rows // job.size
        device = self.target.device

        def of_each(value: int) -> torch.Tensor:
            return torch.full((num,), value, dtype=torch.int32, device=device)

        seats = torch.arange(1, num + 1, dtype=torch.int32, device=device) % len(pool.device_table)
        num_blocks = (job.keys + job.size) // BLOCK_TOKENS + 1
        blocks = torch.randint(1, pool.blocks.num_blocks, (num, num_blocks), dtype=torch.int32, device=device)
        pool.device_table[seats.long(), :num_blocks] = blocks
        order = torch.arange(job.rows, dtype=torch.int32, device=device)
        positions = order % job.size + job.keys
        nowhere, starts = torch.zeros_like(order), order[:: job.size].contiguous()
        return Rows(
            torch.zeros_like(order), positions, nowhere, pool.device_table, seats, starts, of_each(job.size), of_each(job.keys),
            of_each(0), of_each(NO_WINDOW), max_size=job.size,
        )  # fmt: skip


@contextmanager
def tiled(kind: str, tile: Any) -> Iterator[None]:
    """With this tile for all launches of the kind; None: with what is chosen."""
    from runtime.backends.transformers.cuda import launch

    name = "key_tile" if kind == "attention" else "tile"
    chosen = getattr(launch, name)
    try:
        if tile is not None and kind == "attention":
            launch.key_tile = lambda *args: tile
        elif tile is not None:
            launch.tile = lambda other, *args: tile if other == PRODUCTS[kind] else chosen(other, *args)
        yield
    finally:
        setattr(launch, name, chosen)


def measure(kernels: Kernels, job: Job, tiles: Sequence[Any], rounds: int) -> list[float]:
    """Microseconds of one launch with each of them."""
    graphs: list[tuple[torch.cuda.CUDAGraph, int]] = []
    run = kernels.launches(job)  # kept until the end: the graphs read its rows
    for tile in tiles:
        with tiled(job.kind, tile):
            num = run()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                run()
            graphs.append((graph, num))
    taken: list[list[float]] = [[] for _ in tiles]
    for number in range(-1, rounds):  # the first one is for warming up
        for (graph, num), times in zip(graphs, taken, strict=True):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            graph.replay()
            end.record()
            end.synchronize()
            if number >= 0:
                times.append(1000 * start.elapsed_time(end) / (2 * num))
    return [median(times) for times in taken]


@cache
def _worker(model: str, most_rows: int) -> Kernels:
    return Kernels(model, most_rows)


def compile_one(model: str, most_rows: int, job: Job, tile: Any) -> bool:
    """In a process of its own, for the others to find in Triton's cache. False: the device has no room for such a tile."""
    from triton.runtime.errors import OutOfResources

    with torch.inference_mode(), tiled(job.kind, tile):
        try:
            _worker(model, most_rows).launches(job, 1)()
        except OutOfResources:
            return False
    torch.cuda.synchronize()
    return True


def jobs_of(options: argparse.Namespace) -> list[Job]:
    jobs = [Job(kind, rows) for kind in PRODUCTS if kind in options.kinds for rows in options.rows]
    if "attention" in options.kinds:
        shapes = [(keys, num, size) for keys in options.keys for num in options.sessions for size in options.sizes]
        jobs += [Job("attention", num * size, size, keys) for keys, num, size in shapes]
    return jobs


def run(options: argparse.Namespace) -> list[dict[str, Any]]:
    resolve(options.model)  # converted once, before all others want it
    jobs = jobs_of(options)
    most_rows = max(job.rows for job in jobs)
    smallest = {(job.kind, job.size): job for job in reversed(jobs)}  # what kernels are compiled for, of attention
    tries = [(job, tile) for job in smallest.values() for tile in candidates(job)]
    say(f"{len(tries)} kernels are compiled")
    with ProcessPoolExecutor(options.processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        futures = [pool.submit(compile_one, options.model, most_rows, job, tile) for job, tile in tries]
        fits = {(job.kind, job.size, tile): future.result() for (job, tile), future in zip(tries, futures, strict=True)}
    kernels, found = Kernels(options.model, most_rows), []
    with torch.inference_mode():
        for job in jobs:
            tiles = [None, *(tile for tile in candidates(job) if fits[job.kind, job.size, tile])]
            times = dict(zip(map(_told, tiles), measure(kernels, job, tiles, options.rounds), strict=True))
            found.append({"job": job.name, "us": times})
            say(job.name)
    return found


def _told(tile: Any) -> str:
    if tile is None:
        return "chosen"
    return " ".join(f"{name} {value}" for name, value in vars(tile).items())


def page(result: dict[str, Any]) -> str:
    rows = []
    for one in result["found"]:
        best = sorted((us, name) for name, us in one["us"].items() if name != "chosen")[:SHOWN]
        rows.append([one["job"], one["us"]["chosen"], "; ".join(f"{us:.2f} {name}" for us, name in best)])
    about = "\n".join(f"- {name}: {value}" for name, value in result["machine"].items())
    return table(["launch", "chosen: us", "the best others: us, tile"], rows) + "\n\n" + about


def main(argv: Sequence[str] | None = None) -> int:
    options = arguments().parse_args(argv)
    if not torch.cuda.is_available():
        print("cuda_tiles: there is no CUDA device here, whose kernels this measures.", file=sys.stderr)
        return 1
    try:
        found = run(options)
    except SlipstreamError as error:
        print(f"cuda_tiles: {error}", file=sys.stderr)
        return 1
    result = {"model": options.model, "rounds": options.rounds, "machine": machine.describe(), "found": found}
    if options.out is not None:
        options.out.write_text(json.dumps(result, indent=2) + "\n")
    print(page(result))
    return 0


def arguments() -> argparse.ArgumentParser:
    parser = parser_of(__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--kinds", nargs="+", choices=[*PRODUCTS, "attention"], default=[*PRODUCTS, "attention"])
    parser.add_argument("--rows", nargs="+", type=positive, default=[1, 8, 16, 32, 48, 64, 96, 128, 192, 256, 384, 512])
    parser.add_argument("--sessions", nargs="+", type=positive, default=[1, 4, 16, 32, 64], help="of attention")
    parser.add_argument("--sizes", nargs="+", type=positive, default=[1, 6], help="rows of a session, of attention")
    parser.add_argument("--keys", nargs="+", type=positive, default=[256, 1024], help="of a session, of attention")
    parser.add_argument("--rounds", type=positive, default=5, help="of each measurement")
    parser.add_argument("--processes", type=positive, default=8, help="that compile")
    parser.add_argument("--out", type=Path, help="write everything there as JSON")
    return parser


if __name__ == "__main__":
    sys.exit(main())

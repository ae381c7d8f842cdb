"""Milliseconds of all linear layers of a model on a CPU, head included, by the number of rows: plain, and packed by each library
that can. What `runtime.linear` chooses between.

The layers are as wide as the model's and as many, with weights of their own, so that they come from memory as in a forward. All
kinds of a number of rows are measured in turn, several times; medians.

    python benchmarks/linear.py --rows 1 4 8 256 --out linear.json
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import machine
import torch
from command_line import parser_of, positive
from engine import say
from engine_tables import table
from torch import nn
from transformers import AutoConfig

from runtime.errors import SlipstreamError
from runtime.linear import MklLinear, OneDnnLinear, can_pack
from runtime.models import resolve

PLAIN, MKL, ONE_DNN = "plain", "MKL", "oneDNN"


def shapes_of(config: Any) -> list[tuple[int, int]]:
    """(outputs, inputs) of a forward's layers in their order: q, k and v as one, gate and up as another."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    width, inner = config.hidden_size, config.intermediate_size
    heads, kv_heads = config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim
    layer = [(heads + 2 * kv_heads, width), (width, heads), (2 * inner, width), (width, inner)]
    return [*layer * config.num_hidden_layers, (config.vocab_size, width)]


def makers() -> dict[str, Callable[[torch.Tensor], nn.Module]]:
    """By kind: a layer of a weight. Those that this torch has."""
    found: dict[str, Callable[[torch.Tensor], nn.Module]] = {PLAIN: _plain}
    if can_pack(torch.empty(1)):
        found[ONE_DNN] = OneDnnLinear
    if torch.backends.mkl.is_available():
        found[MKL] = MklLinear
    return found


def _plain(weight: torch.Tensor) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    layer.weight = nn.Parameter(weight, requires_grad=False)
    return layer


@torch.inference_mode()
def run(options: argparse.Namespace) -> list[dict[str, Any]]:
    shapes = shapes_of(AutoConfig.from_pretrained(resolve(options.model).path, local_files_only=True))
    weights = [torch.randn(shape) for shape in shapes]
    kinds = {name: [make(weight) for weight in weights] for name, make in makers().items()}
    found = []
    for num_rows in options.rows:
        inputs = {width: torch.randn(num_rows, width) for _, width in shapes}
        times: dict[str, list[float]] = {name: [] for name in kinds}
        for _ in range(options.rounds + 1):  # the first one makes kernels
            for name, layers in kinds.items():
                began = time.perf_counter()
                for layer, (_, width) in zip(layers, shapes, strict=True):
                    layer(inputs[width])
                times[name].append(1000 * (time.perf_counter() - began))
        found.append({"rows": num_rows, "ms": {name: median(taken[1:]) for name, taken in times.items()}})
        say(f"{num_rows} rows")
    return found


def page(result: dict[str, Any]) -> str:
    kinds = list(result["found"][0]["ms"])
    rows = [[one["rows"], *one["ms"].values()] for one in result["found"]]
    about = "\n".join(f"- {name}: {value}" for name, value in result["machine"].items())
    return table(["rows", *(f"{kind}: ms" for kind in kinds)], rows) + "\n\n" + about


def main(argv: Sequence[str] | None = None) -> int:
    options = arguments().parse_args(argv)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    try:
        found = run(options)
    except SlipstreamError as error:
        print(f"linear: {error}", file=sys.stderr)
        return 1
    result = {"model": options.model, "threads": torch.get_num_threads(), "machine": machine.describe(), "found": found}
    if options.out is not None:
        options.out.write_text(json.dumps(result, indent=2) + "\n")
    print(page(result))
    return 0


def arguments() -> argparse.ArgumentParser:
    parser = parser_of(__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--rows", nargs="+", type=positive, default=[1, 2, 4, 6, 8, 16, 32, 64, 256])
    parser.add_argument("--rounds", type=positive, default=9, help="of each measurement")
    parser.add_argument("--threads", type=positive, help="of torch; its own choice if left out")
    parser.add_argument("--out", type=Path, help="write everything there as JSON")
    return parser


if __name__ == "__main__":
    sys.exit(main())

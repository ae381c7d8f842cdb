"""Calls of the kernels: tile shapes by the number of rows, and the buffers that lie between the kernels of one forward.

Nothing here allocates or waits, so all of it can stand in a CUDA graph. Tensors are contiguous in their last axis.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch

from runtime.backends.transformers.cuda import attention, kernels
from runtime.backends.transformers.cuda.blocks import BLOCK_TOKENS
from runtime.backends.transformers.cuda.network import Geometry, Layer

MAX_SPLITS = 16  # parts of the keys of one sequence that are attended to side by side
MAX_PART_ROWS = 4096  # of all parts of all sequences
MAX_QUERIES = 12288  # of all programs that parts are made for: more fill the device without (`benchmarks/cuda_tiles.py`)
MANY = sys.maxsize
NO_WINDOW = 2**30  # in place of a policy's window
SHARED_BYTES = 160 * 1024  # of a program's tiles, where the device does not say
SPARE_BYTES = 16 * 1024  # of what it says: for all else that a program keeps there
SEQUENCE_FIELDS = ("table_rows", "starts", "sizes", "lengths", "sinks", "windows")


@dataclass
class Rows:
    """The rows of one forward and whose they are, all int32 on the device but the ancestors' int64 bit masks."""

    ids: torch.Tensor  # [T], may be strided
    positions: torch.Tensor  # [T]
    slots: torch.Tensor  # [T] where in the pool each row's K/V goes; 0: nowhere
    table: torch.Tensor  # [rows of the table, blocks of a sequence]
    table_rows: torch.Tensor  # [S]
    starts: torch.Tensor  # [S] first row of each sequence
    sizes: torch.Tensor  # [S] its number of rows
    lengths: torch.Tensor  # [S] its committed tokens
    sinks: torch.Tensor  # [S]
    windows: torch.Tensor  # [S]
    max_size: int  # no sequence has more rows
    ancestors: torch.Tensor | None = None  # int64 [T]; None: chains

    @property
    def num_rows(self) -> int:
        return self.ids.shape[0]

    @property
    def num_sequences(self) -> int:
        return self.table_rows.shape[0]


@dataclass
class Buffers:
    """Scratch of one forward of up to `rows` rows."""

    rows: int
    geometry: Geometry
    dtype: torch.dtype
    device: torch.device
    q: torch.Tensor = field(init=False)  # [T, heads * D]
    o: torch.Tensor = field(init=False)  # [T, heads * D]
    parts: torch.Tensor = field(init=False)  # float32 [parts of all rows * heads * D]
    lse: torch.Tensor = field(init=False)  # float32 [parts of all rows * heads]
    act: torch.Tensor = field(init=False)  # [T, I]
    x: torch.Tensor = field(init=False)  # [T, H] the residual stream behind a layer
    mid: torch.Tensor = field(init=False)  # [T, H] and behind its attention
    scaled: torch.Tensor = field(init=False)  # [T, H] either of them times the gain of the norm that follows
    squares: torch.Tensor = field(init=False)  # float32 [T * tiles] and its sums of squares
    aux: list[torch.Tensor] = field(init=False)  # three of [T, H]: x behind the auxiliary layers
    hidden: torch.Tensor = field(init=False)  # [T, 4H] what the forward leaves behind

    def __post_init__(self) -> None:
        g, n = self.geometry, self.rows
        make: dict[str, Any] = {"dtype": self.dtype, "device": self.device}
        # Attention writes nothing for rows of nobody. No other row sees them, but they are calculated with.
        self.o = torch.zeros(n, g.heads * g.head_dim, **make)
        self.q = torch.empty_like(self.o)
        self.x, self.mid, self.scaled, *self.aux = (torch.empty(n, g.hidden, **make) for _ in range(6))
        self.act, self.hidden = torch.empty(n, g.intermediate, **make), torch.empty(n, 4 * g.hidden, **make)
        self.squares = torch.empty(n * cdiv(g.hidden, 16), dtype=torch.float32, device=self.device)
        part_rows = min(n * MAX_SPLITS, MAX_PART_ROWS)
        self.parts = torch.zeros(part_rows * g.heads * g.head_dim, dtype=torch.float32, device=self.device)
        self.lse = torch.zeros(part_rows * g.heads, dtype=torch.float32, device=self.device)


@dataclass(frozen=True)
class Tile:
    """What one program of a product does: BM rows, BN columns, BK of the inner axis at a time."""

    bm: int
    bn: int
    bk: int
    warps: int = 4
    stages: int = 4

    @property
    def options(self) -> dict[str, Any]:
        return {"BM": self.bm, "BN": self.bn, "BK": self.bk, "num_warps": self.warps, "num_stages": self.stages}


# By product, the tiles of up to so many rows: few rows only stream the weights, and many narrow programs share that work.
# `benchmarks/cuda_tiles.py` measures them beside others.
TILES = {
    "qkv": (
        (128, Tile(16, 32, 64, 4, 6)), (256, Tile(64, 16, 64, 4, 5)), (1024, Tile(64, 32, 64, 4, 6)),
        (MANY, Tile(128, 64, 64, 8, 4)),
    ),
    "linear": (
        (48, Tile(16, 16, 128, 4, 5)), (96, Tile(16, 32, 128, 4, 5)), (192, Tile(64, 16, 128, 4, 5)),
        (384, Tile(64, 32, 128, 4, 5)), (MANY, Tile(64, 64, 128, 4, 5)),
    ),
    "gate_up": (
        (32, Tile(16, 32, 64, 4, 5)), (64, Tile(64, 16, 64, 4, 5)), (128, Tile(64, 32, 64, 4, 5)), (256, Tile(64, 64, 64, 4, 5)),
        (1024, Tile(64, 32, 64, 4, 3)), (MANY, Tile(128, 64, 64, 8, 4)),
    ),
    "head": (
        (16, Tile(16, 128, 64, 4, 3)), (32, Tile(32, 128, 64, 4, 3)), (64, Tile(64, 128, 64, 4, 3)),
        (MANY, Tile(128, 128, 64, 8, 3)),
    ),
}  # fmt: skip


def tile(kind: str, num_rows: int, k: int, itemsize: int = 2) -> Tile:
    """Of a product of num_rows rows, K wide."""
    wanted = next(tile for most, tile in TILES[kind] if num_rows <= most)
    if kind == "head" and wanted.bm == 128 and -num_rows % 128 >= 64:  # half of the last one would be empty
        wanted = replace(wanted, bm=64)
    if kind == "linear" and k < 1024:
        wanted = replace(wanted, bk=64)
    return _fitting(wanted, k, itemsize, 2 if kind in ("qkv", "gate_up") else 1)


def _fitting(wanted: Tile, k: int, itemsize: int, num_weights: int) -> Tile:
    """No wider than the product, and with no more stages than there is room for: of x and so many weights."""
    bk, stages = min(wanted.bk, max(16, next_power_of_2(k))), wanted.stages
    while stages > 1 and (wanted.bm + num_weights * wanted.bn) * bk * itemsize * stages > _shared_bytes():
        stages -= 1
    return replace(wanted, bk=bk, stages=stages)


@cache
def _shared_bytes() -> int:
    if not torch.cuda.is_available():  # the interpreter's
        return SHARED_BYTES
    has: int = getattr(torch.cuda.get_device_properties(), "shared_memory_per_block_optin", SHARED_BYTES + SPARE_BYTES)
    return has - SPARE_BYTES


@dataclass(frozen=True)
class KeyTile:
    """What one program of attention looks at: a part of a sequence's keys, BN of them at a time."""

    splits: int  # parts of the keys of one sequence that are attended to side by side
    bn: int
    warps: int = 4
    stages: int = 2


def key_tile(head_dim: int, bm: int, num_rows: int, num_programs: int) -> KeyTile:
    """Of num_rows rows for which num_programs programs, of BM queries each, look at all keys of their sequence."""
    splits = 1
    while splits < MAX_SPLITS and 2 * splits * num_rows <= MAX_PART_ROWS and 2 * splits * num_programs * bm <= MAX_QUERIES:
        splits *= 2
    return KeyTile(splits, 64 if head_dim <= 128 else 32)


def linear_tiles(num_rows: int, n: int, itemsize: int) -> int:
    """Into how many tiles `linear` cuts a row of N columns: the sums of squares that it passes on."""
    return cdiv(n, tile("linear", num_rows, n, itemsize).bn)


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()


def embed(ids: torch.Tensor, embedding: torch.Tensor, gain: torch.Tensor, buffers: Buffers) -> None:
    """Rows of the embedding into buffers.x, and what the first norm needs."""
    num_rows, h = ids.shape[0], embedding.shape[1]
    tiles = linear_tiles(num_rows, h, embedding.element_size())
    kernels.embed_kernel[(num_rows,)](
        ids, embedding, gain, buffers.x, buffers.scaled, buffers.squares, H=h, HP=next_power_of_2(h), TILES=tiles,
        TP=next_power_of_2(tiles), num_warps=4,
    )  # fmt: skip


def qkv(
    layer: Layer,
    g: Geometry,
    rows: Rows,
    buffers: Buffers,  # .scaled and .squares are read
    q: torch.Tensor,  # [T, heads * D]
    keys: torch.Tensor,  # [blocks, kv_heads, 16, D] of this layer
    values: torch.Tensor,
    rotary: tuple[torch.Tensor, torch.Tensor],
    embedding: torch.Tensor | None = None,  # of a draft layer
) -> None:
    num_rows, half = rows.num_rows, g.head_dim // 2
    t = tile("qkv", num_rows, g.hidden, q.element_size())
    t = replace(t, bn=half if layer.q_norm is not None else min(half, t.bn))
    tiles = linear_tiles(num_rows, g.hidden, q.element_size())
    none = layer.input_norm  # stands where a kernel's branch is compiled away
    kernels.qkv_kernel[(cdiv(num_rows, t.bm), (g.heads + 2 * g.kv_heads) * (half // t.bn))](
        buffers.scaled, buffers.squares, rows.ids, rows.ids.stride(0), none if embedding is None else embedding,
        none if layer.embedding_norm is None else layer.embedding_norm, layer.qkv, none if layer.bias is None else layer.bias,
        none if layer.q_norm is None else layer.q_norm, none if layer.k_norm is None else layer.k_norm, *rotary, rows.positions,
        rows.slots, q, keys, values, num_rows, g.eps, K=g.hidden, TILES=tiles,
        TP=next_power_of_2(tiles), HEADS=g.heads, KV_HEADS=g.kv_heads, D=g.head_dim, BLOCK=BLOCK_TOKENS,
        WITH_EMBEDDING=embedding is not None, HAS_BIAS=layer.bias is not None, NORM_QK=layer.q_norm is not None, **t.options,
    )  # fmt: skip


def attend(
    layer: Layer, g: Geometry, rows: Rows, buffers: Buffers, keys: torch.Tensor, values: torch.Tensor, q: torch.Tensor
) -> None:
    """Attention of all rows into `buffers.o`, by way of parts where `key_tile` splits the keys."""
    pairs = rows.max_size * (g.heads // g.kv_heads)
    bm = max(16, min(64, next_power_of_2(pairs)))
    tiles = cdiv(pairs, bm)
    t = key_tile(g.head_dim, bm, rows.num_rows, rows.num_sequences * tiles * g.kv_heads)
    attention.attention_kernel[(rows.num_sequences, tiles, g.kv_heads * t.splits)](
        q, keys, values, buffers.o if t.splits == 1 else buffers.parts, buffers.lse, rows.table, rows.table.stride(0),
        rows.table_rows, rows.starts, rows.sizes, rows.lengths, rows.positions,
        rows.positions if rows.ancestors is None else rows.ancestors, rows.sinks, rows.windows, g.head_dim**-0.5, rows.num_rows,
        HEADS=g.heads, KV_HEADS=g.kv_heads, D=g.head_dim, BLOCK=BLOCK_TOKENS, LAYER_WINDOW=layer.window,
        TREE=rows.ancestors is not None, SPLITS=t.splits, BM=bm, BN=t.bn, num_warps=t.warps, num_stages=t.stages,
    )  # fmt: skip
    if t.splits > 1:
        kernels.merge_kernel[(rows.num_rows, g.heads)](
            buffers.parts, buffers.lse, buffers.o, rows.num_rows, HEADS=g.heads, D=g.head_dim, SPLITS=t.splits, num_warps=1
        )


def linear(
    x: torch.Tensor,  # [*, K]
    w: torch.Tensor,  # [N, K]
    out: torch.Tensor,  # [T, N]
    *,
    residual: torch.Tensor | None = None,  # [T, N]
    rows_of: torch.Tensor | None = None,  # int32 [T]: row i is x[rows_of[i]]
    gain: torch.Tensor | None = None,  # [N] of the norm that follows, for which
    buffers: Buffers | None = None,  # .scaled and .squares are written
) -> None:
    num_rows, n, k = out.shape[0], w.shape[0], w.shape[1]
    t = tile("linear", num_rows, k, w.element_size())
    tiles = cdiv(n, t.bn)
    scaled, squares = (out, out) if buffers is None else (buffers.scaled, buffers.squares)
    kernels.linear_kernel[(cdiv(num_rows, t.bm), tiles)](
        x, x.stride(0), out if rows_of is None else rows_of, w, out if residual is None else residual, out,
        w if gain is None else gain, scaled, squares, num_rows, K=k, N=n, TILES=tiles,
        GATHER=rows_of is not None, ADD=residual is not None, PASS_ON=gain is not None, **t.options,
    )  # fmt: skip


def gate_up(layer: Layer, g: Geometry, buffers: Buffers, num_rows: int) -> None:
    """silu(gate) * up of so many rows into buffers.act."""
    t = tile("gate_up", num_rows, g.hidden, buffers.act.element_size())
    tiles = linear_tiles(num_rows, g.hidden, buffers.act.element_size())
    kernels.gate_up_kernel[(cdiv(num_rows, t.bm), cdiv(g.intermediate, t.bn))](
        buffers.scaled, buffers.squares, layer.gate_up, buffers.act, num_rows, g.eps, K=g.hidden,
        WIDTH=g.intermediate, TILES=tiles, TP=next_power_of_2(tiles), **t.options,
    )  # fmt: skip


def mlp(layer: Layer, g: Geometry, buffers: Buffers, out: torch.Tensor, next_gain: torch.Tensor | None) -> None:
    """out = x + down(silu(gate) * up), x [T, H] in buffers.mid; what the next norm needs is passed on."""
    n = out.shape[0]
    gate_up(layer, g, buffers, n)
    linear(buffers.act[:n], layer.down, out, residual=buffers.mid[:n], gain=next_gain, buffers=buffers)


def keep_states(
    aux: list[torch.Tensor],  # three of [T, H]
    x: torch.Tensor,  # [T, H] behind the last layer
    norm: torch.Tensor,
    eps: float,
    slots: torch.Tensor,
    hidden: torch.Tensor,  # [T, 4H]
    pool: torch.Tensor,  # [slots, 4H]
) -> None:
    num_rows, h = x.shape
    kernels.keep_states_kernel[(num_rows,)](
        *aux, x, norm, slots, hidden, pool, eps, H=h, HP=next_power_of_2(h), num_warps=4,
    )  # fmt: skip


class Head:
    """The output head: logits, or only the best token of each row, for which no logits are written."""

    def __init__(self, weight: torch.Tensor, rows: int = 0, ids_of: torch.Tensor | None = None) -> None:
        """weight [V, H]; rows: that the best tokens are asked of at once, at most; ids_of int64 [V]: the tokens that its rows
        stand for, where they are not all of a vocabulary."""
        self._weight, self._ids_of = weight, ids_of
        size, device = rows * cdiv(weight.shape[0], 32), weight.device
        self._best = torch.empty(size, dtype=torch.float32, device=device)
        self._best_id = torch.empty(size, dtype=torch.int32, device=device)

    def _run(self, x: torch.Tensor, norm: torch.Tensor | None, eps: float, logits: torch.Tensor | None) -> int:
        num_rows, (v, k) = x.shape[0], self._weight.shape
        t = tile("head", num_rows, k, x.element_size())
        tiles = cdiv(v, t.bn)
        kernels.head_kernel[(cdiv(num_rows, t.bm), tiles)](
            x, x.stride(0), self._weight if norm is None else norm, self._weight, self._best if logits is None else logits,
            self._best, self._best_id, num_rows, eps, K=k, V=v, TILES=tiles, NORM=norm is not None, ARGMAX=logits is None,
            **t.options,
        )  # fmt: skip
        return tiles

    def logits(self, x: torch.Tensor, out: torch.Tensor, norm: torch.Tensor | None = None, eps: float = 0.0) -> None:
        """x [T, H] -> out float32 [T, V]."""
        self._run(x, norm, eps, out)

    def best(
        self, x: torch.Tensor, out: torch.Tensor, norm: torch.Tensor | None = None, eps: float = 0.0, fallback: int = -1
    ) -> None:
        """x [T, H] -> the best token of each row into out [T], which may be strided; fallback where it is not finite."""
        tiles = self._run(x, norm, eps, None)
        kernels.best_kernel[(x.shape[0],)](
            self._best, self._best_id, self._best if self._ids_of is None else self._ids_of, out, out.stride(0), TILES=tiles,
            TP=next_power_of_2(tiles), MAP=self._ids_of is not None, FALLBACK=fallback, num_warps=4,
        )  # fmt: skip

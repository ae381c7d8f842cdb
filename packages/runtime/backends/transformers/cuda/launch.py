"""Calls of the kernels: tile shapes by the number of rows, and the buffers that lie between the kernels of one forward.

Nothing here allocates or waits, so all of it can stand in a CUDA graph. Tensors are contiguous in their last axis.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from runtime.backends.transformers.cuda import attention, kernels
from runtime.backends.transformers.cuda.blocks import BLOCK_TOKENS
from runtime.backends.transformers.cuda.network import Geometry, Layer

MAX_SPLITS = 8  # parts of the keys of one sequence that are attended to side by side
NO_WINDOW = 2**30  # in place of a policy's window
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
    parts: torch.Tensor = field(init=False)  # float32 [MAX_SPLITS * T * heads * D]
    lse: torch.Tensor = field(init=False)  # float32 [MAX_SPLITS * T * heads]
    act: torch.Tensor = field(init=False)  # [T, I]
    x: torch.Tensor = field(init=False)  # [T, H] the residual stream behind a layer
    mid: torch.Tensor = field(init=False)  # [T, H] and behind its attention
    aux: list[torch.Tensor] = field(init=False)  # three of [T, H]: x behind the auxiliary layers
    hidden: torch.Tensor = field(init=False)  # [T, 4H] what the forward leaves behind

    def __post_init__(self) -> None:
        g, n = self.geometry, self.rows
        make: dict[str, Any] = {"dtype": self.dtype, "device": self.device}
        self.q, self.o = (torch.empty(n, g.heads * g.head_dim, **make) for _ in range(2))
        self.x, self.mid, *self.aux = (torch.empty(n, g.hidden, **make) for _ in range(5))
        self.act, self.hidden = torch.empty(n, g.intermediate, **make), torch.empty(n, 4 * g.hidden, **make)
        split_rows = min(n, 256) * MAX_SPLITS  # more rows fill the device without splitting
        self.parts = torch.empty(split_rows * g.heads * g.head_dim, dtype=torch.float32, device=self.device)
        self.lse = torch.empty(split_rows * g.heads, dtype=torch.float32, device=self.device)


def row_tile(num_rows: int) -> int:
    return 16 if num_rows <= 16 else 32 if num_rows <= 32 else 64


def col_tile(num_rows: int) -> int:
    """Narrow while a product only streams its weights, so that many programs share the work."""
    return 16 if num_rows <= 32 else 32 if num_rows <= 128 else 64


def k_tile(size: int) -> int:
    """Of the inner axis: wide, but no wider than it."""
    return 128 if size >= 512 else 64 if size >= 64 else 32 if size >= 32 else 16


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()


def qkv(
    layer: Layer,
    g: Geometry,
    rows: Rows,
    x: torch.Tensor,  # [T, H]
    q: torch.Tensor,
    keys: torch.Tensor,  # [blocks, kv_heads, 16, D] of this layer
    values: torch.Tensor,
    rotary: tuple[torch.Tensor, torch.Tensor],
    embedding: torch.Tensor | None = None,  # of a draft layer
) -> None:
    num_rows, half = rows.num_rows, g.head_dim // 2
    bn = half if layer.q_norm is not None else min(half, col_tile(num_rows))
    grid = (cdiv(num_rows, row_tile(num_rows)), (g.heads + 2 * g.kv_heads) * (half // bn))
    none = layer.input_norm  # stands where a kernel's branch is compiled away
    kernels.qkv_kernel[grid](
        x, x.stride(0), layer.input_norm, rows.ids, rows.ids.stride(0),
        none if embedding is None else embedding, none if layer.embedding_norm is None else layer.embedding_norm, layer.qkv, none if layer.bias is None else layer.bias,
        none if layer.q_norm is None else layer.q_norm, none if layer.k_norm is None else layer.k_norm, *rotary,
        rows.positions, rows.slots, q, keys, values, num_rows, g.eps,
        K=g.hidden, HEADS=g.heads, KV_HEADS=g.kv_heads, D=g.head_dim, BLOCK=BLOCK_TOKENS,
        WITH_EMBEDDING=embedding is not None, HAS_BIAS=layer.bias is not None, NORM_QK=layer.q_norm is not None,
        BM=row_tile(num_rows), BN=bn, BK=k_tile(g.hidden), num_warps=4, num_stages=4,
    )  # fmt: skip


def attend(
    layer: Layer, g: Geometry, rows: Rows, buffers: Buffers, keys: torch.Tensor, values: torch.Tensor, q: torch.Tensor
) -> int:
    """Attention of all rows into `buffers`; returns the number of parts it was left in."""
    pairs = rows.max_size * (g.heads // g.kv_heads)
    bm = max(16, min(64, next_power_of_2(pairs)))
    tiles = cdiv(pairs, bm)
    splits = 1
    while splits < MAX_SPLITS and rows.num_rows <= 256 and rows.num_sequences * tiles * g.kv_heads * splits * 2 <= 264:
        splits *= 2
    attention.attention_kernel[(rows.num_sequences, tiles, g.kv_heads * splits)](
        q, keys, values, buffers.o if splits == 1 else buffers.parts, buffers.lse, rows.table, rows.table.stride(0),
        rows.table_rows, rows.starts, rows.sizes, rows.lengths, rows.positions,
        rows.positions if rows.ancestors is None else rows.ancestors, rows.sinks, rows.windows, g.head_dim**-0.5, rows.num_rows,
        HEADS=g.heads, KV_HEADS=g.kv_heads, D=g.head_dim, BLOCK=BLOCK_TOKENS, LAYER_WINDOW=layer.window,
        TREE=rows.ancestors is not None, SPLITS=splits, BM=bm, BN=64 if g.head_dim <= 128 else 32, num_warps=4, num_stages=2,
    )  # fmt: skip
    return splits


def project_attention(
    layer: Layer,
    g: Geometry,
    buffers: Buffers,
    splits: int,
    residual: torch.Tensor,  # [T, H]
    out: torch.Tensor,  # [T, H]
) -> None:
    """out = residual + attention's output through the layer's out matrix."""
    num_rows = out.shape[0]
    if splits == 1:
        linear(buffers.o[:num_rows], layer.out, out, residual=residual)
        return
    bm, bn = row_tile(num_rows), col_tile(num_rows)
    kernels.merge_linear_kernel[(cdiv(num_rows, bm), cdiv(g.hidden, bn))](
        buffers.parts, buffers.lse, layer.out, residual, out, num_rows, HEADS=g.heads, D=g.head_dim, N=g.hidden, SPLITS=splits,
        BM=bm, BN=bn, num_warps=4, num_stages=3,
    )  # fmt: skip


def linear(
    x: torch.Tensor,  # [*, K]
    w: torch.Tensor,  # [N, K]
    out: torch.Tensor,  # [T, N]
    residual: torch.Tensor | None = None,  # [T, N]
    rows_of: torch.Tensor | None = None,  # int32 [T]: row i is x[rows_of[i]]
) -> None:
    num_rows, n, k = out.shape[0], w.shape[0], w.shape[1]
    bm, bn = row_tile(num_rows), col_tile(num_rows)
    kernels.linear_kernel[(cdiv(num_rows, bm), cdiv(n, bn))](
        x, x.stride(0), x if rows_of is None else rows_of, w, out if residual is None else residual, out, num_rows,
        K=k, N=n, GATHER=rows_of is not None, ADD=residual is not None, BM=bm, BN=bn, BK=k_tile(k), num_warps=4, num_stages=4,
    )  # fmt: skip


def mlp(layer: Layer, g: Geometry, act: torch.Tensor, x: torch.Tensor, out: torch.Tensor) -> None:
    """out = x + down(silu(gate) * up) of the normed x [T, H]."""
    num_rows = x.shape[0]
    bm, bn = row_tile(num_rows), col_tile(num_rows)
    kernels.gate_up_kernel[(cdiv(num_rows, bm), cdiv(g.intermediate, bn))](
        x, layer.mlp_norm, layer.gate_up, act, num_rows, g.eps, K=g.hidden, I=g.intermediate, BM=bm, BN=bn, BK=k_tile(g.hidden),
        num_warps=4, num_stages=4,
    )  # fmt: skip
    linear(act[:num_rows], layer.down, out, residual=x)


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
        *aux, x, norm, slots, hidden, pool, eps, H=h, HP=next_power_of_2(h), num_warps=4
    )  # fmt: skip


class Head:
    """The output head: logits, or only the best token of each row, for which no logits are written."""

    def __init__(self, weight: torch.Tensor, rows: int, ids_of: torch.Tensor | None = None) -> None:
        """weight [V, H]; ids_of int64 [V]: the tokens that its rows stand for, where they are not all of a vocabulary."""
        self._weight, self._ids_of = weight, ids_of
        size, device = rows * cdiv(weight.shape[0], 64), weight.device
        self._best = torch.empty(size, dtype=torch.float32, device=device)
        self._best_id = torch.empty(size, dtype=torch.int32, device=device)

    def _run(self, x: torch.Tensor, norm: torch.Tensor | None, eps: float, logits: torch.Tensor | None) -> int:
        num_rows, (v, k) = x.shape[0], self._weight.shape
        bm = row_tile(num_rows)
        tiles = cdiv(v, 64)
        kernels.head_kernel[(cdiv(num_rows, bm), tiles)](
            x, x.stride(0), self._weight if norm is None else norm, self._weight, self._best if logits is None else logits,
            self._best, self._best_id, num_rows, eps, K=k, V=v, TILES=tiles, NORM=norm is not None, ARGMAX=logits is None,
            BM=bm, BN=64, BK=k_tile(k), num_warps=4, num_stages=4,
        )  # fmt: skip
        return tiles

    def logits(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """x [T, H] normed -> out float32 [T, V]."""
        self._run(x, None, 0.0, out)

    def best(
        self, x: torch.Tensor, out: torch.Tensor, norm: torch.Tensor | None = None, eps: float = 0.0, fallback: int = -1
    ) -> None:
        """x [T, H] -> the best token of each row into out [T], which may be strided; fallback where it is not finite."""
        tiles = self._run(x, norm, eps, None)
        kernels.best_kernel[(x.shape[0],)](
            self._best, self._best_id, self._best if self._ids_of is None else self._ids_of, out, out.stride(0), TILES=tiles,
            TP=next_power_of_2(tiles), MAP=self._ids_of is not None, FALLBACK=fallback, num_warps=4,
        )  # fmt: skip

"""Linear layers with weights packed once: what makes verifying a few tokens cost little more than one on a CPU.

Inference only: a packed layer has no parameters and no gradient. It does not know whose layer it is; the served target and
the served drafter use it, training never does. A layer that is not float32 on a CPU, or a torch without oneDNN, stays plain.

MKL packs on CPUs of Intel, where it is quicker with few rows and with many (`benchmarks/linear.py`); oneDNN does on all others,
and wherever it is asked for what MKL has not: bfloat16, or the same bits whatever else is computed.

oneDNN takes another kernel, and so another order of summation, for one row of a wide layer than for several: seen on AVX2,
where from 1025 inputs on a single row differs in its last bits and all other numbers of rows agree. An `invariant` layer
finds out how many rows it takes for all numbers to agree, and never computes fewer.

oneDNN also makes and keeps a kernel for every number of rows that it meets, some megabytes for all layers of a small model:
beyond a few rows the input is filled up to a round number, so that a server which sees batches of every size stays as large
as it is.
"""

from __future__ import annotations

import platform
from abc import ABC, abstractmethod
from functools import cache
from pathlib import Path

import torch
from torch import nn

PROBED_ROWS = (*range(1, 18), 31, 32, 33, 48, 63, 64, 65, 128)
MOST_MIN_ROWS = 16
MKL_ROWS = 256  # that MKL is told to pack for: what is best for so many is for one too
MKL_PROBED_ROWS, MKL_TOLERANCE = (1, 2, 3, 5, 8, 17, 48, 100, 257), 1e-4  # of the largest number
FEW_ROWS = 16  # up to which each number of rows has a kernel of its own


def kernel_rows(num_rows: int) -> int:
    """The number of rows that is computed for so many: their own up to 16, then multiples of 4, from 64 on of 32."""
    step = 1 if num_rows <= FEW_ROWS else 4 if num_rows <= 64 else 32
    return -(-num_rows // step) * step


def can_pack(weight: torch.Tensor) -> bool:
    """Whether oneDNN can hold this weight packed: float32, on a CPU, in a torch that was built with it."""
    return weight.dtype is torch.float32 and weight.device.type == "cpu" and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]


@cache
def can_use_mkl() -> bool:
    """Whether torch has MKL, and this CPU is of the kind that MKL is quick on."""
    if not (torch.backends.mkl.is_available() and hasattr(torch.ops.mkl, "_mkl_linear")):  # type: ignore[no-untyped-call]
        return False
    cpuinfo = Path("/proc/cpuinfo")
    return "GenuineIntel" in (cpuinfo.read_text() if cpuinfo.exists() else platform.processor())


def can_halve(weight: torch.Tensor) -> bool:
    """Whether oneDNN can hold this weight in bfloat16: this CPU multiplies in it, and the weight loses nothing by it."""
    can_multiply = can_pack(weight) and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return bool(can_multiply) and torch.equal(weight.bfloat16().float(), weight)


class PackedLinear(nn.Module, ABC):
    """y = x W^T + b for float32 on a CPU. Holds the packed copy only; the caller keeps W if it needs it (a tied embedding)."""

    packed: torch.Tensor  # a plain attribute, not a parameter: an opaque tensor has no strides and cannot be moved, cast or saved

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        if not can_pack(weight):
            raise ValueError(
                f"A weight of {weight.dtype} on {weight.device} cannot be packed; use torch.nn.Linear, as pack_linears does."
            )
        self.out_features, self.in_features = weight.shape
        self.dtype = dtype
        self.bias = None if bias is None else bias.detach().to(dtype, copy=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # x: [..., in_features] -> [..., out_features]
        if x.requires_grad and torch.is_grad_enabled():
            raise RuntimeError("A packed linear layer has no gradient; train the plain model, and pack the one that is served.")
        return self._compute(x, x.shape[0] if x.dim() == 2 else x.numel() // self.in_features)

    @abstractmethod
    def _compute(self, x: torch.Tensor, num_rows: int) -> torch.Tensor: ...

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


class OneDnnLinear(PackedLinear):
    """An input is filled up to `kernel_rows`, and to `min_rows` at the least, and the answer cut off again. `halve` packs W in
    bfloat16 and rounds x and y to it: less than half of the time where W has to come from memory.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None, min_rows: int = 1, *, halve: bool = False) -> None:
        super().__init__(weight, bias, torch.bfloat16 if halve else torch.float32)
        self.min_rows = min_rows
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach().to(self.dtype).contiguous())
        self._op = torch.ops.mkldnn._linear_pointwise.default  # looked up once

    def _compute(self, x: torch.Tensor, num_rows: int) -> torch.Tensor:
        if self.min_rows <= num_rows <= FEW_ROWS:
            return self.exactly(x)
        num_computed = kernel_rows(max(num_rows, self.min_rows))
        if num_rows < num_computed:
            rows = x.new_zeros(num_computed, self.in_features)
            rows[:num_rows] = x.reshape(num_rows, self.in_features)
            return self.exactly(rows)[:num_rows].reshape(*x.shape[:-1], self.out_features)
        return self.exactly(x)

    def exactly(self, x: torch.Tensor) -> torch.Tensor:
        """Of these rows and no more."""
        y: torch.Tensor = self._op(x.to(self.dtype), self.packed, self.bias, "none", [], "")
        return y.to(x.dtype)


class MklLinear(PackedLinear):
    """For CPUs of Intel. What is packed for one number of rows serves all, as far as `is_right` finds."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        super().__init__(weight, bias)
        self.packed = torch.ops.mkl._mkl_reorder_linear_weight(weight.detach().contiguous(), MKL_ROWS)
        self._shape = weight.new_empty(1).expand(weight.shape)  # nothing but a shape: the operation looks at no more of it
        self._op = torch.ops.mkl._mkl_linear.default

    def _compute(self, x: torch.Tensor, num_rows: int) -> torch.Tensor:
        y: torch.Tensor = self._op(x, self.packed, self._shape, self.bias, num_rows)
        return y


@torch.inference_mode()
def rows_for_invariance(layer: OneDnnLinear) -> int:
    """The smallest number of rows from which on a row's result depends on that row alone, to the last bit.

    RuntimeError if there is none: this machine's oneDNN chooses its kernels otherwise than we know.
    """
    rows = torch.randn(max(PROBED_ROWS), layer.in_features, generator=torch.Generator().manual_seed(0))
    expected = layer.exactly(rows)
    differing = [size for size in PROBED_ROWS if not _agrees(layer, rows, expected, size)]
    min_rows = max(differing, default=0) + 1
    if min_rows > MOST_MIN_ROWS:
        raise RuntimeError(
            f"A linear layer of {layer.in_features} to {layer.out_features} features gives a row other bits among "
            f"{differing[-1]} rows than among {len(rows)}; this machine's oneDNN cannot compute invariantly."
        )
    return min_rows


def _agrees(layer: OneDnnLinear, rows: torch.Tensor, expected: torch.Tensor, size: int) -> bool:
    # The first rows and the last: a row's place must not matter either.
    starts = (0, len(rows) - size)
    return all(torch.equal(layer.exactly(rows[start : start + size]), expected[start : start + size]) for start in starts)


def pack_linears(module: nn.Module, *, invariant: bool = False, halve: bool = False) -> int:
    """Replace every nn.Linear below `module` by its packed form, in place; returns how many. Those that cannot pack stay.

    `halve` packs weights in bfloat16 that are bfloat16 already.

    A weight tied to an embedding stays with the embedding, and the layer gets a packed copy of its own.
    """
    num_packed = 0
    known: dict[tuple[int, int], int] = {}  # by shape, which is what a library chooses its kernels by: what `_packed` found out
    # Parents only: holding the layers themselves would keep all plain weights beside the packed ones until the end.
    for parent in [part for part in module.modules() if any(type(child) is nn.Linear for child in part.children())]:
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear and can_pack(child.weight):  # not a subclass, which may compute something else
                setattr(parent, name, _packed(child, known, invariant, halve and can_halve(child.weight)))
                num_packed += 1
    return num_packed


def _packed(linear: nn.Linear, known: dict[tuple[int, int], int], invariant: bool, halve: bool) -> PackedLinear:
    """known: of invariant layers the least rows; of others whether MKL computes them rightly."""
    shape = linear.out_features, linear.in_features
    if not (invariant or halve) and can_use_mkl() and known.get(shape, True):
        of_mkl = MklLinear(linear.weight, linear.bias)
        if shape not in known:
            known[shape] = is_right(of_mkl, linear)
        if known[shape]:
            return of_mkl
    packed = OneDnnLinear(linear.weight, linear.bias, halve=halve)
    if invariant:
        if shape not in known:
            known[shape] = rows_for_invariance(packed)
        packed.min_rows = known[shape]
    return packed


@torch.inference_mode()
def is_right(packed: PackedLinear, plain: nn.Linear) -> bool:
    """Whether both say the same. MKL promises nothing for other numbers of rows than it packed for, so nothing is taken for
    granted on a machine that we do not know."""
    rows = torch.randn(MKL_PROBED_ROWS[-1], plain.in_features, generator=torch.Generator().manual_seed(0))
    expected = plain(rows)
    most = MKL_TOLERANCE * float(expected.abs().max())
    return all(float((packed(rows[:size]) - expected[:size]).abs().max()) <= most for size in MKL_PROBED_ROWS)

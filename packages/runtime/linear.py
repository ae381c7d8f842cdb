"""Linear layers with weights packed once for oneDNN: what makes verifying a few tokens cost little more than one on a CPU.

Inference only: a packed layer has no parameters and no gradient. It does not know whose layer it is; the served target and
the served drafter use it, training never does. A layer that is not float32 on a CPU, or a torch without oneDNN, stays plain.

oneDNN takes another kernel, and so another order of summation, for one row of a wide layer than for several: seen on AVX2,
where from 1025 inputs on a single row differs in its last bits and all other numbers of rows agree. An `invariant` layer
finds out how many rows it takes for all numbers to agree, and never computes fewer.

oneDNN also makes and keeps a kernel for every number of rows that it meets, some megabytes for all layers of a small model:
beyond a few rows the input is filled up to a round number, so that a server which sees batches of every size stays as large
as it is.
"""

from __future__ import annotations

import torch
from torch import nn

PROBED_ROWS = (*range(1, 18), 31, 32, 33, 48, 63, 64, 65, 128)
MOST_MIN_ROWS = 16
FEW_ROWS = 16  # up to which each number of rows has a kernel of its own


def kernel_rows(num_rows: int) -> int:
    """The number of rows that is computed for so many: their own up to 16, then multiples of 4, from 64 on of 32."""
    step = 1 if num_rows <= FEW_ROWS else 4 if num_rows <= 64 else 32
    return -(-num_rows // step) * step


def can_pack(weight: torch.Tensor) -> bool:
    """Whether oneDNN can hold this weight packed: float32, on a CPU, in a torch that was built with it."""
    return weight.dtype is torch.float32 and weight.device.type == "cpu" and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]


def can_halve(weight: torch.Tensor) -> bool:
    """Whether oneDNN can hold this weight in bfloat16: this CPU multiplies in it, and the weight loses nothing by it."""
    can_multiply = can_pack(weight) and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return bool(can_multiply) and torch.equal(weight.bfloat16().float(), weight)


class PackedLinear(nn.Module):
    """y = x W^T + b for float32 on a CPU. Holds the packed copy only; the caller keeps W if it needs it (a tied embedding).

    An input is filled up to `kernel_rows`, and to `min_rows` at the least, and the answer cut off again. `halve` packs W in
    bfloat16 and rounds x and y to it: less than half of the time where W has to come from memory.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None, min_rows: int = 1, *, halve: bool = False) -> None:
        super().__init__()
        if not can_pack(weight):
            raise ValueError(
                f"A weight of {weight.dtype} on {weight.device} cannot be packed; use torch.nn.Linear, as pack_linears does."
            )
        self.out_features, self.in_features = weight.shape
        self.min_rows = min_rows
        # Plain attributes, not parameters: an opaque tensor has no strides and cannot be moved, cast or saved.
        self.dtype = torch.bfloat16 if halve else torch.float32
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach().to(self.dtype).contiguous())
        self.bias = None if bias is None else bias.detach().to(self.dtype, copy=True)
        self._op = torch.ops.mkldnn._linear_pointwise.default  # looked up once

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # x: [..., in_features] -> [..., out_features]
        if x.requires_grad and torch.is_grad_enabled():
            raise RuntimeError("A packed linear layer has no gradient; train the plain model, and pack the one that is served.")
        num_rows = x.shape[0] if x.dim() == 2 else x.numel() // self.in_features
        if self.min_rows <= num_rows <= FEW_ROWS:
            return self._compute(x)
        num_computed = kernel_rows(max(num_rows, self.min_rows))
        if num_rows < num_computed:
            rows = x.new_zeros(num_computed, self.in_features)
            rows[:num_rows] = x.reshape(num_rows, self.in_features)
            return self._compute(rows)[:num_rows].reshape(*x.shape[:-1], self.out_features)
        return self._compute(x)

    def _compute(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self._op(x.to(self.dtype), self.packed, self.bias, "none", [], "")
        return y.to(x.dtype)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


@torch.inference_mode()
def rows_for_invariance(layer: PackedLinear) -> int:
    """The smallest number of rows from which on a row's result depends on that row alone, to the last bit.

    RuntimeError if there is none: this machine's oneDNN chooses its kernels otherwise than we know.
    """
    rows = torch.randn(max(PROBED_ROWS), layer.in_features, generator=torch.Generator().manual_seed(0))
    expected = layer._compute(rows)
    differing = [size for size in PROBED_ROWS if not _agrees(layer, rows, expected, size)]
    min_rows = max(differing, default=0) + 1
    if min_rows > MOST_MIN_ROWS:
        raise RuntimeError(
            f"A linear layer of {layer.in_features} to {layer.out_features} features gives a row other bits among "
            f"{differing[-1]} rows than among {len(rows)}; this machine's oneDNN cannot compute invariantly."
        )
    return min_rows


def _agrees(layer: PackedLinear, rows: torch.Tensor, expected: torch.Tensor, size: int) -> bool:
    # The first rows and the last: a row's place must not matter either.
    starts = (0, len(rows) - size)
    return all(torch.equal(layer._compute(rows[start : start + size]), expected[start : start + size]) for start in starts)


def pack_linears(module: nn.Module, *, invariant: bool = False, halve: bool = False) -> int:
    """Replace every nn.Linear below `module` by its packed form, in place; returns how many. Those that cannot pack stay.

    `halve` packs weights in bfloat16 that are bfloat16 already.

    A weight tied to an embedding stays with the embedding, and the layer gets a packed copy of its own.
    """
    num_packed = 0
    min_rows: dict[tuple[int, int], int] = {}  # by shape, which is what oneDNN chooses kernels by
    # Parents only: holding the layers themselves would keep all plain weights beside the packed ones until the end.
    for parent in [part for part in module.modules() if any(type(child) is nn.Linear for child in part.children())]:
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear and can_pack(child.weight):  # not a subclass, which may compute something else
                packed = PackedLinear(child.weight, child.bias, halve=halve and can_halve(child.weight))
                if invariant:
                    shape = packed.out_features, packed.in_features
                    packed.min_rows = min_rows[shape] if shape in min_rows else rows_for_invariance(packed)
                    min_rows[shape] = packed.min_rows
                setattr(parent, name, packed)
                num_packed += 1
    return num_packed

"""Linear layers with weights packed once for oneDNN: what makes verifying a few tokens cost little more than one on a CPU.

Inference only: a packed layer has no parameters and no gradient. It does not know whose layer it is; the served target and
the served drafter use it, training never does. A layer that is not float32 on a CPU, or a torch without oneDNN, stays plain.
"""

from __future__ import annotations

import torch
from torch import nn


def can_pack(weight: torch.Tensor) -> bool:
    """Whether oneDNN can hold this weight packed: float32, on a CPU, in a torch that was built with it."""
    return weight.dtype is torch.float32 and weight.device.type == "cpu" and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]


class PackedLinear(nn.Module):
    """y = x W^T + b for float32 on a CPU. Holds the packed copy only; the caller keeps W if it needs it (a tied embedding)."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        super().__init__()
        if not can_pack(weight):
            raise ValueError(
                f"A weight of {weight.dtype} on {weight.device} cannot be packed; use torch.nn.Linear, as pack_linears does."
            )
        self.out_features, self.in_features = weight.shape
        # Plain attributes, not parameters: an opaque tensor has no strides and cannot be moved, cast or saved.
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous())
        self.bias = None if bias is None else bias.detach().clone()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # x: [..., in_features] -> [..., out_features]
        if x.requires_grad and torch.is_grad_enabled():
            raise RuntimeError("A packed linear layer has no gradient; train the plain model, and pack the one that is served.")
        y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")
        return y

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


def pack_linears(module: nn.Module) -> int:
    """Replace every nn.Linear below `module` by its packed form, in place; returns how many. Those that cannot pack stay.

    A weight tied to an embedding stays with the embedding, and the layer gets a packed copy of its own.
    """
    num_packed = 0
    # Parents only: holding the layers themselves would keep all plain weights beside the packed ones until the end.
    for parent in [part for part in module.modules() if any(type(child) is nn.Linear for child in part.children())]:
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear and can_pack(child.weight):  # not a subclass, which may compute something else
                setattr(parent, name, PackedLinear(child.weight, child.bias))
                num_packed += 1
    return num_packed

"""What is computed in which precision: masters, moments and what is summed stay float32; on CUDA the layers run in bfloat16.

A cast model shares everything with its masters but the parameters, which are casts inside the graph: a backward ends in the
masters, in their own precision. Knows no loss and no optimiser.
"""

from __future__ import annotations

import copy

import torch
from torch import nn

from runtime.eagle3 import Eagle3Model


def compute_dtype(device: torch.device) -> torch.dtype:
    """The precision of layers and heads there."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


class Cast:
    """A model in another precision, as often as it is asked for: its modules are copied once, for a copy of them takes longer
    than a step may."""

    def __init__(self, model: Eagle3Model) -> None:
        """model: before its parameters are spread over ranks. Parameters are looked up in its modules at each call."""
        known: dict[int, object] = {id(parameter): torch.empty(0) for parameter in model.parameters()}
        known |= {id(shared): shared for shared in (model.embedding, model.vocabulary, model.config, model.rotary)}
        self._model, self._light = model, copy.deepcopy(model, known)
        self._places: list[tuple[nn.Module, nn.Module, str]] = [
            (master, light, name)
            for master, light in zip(model.modules(), self._light.modules(), strict=True)
            for name, _ in master.named_parameters(recurse=False)
        ]

    def __call__(self, dtype: torch.dtype) -> Eagle3Model:
        """The model with parameters of this dtype, differentiable with regard to its own; itself where they have it. What an
        earlier call gave is cast anew."""
        parameters = [getattr(master, name) for master, _, name in self._places]
        if all(parameter.dtype == dtype for parameter in parameters):
            return self._model
        for (_, light, name), parameter in zip(self._places, parameters, strict=True):
            light._parameters[name] = parameter.to(dtype)
        return self._light


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a [N, K] times b [M, K] transposed, [N, M], summed and returned in float32, or in float64 if that is what they are."""
    if a.dtype in (torch.float32, torch.float64):
        return a @ b.T
    return torch.mm(a, b.T, out_dtype=torch.float32) if a.is_cuda else a.float() @ b.float().T

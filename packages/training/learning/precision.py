"""What is computed in which precision: masters, moments and what is summed stay float32; on CUDA the layers run in bfloat16.

A cast model shares everything with its masters but the parameters, which are casts inside the graph: a backward ends in the
masters, in their own precision. Knows no loss and no optimiser.
"""

from __future__ import annotations

import copy

import torch

from runtime.eagle3 import Eagle3Model


def compute_dtype(device: torch.device) -> torch.dtype:
    """The precision of layers and heads there."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def cast(model: Eagle3Model, dtype: torch.dtype) -> Eagle3Model:
    """The model with parameters of this dtype, differentiable with regard to those of `model`; itself where they have it."""
    if all(parameter.dtype == dtype for parameter in model.parameters()):
        return model
    known: dict[int, object] = {id(parameter): parameter.to(dtype) for parameter in model.parameters()}
    known |= {id(shared): shared for shared in (model.embedding, model.vocabulary, model.config, model.rotary)}
    return copy.deepcopy(model, known)


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a [N, K] times b [M, K] transposed, [N, M], summed and returned in float32, or in float64 if that is what they are."""
    if a.dtype in (torch.float32, torch.float64):
        return a @ b.T
    return torch.mm(a, b.T, out_dtype=torch.float32) if a.is_cuda else a.float() @ b.float().T

"""The kernel that excludes what top_k and top_p exclude, against the general way, which sorts."""

from __future__ import annotations

import math

import pytest
import torch

from runtime.speculation.sampling import _truncate
from runtime.types import SamplingParams

PARAMS = [
    SamplingParams(top_k=1),
    SamplingParams(top_k=7),
    SamplingParams(top_p=0.2),
    SamplingParams(top_p=0.9),
    SamplingParams(top_k=20, top_p=0.75),
    SamplingParams(),
]


@pytest.mark.parametrize("rounded", [False, True], ids=["distinct", "many ties"])
@pytest.mark.parametrize("size", [97, 1000])
def test_as_many_stay_and_the_same(size: int, rounded: bool, device: torch.device):
    from runtime.backends.transformers.cuda.truncation import keep_best

    rows = 3 * torch.randn(len(PARAMS), size, generator=torch.Generator().manual_seed(size))
    rows = rows.round() if rounded else rows
    rows[:, ::9] = -math.inf  # what a grammar or min_p had excluded before
    rows -= rows.amax(dim=-1, keepdim=True)
    expected = rows.clone()
    for row, params in enumerate(PARAMS):
        _truncate(expected[row : row + 1], params)
    found = rows.to(device)
    top_k = torch.tensor([params.top_k or math.inf for params in PARAMS], dtype=torch.float64, device=device)
    top_p = torch.tensor(
        [params.top_p if params.top_p < 1 else math.inf for params in PARAMS], dtype=torch.float64, device=device
    )
    keep_best(found, top_k)
    keep_best(found, top_p, found.logsumexp(dim=-1))
    assert torch.equal(found.cpu(), expected)
    assert (found[:-1] > -math.inf).sum(dim=-1).min() >= 1

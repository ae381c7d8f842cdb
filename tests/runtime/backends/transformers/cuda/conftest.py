"""Where the kernels can run: on a CUDA device, or slowly in Triton's interpreter (TRITON_INTERPRET=1, on any machine)."""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch


@pytest.fixture(scope="session")
def device() -> torch.device:
    if importlib.util.find_spec("triton") and torch.cuda.is_available():
        return torch.device("cuda")
    if importlib.util.find_spec("triton") and os.environ.get("TRITON_INTERPRET") == "1":
        return torch.device("cpu")
    pytest.skip("needs triton and a CUDA device, or TRITON_INTERPRET=1")

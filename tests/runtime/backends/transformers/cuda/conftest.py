"""Where the kernels can run: on a CUDA device, or slowly in Triton's interpreter (TRITON_INTERPRET=1, on any machine)."""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import pytest
import torch


@pytest.fixture(scope="session")
def device() -> torch.device:
    if importlib.util.find_spec("triton") and torch.cuda.is_available():
        return torch.device("cuda")
    if importlib.util.find_spec("triton") and os.environ.get("TRITON_INTERPRET") == "1":
        mend_interpreter()
        return torch.device("cpu")
    pytest.skip("needs triton and a CUDA device, or TRITON_INTERPRET=1")


def mend_interpreter() -> None:
    """Triton's interpreter takes a loaded number as the end of a loop; numpy makes no int of an array of one any more."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patch_and_mend(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.reshape(-1)[0]))

    interpreter._patch_lang_tensor = patch_and_mend

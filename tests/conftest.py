"""What all tests share: workers divide the cores, and tests of absent hardware skip themselves and say so."""

from __future__ import annotations

import os

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """Workers of pytest-xdist compute with their share of the cores, and so do the programs that their tests start.

    Before torch is loaded, which asks once.
    """
    if hasattr(config, "workerinput"):
        share = (os.cpu_count() or 1) // config.workerinput["workercount"]
        os.environ.setdefault("OMP_NUM_THREADS", str(max(share, 1)))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    import torch

    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("cuda"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))

"""Tiles of the products and of attention: each fits the device, and what they leave behind fits its buffers."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="the kernels are written in Triton, which comes with PyTorch for CUDA devices")

from runtime.backends.transformers.cuda import launch
from runtime.backends.transformers.cuda.network import Geometry

ROWS = [1, 2, 15, 16, 17, 32, 33, 48, 49, 64, 65, 96, 97, 128, 129, 192, 193, 256, 257, 384, 385, 512, 1024, 1025, 5000]
GEOMETRY = Geometry(64, 4, 2, 16, 128, 1e-5)


@pytest.mark.parametrize("kind", launch.TILES)
@pytest.mark.parametrize("itemsize", [2, 4])
def test_tiles_have_room(kind: str, itemsize: int) -> None:
    num_weights = 2 if kind in ("qkv", "gate_up") else 1
    for num_rows in ROWS:
        for k in (16, 64, 576, 1536, 8192):
            tile = launch.tile(kind, num_rows, k, itemsize)
            stage = (tile.bm + num_weights * tile.bn) * tile.bk * itemsize
            assert tile.stages == 1 or stage * tile.stages <= launch._shared_bytes()
            assert tile.bk <= max(16, launch.next_power_of_2(k))


def test_products_that_write_rows_and_those_that_read_them_cut_them_alike() -> None:
    """Sums of squares lie by tile of what `linear` wrote, whatever its inner axis was."""
    for num_rows in ROWS:
        assert len({launch.tile("linear", num_rows, k).bn for k in (16, 64, 576, 1536, 1728, 8192)}) == 1


def test_parts_of_attention_lie_within_their_buffer() -> None:
    import torch

    for num_rows in ROWS:
        buffers = launch.Buffers(num_rows, GEOMETRY, torch.float32, torch.device("cpu"))
        for bm in (16, 32, 64):
            for num_programs in (1, 3, 12, 96, 192, 4000):
                splits = launch.key_tile(64, bm, num_rows, num_programs).splits
                assert splits == 1 or splits * num_rows * GEOMETRY.heads <= buffers.lse.numel()

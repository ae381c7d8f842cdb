"""Tiles beside others: what can be seen without the device that it measures."""

from __future__ import annotations

import cuda_tiles
import pytest
import torch


def test_the_best_others_stand_beside_what_is_chosen() -> None:
    times = {"chosen": 5.25, **{f"bm {size}": float(size) for size in (64, 16, 32, 48, 128, 256)}}
    told = cuda_tiles.page({"found": [{"job": "down, 64 rows", "us": times}], "machine": {"GPU": "one"}})
    assert "| down, 64 rows | 5.25 | 16.00 bm 16; 32.00 bm 32; 48.00 bm 48; 64.00 bm 64; 128.00 bm 128 |" in told
    assert "- GPU: one" in told


def test_jobs_are_all_that_was_asked_for() -> None:
    sizes = ["--rows", "1", "64", "--sessions", "4", "--sizes", "1", "6", "--keys", "256"]
    options = cuda_tiles.arguments().parse_args(["--kinds", "down", "attention", *sizes])
    names = [job.name for job in cuda_tiles.jobs_of(options)]
    assert names == ["down, 1 rows", "down, 64 rows", "attention, 4 x 1, 256 keys", "attention, 4 x 6, 256 keys"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without a CUDA device; this one has one")
def test_without_a_device_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert cuda_tiles.main([]) == 1
    assert "there is no CUDA device here" in capsys.readouterr().err

"""What tests of learning share: a lesson for a batch, and where the Triton kernel can run."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable

import pytest
import torch

from runtime.eagle3.model import Eagle3Model
from training.data.batches import Batch
from training.learning.loss import Lesson


@pytest.fixture
def make_lesson() -> Callable[..., Lesson]:
    """What a target with a random head over the whole vocabulary says about a batch, in the model's precision."""

    def make(model: Eagle3Model, batch: Batch, seed: int = 7) -> Lesson:
        vocabulary, width = model.vocabulary, batch.last.shape[1]
        generator = torch.Generator().manual_seed(seed)
        lm_head = torch.randn(vocabulary.vocab_size, width, generator=generator).to(model.fc.weight.dtype)
        last = batch.last.to(lm_head.dtype)
        logits = last @ lm_head.T
        labels = torch.where(batch.chain_ids < 0, -1, vocabulary.to_draft[batch.chain_ids.clamp(min=0)])
        covered = vocabulary.t2d[logits.argmax(-1)]
        return Lesson(lm_head[vocabulary.target_ids], last, logits.logsumexp(-1), covered, labels, batch.host_depths)

    return make


@pytest.fixture(scope="session")
def kernel_device() -> torch.device:
    """A CUDA device, or with TRITON_INTERPRET=1 the CPU, slowly."""
    if importlib.util.find_spec("triton") and torch.cuda.is_available():
        return torch.device("cuda")
    if importlib.util.find_spec("triton") and os.environ.get("TRITON_INTERPRET") == "1":
        return torch.device("cpu")
    pytest.skip("needs triton and a CUDA device, or TRITON_INTERPRET=1")

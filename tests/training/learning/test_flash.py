"""The path that CUDA takes: on a CPU with a plain stand-in for the kernel itself, on a CUDA device with the kernel."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch

from training.data.batches import Batch, pack
from training.learning import attention, flash
from training.learning.loss import carrying, chain_loss
from training.learning.objective import Aim
from training.learning.ttt import unroll

L = 4
PATTERNS = ("pppggggg", "pgggpppgggggg", "ppppppgg", "pppppp", "ggggg", "pggggppggpggg")
LONG_PATTERNS = ("p" * 70 + "g" * 300, "pp" + "g" * 40 + "p" * 33 + "g" * 129, "g" * 17, "p" * 9, "p" * 500 + "gggg")


@pytest.fixture
def stand_in(plain_flash: tuple[Callable, Callable], monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From its call on, attention takes the flash path, with plain PyTorch where the kernel would run."""

    def install() -> None:
        monkeypatch.setattr(flash, "is_usable", lambda q: True)
        for name, function in zip(("varlen_forward", "varlen_backward"), plain_flash, strict=True):
            monkeypatch.setattr(flash, name, function)
        monkeypatch.delattr(attention, "_blocks_forward")
        monkeypatch.delattr(attention, "_blocks_backward")

    return install


def test_spans_run_from_the_first_query_of_a_row_to_its_last_key(make_row: Callable) -> None:
    batch = pack([make_row("ppggggpgggg"), make_row("ppp"), make_row("pgggg")], L)
    spans = batch.spans
    assert batch.row_offsets == [0, 9, 9, 12]
    assert batch.query_at.tolist() == [1, 2, 3, 6, 7, 8, 9, 10, 11]
    assert spans.query_offsets.tolist() == [0, 8, 11]
    assert spans.key_offsets.tolist() == [0, 9, 12]
    assert spans.slots.tolist() == [0, 1, 2, 5, 6, 7, 8, 9, 10]
    assert (spans.longest_query, spans.longest_key, spans.num_slots) == (8, 9, 11)


def test_the_flash_path_computes_the_same_chain_and_gradients(
    make_model: Callable, make_row: Callable, make_lesson: Callable, stand_in: Callable
) -> None:
    """Several turns, rows without any, all depths: loss and every parameter's gradient, in double precision."""
    rows = [make_row(pattern, seed) for seed, pattern in enumerate(PATTERNS)]

    def run() -> tuple[torch.Tensor, list[torch.Tensor]]:
        model = make_model()
        batch = pack(rows, L)
        batch = dataclasses.replace(batch, aux=batch.aux.double().requires_grad_())
        lesson = make_lesson(model, batch)
        carries = carrying(batch.depths, lesson.covered, L)
        result = chain_loss(unroll(model, batch), model.lm_head.weight, lesson, carries, torch.ones(L), Aim())
        result.loss.backward()
        return result.loss.detach(), [batch.aux.grad, *(parameter.grad for parameter in model.parameters())]

    expected, gradients = run()
    stand_in()
    loss, other = run()
    torch.testing.assert_close(loss, expected, rtol=0, atol=1e-10)
    torch.testing.assert_close(other, gradients, rtol=0, atol=1e-10)


def test_a_batch_without_queries_attends_to_nothing(make_model: Callable, make_row: Callable, stand_in: Callable) -> None:
    stand_in()
    batch = pack([make_row("ppp"), make_row("ppg")], L)
    [depth] = unroll(make_model(dtype=torch.float32), batch)
    assert depth.states.shape[0] == 0


def attend(batch: Batch, dtype: torch.dtype) -> list[torch.Tensor]:
    """What rows of random queries attend to and two diagonal keys each, and every gradient of it."""
    packing, device = batch.packing(), batch.query_at.device
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(device, dtype)

    num_queries, num_keys = len(batch.query_at), len(batch.positions)
    q, d_out = random(num_queries, 9, 64), random(num_queries, 9, 64)
    k, v, diagonal = random(num_keys, 3, 64), random(num_keys, 3, 64), random(2, 2, num_queries, 3, 64)
    leaves = [each.requires_grad_() for each in (q, k, v, diagonal)]
    out = packing.attend(q, k, v, diagonal)
    return [out.detach(), *torch.autograd.grad(out, leaves, d_out)]


def assert_close(fast: list[torch.Tensor], exact: list[torch.Tensor], tolerance: float) -> None:
    for mine, expected in zip(fast, exact, strict=True):
        assert mine.shape == expected.shape
        assert (mine.to(expected.dtype) - expected).norm() / expected.norm() < tolerance


def test_rows_of_many_lengths_attend_as_in_blocks(make_row: Callable, stand_in: Callable) -> None:
    """What the next test does on a device, with the plain stand-in."""
    batch = pack([make_row(pattern, seed) for seed, pattern in enumerate(LONG_PATTERNS)], 3)
    exact = attend(batch, torch.float64)
    stand_in()
    assert_close(attend(batch, torch.float64), exact, 1e-12)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_kernel_agrees_with_blocks_on_a_cuda_device(make_row: Callable) -> None:
    """The real flash kernel, forward and backward, on rows of several turns and lengths, merged with diagonal keys."""
    batch = pack([make_row(pattern, seed) for seed, pattern in enumerate(LONG_PATTERNS)], 3, torch.device("cuda"))
    assert_close(attend(batch, torch.bfloat16), attend(batch, torch.float32), 1e-2)

"""The path that CUDA takes: on a CPU with a plain stand-in for the kernel itself, on a CUDA device with the kernel."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch

from training.data.batches import pack
from training.learning import attention, flash
from training.learning.attention import Packing
from training.learning.loss import carrying, chain_loss
from training.learning.objective import Aim
from training.learning.ttt import unroll

L = 4
PATTERNS = ("pppggggg", "pgggpppgggggg", "ppppppgg", "pppppp", "ggggg", "pggggppggpggg")


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


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_kernel_agrees_with_blocks_on_a_cuda_device(make_row: Callable) -> None:
    """The real flash kernel, forward and backward, on rows of several turns and lengths, merged with diagonal keys."""
    patterns = ["p" * 70 + "g" * 300, "pp" + "g" * 40 + "p" * 33 + "g" * 129, "g" * 17, "p" * 9, "p" * 500 + "gggg"]
    batch = pack([make_row(pattern, seed) for seed, pattern in enumerate(patterns)], 3, torch.device("cuda"))
    generator = torch.Generator(device="cuda").manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device="cuda")

    num_queries, num_keys = len(batch.query_at), len(batch.positions)
    inputs = [
        random(num_queries, 9, 64),
        *(random(num_keys, 3, 64) for _ in range(2)),
        *(random(2, num_queries, 3, 64) for _ in range(2)),
    ]
    d_out = random(num_queries, 9, 64)

    def run(packing: Packing, dtype: torch.dtype) -> list[torch.Tensor]:
        q, k, v, kd, vd = leaves = [each.to(dtype).requires_grad_() for each in inputs]
        out = packing.attend(q, k, v, list(zip(kd, vd, strict=True)))
        return [out, *torch.autograd.grad(out, leaves, d_out.to(dtype))]

    exact, fast = run(batch.packing(), torch.float32), run(batch.packing(), torch.bfloat16)
    for a, b in zip(fast, exact, strict=True):
        assert (a.float() - b).norm() / b.norm() < 1e-2

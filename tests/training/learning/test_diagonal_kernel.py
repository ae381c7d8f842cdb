"""The kernels against the same in plain PyTorch. Triton's interpreter runs them on any machine: TRITON_INTERPRET=1."""

from __future__ import annotations

import pytest
import torch

from training.learning import attention


@pytest.mark.parametrize(("num_depths", "num_heads", "num_kv", "dim"), [(1, 6, 2, 16), (5, 9, 3, 8), (3, 4, 4, 24), (2, 1, 1, 4)])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.03)])
def test_kernels_agree_with_plain_pytorch(
    kernel_device: torch.device, num_depths: int, num_heads: int, num_kv: int, dim: int, dtype: torch.dtype, tolerance: float
) -> None:
    from training.learning import diagonal_kernel

    generator = torch.Generator().manual_seed(dim)
    num_queries = 7
    diagonal = torch.randn(2, num_depths, num_queries, num_kv, dim, generator=generator).to(dtype)
    q, out, d_out, dq = (torch.randn(num_queries, num_heads, dim, generator=generator).to(dtype) for _ in range(4))
    lse = torch.randn(num_queries, num_heads, generator=generator)
    true = [each.double() for each in (q, diagonal, out, lse)]
    merged, total, scores = attention._merge(*true)
    through_q = dq.double()
    d_diagonal = attention._merge_backward(d_out.double(), *true[:2], merged, total, scores, through_q)

    there_q, there, there_d = (each.to(kernel_device) for each in (q, diagonal, d_out))
    got, got_total, got_dq = (each.clone().to(kernel_device) for each in (out, lse, dq))
    diagonal_kernel.merge(there_q, there, got, got_total)
    got_d_diagonal = diagonal_kernel.merge_backward(there_d, there_q, there, got, got_total, got_dq)
    pairs = [(got, merged), (got_total, total), (got_dq, through_q), (got_d_diagonal, d_diagonal)]
    for mine, expected in pairs:
        torch.testing.assert_close(mine.double().cpu(), expected, rtol=tolerance, atol=tolerance)


def test_no_query_merges_nothing(kernel_device: torch.device) -> None:
    from training.learning import diagonal_kernel

    q, lse = torch.empty(0, 4, 8, device=kernel_device), torch.empty(0, 4, device=kernel_device)
    diagonal = torch.empty(2, 3, 0, 2, 8, device=kernel_device)
    diagonal_kernel.merge(q, diagonal, q.clone(), lse)
    assert diagonal_kernel.merge_backward(q, q, diagonal, q, lse, q.clone()).shape == diagonal.shape

"""Root mean square norms in few calls, for a CPU: there a call takes longer than what it computes."""

from __future__ import annotations

import torch


def rms_norm(x: torch.Tensor, gain: torch.Tensor, eps: torch.Tensor) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * gain over the last axis, in x's dtype; each row by itself, to the last bit. eps: a scalar."""
    size = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return x.mul(torch.addcmul(eps, size, size, value=1 / x.shape[-1]).rsqrt_()).mul_(gain)

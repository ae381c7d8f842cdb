"""From the host to the device without a wait: what is sent arrives in the order of what is launched."""

from __future__ import annotations

import numpy as np
import torch


def staged(values: np.ndarray | torch.Tensor, device: torch.device) -> torch.Tensor:
    """On the host, where a copy to the device may take it from: any other copy first waits for the steps under way."""
    tensor = torch.as_tensor(values)
    return tensor.pin_memory() if device.type == "cuda" else tensor


def send(values: np.ndarray | torch.Tensor, device: torch.device) -> torch.Tensor:
    """On the device."""
    return staged(values, device).to(device, non_blocking=True)

"""What is sent arrives as it was, however much is on its way and however long the device takes to come to it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from runtime.backends.transformers.cuda.sending import HALF_BYTES, Sender

DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")),
]


@pytest.mark.parametrize("name", DEVICES)
def test_arrays_of_all_kinds_arrive_behind_a_busy_device(name: str) -> None:
    device, rng = torch.device(name), np.random.default_rng(0)
    sender, target = Sender(device), torch.zeros(2, 3, dtype=torch.int32, device=device)
    sent: list[tuple[np.ndarray, torch.Tensor]] = []
    if name == "cuda":
        torch.cuda._sleep(200_000_000)  # type: ignore[no-untyped-call]
    for number in range(400):  # several times as much as the ring has
        size = HALF_BYTES // 4 + 1 if number % 100 == 99 else int(rng.integers(1, HALF_BYTES // 64))
        values = rng.integers(-9, 9, (2, size), dtype=np.int32)
        values = (values, values.astype(np.int64), values.astype(np.float64), values[:, ::2], values.T)[number % 5]
        sent.append((values.copy(), sender.send(values)))
    sender.write(target, np.array([[1, 2, 3], [4, 5, 6]], dtype=np.int32))
    for values, tensor in sent:
        assert tensor.device.type == name
        assert np.array_equal(tensor.cpu().numpy(), values)
        assert str(tensor.dtype) == f"torch.{values.dtype}"
    assert target.tolist() == [[1, 2, 3], [4, 5, 6]]

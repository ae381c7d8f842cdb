"""Between host and device without a wait: what is sent keeps the order of what is launched; results tell when they came."""

from __future__ import annotations

import time

import numpy as np
import torch

HALF_BYTES = 2**17  # of the ring
ALIGNMENT = 16  # bytes


class Sender:
    """Sends small arrays to one device, on its current stream. One thread at a time.

    A copy to the device is no wait only out of pinned memory, and asking for some takes longer than the copy. So there is a ring
    of it, in two halves: one is written to again when all that was sent from it has left.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._half, self._used = 0, 0  # which, and bytes of it
        if device.type == "cuda":
            self._ring = torch.empty(2, HALF_BYTES, dtype=torch.uint8, pin_memory=True).numpy()
            self._left = [torch.cuda.Event() for _ in range(2)]  # type: ignore[no-untyped-call]

    def send(self, values: np.ndarray) -> torch.Tensor:
        """On the device; where that is the host, it may be a view."""
        return self._staged(values).to(self._device, non_blocking=True)

    def write(self, target: torch.Tensor, values: np.ndarray) -> None:
        """Into a tensor of the same shape on the device."""
        target.copy_(self._staged(values), non_blocking=True)

    def _staged(self, values: np.ndarray) -> torch.Tensor:
        """On the host, where a copy to the device may take it from; to be copied before the next one is staged."""
        if self._device.type != "cuda":
            return torch.from_numpy(values)
        if values.nbytes > HALF_BYTES:
            return torch.from_numpy(values).pin_memory()
        if self._used + values.nbytes > HALF_BYTES:
            self._left[self._half].record(torch.cuda.current_stream(self._device))
            self._half, self._used = 1 - self._half, 0
            self._left[self._half].synchronize()  # at once, the first time
        place = self._ring[self._half, self._used : self._used + values.nbytes].view(values.dtype).reshape(values.shape)
        place[...] = values
        self._used += -(-values.nbytes // ALIGNMENT) * ALIGNMENT
        return torch.from_numpy(place)


class Slot:
    """Where results come to lie on the host: when they are there, and how long the device was at work for them."""

    def __init__(self, num: int, size: int, on_cuda: bool) -> None:
        self.result = torch.zeros(num, size, dtype=torch.int32, pin_memory=on_cuda)
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if on_cuda else []  # type: ignore[no-untyped-call]
        self._times = [0.0, 0.0]  # on a CPU

    def begin(self) -> None:
        self._mark(0)

    def end(self) -> None:
        self._mark(1)

    def _mark(self, which: int) -> None:
        if self._events:
            self._events[which].record()
        self._times[which] = time.perf_counter()

    @property
    def is_there(self) -> bool:
        return not self._events or bool(self._events[1].query())  # type: ignore[no-untyped-call]

    def wait(self) -> float:
        """Until it is there; seconds that the device took."""
        if not self._events:
            return self._times[1] - self._times[0]
        began, ended = self._events
        ended.synchronize()
        return float(began.elapsed_time(ended)) / 1e3

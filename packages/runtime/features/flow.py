"""Flow control between whoever makes rows and whoever trains on them: a gate with hysteresis, in rows and in bytes.

The gate closes when what was let in and is not acknowledged reaches a high watermark, of rows or of bytes, and opens again
when both are down to their low ones. Only acknowledgements release it. Pure arithmetic: no lock, no thread, no clock; what a
closed gate means (a prompt-driven producer waits, served traffic is shed) is its owner's to say. `Gate` is told how much there
is; `FlowControl` counts what passed it.

    outstanding rows   0 ........ quantum ........ low ........ high
                                                    opens <----> closes

A step needs a whole quantum of rows. With a low watermark below it, producer and trainer would wait for each other for ever:
the one for fewer rows, the other for more. Such watermarks are refused.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from runtime.config import require
from runtime.features.refs import SampleRef


@dataclass(frozen=True)
class Quantum:
    """What one optimiser step may take."""

    num_rows: int
    num_bytes: int

    @staticmethod
    def of_step(num_ranks: int, batch_rows: int, num_accumulated: int, max_row_bytes: int) -> Quantum:
        """Ranks times rows of a batch times batches that are accumulated, all of them as large as rows may be."""
        num_rows = num_ranks * batch_rows * num_accumulated
        return Quantum(num_rows, num_rows * max_row_bytes)


@dataclass(frozen=True)
class Watermarks:
    high_rows: int
    low_rows: int
    high_bytes: int
    low_bytes: int

    def check(self, quantum: Quantum) -> None:
        """ConfigError, naming the watermark, where producer and trainer could end up waiting for each other."""
        for unit, high, low, needed in (
            ("rows", self.high_rows, self.low_rows, quantum.num_rows),
            ("bytes", self.high_bytes, self.low_bytes, quantum.num_bytes),
        ):
            one_step = f"at least {needed}, the {unit} of one step, or producer and trainer wait for each other for ever"
            require(low >= needed, f"the low watermark of {unit}", low, one_step)
            require(high >= low, f"the high watermark of {unit}", high, f"at least the low one, {low}, and so one step")


class Gate:
    """Open or closed. Not safe for threads: its owner holds a lock, or is the only one to ask."""

    def __init__(self, marks: Watermarks) -> None:
        self._marks = marks
        self.is_open = True
        self.num_closings = 0

    def more(self, num_rows: int, num_bytes: int) -> None:
        """So many there are, after some came."""
        if self.is_open and self._is_high(num_rows, num_bytes):
            self.is_open = False
            self.num_closings += 1

    def fewer(self, num_rows: int, num_bytes: int) -> None:
        """So many there are, after some went."""
        if num_rows <= self._marks.low_rows and num_bytes <= self._marks.low_bytes:
            self.is_open = True

    def now(self, num_rows: int, num_bytes: int) -> bool:
        """So many there are, whatever happened; whether it is open."""
        if not self.is_open and not self._is_high(num_rows, num_bytes):
            self.fewer(num_rows, num_bytes)
        self.more(num_rows, num_bytes)
        return self.is_open

    def _is_high(self, num_rows: int, num_bytes: int) -> bool:
        return num_rows >= self._marks.high_rows or num_bytes >= self._marks.high_bytes


class FlowControl:
    """The gate and what passed it. Not safe for threads: its owner holds a lock."""

    def __init__(self, marks: Watermarks, quantum: Quantum) -> None:
        marks.check(quantum)
        self._gate = Gate(marks)
        self._outstanding: dict[str, int] = {}  # sample id -> bytes
        self.num_bytes = 0

    @property
    def is_open(self) -> bool:
        return self._gate.is_open

    @property
    def num_closings(self) -> int:
        return self._gate.num_closings

    @property
    def num_rows(self) -> int:
        return len(self._outstanding)

    def let_in(self, ref: SampleRef) -> None:
        """Count a row that passed; its owner looked at `is_open` before."""
        self._release(ref.sample_id)  # a newer generation of a row that passed already takes its place
        self._outstanding[ref.sample_id] = ref.num_bytes
        self.num_bytes += ref.num_bytes
        self._gate.more(self.num_rows, self.num_bytes)

    def acknowledge(self, sample_ids: Iterable[str]) -> None:
        """These rows are done with. Again, or for rows that never passed: no change."""
        for sample_id in sample_ids:
            self._release(sample_id)
        self._gate.fewer(self.num_rows, self.num_bytes)

    def _release(self, sample_id: str) -> None:
        self.num_bytes -= self._outstanding.pop(sample_id, 0)

"""`RefChannel`: references from a producer of rows to their trainer, in one process, with flow control in between.

The two sides have a view each. End of stream and failure are different things: after `close` the consumer gets what was
published and then finds the channel over; after `fail` it gets what was published and then ProducerFailed, so that a run
whose rows broke off never takes itself for finished. A failure outlasts a close, never the other way round. References
only: tensors are refused. Knows no store and no ledger.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from runtime.errors import ProducerFailed
from runtime.features.flow import FlowControl, Quantum, Watermarks
from runtime.features.refs import SampleRef, refuse_tensors


@dataclass(frozen=True)
class ChannelFigures:
    num_waiting: int  # published, not taken yet
    num_outstanding: int  # published, not acknowledged yet
    is_open: bool  # the gate: False while the producer waits for acknowledgements
    num_closings: int  # how often the gate has closed


class RefChannel:
    """`producer` and `consumer` are its two views; each may be used from any thread."""

    def __init__(self, marks: Watermarks, quantum: Quantum) -> None:
        """ConfigError if a watermark is below the quantum of one step."""
        state = _State(FlowControl(marks, quantum))
        self.producer = ProducerView(state)
        self.consumer = ConsumerView(state)


class _State:
    """What both views share. Everything is touched under `changed`."""

    def __init__(self, flow: FlowControl) -> None:
        self.flow = flow
        self.changed = threading.Condition()
        self.refs: deque[SampleRef] = deque()
        self.is_closed = False  # by the producer: nothing more will come
        self.failure: str | None = None
        self.is_left = False  # by the consumer: nobody will take anything any more
        self.is_out_of_room = False  # the producer waits, though the gate is open

    def push(self, ref: SampleRef) -> None:
        assert not self.is_closed, "a closed channel takes nothing"
        self.flow.let_in(ref)
        self.refs.append(ref)
        self.is_out_of_room = False
        self.changed.notify_all()

    def figures(self) -> ChannelFigures:
        with self.changed:
            flow = self.flow
            return ChannelFigures(len(self.refs), flow.num_rows, flow.is_open, flow.num_closings)


class ProducerView:
    def __init__(self, state: _State) -> None:
        self._state = state

    def publish(self, ref: SampleRef) -> bool:
        """Hand over a row, waiting while the gate is closed. False, at once, when the consumer has left: nobody will take it."""
        refuse_tensors(ref)
        with self._state.changed:
            self._state.changed.wait_for(lambda: self._state.flow.is_open or self._state.is_left)
            if self._state.is_left:
                return False
            self._state.push(ref)
            return True

    def wait(self, timeout_s: float) -> bool:
        """For a producer that has no room for its next row: until the consumer acknowledges or leaves; whether it is still
        there. From here to the next row, the consumer knows that none comes before it is done with those it has."""
        with self._state.changed:
            self._state.is_out_of_room = True
            if not self._state.is_left:
                self._state.changed.wait(timeout_s)
            return not self._state.is_left

    def close(self) -> None:
        """Nothing more will come. Idempotent; does not undo a failure."""
        with self._state.changed:
            self._state.is_closed = True
            self._state.changed.notify_all()

    def fail(self, reason: str) -> None:
        """Rows broke off. The first reason counts, a close before it does not."""
        with self._state.changed:
            self._state.is_closed = True
            self._state.failure = self._state.failure or reason
            self._state.changed.notify_all()

    def figures(self) -> ChannelFigures:
        return self._state.figures()


class ConsumerView:
    def __init__(self, state: _State) -> None:
        self._state = state

    def get(self, max_rows: int, timeout_s: float) -> list[SampleRef]:
        """Up to max_rows rows in the order of publication, waiting up to the time-out for the first. None: nothing came in time,
        or `is_over`. ProducerFailed once everything published before the failure was taken."""
        with self._state.changed:
            self._state.changed.wait_for(lambda: self._state.refs or self._state.is_closed, timeout_s)
            if not self._state.refs and self._state.failure is not None:
                raise ProducerFailed(self._state.failure)
            return [self._state.refs.popleft() for _ in range(min(max_rows, len(self._state.refs)))]

    @property
    def is_live(self) -> bool:
        """More may be published before anything is acknowledged."""
        with self._state.changed:
            return not self._state.is_closed and self._state.flow.is_open and not self._state.is_out_of_room

    @property
    def is_over(self) -> bool:
        """The producer closed in good order, and everything was taken."""
        with self._state.changed:
            return self._state.is_closed and self._state.failure is None and not self._state.refs

    def ack(self, sample_ids: Iterable[str]) -> None:
        """These rows are done with: trained, or found unusable. The only thing that opens the gate again."""
        with self._state.changed:
            self._state.flow.acknowledge(sample_ids)
            self._state.changed.notify_all()

    def leave(self) -> None:
        """Nothing will be taken any more: a producer that waits wakes at once. Idempotent."""
        with self._state.changed:
            self._state.is_left = True
            self._state.changed.notify_all()

    def figures(self) -> ChannelFigures:
        return self._state.figures()

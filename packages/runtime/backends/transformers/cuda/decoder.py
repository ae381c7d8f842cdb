"""Whole steps on the device, as the host sees them: who takes part, what they need, and one small tensor to read afterwards.

What a step launches is in `step`; of each number of sequences and each depth it is one CUDA graph. Several steps may be
launched in a row, and their tokens come together: with many sequences it is the host that is slow. A step may be launched
before the one ahead of it was collected, since all that it needs of that one is on the device.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from weakref import WeakKeyDictionary

import numpy as np
import torch

from runtime.backends.base import Segment
from runtime.backends.transformers.cuda.blocks import BLOCK_TOKENS, Table
from runtime.backends.transformers.cuda.drafting import KNOWN
from runtime.backends.transformers.cuda.launch import NO_WINDOW
from runtime.backends.transformers.cuda.sampling import BLOCK_PLACES, truncates
from runtime.backends.transformers.cuda.sending import Sender, Slot
from runtime.backends.transformers.cuda.step import MAX_DRAFTING, MAX_JOINING, PRIME_ROWS, Picks, Step
from runtime.backends.transformers.cuda.target import BUCKETS, MAX_GRAPH_ROWS, CudaTarget, Graphs, bucket
from runtime.backends.whole_steps import Emitted
from runtime.eagle3.model import Eagle3Model
from runtime.speculation.sampling import Sampled

WARM_UP_ROUNDS = 3  # behind one that captures
WARM_UP_STEPS = 6  # of a round, in a row, as steps follow each other later
MAX_SEQUENCES = 2048  # of one step
MAX_STEPS = 16  # in a row
MAX_FLIGHTS = 6  # launched and not collected: two steps, each of those that draft, those that draft less and those that do not


@dataclass(eq=False)
class _Sequence:
    """What the device knows of one sequence. Valid for as long as the table says the same."""

    row: int = -1  # of the table,
    seating: int = -1  # as it got it
    length: int = -1
    fresh: int = 0  # tokens behind the last committed rows that lie in the device's state, the pending one included
    primed: int = 0  # the drafter has K/V of so many positions
    sampled: Sampled | None = None  # where it stood when the device heard of it
    place: int = 0  # of its output that comes next
    last_place: int = 0  # the device has no random numbers of this place and beyond
    flight: _Flight | None = None  # the last that it is in, until that is collected
    is_lost: bool = False  # a step of it was not wanted: the device went on alone, and what is under way means nothing

    @property
    def num_ahead(self) -> int:
        """Tokens that what is under way may bring."""
        return 0 if self.flight is None else self.flight.num_tokens


@dataclass(frozen=True, eq=False)
class _Flight:
    """Steps that were launched and not collected yet."""

    tables: list[Table]
    sequences: list[_Sequence]
    num: int
    depth: int
    num_steps: int
    slot: Slot

    @property
    def num_tokens(self) -> int:
        """Of each sequence, at most."""
        return (self.depth + 1) * self.num_steps


class FusedDecoder:
    """Steps of a `CudaTarget`'s sequences, with a drafter or without. One thread at a time, the target's."""

    def __init__(self, target: CudaTarget, max_depth: int, max_sequences: int) -> None:
        self._target = target
        self._max_sequences = min(max_sequences, MAX_SEQUENCES, len(target.pool.device_table) - 1)
        self._step = Step(target, max_depth, bucket(self._max_sequences))
        on_cuda = target.device.type == "cuda"
        self._slots = deque(Slot(MAX_STEPS, len(self._step.result), on_cuda) for _ in range(MAX_FLIGHTS))
        self._sequences: WeakKeyDictionary[Table, _Sequence] = WeakKeyDictionary()
        self._seats = [0] * len(self._step.table_rows)  # what they hold
        self._graphs, self._sender = Graphs(target.device), Sender(target.device)
        self._flights: deque[_Flight] = deque()

    @property
    def max_sequences(self) -> int:
        return self._max_sequences

    @property
    def max_depth(self) -> int:
        return self._step.recent - 1

    @property
    def max_steps(self) -> int:
        return MAX_STEPS

    def depth_of(self, num_sequences: int) -> int:
        """Of the longest chains that so many sequences can have."""
        return self.max_depth if bucket(num_sequences) <= MAX_DRAFTING else 0

    def load_drafter(self, model: Eagle3Model) -> bool:
        """Draft with this network from the next step on. False, and no change, if the kernels cannot run it."""
        if not self._step.load(model):
            return False
        for sequence in self._sequences.values():
            sequence.primed = 0  # what the other one left means nothing to this one
        return True

    def leave(self, cache: int) -> None:
        """Forget a sequence: its next step begins anew. Blocks taken ahead are freed. Also for one that was never here."""
        table = self._target.pool[cache]
        self._lose(table)
        self._target.pool.blocks.trim(table)

    def abandon(self) -> None:
        """Something went wrong: nothing of what is under way is collected, and all sequences begin anew."""
        self._flights.clear()
        for table in list(self._sequences):
            self._lose(table)
            self._target.pool.blocks.trim(table)

    def _lose(self, table: Table) -> None:
        if sequence := self._sequences.pop(table, None):
            sequence.is_lost, table.num_ahead = True, 0

    def can_continue(self, cache: int, depth: int) -> bool:
        """Whether the device has all that another step of this sequence needs, its pending token too."""
        table = self._target.pool[cache]
        sequence = self._sequences.get(table)
        return sequence is not None and self._is_ready(table, sequence, depth)

    @torch.inference_mode()
    def launch(
        self,
        caches: Sequence[int],
        histories: Sequence[Sequence[int]],
        sampled: Sequence[Sampled | None],
        depth: int,
        num_steps: int = 1,
    ) -> bool:
        """Begin a step of these sequences, or several in a row; `collect` ends the first that was begun, and at most
        `MAX_FLIGHTS` may be under way. Who is in one of them already must be able to continue. False: a graph was captured.

        histories[i] are all its tokens, the pending one last, which is the only one without K/V, and sampled[i] says where a
        sampled request stands; nobody looks at those of a request that `can_continue`. At most `max_sequences`, chains of at
        most `depth_of` them, and none may come closer than so many tokens to the model's last position.
        """
        pool, num_tokens = self._target.pool, (depth + 1) * num_steps
        tables = [pool[cache] for cache in caches]
        sequences = [self._sequence(table) for table in tables]
        needs = [table.num_ahead + num_tokens for table in tables]
        if lacking := [(table, num) for table, num in zip(tables, needs, strict=True) if _lacks(table, num)]:
            pool.hold_rows(tables)
            pool.reserve([table for table, _ in lacking], [num for _, num in lacking], takes_ahead=True)
        behind = [
            (table, sequence, history, one)
            for table, sequence, history, one in zip(tables, sequences, histories, sampled, strict=True)
            if not (self._is_ready(table, sequence, depth) and _is_same_request(sequence.sampled, one))
        ]
        if behind:
            self._bring_up(behind, depth)
        self._draw_numbers(sequences, num_tokens)
        flight = _Flight(tables, sequences, bucket(len(tables)), depth, num_steps, self._slots[0])
        is_known = self._start([sequence.row for sequence in sequences], flight, _picks(sequences))
        self._slots.rotate(-1)
        self._flights.append(flight)
        for table, sequence in zip(tables, sequences, strict=True):
            sequence.flight = flight
            table.num_ahead += num_tokens
        self._draw_numbers(sequences, num_tokens)  # for the next one too, while the device is busy
        return is_known

    def has_landed(self) -> bool:
        """Whether what was launched first is over."""
        return self._flights[0].slot.is_there

    def collect(self, still_wanted: Sequence[bool]) -> Emitted:
        """Wait for the first that was launched: new tokens of each sequence, at least one, the last of which is pending.

        K/V and states of all new tokens but the last are committed then. -1 stands where no logit was finite. What is no longer
        wanted changes nothing; nor does it in what is launched already, where nothing comes for it.
        """
        flight = self._flights.popleft()
        began = time.perf_counter()
        device_s = flight.slot.wait()
        waited_s = time.perf_counter() - began
        tokens, sizes = self._read(flight)
        advance = self._target.pool.advance
        for index, (table, sequence, is_wanted) in enumerate(zip(flight.tables, flight.sequences, still_wanted, strict=True)):
            if sequence.flight is flight:
                sequence.flight = None
            if sequence.is_lost:
                tokens[index] = []
                continue
            if not is_wanted:
                self._lose(table)
                continue
            table.num_ahead -= flight.num_tokens
            new = tokens[index]
            # Of several steps the device's state has the last one's tokens only: of plain ones the drafter lacks those before.
            sequence.fresh = 1 if not flight.depth else sizes[index][-1] if sizes else len(new)
            sequence.length += len(new)
            sequence.place += len(new)
            sequence.primed = sequence.length - sequence.fresh if flight.depth else sequence.primed
            advance(table, len(new), keep_tail=True)
        return Emitted(tokens, sizes, waited_s, device_s)

    def warm_up(self, num_sequences: int) -> dict[tuple[int, int], float]:
        """Capture all greedy steps of up to so many sequences, that none has to wait for it; seconds of each by number and depth.

        Forwards of prompts are compiled too. What samples is captured when it first comes.
        """
        self._warm_up_prompts()
        seconds = {}
        for num in sorted({bucket(n) for n in range(1, min(num_sequences, self._max_sequences) + 1)}):
            for depth in range(1 if self._step.network is None else self.depth_of(num) + 1):
                self._seconds_of_nobody(num, depth, 1)
                seconds[num, depth] = min(self._seconds_of_nobody(num, depth, WARM_UP_STEPS) for _ in range(WARM_UP_ROUNDS))
        return seconds

    def _seconds_of_nobody(self, num: int, depth: int, num_steps: int) -> float:
        """A step's, of so many in a row that nobody takes part in."""
        nobody = _Flight([], [], num, depth, num_steps, self._slots[0])
        self._start([], nobody, Picks.BEST)
        return nobody.slot.wait() / num_steps

    @torch.inference_mode()
    def _warm_up_prompts(self) -> None:
        target = self._target
        target.warm_up()
        room = target.pool.blocks.num_free * BLOCK_TOKENS
        size = min(MAX_GRAPH_ROWS + 1, target.info.max_positions - self.max_depth - 2, room - self.max_depth - 1)
        cache = target.new_cache()
        target.forward([Segment(cache, [0] * size)])
        target.commit(cache, range(size))
        can_prime = self._step.network is not None
        for num_rows in (0, *BUCKETS[: BUCKETS.index(PRIME_ROWS) + 1]) if can_prime else (0,):
            self._join([], [], np.zeros((3, num_rows), dtype=np.int32))
        if can_prime:
            self.launch([cache], [[0] * (size + 1)], [None], min(1, self.max_depth))
            self.collect([False])
        target.forward([Segment(cache, [0])])
        target.drop(cache)

    # --- between host and device ---

    def _sequence(self, table: Table) -> _Sequence:
        sequence = self._sequences.get(table)
        if sequence is None:
            sequence = self._sequences[table] = _Sequence()
        return sequence

    def _is_ready(self, table: Table, sequence: _Sequence, depth: int) -> bool:
        """Whether the device's state holds, or will when what is under way is over, and the drafter is no further behind than
        one step."""
        if (sequence.row, sequence.seating, sequence.length) != (table.row, table.seating, table.length):
            return False
        if sequence.flight is not None:
            return not depth or sequence.flight.depth > 0
        return not depth or sequence.primed >= table.length - sequence.fresh

    def _bring_up(self, behind: Sequence[tuple[Table, _Sequence, Sequence[int], Sampled | None]], depth: int) -> None:
        """Write the device's state where it does not hold, and let the drafter catch up where it is far behind."""
        to_prime = [np.zeros((3, 0), dtype=np.int32)]  # ids, positions and slots of rows
        rows: list[int] = []
        states: list[tuple[int, ...]] = []  # as the kernels have them
        for table, sequence, history, sampled in behind:
            assert table.row is not None
            assert sequence.flight is None, "what is under way must be collected first"
            assert len(history) == table.length + 1, "only the pending token may lack K/V"
            if (sequence.row, sequence.seating, sequence.length) != (table.row, table.seating, table.length):
                # What the drafter has of a row depends on the token behind it, which a truncation may have changed.
                sequence.primed = min(sequence.primed, max(table.length - 1, 0), max(sequence.length - 1, 0))
            sequence.row, sequence.seating, sequence.length, sequence.fresh = table.row, table.seating, table.length, 1
            sequence.sampled, sequence.place = sampled, 0 if sampled is None else sampled.place
            sequence.last_place = sequence.place // BLOCK_PLACES * BLOCK_PLACES
            window = NO_WINDOW if table.policy.window is None else table.policy.window
            rows.append(table.row)
            states.append((table.length, 1, table.policy.sink, window, sequence.place, history[-1]))
            if depth:
                to_prime.append(_rows_of(table, history, sequence.primed, table.length - 1))
                sequence.primed = table.length - 1
        self._step.seats.take(rows, [sampled for *_, sampled in behind])
        primed = np.concatenate(to_prime, axis=1)
        while rows or primed.shape[1]:
            self._join(rows[:MAX_JOINING], states[:MAX_JOINING], primed[:, :PRIME_ROWS])
            rows, states, primed = rows[MAX_JOINING:], states[MAX_JOINING:], primed[:, PRIME_ROWS:]

    def _join(self, rows: Sequence[int], states: Sequence[tuple[int, ...]], primed: np.ndarray) -> None:
        """Let the device know these states by their rows of the table, and the drafter's K/V of the rows primed int32 [3, n]."""
        num, num_primed = len(rows), primed.shape[1]
        num_rows = bucket(num_primed) if num_primed else 0
        packed = np.zeros(len(self._step.joining(num_rows)), dtype=np.int32)
        if num:
            packed[:num] = rows
            packed[MAX_JOINING : MAX_JOINING * (1 + KNOWN)].reshape(MAX_JOINING, KNOWN)[:num] = states
        packed[MAX_JOINING * (1 + KNOWN) :].reshape(3, num_rows)[:, :num_primed] = primed
        self._sender.write(self._step.joining(num_rows), packed)
        self._graphs.run(("join", num_rows), partial(self._step.join, num_rows))

    def _draw_numbers(self, sequences: Sequence[_Sequence], num_places: int) -> None:
        """Random numbers for so many places of those that sample, behind those of what is under way; two blocks at most."""
        lacking: list[tuple[int, int, Sampled]] = []  # row, block, whose
        for sequence in sequences:
            if sequence.sampled is None:
                continue
            while sequence.last_place < sequence.place + sequence.num_ahead + num_places:
                lacking.append((sequence.row, sequence.last_place // BLOCK_PLACES, sequence.sampled))
                sequence.last_place += BLOCK_PLACES
        if lacking:
            self._step.seats.fill(*(list(column) for column in zip(*lacking, strict=True)))

    def _start(self, rows: list[int], flight: _Flight, picks: Picks) -> bool:
        """Steps of these rows of the table, and of nobody in the places up to `num`; their results come to the host. Whether
        all of it was captured before."""
        step, num, depth = self._step, flight.num, flight.depth
        seats = rows + [0] * (num - len(rows))
        if seats != self._seats[:num]:
            self._seats = seats + [0] * (len(self._seats) - num)
            self._sender.write(step.table_rows, np.array(self._seats, dtype=np.int32))
        size, is_known = num * (depth + 2), True
        flight.slot.begin()
        for number in range(flight.num_steps):
            is_known &= self._graphs.run((num, depth, picks), partial(step.run, num, depth, picks))
            flight.slot.result[number, :size].copy_(step.result[:size], non_blocking=True)
        flight.slot.end()
        return is_known

    def _read(self, flight: _Flight) -> tuple[list[list[int]], list[list[int]] | None]:
        """What was emitted, row by row: tokens, and how many came with each of several steps with drafts."""
        num, num_steps, width, num_rows = flight.num, flight.num_steps, flight.depth + 2, len(flight.tables)
        result = flight.slot.result[:num_steps, : num * width].view(num_steps, num, width)[:, :num_rows]
        if not flight.depth:  # one token each
            return result[:, :, 1].t().tolist(), None
        by_step = [[row[1 : 1 + row[0]] for row in rows] for rows in result.tolist()]
        if num_steps == 1:
            return by_step[0], None
        by_sequence = list(zip(*by_step, strict=True))
        return [list(chain(*parts)) for parts in by_sequence], [list(map(len, parts)) for parts in by_sequence]


def _lacks(table: Table, num_tokens: int) -> bool:
    """Whether anything is missing that so many new tokens need: blocks of its own, or the device's knowledge of them."""
    has_blocks = len(table.blocks) * BLOCK_TOKENS >= table.length + num_tokens
    return not has_blocks or table.row is None or table.may_share or table.first_stale < len(table.blocks)


def _picks(sequences: Sequence[_Sequence]) -> Picks:
    """How the tokens of a step of these are to be picked."""
    params = [sequence.sampled.params for sequence in sequences if sequence.sampled is not None]
    if not params:
        return Picks.BEST
    picks = Picks.SAMPLED
    if any(map(truncates, params)):
        picks |= Picks.TRUNCATED
    if any(one.seed is not None for one in params):
        picks |= Picks.CERTAIN
    return picks


def _is_same_request(one: Sampled | None, other: Sampled | None) -> bool:
    """Each request has a stream of numbers of its own; greedy ones do not differ."""
    return one is other or (one is not None and other is not None and one.uniforms is other.uniforms)


def _rows_of(table: Table, history: Sequence[int], first: int, end: int) -> np.ndarray:
    """What the drafter needs of committed positions first .. end-1: the token behind each, the position and the slot, int32
    [3, end - first]. Those that the cache dropped go to the dead block."""
    positions = np.arange(first, end, dtype=np.int32)
    slots = np.array(table.blocks, dtype=np.int32)[positions // BLOCK_TOKENS] * BLOCK_TOKENS
    slots = np.where(slots > 0, slots + positions % BLOCK_TOKENS, 0).astype(np.int32)
    return np.stack([np.array(history[first + 1 : end + 1], dtype=np.int32), positions, slots])

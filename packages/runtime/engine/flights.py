"""Whole steps under way, what they brought, and what the pacer learns of that: what steps take, what became of drafts."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from runtime.drafters.base import Drafter
from runtime.engine.work import Work
from runtime.speculation.accept import Verdicts
from runtime.speculation.costs import StepCosts
from runtime.speculation.depth import Pacer
from runtime.speculation.shape import Group

UNLEARNED, MOST_UNLEARNED = 8, 12  # landings: after so many the host learns of drafts when it has time, or has to
HARDLY = 0.05  # waited: so much of the device's time
ENOUGH_CHAINS = 256  # of the last ones: what averages remember of most batches
ENOUGH_TOKENS = 1024  # to tell how many steps are idle: several turns' mostly


class Outcome(NamedTuple):
    """What a step, or several, emitted for one session; as many rows are committed."""

    work: Work
    verdict: Verdicts


@dataclass(frozen=True)
class Flight:
    """A step that is under way, or several."""

    works: list[Work]
    requests: set[int]  # their ids
    caches: list[int]
    depth: int
    num_steps: int
    began: float
    has_sampled: bool  # some of them are
    is_typical: bool  # of what the device takes for such a step
    is_alone: bool  # nothing else was to be computed just before it

    @property
    def num_rows(self) -> int:
        """Steps of one session each."""
        return len(self.works) * self.num_steps

    @property
    def most_tokens(self) -> int:
        return (self.depth + 1) * self.num_steps


@dataclass(frozen=True)
class Landed:
    """What a step brought: works as they are now and as they were launched, and their new tokens."""

    works: list[tuple[Work, Work, Verdicts]]
    flight: Flight
    seconds: float  # from the landing before it, less what was spent elsewhere
    waited_s: float  # of these, for the device, or learned while it had to wait
    device_s: float | None  # that it was at work for this alone

    @property
    def host_s(self) -> float:
        """What the device must take for this before it is what takes the time: as long as the host was at work. Where the device
        had prompts to read in between and the host waited, the device's own time less that wait."""
        if self.flight.is_alone or self.device_s is None or self.waited_s < HARDLY * self.device_s:
            return self.seconds - self.waited_s
        return max(self.device_s - self.waited_s, 0.0)

    def outcomes(self) -> list[Outcome]:
        outcomes = []
        for work, launched, verdict in self.works:
            work.drafter, work.ask, work.shape = launched.drafter, launched.ask, launched.shape
            if work.drafter is not None and work.shape.depth:
                work.request.note_drafter(work.drafter.version)
            outcomes.append(Outcome(work, verdict))
        return outcomes


@dataclass
class Use:
    """What became of steps, of one session each, and of their tokens."""

    num_missed: int = 0  # begun, and not there any more when they landed: the turn had ended with the step before
    num_landed: int = 0
    num_emitted: int = 0  # tokens, by those
    num_taken: int = 0  # of which so many became history, until turns ended

    def add(self, landed: Landed) -> None:
        flight, num_works = landed.flight, len(landed.works)
        self.num_missed += (len(flight.works) - num_works) * flight.num_steps
        self.num_landed += num_works * flight.num_steps
        self.num_emitted += sum([len(verdict.token_ids) for _, _, verdict in landed.works])

    @property
    def num_idle(self) -> float:
        """Steps for nothing, since a turn had ended before, which nobody knew when they began."""
        share_taken = self.num_taken / self.num_emitted if self.num_emitted else 1.0
        return self.num_missed + self.num_landed * max(1.0 - share_taken, 0.0)


class Lessons:
    """For the pacer, of steps that landed: what they took, at once, and what became of drafts, now and then. That, and what is
    chosen then, takes the host as long as a few sessions' tokens, so it is done while the device keeps the host waiting, if that
    can be had in time: behind a prompt least of all."""

    def __init__(self, pacer: Pacer) -> None:
        self.costs: dict[bool, StepCosts] = {}  # of steps with a sampled session, and of those without; none: depths are fixed
        self._pacer = pacer
        self._use = Use()
        self._num_landed = 0  # since the last time
        self._drafted: deque[Landed] = deque()  # of those the last ones with drafts,
        self._num_chains = 0  # and how many they had
        self._seconds = 0.0  # that the last time took

    def note(self, landed: Sequence[Landed]) -> None:
        for one in landed if self.costs else ():
            self._num_landed += 1
            self._use.add(one)
            self._note_costs(one)
            if one.flight.depth:
                self._drafted.append(one)
                self._num_chains += one.flight.num_rows
                while self._num_chains - self._drafted[0].flight.num_rows >= ENOUGH_CHAINS:
                    self._num_chains -= self._drafted.popleft().flight.num_rows

    def note_taken(self, num_tokens: int) -> None:
        """How many tokens of what was noted last became history."""
        self._use.num_taken += num_tokens
        if self._use.num_taken >= ENOUGH_TOKENS:
            self._pacer.record_idle(self._use.num_idle / self._use.num_taken, self._use.num_taken)
            self._use = Use()

    def _note_costs(self, landed: Landed) -> None:
        flight = landed.flight
        costs, num = self.costs[flight.has_sampled], len(flight.works)
        costs.record_host(num, landed.host_s / flight.num_steps)
        if flight.is_typical and landed.device_s is not None:
            costs.record_device(num, flight.depth, landed.device_s / flight.num_steps)

    def forget(self) -> None:
        self._drafted.clear()
        self._num_landed = self._num_chains = 0

    def fit_into(self, seconds: float) -> bool:
        """Whether there are some, and the host waits so long that they cost nothing."""
        return seconds >= self._seconds and (self._pacer.is_due or self._num_landed >= UNLEARNED)

    @property
    def is_overdue(self) -> bool:
        return self._num_landed >= MOST_UNLEARNED

    def learn(self, drafter: Drafter | None) -> float:
        """From what became of drafts since the last time, of those of the drafter that is loaded. The seconds it took."""
        began = time.perf_counter()
        for landed in self._drafted:
            self._learn_chains(landed, drafter)
        self.forget()
        self._pacer.refresh()
        self._seconds = time.perf_counter() - began
        return self._seconds

    def _learn_chains(self, landed: Landed, drafter: Drafter | None) -> None:
        num_accepted: dict[Group, list[int]] = {}
        for _, launched, verdict in landed.works:
            if launched.ask is not None and launched.drafter is drafter:
                numbers = num_accepted.setdefault((launched.ask.version, launched.ask.kind), [])
                numbers.extend([size - 1 for size in verdict.sizes])
        for group, numbers in num_accepted.items():
            self._pacer.record_chains(group, landed.flight.depth, numbers)

"""What a step costs on this machine, in seconds: the target's forward by its rows, a drafter's proposal by its shape.

A forward's first estimate is a table measured at start-up. Real steps correct it by the median of what they took against what
was expected, at the numbers of rows that occur and between them, so a loaded machine, a longer context or a wrong table bend
it, and single outliers do not.
Proposals are known from real ones only, and a drafter that was never asked is taken to cost nothing: it will be asked.
Pure arithmetic: whoever measures tells it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Mapping
from statistics import fmean, median

RECENT = 16  # observations that a median is taken of
HOST_RECENT = 32  # of what the host did, which is of two kinds, beside prompts and not
TRUSTED = 3  # observations that make one
LEAST_SHARE = 0.1  # of what a step was measured to take, whatever real ones seem to take
TELLING_STEPS = 8  # of one depth after those of another


class Costs:
    learns_from_plain = True  # steps without drafts are made now and then, to know what they cost

    def __init__(self, forward_s: Mapping[int, float], session_s: float = 0.0) -> None:
        """forward_s: of one session's rows, by their number; session_s: of each session beyond the first."""
        assert forward_s, "at least one measurement"
        self._rows = sorted(forward_s)
        self._seconds = [
            max(forward_s[r] for r in self._rows[: i + 1]) for i in range(len(self._rows))
        ]  # more rows never cost less
        self._session_s = session_s
        self._ratios: dict[tuple[int, int], dict[int, _Recent]] = {}  # (sessions, context), rows, each in its class
        self._levels: dict[tuple[str, int, int], dict[int, _Recent]] = {}  # (version, width, sessions), levels drafted
        self._proposals: dict[tuple[str, int], dict[tuple[int, int], _Recent]] = {}  # (version, width), (sessions, depth)

    def size(self, num_sessions: int) -> int:
        """The same for numbers of sessions whose steps cost the same."""
        return num_sessions

    def forward(self, num_sessions: int, num_rows: float, context: int) -> float:
        """Of a step's forward and all that comes with it but drafting."""
        return self._expected(num_sessions, num_rows) * self._ratio(num_sessions, num_rows, context)

    def record_forward(self, num_sessions: int, num_rows: int, context: int, seconds: float) -> None:
        place = (size_class(num_sessions), context_bucket(context))
        ratio = seconds / self._expected(num_sessions, num_rows)
        self._ratios.setdefault(place, {}).setdefault(bucket(num_rows), _Recent()).add(ratio)

    def is_known(self, num_sessions: int, num_rows: int, context: int) -> bool:
        """Whether real steps like this one were seen."""
        recent = self._ratios.get((size_class(num_sessions), context_bucket(context)), {}).get(bucket(num_rows))
        return recent is not None and recent.is_trusted

    def _ratio(self, num_sessions: int, num_rows: float, context: int) -> float:
        """Of real seconds to expected ones: between the nearest numbers of rows that were seen, in this or a shorter context."""
        here = bucket(num_rows)
        for shorter in range(context_bucket(context), -1, -1):
            seen = self._ratios.get((size_class(num_sessions), shorter), {})
            low = max((rows for rows, recent in seen.items() if rows <= here and recent.is_trusted), default=None)
            high = min((rows for rows, recent in seen.items() if rows >= here and recent.is_trusted), default=None)
            if low is None or high is None or low == high:
                nearest = high if low is None else low
                if nearest is not None:
                    return seen[nearest].median
                continue
            share = (here - low) / (high - low)
            return seen[low].median * (1 - share) + seen[high].median * share
        return 1.0

    def proposal(self, version: str, width: int, num_sessions: int, depth: int, context: int) -> float:
        """Of one call of a drafter for so many sessions; by the most similar call known, per level."""
        known = self._proposals.get((version, width))
        if not known or not depth:
            return 0.0
        here = (bucket(num_sessions), depth)
        if here in known:
            return known[here].median
        nearest = min(known, key=lambda place: (abs(place[0] - here[0]), abs(place[1] - depth)))
        return known[nearest].median * depth / nearest[1]

    def level(self, version: str, width: int, num_sessions: int) -> float:
        """Of one level more of such a call: by what calls of few and of many levels took, catching up apart."""
        known = self._levels.get((version, width, bucket(num_sessions)), {})
        places = sorted(levels for levels, recent in known.items() if recent.is_trusted)
        if len(places) < 2:
            return known[places[0]].median / places[0] if places else 0.0
        few, many = places[0], places[-1]
        return max(known[many].median - known[few].median, 0.0) / (many - few)

    def record_proposal(
        self, version: str, width: int, num_sessions: int, depth: int, seconds: float, levels: int | None = None
    ) -> None:
        """levels: that were drafted, where not all that were asked for were worth it."""
        known = self._proposals.setdefault((version, width), {})
        known.setdefault((bucket(num_sessions), depth), _Recent()).add(seconds)
        if levels := depth if levels is None else levels:
            self._levels.setdefault((version, width, bucket(num_sessions)), {}).setdefault(levels, _Recent()).add(seconds)

    def forget(self, version: str) -> None:
        """Nobody drafts with it any more."""
        self._levels = {place: known for place, known in self._levels.items() if place[0] != version}
        self._proposals = {place: known for place, known in self._proposals.items() if place[0] != version}

    def _expected(self, num_sessions: int, num_rows: float) -> float:
        """By the table: linear between two places of it, and on from the last two."""
        if len(self._rows) == 1:
            return self._seconds[0] + self._session_s * (num_sessions - 1)
        above = min(max(bisect_right(self._rows, num_rows), 1), len(self._rows) - 1)
        low, high = self._rows[above - 1], self._rows[above]
        share = (max(num_rows, self._rows[0]) - low) / (high - low)
        seconds = self._seconds[above - 1] * (1 - share) + self._seconds[above] * share
        return seconds + self._session_s * (num_sessions - 1)


class StepCosts(Costs):
    """Of whole steps on a device. A forward is a plain step; all that drafting adds to it, rows to verify too, the proposal.

    A step takes what the device takes, or what the host takes for it meanwhile, if that is more, which differs from step to step:
    beside a prompt the device has so much to do that the host is seldom late. The table has every size and depth of step on the
    device, measured alike; real ones take longer, most of all for the context that is read.
    """

    learns_from_plain = False

    def __init__(self, seconds: Mapping[tuple[int, int], float]) -> None:
        """seconds: of steps by number of sessions and depth."""
        super().__init__({num: taken for (num, depth), taken in seconds.items() if not depth})
        self._table = dict(seconds)
        self._stretches: dict[int, _Stretch] = {}  # by number of sessions in the table
        self._host: dict[int, _Recent] = {}  # by sessions in their bucket: seconds that the host was at work for a step
        self._steps: dict[tuple[int, int], float] = {}  # by number of sessions and depth, until something new is known

    def size(self, num_sessions: int) -> int:
        return self._rows[min(bisect_left(self._rows, num_sessions), len(self._rows) - 1)]

    def forward(self, num_sessions: int, num_rows: float, context: int) -> float:
        return self._step(num_sessions, 0)

    def proposal(self, version: str, width: int, num_sessions: int, depth: int, context: int) -> float:
        return self._step(num_sessions, depth) - self._step(num_sessions, 0)

    def record_host(self, num_sessions: int, seconds: float) -> None:
        """What the host did for a step of so many sessions, while the device was at work or not."""
        self._steps.clear()
        self._host.setdefault(self.size(num_sessions), _Recent(HOST_RECENT)).add(seconds)

    def record_device(self, num_sessions: int, depth: int, seconds: float) -> None:
        """What the device took for a step of so many sessions, all of which drafted so deep."""
        self._steps.clear()
        num = self.size(num_sessions)
        self._stretches.setdefault(num, _Stretch()).add(depth, seconds / self._measured(num, depth))

    def _step(self, num_sessions: int, depth: int) -> float:
        seconds = self._steps.get((num_sessions, depth))
        if seconds is None:
            seconds = self._steps[num_sessions, depth] = self._seconds_of(num_sessions, depth)
        return seconds

    def _seconds_of(self, num_sessions: int, depth: int) -> float:
        num = self.size(num_sessions)
        stretch, host = self._stretches.get(num), self._host.get(num)
        device_s = self._measured(num, depth) * (1.0 if stretch is None else max(stretch.at(depth), LEAST_SHARE))
        return device_s if host is None or not host.is_trusted else host.at_least(device_s)

    def _measured(self, num: int, depth: int) -> float:
        return self._table.get((num, depth), self._table[num, 0])


class _Stretch:
    """How many times the table's seconds steps of one size take.

    That changes with the context and with what else the machine does, much alike for all depths, so steps of any depth tell it.
    By how much a depth differs from the others is told by its steps right after those of another one.
    """

    def __init__(self) -> None:
        self._recent = _Recent()  # of the last steps, without what is their depths' own
        self._own: dict[int, _Recent] = {}  # by depth: what is its own
        self._depth = -1  # of the last step
        self._num_alike = 0  # steps of that depth in a row
        self._before: float | None = None  # how it was before these

    def add(self, depth: int, ratio: float) -> None:
        if depth != self._depth:
            self._depth, self._num_alike, self._before = depth, 0, self._common()
        self._num_alike += 1
        if self._before is not None and self._num_alike <= TELLING_STEPS:
            self._own.setdefault(depth, _Recent()).add(ratio / self._before)
        self._recent.add(ratio / self._own_of(depth))

    def at(self, depth: int) -> float:
        return (self._common() or 1.0) * self._own_of(depth)

    def _common(self) -> float | None:
        return self._recent.quick if self._recent.is_trusted else None

    def _own_of(self, depth: int) -> float:
        own = self._own.get(depth)
        return own.quick if own is not None and own.is_trusted else 1.0


def bucket(number: float) -> int:
    """Numbers that differ by less than about a third share one."""
    number = max(round(number), 1)
    return number if number <= 8 else 8 + 2 * (number.bit_length() - 4) + (number >> (number.bit_length() - 2) & 1)


def size_class(num_sessions: int) -> int:
    """Up to 1, 2, 4, 8, ... sessions: by how much a forward differs from what is expected is much the same for all of these."""
    return (num_sessions - 1).bit_length()


def context_bucket(num_tokens: int) -> int:
    """Up to 255, 1023, 4095, ... tokens."""
    return max(num_tokens.bit_length() - 7, 0) // 2


class _Recent:
    """The last few observations."""

    def __init__(self, num: int = RECENT) -> None:
        self._values: deque[float] = deque(maxlen=num)
        self._median: float | None = None
        self._quick: float | None = None
        self._low: list[float] | None = None  # the smaller ones

    @property
    def is_trusted(self) -> bool:
        return len(self._values) >= TRUSTED

    @property
    def median(self) -> float:
        if self._median is None:
            self._median = median(self._values)
        return self._median

    @property
    def quick(self) -> float:
        """Of the quicker ones: what disturbs a step on a device only ever adds to it."""
        if self._quick is None:
            self._quick = sorted(self._values)[len(self._values) // 4]
        return self._quick

    def at_least(self, value: float) -> float:
        """What they are on average, none of them counted as less than this. The largest quarter is left out, as disturbed."""
        if self._low is None:
            self._low = sorted(self._values)[: -(-len(self._values) * 3 // 4)][:: -(-len(self._values) // RECENT)]
        return fmean([max(one, value) for one in self._low])

    def add(self, value: float) -> None:
        self._values.append(value)
        self._median = self._quick = self._low = None

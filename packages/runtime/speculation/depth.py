"""How much to draft: the shape of the next draft of each decoding session. Pure arithmetic; knows no model and no session.

Adaptive: of the shapes that the settings allow, no draft included, the one that promises the most tokens per second for the
whole batch, by what drafts of this kind gained lately (`acceptance`) and what a step costs here (`costs`):

    tokens    sum over sessions of 1 + gain(depth)
    seconds   forward(sessions + drafted nodes) + proposal(depth)

Whole steps begin before it is known who has ended, so each turn takes a few steps more, and time for these.

Certain drafts that say how sure they are get cut once more when they are there: nodes that are not worth their row are not
verified. Sampled chains are never cut, since what is cut must not depend on what was drawn. Now and then, for a few steps,
drafts are made where none are worth it, none where they are, or they are left uncut, go deeper, less deep or have the other
width, so that a change is noticed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from runtime.config import SpeculationConfig, SpeculationMode, TreeShape
from runtime.drafters.base import Draft, IsEnough
from runtime.speculation.acceptance import MEMORY, Acceptance, Average, Confidence
from runtime.speculation.costs import Costs
from runtime.speculation.habit import Habit
from runtime.speculation.shape import PLAIN, SAMPLED, Ask, Group, Shape

RECHECK_STEPS = 8  # a choice holds for so many steps
HELD_STEPS = 7  # more of the same sessions, there, for which nothing is asked at all
MAX_HELD = 64  # sets of sessions
MAX_CHOICES = 512
IS_BETTER = 1.02  # a new shape must promise so much more than the present one, and any shape than none
IDLE_MEMORY = 4096  # tokens for which it is remembered how many steps are for nothing
TREE_DOUBT = 1.05  # a tree must promise so much more than a chain, where both may be: less is known of the many trees
UNCUT_EVERY = 16  # steps
PROBE_DEPTH, PROBE_STEPS = 2, 2
PROBE_SHARE = 8  # one of so many sessions takes part
PROBE_WEIGHT = 8  # observations that the past counts for when a probe begins
MEMORY_PER_SESSION = (4, 8)  # observations more that averages remember for each session of the batch; of whole steps
PLAIN_EVERY, FIRST_PLAIN_EVERY = 256, 16  # steps with drafts; the latter until the cost of plain ones is known
NEVER_PLAIN = 1.5  # where drafts promise so much more, what plain steps cost need not be known exactly
OTHER_STEPS = 4  # of a look at the other width, deeper, or less deep

Limits = dict[Group, Counter[int]]  # how many sessions can use so many levels


class Pacer:
    """costs: None pins the shape, whatever the mode. whole_steps: they run on a device by themselves, so short that choosing
    takes a share of them: a choice that is old holds on until `refresh`, which is called while nobody waits. What a depth costs
    is known by steps of its own."""

    def __init__(self, config: SpeculationConfig, costs: Costs | None = None, whole_steps: bool = False) -> None:
        self._config = config
        self._whole_steps = whole_steps
        self.costs = costs
        self._acceptance: dict[tuple[Group, int], Acceptance] = {}  # by group and width
        self._confidence: dict[Group, Confidence] = {}
        self._habits: dict[Group, Habit] = {}
        self._choices: dict[Hashable, _Choice] = {}  # by what they were made for
        self._choice = _Choice({}, 0.0, 0)  # the last one
        self._due: dict[Hashable, tuple[Costs, Limits, int, int]] = {}  # what `refresh` is to choose for, by signature
        self._held: dict[Hashable, _Held] = {}  # what was said, by the sessions it was said of
        self._num_held = 0  # steps for which nothing was asked, since `choose` was
        self._fates: dict[tuple[Group, int], list[int]] = {}  # by depth: levels accepted of chains since the last choice
        self._num_steps = 0
        self._num_sessions = 0  # in the last step
        self._num_drafting = 0  # steps since the last one that was plain to know its cost
        self._idle = Average(0.0, 0.0)  # steps of a session that were for nothing, for each token

    @property
    def is_adaptive(self) -> bool:
        return self.costs is not None and self._config.mode is SpeculationMode.ADAPTIVE

    # --- before drafting ---

    def choose(self, asks: Sequence[Ask], num_sessions: int, context: int) -> list[Shape]:
        """A shape for each of the sessions that ask, among the num_sessions of the next step, whose mean history is `context`."""
        if not self.is_adaptive:
            most = self._config.max_draft_tokens
            by_ask = {ask: self._shape(most, self._widths(ask.kind)[0]).cut(ask.limit) for ask in set(asks)}
            return [by_ask[ask] for ask in asks]
        num_steps, self._num_held = 1 + self._num_held, 0
        self._num_steps += 1
        self._num_sessions = num_sessions
        numbers = Counter(asks)
        limits: Limits = {}
        for ask, number in numbers.items():
            if limit := min(ask.limit, self._config.max_draft_tokens):
                limits.setdefault((ask.version, ask.kind), Counter())[limit] += number
        self._choice = self._choice_for(limits, num_sessions, context)
        if any(shape.depth for shape in self._choice.shapes.values()) and self._is_plain_due(num_sessions, context):
            return [PLAIN] * len(asks)
        shapes = {group: self._next(group, shape, num_steps) for group, shape in self._choice.shapes.items()}
        if any(self._is_trying(group) for group in shapes):
            return self._shared(shapes, asks)
        by_ask = {ask: shapes.get((ask.version, ask.kind), PLAIN).cut(ask.limit) for ask in numbers}
        chosen = [by_ask[ask] for ask in asks]
        if self._whole_steps:
            self._hold(asks, num_sessions, chosen, shapes)
        return chosen

    def held(self, asks: Sequence[Ask], num_sessions: int) -> list[Shape] | None:
        """What `choose` said of such sessions, while it holds; None: choose anew."""
        held = self._held.get((num_sessions, *asks))
        if held is None or held.num_used == HELD_STEPS or held.costs is not self.costs:
            return None
        held.num_used += 1
        self._num_held += 1
        self._num_steps += 1
        return held.shapes

    def _hold(self, asks: Sequence[Ask], num_sessions: int, chosen: list[Shape], shapes: Mapping[Group, Shape]) -> None:
        is_settled = all(shape.depth and self._habit(group).is_settled for group, shape in shapes.items())
        if len(self._held) >= MAX_HELD or not is_settled:
            self._held.clear()
        if is_settled:
            self._held[num_sessions, *asks] = _Held(self.costs, chosen)

    def _choice_for(self, limits: Limits, num_sessions: int, context: int) -> _Choice:
        size = self._costs.size
        groups = tuple((group, max(of_one), size(of_one.total())) for group, of_one in limits.items())
        signature = (id(self.costs), size(num_sessions), groups)
        choice = self._choices.get(signature)
        is_old = choice is not None and self._num_steps - choice.made_at >= RECHECK_STEPS
        if choice is None or (is_old and not self._whole_steps):
            return self._choose(signature, limits, num_sessions, context)
        if is_old:
            self._due[signature] = (self._costs, limits, num_sessions, context)
        return choice

    def _choose(self, signature: Hashable, limits: Limits, num_sessions: int, context: int) -> _Choice:
        if len(self._choices) >= MAX_CHOICES:
            self._choices.clear()
        self._learn()
        shapes, rate = self._best(limits, num_sessions, context)
        choice = self._choices[signature] = _Choice(shapes, rate, self._num_steps)
        return choice

    @property
    def is_due(self) -> bool:
        """Whether `refresh` has something to do."""
        return bool(self._due)

    def refresh(self) -> None:
        """Make the choices anew that were old, if costs are still the same."""
        due, self._due = self._due, {}
        for signature, (costs, limits, num_sessions, context) in due.items():
            before = self._choices.get(signature)
            if costs is self.costs and (
                before is None or self._choose(signature, limits, num_sessions, context).shapes != before.shapes
            ):
                self._held.clear()

    def _is_plain_due(self, num_sessions: int, context: int) -> bool:
        """Whether it is time for a step without drafts, to know what it costs."""
        if not self._costs.learns_from_plain:
            return False
        if self._choice.rate * self._costs.forward(num_sessions, num_sessions, context) > NEVER_PLAIN * num_sessions:
            return False
        self._num_drafting += 1
        gap = PLAIN_EVERY if self._costs.is_known(num_sessions, num_sessions, context) else FIRST_PLAIN_EVERY
        if self._num_drafting < gap:
            return False
        self._num_drafting = 0
        return True

    def _shared(self, shapes: Mapping[Group, Shape], asks: Sequence[Ask]) -> list[Shape]:
        """Each group's shape; but where none are worth it, some of its sessions try for all."""
        places: Counter[Group] = Counter()  # of those that can draft, within their group
        shared: list[Shape] = []
        for ask in asks:
            group = (ask.version, ask.kind)
            is_left_out = group not in shapes or (self._is_trying(group) and places[group] % PROBE_SHARE > 0)
            shared.append(PLAIN if is_left_out else shapes[group].cut(ask.limit))
            places[group] += ask.limit > 0
        return shared

    def _is_trying(self, group: Group) -> bool:
        """Whether a probe is under way of what is not worth it as far as is known."""
        return self._habit(group).is_probing and not self._choice.shapes[group].depth

    def _next(self, group: Group, chosen: Shape, num_steps: int) -> Shape:
        """The shape of this step: as chosen, or that of a probe. num_steps: with those since the last call."""
        habit = self._habit(group)
        if (probe := habit.probe()) is not None:
            return probe
        if chosen.depth:
            if (number := habit.count_drafting(num_steps)) is not None and (others := self._others(group, chosen)):
                habit.begin(others[number % len(others)], OTHER_STEPS)
        elif habit.is_probe_due():
            width = self._widths(group[1])[0]
            self._acceptance_of(group, width).forget(PROBE_WEIGHT)
            habit.begin(self._shape(min(PROBE_DEPTH, self._config.max_draft_tokens), width), PROBE_STEPS)
        return chosen

    def _others(self, group: Group, chosen: Shape) -> list[Shape]:
        """What is worth a look beside the chosen one: the other width, and its neighbours, whose cost is known by them alone."""
        most, widths = self._config.max_draft_tokens, self._widths(group[1])
        others = [self._shape(chosen.depth, width) for width in widths if width != chosen.width]
        if chosen.depth < most:
            others.append(self._shape(min(chosen.depth + 2, most), chosen.width))
        if self._whole_steps and chosen.depth > 2:
            others.append(self._shape(chosen.depth - 2, chosen.width))
        return others

    def _best(self, limits: Limits, num_sessions: int, context: int) -> tuple[dict[Group, Shape], float]:
        """For one group of sessions after the other, the largest first, the best shape beside those chosen already; and the
        tokens a second that all of them promise."""
        chosen: dict[Group, Shape] = {}
        best_rate = 0.0
        tokens, rows, seconds = float(num_sessions), float(num_sessions), 0.0
        for group, of_one in sorted(limits.items(), key=lambda item: -item[1].total()):
            habit, most = self._habit(group), max(of_one)
            widths = self._widths(group[1])
            gains = {width: self._acceptance_of(group, width).gains(most) for width in widths}
            best, best_rate, promised = PLAIN, 0.0, (0.0, 0.0, 0.0)
            for shape in self._shapes(group[1], most):
                promise = self._promise(group, shape, of_one, gains.get(shape.width, ()), context)
                more_tokens, more_rows, more_seconds = promise
                forward = self._costs.forward(num_sessions, rows + more_rows, context)
                rate = (tokens + more_tokens) / (forward + seconds + more_seconds)
                rate /= 1.0 + self._idle.value * (tokens + more_tokens) / num_sessions
                rate *= IS_BETTER if shape in (PLAIN, habit.shape) else 1.0
                rate /= TREE_DOUBT if shape.width > 1 and 1 in widths else 1.0
                if rate > best_rate:
                    best, best_rate, promised = shape, rate, promise
            chosen[group] = habit.shape = best
            more_tokens, more_rows, more_seconds = promised
            tokens, rows, seconds = tokens + more_tokens, rows + more_rows, seconds + more_seconds
        return chosen, best_rate

    def _promise(
        self, group: Group, shape: Shape, limits: Counter[int], gains: Sequence[float], context: int
    ) -> tuple[float, float, float]:
        """Of a shape for a group: tokens gained, rows to verify, seconds to draft. gains: of drafts as wide, by depth."""
        if not shape.depth:
            return 0.0, 0.0, 0.0
        acceptance = self._acceptance_of(group, shape.width)
        depths = [(min(limit, shape.depth), number) for limit, number in limits.items()]
        guess = shape.num_nodes or shape.depth
        rows = sum(number * acceptance.size(depth, guess) for depth, number in depths)
        seconds = self._costs.proposal(group[0], shape.width, limits.total(), shape.depth, context)
        return sum(number * gains[depth] for depth, number in depths), rows, seconds

    def _shapes(self, kind: str, max_depth: int) -> Iterable[Shape]:
        yield PLAIN
        for width in self._widths(kind):
            for depth in range(1, max_depth + 1):
                yield self._shape(depth, width)

    def _shape(self, depth: int, width: int) -> Shape:
        if width == 1 or not depth:
            return Shape(depth)
        return Shape(depth, width, self._config.tree_nodes)

    def _widths(self, kind: str) -> tuple[int, ...]:
        match self._config.shape:
            case TreeShape.CHAIN:
                return (1,)
            case TreeShape.TREE:
                return (self._config.tree_width,)
            case TreeShape.AUTO:  # a sampled chain is accepted more often than any tree of certain nodes
                return (1,) if kind == SAMPLED else (1, self._config.tree_width)

    # --- while drafting ---

    def enough_for(self, ask: Ask, shape: Shape, num_sessions: int, context: int) -> IsEnough | None:
        """When a chain of this shape need not become longer: another level would bring fewer tokens than its time is worth."""
        group, depth = (ask.version, ask.kind), shape.depth
        is_free = not self.is_adaptive or self._num_steps % UNCUT_EVERY == 0 or self._habit(group).is_probing
        if is_free or depth < 2 or shape.width > 1 or ask.kind == SAMPLED:
            return None
        rows = num_sessions * (1 + depth)
        rows_s = self._costs.forward(num_sessions, rows, context) - self._costs.forward(num_sessions, num_sessions, context)
        least = self._choice.rate * (self._costs.level(ask.version, 1, num_sessions) + rows_s / depth) / num_sessions  # tokens
        likely, confidence = self._acceptance_of(group, 1).chance(0), self._confidence_of(ask)  # later levels lack those left out
        return lambda confidences: confidence.reach(confidences) * likely < least

    # --- after drafting ---

    def cut(self, drafts: Sequence[tuple[Ask, Draft]], num_sessions: int, context: int, proposal_s: float) -> list[Draft]:
        """Of a step's drafts, for which proposal_s were spent, only the nodes that are worth their row."""
        uncut = [draft for _, draft in drafts]
        if not self.is_adaptive or self._num_steps % UNCUT_EVERY == 0:
            return uncut
        ranked: list[tuple[float, int, int]] = []  # (score, draft, node), the best first; a parent before its children
        num_rows = num_sessions
        for index, (ask, draft) in enumerate(drafts):
            if draft.confidences is None or draft.probs is not None or self._habit((ask.version, ask.kind)).is_probing:
                num_rows += len(draft.token_ids)
                continue
            scores = self._confidence_of(ask).scores(draft)
            ranked += [(score, index, node) for node, score in enumerate(scores)]
        ranked.sort(key=lambda entry: -entry[0])
        num_kept = self._worth([score for score, *_ in ranked], num_sessions, num_rows, context, proposal_s)
        kept: dict[int, list[int]] = {index: [] for _, index, _ in ranked}
        for _, index, node in ranked[:num_kept]:
            kept[index].append(node)
        return [draft.only(sorted(kept[index])) if index in kept else draft for index, draft in enumerate(uncut)]

    def _worth(self, scores: Sequence[float], num_sessions: int, num_rows: int, context: int, proposal_s: float) -> int:
        """How many of the best nodes make the most tokens per second."""
        stride = max(len(scores) // 16, 1)
        best, best_rate, tokens = 0, 0.0, float(num_sessions)
        for num in range(len(scores) + 1):
            if num:
                tokens += scores[num - 1]
            if num % stride == 0 or num == len(scores):
                rate = tokens / (self._costs.forward(num_sessions, num_rows + num, context) + proposal_s)
                if rate > best_rate:
                    best, best_rate = num, rate
        return best

    # --- after verification ---

    def record_chains(self, group: Group, depth: int, num_accepted: Sequence[int]) -> None:
        """What became of a step's chains of which no confidences are known, whole as they were asked for."""
        if self.is_adaptive:
            self._fates.setdefault((group, depth), []).extend(num_accepted)

    def record_idle(self, num_steps: float, num_tokens: int) -> None:
        """Of whole steps, which begin before it is known who has ended: how many steps of a session are for nothing, for each of
        so many tokens. The deeper the drafts, the fewer steps a turn has, and the more these weigh."""
        self._idle.add(num_steps, IDLE_MEMORY, num_tokens)

    def _learn(self) -> None:
        """From the chains since the last choice, which took no time step by step."""
        for (group, depth), num_accepted in self._fates.items():
            self._acceptance_of(group, 1).record_chains(depth, num_accepted, self._memory)
        self._fates.clear()

    @property
    def _memory(self) -> int:
        return MEMORY + MEMORY_PER_SESSION[self._whole_steps] * self._num_sessions

    def record(self, ask: Ask, shape: Shape, draft: Draft, path: Sequence[int]) -> None:
        """What became of one session's draft: the nodes that were accepted."""
        if not self.is_adaptive:
            return
        group, memory = (ask.version, ask.kind), self._memory
        self._acceptance_of(group, shape.width).record(shape.depth, len(draft.token_ids), len(path), memory)
        if draft.confidences is None or draft.probs is not None:
            return
        self._confidence_of(ask).record(draft, path)
        if shape.width > 1:  # the chain in the tree tells how chains would do
            chain = draft.likeliest_chain()
            num_accepted = sum(node == accepted for node, accepted in zip(chain, path, strict=False))
            self._acceptance_of(group, 1).record(shape.depth, len(chain), num_accepted, memory)

    def forget(self, version: str) -> None:
        """Nobody drafts with it any more."""
        for known in (self._habits, self._confidence):
            for group in [group for group in known if group[0] == version]:
                del known[group]
        for key in [key for key in self._acceptance if key[0][0] == version]:
            del self._acceptance[key]
        if self.costs is not None:
            self.costs.forget(version)
        self._choices.clear()
        self._fates.clear()
        self._held.clear()
        self._due.clear()

    # --- what is known ---

    @property
    def _costs(self) -> Costs:
        assert self.costs is not None
        return self.costs

    def _habit(self, group: Group) -> Habit:
        return self._habits.setdefault(group, Habit())

    def _acceptance_of(self, group: Group, width: int) -> Acceptance:
        known = self._acceptance.get((group, width))
        if known is None:
            known = self._acceptance[group, width] = Acceptance(None if width == 1 else self._acceptance_of(group, 1))
        return known

    def _confidence_of(self, ask: Ask) -> Confidence:
        return self._confidence.setdefault((ask.version, ask.kind), Confidence())


class _Choice(NamedTuple):
    shapes: dict[Group, Shape]
    rate: float  # tokens a second that they promise
    made_at: int  # step


@dataclass
class _Held:
    """What was said, and by which costs."""

    costs: Costs | None
    shapes: list[Shape]
    num_used: int = 0

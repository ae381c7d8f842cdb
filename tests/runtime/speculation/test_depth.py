"""The choice of how much to draft, on a simulated machine whose costs and whose drafter's luck are known.

A step of the simulation costs forward(rows) + proposal(depth, width) seconds. Level k of a draft is accepted with the
drafter's own chance for it; a tree raises that chance. Adaptive is held against the best shape there is for that machine.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import pairwise

import pytest

from runtime.config import SpeculationConfig, SpeculationMode, TreeShape
from runtime.drafters.base import Draft, IsEnough, SparseProbs
from runtime.speculation.acceptance import Acceptance, Confidence
from runtime.speculation.costs import Costs, StepCosts, bucket
from runtime.speculation.depth import HELD_STEPS, RECHECK_STEPS, Pacer
from runtime.speculation.habit import OTHER_EVERY
from runtime.speculation.shape import GREEDY, SAMPLED, SEEDED, Ask, Shape

ROWS = (1, 2, 4, 8, 16, 32)


def cpu(rows: float) -> float:
    """Like SmolLM2-135M on two cores: 31 ms for one row, 36 for four, 45 for eight, 65 for sixteen."""
    return 0.028 + 0.0023 * rows


def steep(rows: float) -> float:
    return 0.01 * rows


def card(rows: float) -> float:
    return 0.001 + 0.000002 * rows


@dataclass
class Machine:
    forward: Callable[[float], float]
    level_s: float = 0.002  # of drafting
    chance: float = 0.6  # that a level of a chain is accepted
    tree_bonus: float = 0.1
    spread: float = 0.3  # of that chance, from level to level
    noise: float = 0.05
    rng: random.Random = field(default_factory=lambda: random.Random(1))

    def costs(self) -> Costs:
        return Costs({rows: self.forward(rows) for rows in ROWS})

    def proposal_s(self, shape: Shape) -> float:
        return self.level_s * shape.depth * (1.0 if shape.width == 1 else 1.2)

    def draft(self, shape: Shape, is_enough: IsEnough | None = None) -> tuple[Draft, list[int]]:
        """A draft and what will be accepted of it. Confidences are honest: a level is as sure as its luck."""
        token_ids: list[int] = []
        parents: list[int] = []
        confidences: list[float] = []
        path: list[int] = []
        parent, alive = -1, True
        for level in range(shape.depth):
            if level and is_enough is not None and is_enough(confidences):
                break
            chance = min(max(self.chance + self.rng.uniform(-self.spread, self.spread), 0.0), 1.0) if self.chance else 0.0
            first = len(token_ids)
            siblings = 1 if shape.width == 1 else 2
            for sibling in range(siblings):
                token_ids.append(sibling)
                parents.append(parent)
                confidences.append(chance if sibling == 0 else self.tree_bonus * (1 - chance))
            u = self.rng.random()
            hit = first if u < chance else first + 1 if siblings == 2 and u < chance + confidences[-1] else None
            alive = alive and hit is not None
            if alive and hit is not None:
                path.append(hit)
            parent = first if hit is None else hit
        if shape.width == 1:
            return Draft(token_ids, None, None, confidences), path
        return Draft(token_ids, None, parents, confidences), path


def run(pacer: Pacer, machine: Machine, num_sessions: int, num_steps: int, may_end: bool = False) -> tuple[float, list[Shape]]:
    """Tokens per second, and the first session's shape of each step. may_end: single chains end where they are long enough."""
    tokens, seconds, first_shapes = 0, 0.0, []
    asks = [Ask("v", 64, GREEDY)] * num_sessions
    for _ in range(num_steps):
        shapes = pacer.choose(asks, num_sessions, context=200)
        first_shapes.append(shapes[0])
        enough = pacer.enough_for(asks[0], shapes[0], num_sessions, 200) if may_end and shapes[0].depth else None
        made = [machine.draft(shape, enough) for shape in shapes]
        drafts = [draft for draft, _ in made]
        drafted = shapes[0] if enough is None else shapes[0].cut(drafts[0].depth)
        proposal_s = machine.proposal_s(drafted) * machine.rng.uniform(1, 1 + machine.noise)
        if shapes[0].depth and pacer.costs is not None:
            pacer.costs.record_proposal("v", shapes[0].width, num_sessions, shapes[0].depth, proposal_s, drafted.depth)
            drafts = pacer.cut(list(zip(asks, drafts, strict=True)), num_sessions, 200, proposal_s)
        num_rows = sum(1 + len(draft.token_ids) for draft in drafts)
        forward_s = machine.forward(num_rows) * machine.rng.uniform(1, 1 + machine.noise)
        if pacer.costs is not None:
            pacer.costs.record_forward(num_sessions, num_rows, 200, forward_s)
        for shape, (whole, path), draft in zip(shapes, made, drafts, strict=True):
            kept = path if draft is whole else surviving(whole, path, draft)
            if shape.depth:
                pacer.record(asks[0], shape, draft, kept)
            tokens += 1 + len(kept)
        seconds += forward_s + proposal_s
    return tokens / seconds, first_shapes


def surviving(whole: Draft, path: list[int], draft: Draft) -> list[int]:
    """The accepted path in the nodes of the draft after it was cut: for as far as they hold it."""
    kept, parent = [], -1
    for node in path:
        found = next(
            (
                place
                for place, before in enumerate(draft.lineage)
                if before == parent and draft.token_ids[place] == whole.token_ids[node]
            ),
            None,
        )
        if found is None:
            break
        kept.append(found)
        parent = found
    return kept


def adaptive(machine: Machine, shape: TreeShape = TreeShape.CHAIN, max_draft_tokens: int = 5) -> Pacer:
    return Pacer(SpeculationConfig(shape=shape, max_draft_tokens=max_draft_tokens), machine.costs())


def machine_of(forward: Callable[[float], float], chance: float, shape: TreeShape) -> Machine:
    return Machine(forward, level_s=forward(1) / 15, chance=chance, tree_bonus=0.1 if shape is TreeShape.AUTO else 0.0)


@cache
def best_fixed(forward: Callable[[float], float], chance: float, shape: TreeShape, num_sessions: int, num_steps: int) -> float:
    configs = [SpeculationConfig(mode=SpeculationMode.FIXED, max_draft_tokens=depth) for depth in range(6)]
    configs += [replace(config, shape=TreeShape.TREE) for config in configs[2::2]]
    return max(run(Pacer(config), machine_of(forward, chance, shape), num_sessions, num_steps)[0] for config in configs)


@pytest.mark.parametrize("shape", [TreeShape.CHAIN, TreeShape.AUTO])
@pytest.mark.parametrize("num_sessions", [1, 4, 16])
@pytest.mark.parametrize("chance", [0.0, 0.2, 0.5, 0.8, 0.97])
@pytest.mark.parametrize("forward", [cpu, steep, card])
def test_it_is_hardly_slower_than_the_best_fixed_shape(
    forward: Callable[[float], float], chance: float, num_sessions: int, shape: TreeShape
) -> None:
    # 0.97, less the luck of so short a run.
    num_steps = {1: 800, 4: 300, 16: 150}[num_sessions]
    machine = machine_of(forward, chance, shape)
    pacer = adaptive(machine, shape)
    run(pacer, machine, num_sessions, 150)  # it learns
    rate, _ = run(pacer, machine, num_sessions, num_steps)
    assert rate >= 0.96 * best_fixed(forward, chance, shape, num_sessions, num_steps)


def test_a_useless_drafter_is_switched_off_soon_and_costs_little() -> None:
    machine = Machine(cpu, chance=0.0, noise=0.0)
    rate, shapes = run(adaptive(machine), machine, 1, 1500)
    assert all(shape.depth == 0 for shape in shapes[40:64]), "off within a few dozen steps"
    assert rate > 0.97 / cpu(1)
    late = shapes[500:]
    assert 2 <= sum(shape.depth > 0 for shape in late) <= 8, "it looks again now and then"


def test_it_is_switched_on_again_when_acceptance_returns_and_off_when_it_goes() -> None:
    machine = Machine(cpu, chance=0.0)
    pacer = adaptive(machine)
    _, shapes = run(pacer, machine, 1, 400)
    assert shapes[-1].depth == 0
    machine.chance = 0.8
    _, shapes = run(pacer, machine, 1, 700)
    assert sum(shape.depth >= 3 for shape in shapes[-100:]) > 85
    machine.chance = 0.0
    _, shapes = run(pacer, machine, 1, 160)
    assert sum(shape.depth for shape in shapes[-100:]) < 20


def test_the_depth_follows_the_batch_and_the_drafter() -> None:
    depths = {}
    for num_sessions in (1, 16):
        for chance in (0.3, 0.9):
            machine = Machine(lambda rows: 0.01 + 0.001 * rows, chance=chance, level_s=0.0005)
            _, shapes = run(adaptive(machine, max_draft_tokens=8), machine, num_sessions, 300)
            depths[num_sessions, chance] = sum(shape.depth for shape in shapes[-100:]) / 100
    assert depths[1, 0.9] > 5.5
    assert depths[1, 0.3] < depths[1, 0.9] - 2
    assert depths[16, 0.9] < depths[1, 0.9]


def test_trees_are_chosen_where_siblings_help_and_rows_are_cheap() -> None:
    for forward, bonus, is_tree in ((card, 0.7, True), (steep, 0.02, False)):
        machine = Machine(forward, chance=0.6, tree_bonus=bonus, level_s=forward(1) / 20)
        _, shapes = run(adaptive(machine, TreeShape.AUTO), machine, 1, 600)
        share = sum(shape.width > 1 for shape in shapes[-200:]) / 200
        assert (share > 0.9) is is_tree


def test_sampled_drafts_are_chains_where_that_is_left_open() -> None:
    machine = Machine(card, chance=0.6, tree_bonus=0.9, level_s=0.00005)
    pacer = adaptive(machine, TreeShape.AUTO)
    kinds, seen = (GREEDY, SAMPLED, SEEDED), {}
    for _ in range(600):
        asks = [Ask("v", 64, kind) for kind in kinds]
        for ask, shape in zip(asks, pacer.choose(asks, 3, 100), strict=True):
            draft, path = machine.draft(shape)
            if shape.depth:
                pacer.record(ask, shape, draft, path)
                seen.setdefault(ask.kind, []).append(shape.width)
    assert set(seen[SAMPLED]) == {1}
    assert seen[GREEDY].count(4) > 400
    assert seen[SEEDED].count(4) > 400


def test_fixed_means_fixed() -> None:
    config = SpeculationConfig(mode=SpeculationMode.FIXED, max_draft_tokens=4)
    machine = Machine(cpu, chance=0.0)
    pacer = Pacer(config, machine.costs())
    _, shapes = run(pacer, machine, 2, 100)
    assert set(shapes) == {Shape(4)}
    tree = Pacer(
        SpeculationConfig(mode=SpeculationMode.FIXED, shape=TreeShape.TREE, max_draft_tokens=4, tree_nodes=9, tree_width=3)
    )
    assert tree.choose([Ask("v", 64), Ask("v", 2), Ask("v", 0)], 3, 100) == [Shape(4, 3, 9), Shape(2, 3, 9), Shape(0, 3, 9)]


def test_nobody_gets_more_than_it_can_use_and_kinds_are_judged_apart() -> None:
    machine = Machine(cpu, chance=0.9)
    pacer = adaptive(machine)
    good, bad = Ask("v", 64, GREEDY), Ask("v", 64, SAMPLED)
    for _ in range(100):
        shapes = pacer.choose([good, bad], 2, 100)
        for ask, shape in zip((good, bad), shapes, strict=True):
            if shape.depth:
                draft = Draft([1] * shape.depth)
                pacer.record(ask, shape, draft, range(shape.depth) if ask is good else [])
    for _ in range(40):  # past any probe
        shapes = pacer.choose([good, bad, Ask("v", 1, GREEDY), Ask("v", 0, GREEDY)], 4, 100)
        if shapes[1].depth == 0:
            break
    assert shapes[0].depth >= 4
    assert [shape.depth for shape in shapes[1:]] == [0, 1, 0]


@pytest.mark.parametrize("chance", [0.4, 0.6, 0.8])
def test_chains_that_end_early_gain_on_those_that_are_only_cut(chance: float) -> None:
    rates = {False: 0.0, True: 0.0}
    for may_end in rates:
        for seed in range(4):
            machine = Machine(cpu, level_s=cpu(1) / 15, chance=chance, spread=0.5, rng=random.Random(seed))
            rates[may_end] += run(adaptive(machine), machine, 1, 3000, may_end)[0]
    assert rates[True] > 1.01 * rates[False]


def test_only_certain_chains_end_early() -> None:
    machine = Machine(cpu, chance=0.6)
    pacer = adaptive(machine)
    run(pacer, machine, 1, 300)
    ask, chain = Ask("v", 64, GREEDY), Shape(5)
    pacer.choose([ask], 1, 200)
    while (enough := pacer.enough_for(ask, chain, 1, 200)) is None:  # a step in which nothing is left out
        pacer.choose([ask], 1, 200)
    assert enough([0.01])
    assert not enough([0.99, 0.98])
    assert pacer.enough_for(ask, Shape(1), 1, 200) is None
    assert pacer.enough_for(ask, Shape(3, 4, 12), 1, 200) is None
    assert pacer.enough_for(ask._replace(kind=SAMPLED), chain, 1, 200) is None
    assert Pacer(SpeculationConfig(mode=SpeculationMode.FIXED)).enough_for(ask, chain, 1, 200) is None


def test_sampled_chains_are_never_cut() -> None:
    machine = Machine(steep, chance=0.5)
    pacer, ask = adaptive(machine), Ask("v", 64)
    q = SparseProbs.__new__(SparseProbs)
    sampled = Draft([1, 2, 3], [q] * 3, None, [0.1, 0.1, 0.1])
    certain = Draft([1, 2, 3], None, None, [0.2, 0.9, 0.9])
    pacer.choose([ask, ask], 2, 100)
    assert pacer.cut([(ask, sampled), (ask, certain)], 2, 100, 0.0) == [sampled, Draft([], None, None, [])]
    cheap = adaptive(Machine(card))
    cheap.choose([ask], 1, 100)
    falling = Draft([1, 2, 3], None, None, [0.99, 0.0001, 0.9])
    assert cheap.cut([(ask, falling)], 1, 100, 0.0) == [Draft([1], None, None, [0.99])]


def test_a_version_that_is_gone_is_forgotten() -> None:
    machine = Machine(cpu, chance=0.9)
    pacer = adaptive(machine)
    run(pacer, machine, 1, 50)
    pacer.forget("v")
    assert not pacer._acceptance
    assert not pacer._confidence
    assert not pacer._habits
    assert not pacer._choices
    run(pacer, machine, 1, 50)


def test_a_choice_that_was_due_for_a_version_that_is_gone_is_not_made() -> None:
    pacer = Pacer(SpeculationConfig(), Costs({1: 1.0, 8: 1.5}), whole_steps=True)
    for _ in range(RECHECK_STEPS + 1):
        pacer.choose([Ask("v", 5)], 1, 0)
    assert pacer._due is not None
    pacer.forget("v")
    pacer.refresh()
    assert not pacer._habits
    assert not pacer._choices


# --- acceptance and confidence ---


def test_gains_are_sums_of_how_often_each_level_is_accepted() -> None:
    acceptance = Acceptance()
    for step in range(2000):
        acceptance.record(3, 3, (0, 1, 3, 3)[step % 4], 128)
    gains = acceptance.gains(5)
    assert gains[0] == 0.0
    assert gains[1] == pytest.approx(0.75, abs=0.03)
    assert gains[2] == pytest.approx(1.25, abs=0.05)
    assert gains[3] == pytest.approx(1.75, abs=0.06)
    assert gains[3] < gains[4] < gains[5] < 2.8, "deeper levels are guessed from those known"
    assert acceptance.size(3, 9) == pytest.approx(3)
    assert acceptance.size(2, 9) == 9


def test_what_is_forgotten_gives_way_quickly() -> None:
    slow, quick = Acceptance(), Acceptance()
    for acceptance in (slow, quick):
        for _ in range(500):
            acceptance.record(1, 1, 0, 64)
    quick.forget(4)
    for acceptance in (slow, quick):
        for _ in range(4):
            acceptance.record(1, 1, 1, 64)
    assert quick.gains(1)[1] > 0.4 > 0.1 > slow.gains(1)[1]


def test_confidence_learns_how_far_the_drafter_can_be_believed() -> None:
    rng, confidence = random.Random(1), Confidence()
    boastful = Draft([1, 2, 3], None, [-1, -1, 0], [0.95, 0.03, 0.95])
    assert confidence.scores(boastful)[0] == pytest.approx(0.94, abs=0.03), "believed at first"
    for _ in range(3000):
        first = rng.random() < 0.5
        second = first and rng.random() < 0.5
        confidence.record(boastful, [0, 2] if second else [0] if first else [])
    scores = confidence.scores(boastful)
    assert scores == pytest.approx([0.5, 0.0, 0.25], abs=0.06)


# --- costs ---


def test_forwards_are_estimated_between_and_beyond_the_table() -> None:
    costs = Costs({1: 1.0, 4: 2.5, 2: 1.5, 8: 2.0}, session_s=0.25)
    assert costs.forward(1, 1, 0) == 1.0
    assert costs.forward(1, 3, 0) == 2.0
    assert costs.forward(1, 8, 0) == 2.5, "more rows never cost less"
    assert costs.forward(1, 16, 0) == 2.5
    assert Costs({1: 1.0, 4: 2.5}).forward(1, 8, 0) == 4.5
    assert Costs({1: 1.0}).forward(3, 8, 0) == 1.0
    assert costs.forward(5, 8, 0) == 3.5


def test_real_steps_correct_the_table_and_what_lies_between() -> None:
    costs = Costs({1: 1.0, 9: 1.8})
    assert not costs.is_known(1, 1, 100)
    for seconds in (2.0, 2.0, 90.0, 2.0, 2.0):  # one outlier
        costs.record_forward(1, 1, 100, seconds)
    assert costs.is_known(1, 1, 100)
    assert costs.forward(1, 1, 100) == 2.0
    assert costs.forward(1, 6, 100) == pytest.approx(3.0), "what was not seen is as much off as the nearest that was"
    assert costs.forward(1, 1, 5000) == 2.0, "a longer context is first thought to be like a shorter one"
    assert costs.forward(4, 1, 100) == 1.0, "of another batch nothing is known"
    for _ in range(40):
        costs.record_forward(1, 6, 100, 1.5)
        costs.record_forward(1, 1, 5000, 4.0)
    assert costs.forward(1, 6, 100) == 1.5
    assert costs.forward(1, 1, 100) == 2.0
    assert costs.forward(1, 1, 5000) == 4.0
    assert costs.forward(1, 3, 100) == pytest.approx(1.2 * (2.0 * 0.6 + 1.0 * 0.4)), "between the two"


def test_a_table_measured_on_a_disturbed_machine_is_overcome() -> None:
    for table in ({1: 1.0, 2: 1.0, 32: 1.1}, {1: 0.5, 2: 1.0, 32: 1.0}, {1: 0.03, 32: 3.0}):
        for chance, low, high in ((0.85, 3.5, 7.0), (0.0, 0.0, 0.3)):
            machine = Machine(cpu, chance=chance)
            pacer = Pacer(SpeculationConfig(shape=TreeShape.CHAIN), Costs(table))
            run(pacer, machine, 1, 700)
            _, shapes = run(pacer, machine, 1, 200)
            assert low <= sum(shape.depth for shape in shapes) / 200 <= high


def test_proposals_are_known_from_similar_ones() -> None:
    costs = Costs({1: 1.0})
    assert costs.proposal("v", 1, 1, 5, 100) == 0.0, "who was never asked will be"
    for seconds in (0.5, 0.6, 0.5):
        costs.record_proposal("v", 1, 1, 5, seconds)
    assert costs.proposal("v", 1, 1, 5, 100) == 0.5
    assert costs.proposal("v", 1, 1, 2, 100) == pytest.approx(0.2)
    assert costs.proposal("v", 1, 4, 2, 100) == pytest.approx(0.2)
    assert costs.proposal("v", 4, 1, 5, 100) == costs.proposal("w", 1, 1, 5, 100) == costs.proposal("v", 1, 1, 0, 100) == 0.0


def test_a_level_costs_what_longer_calls_take_more() -> None:
    costs = Costs({1: 1.0})
    assert costs.level("v", 1, 1) == 0.0
    for _ in range(3):
        costs.record_proposal("v", 1, 1, 5, 3.0)
    assert costs.level("v", 1, 1) == 0.6
    for levels, seconds in ((2, 1.5), (2, 1.5), (2, 1.5), (1, 9.0)):
        costs.record_proposal("v", 1, 1, 5, seconds, levels)
    assert costs.level("v", 1, 1) == 0.5, "and a single call of one level says nothing"
    assert costs.level("v", 1, 64) == 0.0


def test_whole_steps_never_seem_to_take_no_time() -> None:
    costs = StepCosts({(1, depth): 1.0 + 0.1 * depth for depth in range(4)})
    for _ in range(20):
        costs.record_device(1, 3, 1e-6)  # a table from a machine that was disturbed
    for depth in range(4):
        assert 0.0 < costs.forward(1, 1, 100) + costs.proposal("v", 1, 1, depth, 100) < 0.2


def test_where_the_host_takes_the_time_depth_costs_nothing() -> None:
    costs = StepCosts({(num, depth): 1.0 + 0.1 * depth for num in (1, 8) for depth in range(6)})
    costs.record_host(8, 50.0)
    assert costs.forward(8, 8, 100) == 1.0, "one alone says little: it may be the first, that had things to prepare"
    for _ in range(3):
        costs.record_host(8, 1.25)
    assert costs.forward(8, 8, 100) == 1.25
    assert [costs.proposal("v", 1, 8, depth, 100) for depth in (1, 2, 3, 5)] == pytest.approx([0.0, 0.0, 0.05, 0.25])
    assert costs.forward(1, 1, 100) == 1.0, "with other numbers of sessions it may be otherwise"


def test_the_more_steps_are_for_nobody_the_less_deep_are_drafts() -> None:
    """Behind the end of each turn there are as many, however deep."""
    costs = StepCosts({(8, depth): 1.0 + 0.1 * depth for depth in range(8)})
    pacer = Pacer(SpeculationConfig(shape=TreeShape.CHAIN), costs, whole_steps=True)
    reached = [round(10_000 * 0.8**level) for level in range(8)]
    ended = [more - fewer for more, fewer in pairwise([*reached, 0])]
    pacer.record_chains(("v", GREEDY), 7, [level for level, number in enumerate(ended) for _ in range(number)])
    asks = [Ask("v", 7)] * 8
    assert pacer.choose(asks, 8, 0) == [Shape(6)] * 8
    pacer.record_idle(0.5, 1000)
    pacer.forget("another")
    assert pacer.choose(asks, 8, 0) == [Shape(3)] * 8


def test_what_steps_take_beyond_the_table_is_told_by_those_of_any_depth() -> None:
    costs = StepCosts({(8, depth): 1.0 + 0.1 * depth for depth in range(6)})

    def seconds(depth: int) -> float:
        return costs.forward(8, 8, 100) + costs.proposal("v", 1, 8, depth, 100)

    def run(depth: int, taken: float, number: int = 30) -> None:
        for index in range(number):
            costs.record_device(8, depth, taken * (3.0 if index % 5 == 4 else 1.0))  # now and then something disturbs it

    run(5, 1.5 * 1.2)
    assert [seconds(depth) for depth in (0, 3, 5)] == pytest.approx([1.2, 1.3 * 1.2, 1.5 * 1.2])
    run(3, 1.3 * 1.2 * 1.1, 4)  # the table is wrong about this depth
    run(5, 1.5 * 1.2)
    assert [seconds(depth) for depth in (0, 3, 5)] == pytest.approx([1.2, 1.3 * 1.2 * 1.1, 1.5 * 1.2])
    run(5, 1.5 * 2.0)  # longer contexts
    assert [seconds(depth) for depth in (0, 3, 5)] == pytest.approx([2.0, 1.3 * 2.0 * 1.1, 1.5 * 2.0])


@pytest.mark.parametrize(("chance", "width"), [(0.70, 1), (0.75, 4)])
def test_a_tree_must_promise_clearly_more_than_a_chain(chance: float, width: int) -> None:
    """Of one level, at equal cost: 0.65 of chains are accepted, and that many of trees."""
    pacer = Pacer(SpeculationConfig(shape=TreeShape.AUTO, tree_width=4, max_draft_tokens=1), Costs({1: 1.0}))
    for known, taken in ((1, 0.65), (4, chance)):
        acceptance = pacer._acceptance_of(("v", GREEDY), known)
        for _ in range(100):
            acceptance.record_chains(1, [1] * round(100 * taken) + [0] * round(100 * (1 - taken)))
    [shape] = pacer.choose([Ask("v", 1)], 1, 100)
    assert shape.width == width


@pytest.mark.parametrize(("gain", "depth"), [(0.05, 1), (0.01, 0)])
def test_a_tree_must_promise_clearly_more_than_a_chain_only_where_it_could_be_one(gain: float, depth: int) -> None:
    """A tree's step promises so much more than a plain one."""
    costs = Costs({1: 1.0, 2: 1.7 / (1 + gain)})
    pacer = Pacer(SpeculationConfig(shape=TreeShape.TREE, tree_width=4, tree_nodes=1, max_draft_tokens=1), costs)
    acceptance = pacer._acceptance_of(("v", GREEDY), 4)
    for _ in range(100):
        acceptance.record_chains(1, [1] * 70 + [0] * 30)
    [shape] = pacer.choose([Ask("v", 1)], 1, 100)
    assert shape.depth == depth


def test_chains_counted_together_count_like_each_by_itself() -> None:
    rng = random.Random(3)
    one_by_one, together = Acceptance(), Acceptance()
    for _ in range(300):
        numbers = [min(sum(1 for _ in iter(lambda: rng.random() < 0.7, False)), 4) for _ in range(8)]
        for number in numbers:
            one_by_one.record(4, 4, number, 512)
        together.record_chains(4, numbers, 512)
    assert together.gains(4) == pytest.approx(one_by_one.gains(4), rel=0.02)
    assert together.size(4, 0) == one_by_one.size(4, 0) == 4
    for _ in range(200):
        one_by_one.record(1, 1, 1, 512)
    together.record_chains(1, [1] * 200, 512)
    assert together.chance(0) == pytest.approx(one_by_one.chance(0), rel=0.1)


def test_buckets_are_exact_where_it_matters_and_ascend() -> None:
    assert [bucket(number) for number in range(1, 9)] == list(range(1, 9))
    buckets = [bucket(number) for number in range(1, 5000)]
    assert buckets == sorted(buckets)
    assert set(buckets) == set(range(1, max(buckets) + 1))
    for low, high in ((9, 11), (12, 15), (64, 95), (96, 127)):
        assert bucket(low) == bucket(high) != bucket(high + 1)


def test_what_was_said_of_whole_steps_holds_for_the_same_sessions_and_no_longer() -> None:
    costs = StepCosts({(num, depth): 1.0 + 0.05 * depth for num in (1, 2, 4) for depth in range(4)})
    pacer = Pacer(SpeculationConfig(shape=TreeShape.CHAIN, max_draft_tokens=3), costs, whole_steps=True)
    asks = [Ask("v", 3), Ask("v", 2)]
    assert pacer.held(asks, 2) is None, "nothing was said yet"
    said = pacer.choose(asks, 2, 100)
    assert [shape.depth for shape in said] == [3, 2]
    for others, num in ((asks[:1], 2), ([Ask("w", 3), Ask("v", 2)], 2), (asks, 3)):
        assert pacer.held(others, num) is None
    pacer.costs = StepCosts({(1, 0): 1.0})
    assert pacer.held(asks, 2) is None
    pacer.costs = costs
    for _ in range(HELD_STEPS):
        assert pacer.held(list(asks), 2) == said
    assert pacer.held(asks, 2) is None, "it is time to ask again"
    pacer.choose(asks, 2, 100)
    pacer.forget("v")
    assert pacer.held(asks, 2) is None


def test_what_was_said_of_some_sessions_holds_while_others_come_and_go_until_more_is_known() -> None:
    costs = StepCosts({(num, depth): 1.0 + 0.05 * depth for num in (1, 2) for depth in range(4)})
    pacer = Pacer(SpeculationConfig(shape=TreeShape.CHAIN, max_draft_tokens=3), costs, whole_steps=True)
    two, one = [Ask("v", 3), Ask("v", 3)], [Ask("v", 3)]
    said = pacer.choose(two, 2, 100)
    assert pacer.choose(one, 1, 100)
    assert pacer.held(two, 2) == said
    for _ in range(RECHECK_STEPS):
        pacer.record_chains(("v", GREEDY), 3, [0] * 100)
        pacer.choose(one, 1, 100)
    assert pacer.held(two, 2) == said
    pacer.refresh()
    assert pacer.choose(one, 1, 100)[0].depth == 0
    assert pacer.held(two, 2) is None


def test_looks_at_other_shapes_come_as_often_where_steps_are_held() -> None:
    costs = StepCosts({(1, depth): 1.0 + 0.4 * depth for depth in range(6)})
    pacer = Pacer(SpeculationConfig(shape=TreeShape.CHAIN, max_draft_tokens=5), costs, whole_steps=True)
    asks, depths = [Ask("v", 5)], []
    for _ in range(20 * OTHER_EVERY):
        shapes = pacer.held(asks, 1) or pacer.choose(asks, 1, 100)
        depths.append(shapes[0].depth)
        pacer.record_chains(("v", GREEDY), depths[-1], [min(depths[-1], 2)])
        pacer.refresh()
    usual = max(set(depths), key=depths.count)
    num_looks = sum(depth != usual and before == usual for before, depth in pairwise(depths[OTHER_EVERY:]))
    assert 17 <= num_looks <= 32, "beside looks, what was not seen for long is tried anew"


@pytest.mark.parametrize("asks", [[(GREEDY, 5), (SAMPLED, 5)], [(SAMPLED, 0), (SAMPLED, 5)]], ids=["behind", "beside none"])
@pytest.mark.parametrize("whole_steps", [False, True])
def test_what_is_off_is_tried_wherever_its_sessions_stand(whole_steps: bool, asks: list[tuple[str, int]]):
    table = {(num, depth): (1 + 0.2 * depth) / 1000 for num in (1, 2) for depth in range(6)}
    costs = StepCosts(table) if whole_steps else Costs({1: 1e-3, 2: 1.05e-3, 16: 4e-3})
    pacer = Pacer(SpeculationConfig(shape=TreeShape.CHAIN, max_draft_tokens=5), costs, whole_steps=whole_steps)

    def num_sampled(num_steps: int, is_accepted: bool) -> int:
        num_drafted = 0
        for _ in range(num_steps):
            of_step = [Ask("v", limit, kind) for kind, limit in asks]
            for ask, shape in zip(of_step, pacer.choose(of_step, 2, 100), strict=True):
                assert shape.depth <= ask.limit
                if shape.depth:
                    num_drafted += ask.kind == SAMPLED
                    is_good = is_accepted or ask.kind == GREEDY
                    pacer.record_chains((ask.version, ask.kind), shape.depth, [shape.depth * is_good])
            pacer.refresh()
        return num_drafted

    assert num_sampled(600, is_accepted=False) < 200
    assert num_sampled(3000, is_accepted=True) >= 8, "tried, and more where that shows its worth"

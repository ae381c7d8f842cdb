"""How deep whole steps on a device draft, by costs like those of a card: a simulation whose drafter's luck is known.

Rates are of expected tokens, so that the luck of a short run says nothing; what the pacer learns from is drawn.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from runtime.config import SpeculationConfig, TreeShape
from runtime.speculation.costs import HOST_RECENT, StepCosts
from runtime.speculation.depth import RECHECK_STEPS, Pacer
from runtime.speculation.shape import GREEDY, Ask

# Milliseconds of a plain step and of one with a chain of 5, of SmolLM2-135M on a large card, by number of sessions.
STEPS = {1: (0.82, 1.04), 2: (0.83, 1.06), 4: (0.86, 1.08), 8: (0.92, 1.35), 16: (0.96, 1.37), 32: (1.03, 1.59), 64: (1.4, 2.08)}
GOOD, FAIR, POOR = (0.75, 0.79, 0.82, 0.85, 0.86), (0.50, 0.54, 0.56, 0.56, 0.57), (0.03,) * 5  # that level k is accepted
HOST_S = 10e-6  # of each session and step, between two steps of the device: at start nobody knows of it


def step_s(num: int, depth: int) -> float:
    plain, deep = STEPS[min(size for size in STEPS if size >= num)]
    return (plain + (deep - plain) * (0.15 + 0.17 * depth if depth else 0.0)) / 1000


def expected(chances: Sequence[float], depth: int) -> float:
    """Tokens of a session's step."""
    tokens, reach = 1.0, 1.0
    for chance in chances[:depth]:
        reach *= chance
        tokens += reach
    return tokens


class Device:
    def __init__(self, chances: Sequence[float]) -> None:
        self.chances = chances
        self._rng = random.Random(1)
        self._costs = StepCosts({(num, depth): step_s(num, depth) for num in STEPS for depth in range(6)})
        self._pacer = Pacer(SpeculationConfig(shape=TreeShape.CHAIN, max_draft_tokens=5), self._costs, whole_steps=True)

    def step(self, num: int) -> tuple[float, float, int]:
        """Tokens, seconds, and the depth of most."""
        asks = [Ask("v", 5)] * num
        shapes = self._pacer.held(asks, num) or self._pacer.choose(asks, num, 200)
        self._pacer.refresh()
        depth, tokens, seconds = max(shape.depth for shape in shapes), 0.0, 0.0
        num_drafting = sum(shape.depth > 0 for shape in shapes)
        for size, part_depth in ((num_drafting, depth), (num - num_drafting, 0)):
            if size:
                took = step_s(size, part_depth) * self._rng.uniform(1, 1.03) + HOST_S * size
                self._costs.record_device(size, part_depth, took)
                tokens, seconds = tokens + size * expected(self.chances, part_depth), seconds + took
        if num_drafting:
            luck = [(level for level in range(depth) if self._rng.random() >= self.chances[level]) for _ in range(num_drafting)]
            self._pacer.record_chains(("v", GREEDY), depth, [next(levels, depth) for levels in luck])
        return tokens, seconds, depth if num_drafting > num // 2 else 0

    def run(self, numbers: Sequence[int]) -> float:
        """Its rate against that of the best depth for each number of sessions, which knew that at once."""
        steps = [self.step(num) for num in numbers]
        ideal = sum(tokens / best_rate(num, self.chances) for num, (tokens, *_) in zip(numbers, steps, strict=True))
        return ideal / sum(seconds for _, seconds, _ in steps)


def best_rate(num: int, chances: Sequence[float]) -> float:
    return max(num * expected(chances, depth) / (1.015 * step_s(num, depth) + HOST_S * num) for depth in range(6))


@pytest.mark.parametrize("num", STEPS)
@pytest.mark.parametrize("chances", [GOOD, FAIR, POOR], ids=["good", "fair", "poor"])
def test_little_is_lost_from_the_first_steps_on(chances: Sequence[float], num: int):
    device = Device(chances)
    assert device.run([num] * 500) > (0.97 if chances is POOR else 0.985)
    assert device.run([num] * 500) > 0.985


@pytest.mark.parametrize("chances", [GOOD, FAIR], ids=["good", "fair"])
def test_a_batch_that_shrinks_as_its_turns_end_loses_little_too(chances: Sequence[float]):
    """Every number of sessions for the first time, then again."""
    device = Device(chances)
    wave = [32] * 30 + [num for num in range(31, 0, -1) for _ in range(2)]
    assert device.run(wave) > 0.97
    assert device.run(wave) > 0.985


def test_a_change_is_noticed():
    device = Device(POOR)
    device.run([8] * 300)
    device.chances = GOOD
    device.run([8] * 1500)
    assert device.run([8] * 200) > 0.985
    device.chances = POOR
    device.run([8] * 200)
    assert device.run([8] * 300) > 0.97


def test_where_the_host_is_late_in_some_steps_only_depth_costs_in_the_others() -> None:
    """Every other step is one beside a prompt, where the device has more to do than the host."""
    costs = StepCosts({(num, depth): (1 + 0.1 * depth) / 1000 for num in (1, 8) for depth in range(6)})

    def step_ms(depth: int) -> float:
        return 1000 * (costs.forward(8, 8, 100) + costs.proposal("v", 1, 8, depth, 100))

    for late_s in (0.0, 0.002) * 8:
        costs.record_host(8, late_s)
    shallow, deep = step_ms(1), step_ms(5)
    assert 1.1 < shallow < 2.0, "between what the device takes and what the host does"
    assert 0.0 < deep - shallow < 0.4, "some of the four levels, not all"
    for _ in range(HOST_RECENT):
        costs.record_host(8, 0.002)
    assert step_ms(1) == step_ms(5) == pytest.approx(2.0)
    costs.record_host(8, 0.5)
    assert step_ms(1) == pytest.approx(2.0), "what disturbs a single step says nothing"


def test_one_choice_holds_for_all_numbers_of_sessions_whose_whole_steps_cost_the_same(monkeypatch: pytest.MonkeyPatch):
    costs = StepCosts({(num, depth): (1 + 0.1 * depth) / 1000 for num in (8, 16) for depth in range(4)})
    pacer = Pacer(SpeculationConfig(shape=TreeShape.CHAIN, max_draft_tokens=3), costs, whole_steps=True)
    chosen_for: list[int] = []
    choose = Pacer._choose
    monkeypatch.setattr(Pacer, "_choose", lambda self, *args: chosen_for.append(args[2]) or choose(self, *args))
    for num in (16, 13, 15, 9, 8, 16, 5):
        pacer.choose([Ask("v", 3)] * num, num, 100)
    assert chosen_for == [16, 8]


def test_all_that_is_old_is_chosen_anew_not_the_last_alone(monkeypatch: pytest.MonkeyPatch):
    costs = StepCosts({(num, depth): 1e-3 for num in (1, 2) for depth in range(4)})
    pacer = Pacer(SpeculationConfig(shape=TreeShape.CHAIN, max_draft_tokens=3), costs, whole_steps=True)
    for number in range(4 * RECHECK_STEPS):
        pacer.choose([Ask("v", 3)] * (1 + number % 2), 1 + number % 2, 100)
    chosen_for: list[int] = []
    choose = Pacer._choose
    monkeypatch.setattr(Pacer, "_choose", lambda self, *args: chosen_for.append(args[2]) or choose(self, *args))
    pacer.refresh()
    assert sorted(chosen_for) == [1, 2]
    assert not pacer.is_due

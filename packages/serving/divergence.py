"""Whether the active drafter gains here what its trainer's gate expected of it on held-out rows of this traffic.

The manifest says which share of the drafts at each depth the gate found accepted (`acceptance_at_<k>`); the engine counts the
drafts that it made at each depth. So what was to be expected does not depend on how deep the server drafts:

    expected = sum over k of drafts made at depth k * acceptance_at_k        divergence = accepted / expected - 1

It is told over windows of so many verification steps, each by itself, so that a change of the traffic shows. Trees, and drafts
that are cut where they are doubtful, are accepted more often than the chains of the gate: a server that makes such is warned of
less than expected only. Both count sampled and greedy requests as they come.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from itertools import count

from runtime.config import RegistryConfig
from runtime.types import SpeculationStats

log = logging.getLogger(__name__)


class AcceptanceWatch:
    def __init__(self, config: RegistryConfig, *, has_chains_only: bool) -> None:
        """has_chains_only: every draft is a chain that is never cut."""
        self._config = config
        self._has_chains_only = has_chains_only
        self._version = ""
        self._expected: list[float] = []  # [k]
        self._before = SpeculationStats()  # when the window began
        self._divergence: float | None = None

    def divergences(self) -> dict[str, float]:
        """Of the active version over its last whole window; empty until there is one."""
        divergence = self._divergence
        return {} if divergence is None else {self._version: divergence}

    def look(self, version: str, metrics: Mapping[str, float], stats: SpeculationStats) -> None:
        """The active version, what its manifest says, and what the engine has counted of it since it started."""
        if version != self._version:
            self._divergence, self._version = None, version
            self._before = stats.copy()
            self._expected = []
            for k in count():
                if f"acceptance_at_{k}" not in metrics:
                    break
                self._expected.append(metrics[f"acceptance_at_{k}"])
        if not self._expected or stats.num_steps - self._before.num_steps < self._config.divergence_steps:
            return
        drafted = _grown(self._before.drafted_per_position, stats.drafted_per_position)
        accepted = _grown(self._before.accepted_per_position, stats.accepted_per_position)
        num_steps = stats.num_steps - self._before.num_steps
        self._before = stats.copy()
        expected = sum(made * share for made, share in zip(drafted, self._expected, strict=False))
        if expected <= 0.0:
            return  # nothing was drafted, or nothing was hoped for
        num_accepted = sum(accepted[: len(self._expected)])
        self._divergence = num_accepted / expected - 1.0
        self._warn(num_accepted, expected, num_steps)

    def _warn(self, num_accepted: int, expected: float, num_steps: int) -> None:
        limit, divergence = self._config.max_divergence, self._divergence
        if limit is None or divergence is None or abs(divergence) <= limit or (divergence > 0 and not self._has_chains_only):
            return
        log.warning(
            "Drafter %s: %d drafts were accepted in the last %d steps, where its held-out rows let expect %.0f (%+.0f %%, and "
            "registry.max_divergence is %.0f %%). The traffic has changed, or the trainer's estimate is wrong.",
            self._version,
            num_accepted,
            num_steps,
            expected,
            100 * divergence,
            100 * limit,
        )


def _grown(before: list[int], now: list[int]) -> list[int]:
    return [number - (before[k] if k < len(before) else 0) for k, number in enumerate(now)]

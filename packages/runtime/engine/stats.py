"""What an engine counts. Counting is cheap, for it happens for each session in each step: like steps are counted with like,
and summed up when somebody asks."""

from __future__ import annotations

from runtime.engine.base import EngineStats
from runtime.types import SpeculationStats


class StepTally:
    """Written by the engine's thread; `stats` may be called from any."""

    def __init__(self) -> None:
        self._steps: dict[tuple[int, int, int], int] = {}  # (nodes drafted, of them accepted, depth): how many

    def add(self, num_drafted: int, num_accepted: int, depth: int, number: int = 1) -> None:
        """Steps, so many alike."""
        kind = (num_drafted, num_accepted, depth)
        self._steps[kind] = self._steps.get(kind, 0) + number

    def stats(self) -> SpeculationStats:
        stats = SpeculationStats()
        for (num_drafted, num_accepted, depth), number in self._steps.copy().items():
            stats.record(num_drafted, num_accepted, depth, number)
        return stats


class EngineStatsBuilder:
    """Counters of the engine's thread; `build` may be called from any thread."""

    def __init__(self) -> None:
        self.prompt_tokens = 0
        self.cached_prompt_tokens = 0
        self.generation_tokens = 0
        self.num_target_forwards = 0
        self._by_version: dict[str, StepTally] = {}

    def of_version(self, version: str) -> StepTally:
        tally = self._by_version.get(version)
        if tally is None:
            tally = self._by_version[version] = StepTally()
        return tally

    def build(
        self, kv_bytes: int, kv_budget_bytes: int, drafter_version: str, num_drafter_failures: int, num_swaps: int
    ) -> EngineStats:
        return EngineStats(
            kv_bytes=kv_bytes,
            kv_budget_bytes=kv_budget_bytes,
            prompt_tokens=self.prompt_tokens,
            cached_prompt_tokens=self.cached_prompt_tokens,
            generation_tokens=self.generation_tokens,
            num_target_forwards=self.num_target_forwards,
            num_drafter_failures=num_drafter_failures,
            speculation={version: tally.stats() for version, tally in self._by_version.copy().items()},
            drafter_version=drafter_version,
            num_swaps=num_swaps,
        )

"""What a forward costs is measured through the target's own door, and nothing of it stays."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from runtime.backends.base import Segment, SegmentOutput, Target
from runtime.engine import calibration
from runtime.engine.calibration import ROWS, measure_forward


def test_more_rows_cost_more_and_no_cache_is_left(target: Target) -> None:
    costs = measure_forward(target)
    assert 0 < costs.forward(1, 1, 0) <= costs.forward(1, 32, 0) < 10
    assert costs.forward(8, 8, 0) >= costs.forward(1, 8, 0)
    assert target.cache_bytes() == 0


def test_a_slow_target_is_measured_once_and_a_failing_one_leaves_nothing(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    forward, sizes = target.forward, []

    def watched(segments: Sequence[Segment]) -> list[SegmentOutput]:
        sizes.append([len(segment.token_ids) for segment in segments])
        if len(sizes) == 40:
            raise RuntimeError("broken")
        return forward(segments)

    monkeypatch.setattr(target, "forward", watched)
    monkeypatch.setattr(calibration, "BUDGET_S", 0.0)
    measure_forward(target)
    assert sizes[4:] == 2 * [*([rows] for rows in ROWS), [1] * 4]
    monkeypatch.setattr(calibration, "BUDGET_S", 60.0)
    with pytest.raises(RuntimeError):
        measure_forward(target)
    assert target.cache_bytes() == 0

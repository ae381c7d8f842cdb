"""Confidence in acceptance lengths, by a bootstrap over rows or prompts: whole ones are drawn.

Counts are summed first and divided last, in every resample as in the figure itself.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Counted = Sequence[tuple[float, float]]
"""(accepted drafts, verification steps) of each row or prompt."""


def length(counted: Counted) -> float:
    """1 + accepted / steps; 1.0 without steps."""
    accepted, steps = np.asarray(counted, dtype=float).reshape(-1, 2).sum(axis=0)
    return float(1.0 + accepted / steps) if steps else 1.0


def lengths(counted: Counted, *, resamples: int, seed: int) -> npt.NDArray[np.float64]:
    """[resamples] acceptance lengths."""
    accepted, steps = (_weights(len(counted), resamples, seed) @ np.asarray(counted, dtype=float)).T
    return np.asarray(1.0 + accepted / np.maximum(steps, 1), dtype=np.float64)


def differences(one: Counted, other: Counted, *, resamples: int, seed: int) -> npt.NDArray[np.float64]:
    """[resamples] acceptance lengths of one minus other, pairs kept together: both are of the same rows, in the same order."""
    assert len(one) == len(other), "a pair for each row"
    return lengths(one, resamples=resamples, seed=seed) - lengths(other, resamples=resamples, seed=seed)


def interval(values: npt.NDArray[np.float64], confidence: float) -> tuple[float, float]:
    """The two ends between which this share of the resamples lies."""
    tail = (1.0 - confidence) / 2
    low, high = np.quantile(values, [tail, 1.0 - tail])
    return float(low), float(high)


def lower(values: npt.NDArray[np.float64], confidence: float) -> float:
    """The one-sided bound that this share of the resamples exceeds."""
    return float(np.quantile(values, 1.0 - confidence, method="lower"))


def _weights(num_rows: int, resamples: int, seed: int) -> npt.NDArray[np.int64]:
    """[resamples, rows] how often each row is drawn; the same for the same arguments."""
    return np.random.default_rng(seed).multinomial(num_rows, np.full(num_rows, 1 / num_rows), size=resamples)

"""Rows into a feature plane: a dialogue whose first row is there is there as a whole."""

from __future__ import annotations

import pytest
import torch

from runtime.backends.transformers.packed import load_packed
from runtime.config import FeaturesConfig
from runtime.errors import FeatureBudgetExceeded
from runtime.features.plane import open_feature_plane
from training.capture.features import FeatureSink
from training.data.tokens import TokenRow


def test_a_dialogue_of_several_rows_that_is_cut_off_is_made_again(state) -> None:
    """Whoever goes on asks for the first row of a dialogue alone."""
    ids = [1, 2, 3, 4] * 250
    rows = [TokenRow("talk", part, ids, ((4, len(ids)),)) for part in ("0", "0.1", "0.2", "0.3", "0.4")]

    def stored(budget_mib: int) -> list[bool]:
        store, ledger = open_feature_plane(state.root / "features", FeaturesConfig(budget_mib=budget_mib))
        forward = load_packed(state.model, torch.device("cpu"))
        settings = {"run_id": "run", "is_heldout": lambda source: False, "max_batch_tokens": 2000}
        sink = FeatureSink(forward, store, ledger, state.target, **settings)
        try:
            if not sink.is_known(rows[0].name):
                sink.add(rows)
        finally:
            known = [sink.is_known(row.name) for row in rows]
            store.close()
            ledger.close()
            results.append(known)
        return known

    results: list[list[bool]] = []
    with pytest.raises(FeatureBudgetExceeded):
        stored(1)
    assert results.pop() == [False, False, True, True, True]
    assert stored(8) == [True] * 5
    assert len(state.ledger.trainable()) == 5

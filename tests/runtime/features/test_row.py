"""A row exists only if its parts fit, and goes through its stored form unchanged."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from runtime.errors import FeatureError
from runtime.features import FeatureRow
from runtime.features.row import specs_of
from runtime.hidden_states import HiddenStates


def test_round_trip_through_tensors(make_row: Callable[..., FeatureRow]) -> None:
    row = make_row()
    again = FeatureRow.from_tensors(row.tensors(torch.float32), row.labels)
    assert torch.equal(again.token_ids, row.token_ids)
    assert torch.equal(again.generated, row.generated)
    assert torch.equal(again.hidden.aux, row.hidden.aux)
    assert torch.equal(again.hidden.last, row.hidden.last)
    assert again.labels == row.labels


def test_specs_name_shape_and_dtype(make_row: Callable[..., FeatureRow]) -> None:
    specs = specs_of(make_row(num_tokens=12).tensors(torch.bfloat16))
    assert {name: (spec.shape, spec.dtype) for name, spec in specs.items()} == {
        "token_ids": ((12,), "int64"),
        "generated": ((12,), "bool"),
        "aux": ((11, 24), "bfloat16"),
        "last": ((11, 8), "bfloat16"),
    }


N = 5
GOOD = {
    "token_ids": torch.arange(N + 1),
    "generated": torch.ones(N + 1, dtype=torch.bool),
    "aux": torch.zeros(N, 24),
    "last": torch.zeros(N, 8),
}


@pytest.mark.parametrize(
    "change",
    [
        {"token_ids": torch.arange(N)},
        {"token_ids": torch.arange(N + 1, dtype=torch.int32)},
        {"generated": torch.ones(N, dtype=torch.bool)},
        {"generated": torch.ones(N + 1)},
        {"aux": torch.zeros(N + 1, 24)},
        {"aux": torch.zeros(N, 16)},
        {"last": torch.zeros(N - 1, 8)},
        {"last": torch.zeros(N * 8)},
        {"token_ids": torch.zeros(0, dtype=torch.int64), "generated": torch.zeros(0, dtype=torch.bool)},
        {"other": torch.zeros(1)},
    ],
)
def test_parts_that_do_not_fit_are_refused(change: dict[str, torch.Tensor]) -> None:
    FeatureRow.from_tensors(GOOD, {})
    with pytest.raises(FeatureError):
        FeatureRow.from_tensors(GOOD | change, {})


def test_a_row_of_one_token_is_refused() -> None:
    with pytest.raises(FeatureError, match="n >= 1"):
        FeatureRow(
            torch.zeros(1, dtype=torch.int64),
            torch.ones(1, dtype=torch.bool),
            HiddenStates(torch.zeros(0, 24), torch.zeros(0, 8)),
        )

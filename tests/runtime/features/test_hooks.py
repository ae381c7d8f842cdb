"""Hooks of an operator: what they may answer, what becomes of a row, and what cannot be loaded."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from runtime.errors import ConfigError, FeatureError
from runtime.features import FeatureRow
from runtime.features.hooks import checked_slice, load_hook, redacted

MakeRow = Callable[..., FeatureRow]


def _mask(*masked: int) -> list[bool]:
    return [index in masked for index in range(12)]


def test_a_row_is_kept_or_dropped_as_the_hook_says(make_row: MakeRow) -> None:
    row = make_row(num_tokens=12)
    assert redacted(row, None) is row
    assert redacted(row, False) is row
    assert redacted(row, True) is None


@pytest.mark.parametrize(
    ("masked", "taught"),
    [
        ((), [6, 7, 8, 9, 10, 11]),
        ((0, 3), [6, 7, 8, 9, 10, 11]),
        ((5,), [7, 8, 9, 10, 11]),  # the first generated token is drafted from the state that was taken
        ((8,), [6, 7, 10, 11]),
        ((11,), [6, 7, 8, 9, 10]),
    ],
)
def test_nothing_is_taught_from_a_masked_token_to_it_or_right_behind_it(
    make_row: MakeRow, masked: tuple[int, ...], taught: list[int]
) -> None:
    row = make_row(num_tokens=12, num_generated=6)
    kept = redacted(row, _mask(*masked))
    assert kept is not None
    assert kept.generated.nonzero().flatten().tolist() == taught
    assert kept.token_ids.tolist() == [0 if index in masked else index for index in range(12)]
    for before, after in ((row.hidden.aux, kept.hidden.aux), (row.hidden.last, kept.hidden.last)):
        for index in range(11):
            assert torch.equal(after[index], torch.zeros_like(before[index]) if index in masked else before[index])
    assert row.token_ids.tolist() == list(range(12))  # what came in is as it was


def test_a_row_that_teaches_nothing_any_more_is_dropped(make_row: MakeRow) -> None:
    assert redacted(make_row(num_generated=6), _mask(6, 8, 10)) is None


@pytest.mark.parametrize("answer", [1, 0, "yes", [True], [0] * 12, [None] * 12, {True}, object()])
def test_an_answer_of_another_form_keeps_nothing(make_row: MakeRow, answer: object) -> None:
    with pytest.raises(FeatureError, match="The row is not kept"):
        redacted(make_row(num_tokens=12), answer)


@pytest.mark.parametrize("answer", ["", None, 3, "x" * 65])
def test_a_slice_has_a_short_name(answer: object) -> None:
    assert checked_slice("code") == "code"
    with pytest.raises(FeatureError, match="a name of 1 to 64 characters"):
        checked_slice(answer)


def test_a_hook_is_found_by_its_dotted_name() -> None:
    assert load_hook("capture.redact", "math.sqrt") is math.sqrt
    assert load_hook("capture.redact", None) is None


@pytest.mark.parametrize("name", ["no_such_package.function", "math.no_such_function", "math.pi", "math"])
def test_a_hook_that_cannot_be_loaded_is_named(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"capture\.redact is '{name}'"):
        load_hook("capture.redact", name)

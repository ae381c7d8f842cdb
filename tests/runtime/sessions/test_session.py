"""Session: which state follows which, appends that come twice, and the features it keeps."""

from __future__ import annotations

import itertools

import pytest
import torch

from runtime.errors import HistoryMismatch, SessionBusy
from runtime.hidden_states import HiddenStates
from runtime.sessions.session import MAX_REMEMBERED_APPENDS, Session, State
from runtime.types import SessionOptions

WAYS = {
    (State.IDLE, "begin"): State.GENERATING,
    (State.IDLE, "reserve"): State.RESERVED,
    (State.IDLE, "hold"): State.COPYING,
    (State.RESERVED, "begin"): State.GENERATING,
    (State.RESERVED, "end"): State.IDLE,
    (State.COPYING, "end"): State.IDLE,
    (State.GENERATING, "end"): State.IDLE,
    (State.CLOSED, "end"): State.CLOSED,
    **{(state, "close"): State.CLOSED for state in State if state is not State.CLOSED},
}


def a_session() -> Session:
    return Session("s", SessionOptions(), ttl_s=1.0)


@pytest.mark.parametrize(("state", "verb"), list(itertools.product(State, ["begin", "reserve", "hold", "end", "close"])))
def test_every_way_from_state_to_state(state: State, verb: str) -> None:
    session = a_session()
    session.state = state
    if (state, verb) in WAYS:
        getattr(session, verb)()
        assert session.state is WAYS[state, verb]
    else:
        with pytest.raises(SessionBusy):
            getattr(session, verb)()
        assert session.state is state


def test_a_repeated_append_adds_nothing_as_long_as_it_is_remembered() -> None:
    session = a_session()
    assert session.append([1, 2], "a") == 2
    assert session.append([3], None) == 3
    assert session.append([1, 2], "a") == 2
    assert session.history == [1, 2, 3]
    for index in range(MAX_REMEMBERED_APPENDS):
        session.append([4], str(index))
    assert "a" not in session.appends
    assert len(session.appends) == MAX_REMEMBERED_APPENDS


def test_expected_lengths() -> None:
    session = a_session()
    session.append([1], None)
    session.check_length(None)
    session.check_length(1)
    with pytest.raises(HistoryMismatch, match="expected_history_length is 4"):
        session.check_length(4)


# --- kept features ---


def rows(*values: int) -> HiddenStates:
    """Row of position p: p in every place."""
    column = torch.tensor(values, dtype=torch.float32)[:, None]
    return HiddenStates(column.expand(-1, 6).clone(), column.expand(-1, 2).clone())


def holding(*parts: HiddenStates, cached: int) -> Session:
    session = a_session()
    session.features, session.cached = list(parts), cached
    return session


def test_states_from_a_position_on_and_up_to_one() -> None:
    session = holding(rows(0, 1, 2), rows(3), rows(4, 5), cached=6)
    assert session.first_kept == 0
    for position in range(6):
        assert session.aux_from(position)[:, 0].tolist() == list(range(position, 6))
    for length in range(7):
        kept = [value for part in session.features_upto(length) for value in part.last[:, 0].tolist()]
        assert kept == list(range(length))
    session = holding(rows(3), rows(4, 5), cached=6)
    assert session.first_kept == 3
    assert session.aux_from(4)[:, 0].tolist() == [4, 5]
    assert [len(part) for part in session.features_upto(5)] == [1, 1]


def test_the_parts_of_a_turn_become_one_and_those_before_stay() -> None:
    session = holding(rows(0, 1), rows(2), cached=3)
    session.compact_features()
    [first] = session.features
    session.features += [rows(3), rows(4), rows(5)]
    session.cached = 6
    session.compact_features()
    session.compact_features()
    assert session.features[0] is first
    assert [part.aux[:, 0].tolist() for part in session.features] == [[0, 1, 2], [3, 4, 5]]


def test_old_states_are_forgotten_in_halves() -> None:
    session = holding(rows(*range(10)), cached=10)
    session.forget_features(4)
    assert session.first_kept == 0  # not worth a copy yet
    session.features.append(rows(10, 11))
    session.cached = 12
    session.forget_features(6)
    assert session.first_kept == 6
    [part] = session.features
    assert part.aux[:, 0].tolist() == list(range(6, 12))
    assert part.aux.untyped_storage().nbytes() == 6 * 6 * 4  # no view of what was forgotten
    session.forget_features(3)
    assert session.first_kept == 6

"""The stop matcher against a naive oracle over the whole text, however it is cut into pieces."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.speculation import StopMatcher


def run(stops, pieces, include_stop=False):
    """All text released, the matched stop, and the longest text ever held back."""
    matcher, shown, seen, most_held = StopMatcher(stops, include_stop), "", "", 0
    for piece in pieces:
        safe, matched = matcher.push(piece)
        shown, seen = shown + safe, seen + piece
        if matched is not None:
            return shown, matched, most_held
        most_held = max(most_held, len(seen) - len(shown))
    return shown + matcher.flush(), None, most_held


def oracle(stops, text, include_stop):
    """Walk the ends; at the first end where stops complete, take the longest."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return text[: end if include_stop else end - len(stop)], stop
    return text, None


letters = st.text(alphabet="abé🙂", max_size=12)


@settings(max_examples=500, deadline=None)
@given(
    stops=st.lists(st.text(alphabet="abé🙂", min_size=1, max_size=5), max_size=4).map(tuple),
    pieces=st.lists(letters, max_size=8),
    include_stop=st.booleans(),
)
def test_any_cut_of_any_text_gives_what_the_oracle_says(stops, pieces, include_stop):
    shown, matched, most_held = run(stops, pieces, include_stop)
    assert (shown, matched) == oracle(stops, "".join(pieces), include_stop)
    assert most_held <= max((len(stop) - 1 for stop in stops), default=0)


@settings(max_examples=200, deadline=None)
@given(stops=st.lists(st.text(alphabet="ab", min_size=1, max_size=4), min_size=1, max_size=3).map(tuple), text=letters)
def test_nothing_is_held_back_that_cannot_become_a_stop(stops, text):
    matcher = StopMatcher(stops)
    shown = ""
    for end, character in enumerate(text, 1):
        safe, matched = matcher.push(character)
        if matched is not None:
            return
        shown += safe
        held = text[len(shown) : end]
        assert any(stop.startswith(held) for stop in stops)
        assert not any(text[:end].endswith(stop[:n]) for stop in stops for n in range(len(held) + 1, len(stop)))


@pytest.mark.parametrize(
    ("stops", "pieces", "shown", "matched"),
    [
        (("###",), ["a#", "#", "#b"], "a", "###"),  # over three pushes
        (("###",), ["a##", "b##"], "a##b##", None),  # false alarms come out
        (("bc", "abcd"), ["xabcd"], "xa", "bc"),  # completes first, though it starts later
        (("bc", "abc"), ["xabc"], "x", "abc"),  # completing together: the one that starts first
        (("aab",), ["aaab"], "a", "aab"),  # a failed start inside another start
        (("\n\n",), ["a\n", "\nb"], "a", "\n\n"),
        ((), ["any", "thing"], "anything", None),
    ],
)
def test_cases(stops, pieces, shown, matched):
    assert run(stops, pieces)[:2] == (shown, matched)


def test_the_stop_is_kept_on_request_but_nothing_behind_it():
    assert run(("END",), ["one E", "ND two"], include_stop=True)[:2] == ("one END", "END")


def test_after_a_match_nothing_comes():
    matcher = StopMatcher(("b",))
    assert matcher.push("abc") == ("a", "b")
    assert matcher.push("ab") == ("", None)
    assert matcher.flush() == ""

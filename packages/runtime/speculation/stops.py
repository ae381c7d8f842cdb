"""Stop strings in a stream of text that arrives in pieces of any size. Knows characters, not tokens.

The stop that completes first wins; of several completing at the same character, the one that starts earliest (the longest).
Text that may still turn out to be the beginning of a stop is held back until it cannot.
"""

from __future__ import annotations


class StopMatcher:
    """Watches one generation's text. After a match it is done: whatever follows is discarded."""

    def __init__(self, stops: tuple[str, ...], include_stop: bool = False) -> None:
        self._stops = tuple(sorted(set(stops), key=len, reverse=True))  # the longest first
        self._include_stop = include_stop
        self._fallbacks = [_fallbacks(stop) for stop in self._stops]
        self._matched = [0] * len(self._stops)  # per stop: how much of it the text so far ends with
        self._held = ""  # seen, not yet released
        self._is_done = False

    def push(self, text: str) -> tuple[str, str | None]:
        """The text that became safe to show, and the stop that ended it, if one did."""
        if self._is_done:
            return "", None
        if not self._stops:
            return text, None
        start = len(self._held)
        self._held += text
        for end, character in enumerate(text, start + 1):
            for index, stop in enumerate(self._stops):
                if self._step(index, character) == len(stop):
                    safe = self._held[: end if self._include_stop else end - len(stop)]
                    self._held, self._is_done = "", True
                    return safe, stop
        num_safe = len(self._held) - max(self._matched)
        safe, self._held = self._held[:num_safe], self._held[num_safe:]
        return safe, None

    def flush(self) -> str:
        """What is still held back, when the text has ended without a stop."""
        rest, self._held = self._held, ""
        return rest

    def _step(self, index: int, character: str) -> int:
        """Knuth-Morris-Pratt: the longest beginning of this stop that the text, with one more character, ends with."""
        stop, fallbacks, matched = self._stops[index], self._fallbacks[index], self._matched[index]
        while matched and stop[matched] != character:
            matched = fallbacks[matched - 1]
        if stop[matched] == character:
            matched += 1
        self._matched[index] = matched
        return matched


def _fallbacks(stop: str) -> list[int]:
    """For each prefix of the stop, the length of the longest shorter prefix that it also ends with."""
    lengths = [0] * len(stop)
    matched = 0
    for end in range(1, len(stop)):
        while matched and stop[end] != stop[matched]:
            matched = lengths[matched - 1]
        if stop[end] == stop[matched]:
            matched += 1
        lengths[end] = matched
    return lengths

"""What a group of sessions is at, and when it tries something else for a few steps, so that a change is noticed."""

from __future__ import annotations

from runtime.speculation.shape import PLAIN, Shape

FIRST_PROBE_GAP, LAST_PROBE_GAP = 32, 512  # steps without drafts between two probes; doubles each time
OTHER_EVERY = 128  # steps with drafts between two looks at another shape


class Habit:
    """Of one group: counts its steps, and has the running probe."""

    def __init__(self) -> None:
        self.shape = PLAIN  # chosen last
        self.is_probing = False
        self._probe = PLAIN
        self._num_left = 0  # steps of the probe
        self._num_off = 0  # steps without drafts since the last probe
        self._num_on = 0
        self._gap = FIRST_PROBE_GAP

    def probe(self) -> Shape | None:
        """The shape of the running probe, for one of its steps."""
        self.is_probing = self._num_left > 0
        self._num_left -= self.is_probing
        return self._probe if self.is_probing else None

    def begin(self, probe: Shape, num_steps: int) -> None:
        self._probe, self._num_left = probe, num_steps

    def is_probe_due(self) -> bool:
        """Called for each step without drafts."""
        self._num_off += 1
        if self._num_off < self._gap:
            return False
        self._num_off, self._gap = 0, min(2 * self._gap, LAST_PROBE_GAP)
        return True

    @property
    def is_settled(self) -> bool:
        return not (self.is_probing or self._num_left)

    def count_drafting(self, num_steps: int) -> int | None:
        """Called for steps with drafts. Where another shape is due for a look: the how manieth look it is."""
        self._num_off = 0
        before, self._num_on = self._num_on, self._num_on + num_steps
        if self._num_on // FIRST_PROBE_GAP > before // FIRST_PROBE_GAP:
            self._gap = max(self._gap // 2, FIRST_PROBE_GAP)
        looks = self._num_on // OTHER_EVERY
        return looks if looks > before // OTHER_EVERY else None

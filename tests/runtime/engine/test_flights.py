"""What is learned of steps that landed."""

from __future__ import annotations

from typing import cast

import pytest

from runtime.engine.flights import Flight, Landed, Use
from runtime.engine.work import Work
from runtime.speculation.accept import Verdicts


def landed(seconds: float, waited_s: float, device_s: float | None, is_alone: bool) -> Landed:
    flight = Flight([], set(), [], depth=3, num_steps=1, began=0.0, has_sampled=False, is_typical=True, is_alone=is_alone)
    return Landed([], flight, seconds, waited_s, device_s)


@pytest.mark.parametrize("device_s", [None, 1.0, 1.5])
def test_a_step_alone_takes_the_host_what_it_did_not_wait(device_s: float | None) -> None:
    assert landed(2.0, 0.5, device_s, is_alone=True).host_s == 1.5


def test_of_a_step_beside_prompts_only_its_own_time_on_the_device_counts() -> None:
    """The device was at work for 2 s, of which 0.9 s for prompts, and the host waited for 0.5: a step that takes 0.5 s less,
    whatever its depth, would let the host wait for nothing."""
    assert landed(2.0, 0.5, 1.1, is_alone=False).host_s == pytest.approx(0.6)
    assert landed(2.0, 1.5, 1.1, is_alone=False).host_s == 0.0
    assert landed(2.0, 0.5, None, is_alone=False).host_s == 1.5, "nobody knows"


def test_where_the_host_hardly_waited_beside_prompts_it_is_what_takes_the_time() -> None:
    """How long the device stood still is not known; that it did is."""
    assert landed(2.0, 0.01, 1.1, is_alone=False).host_s == pytest.approx(1.99)


def test_idle_is_what_was_begun_and_brought_no_token_that_was_taken() -> None:
    """Three sessions for two steps each: one brings 3 + 1 tokens, one 2 + 2, of which its turn takes the first, and of the third
    the turn had ended before."""
    work = cast(Work, None)  # nobody looks at it
    flight = Flight([work] * 3, set(), [], depth=3, num_steps=2, began=0.0, has_sampled=False, is_typical=True, is_alone=True)
    verdicts = [Verdicts([1, 2, 3, 4], (3, 1)), Verdicts([5, 6, 7, 8], (2, 2))]
    use = Use()
    use.add(Landed([(work, work, verdict) for verdict in verdicts], flight, 1.0, 0.0, 1.0))
    use.num_taken = 4 + 1
    assert use.num_idle == pytest.approx(2 + 3 / 2), "at two tokens a step"

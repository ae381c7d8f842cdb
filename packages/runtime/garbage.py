"""Python's garbage collector, out of the way of a loop that must not stand still. Knows no engine and no program."""

from __future__ import annotations

import gc
import threading
import time

NEW_OBJECTS = (
    100_000  # that live on, before the collector looks at them: with dozens of answers at a time it would do little else
)
YOUNG_EVERY_S, TIMES_UNTIL_ALL = 1.0, 10  # but it looks by the clock: a few objects may hold many bytes, as a failure's frames do

_clock: threading.Thread | None = None


def set_apart_what_is_loaded() -> None:
    """Keep what has been loaded, half a million objects, out of the collector's sight; at what is new it looks by the clock.
    A full collection that looks at them all stops all threads for a quarter of a second.

    Of what is there now, cycles are never freed; a drafter is none. For the whole process, for good.
    """
    global _clock
    gc.collect()
    gc.freeze()
    gc.set_threshold(NEW_OBJECTS, *gc.get_threshold()[1:])
    if _clock is None:
        _clock = threading.Thread(target=_collect_by_the_clock, name="slipstream-garbage", daemon=True)
        _clock.start()


def _collect_by_the_clock() -> None:
    number = 0
    while True:
        time.sleep(YOUNG_EVERY_S)
        number += 1
        gc.collect(2 if number % TIMES_UNTIL_ALL == 0 else 1)

"""Python's garbage collector, out of the way of a loop that must not stand still. Knows no engine and no program."""

from __future__ import annotations

import gc

NEW_OBJECTS = (
    100_000  # that live on, before the collector looks at them: with dozens of answers at a time it would do little else
)


def set_apart_what_is_loaded() -> None:
    """Keep what has been loaded, half a million objects, out of the collector's sight, and let it look seldom at what is new. A
    full collection that looks at them all stops all threads for a quarter of a second.

    Of what is there now, cycles are never freed; a drafter is none. For the whole process, for good.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(NEW_OBJECTS, *gc.get_threshold()[1:])

"""Which thread computes with how many cores. Knows OpenMP, on which torch runs its parallel operations on a CPU; no model.

Each thread that makes torch compute in parallel gets a team of OpenMP threads, which stays as long as the thread does. While
more team members are alive than there are cores, all teams wait for their next operation asleep, and a decoding step, which is
some hundred short operations, takes half as long again. So one thread computes in parallel, the engine's. Whoever did so before
gives its team back, and the other threads of a server have one core each.
"""

from __future__ import annotations

import ctypes

SOFT = 1  # omp_pause_soft: keep what was set, free what was taken


def give_back_team() -> None:
    """End the calling thread's team, if it has one and OpenMP can; its next parallel operation makes a new one, in 0.1 ms.

    Not from within a parallel operation.
    """
    try:
        pause = ctypes.CDLL(None).omp_pause_resource_all
    except (AttributeError, OSError, TypeError):  # older than OpenMP 5, or not in sight: nothing is lost but time
        return
    pause(SOFT)

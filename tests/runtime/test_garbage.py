"""The garbage collector's settings, in a process of their own: they are for good."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import gc
from runtime.garbage import NEW_OBJECTS, set_apart_what_is_loaded

class Node:
    def __init__(self):
        self.me = self

gone = Node()
seen = []
gc.callbacks.append(lambda phase, info: seen.append(phase))
del gone
set_apart_what_is_loaded()
assert gc.get_freeze_count() > 1000, gc.get_freeze_count()
assert not [one for one in gc.get_objects() if isinstance(one, Node)], "what was unreachable is not kept"
assert gc.get_threshold()[0] == NEW_OBJECTS and gc.isenabled()
seen.clear()
kept = [[] for _ in range(NEW_OBJECTS // 2)]
assert not seen, "it looks seldom"
kept += [[] for _ in range(NEW_OBJECTS)]
assert seen, "but it does look"
"""


def test_what_is_loaded_is_set_apart_and_what_is_new_is_looked_at_seldom() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


BY_THE_CLOCK = """
import gc, time, weakref
from runtime import garbage

garbage.YOUNG_EVERY_S = 0.1
garbage.set_apart_what_is_loaded()
garbage.set_apart_what_is_loaded()

class Request:
    body = b""

def fail(request):
    try:
        raise ValueError
    except ValueError as error:
        request.error = error  # whose traceback has this frame, and that the request

request = Request()
gone = weakref.ref(request)
fail(request)
del request
assert gone() is not None
deadline = time.monotonic() + 20
while gone() is not None and time.monotonic() < deadline:
    time.sleep(0.05)
assert gone() is None, "few objects, and yet they go"
"""


def test_what_a_failure_holds_goes_by_the_clock() -> None:
    done = subprocess.run([sys.executable, "-c", BY_THE_CLOCK], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr

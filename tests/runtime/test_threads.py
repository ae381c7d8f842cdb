"""Whose team computes: counted as the threads that the process has."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

CODE = """
import os, threading
import torch
from runtime.threads import give_back_team

def count():
    return len(os.listdir("/proc/self/task"))

torch.set_num_threads(3)
before, x = count(), torch.ones(1000, 1000)
x + x
assert count() == before + 2, (before, count())
give_back_team()
assert count() == before, (before, count())
give_back_team()
assert float((x + x).sum()) == 2e6 and torch.get_num_threads() == 3
assert count() == before + 2, (before, count())
"""


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="threads are counted in /proc")
def test_a_team_that_is_given_back_is_gone_until_it_is_needed_again() -> None:
    ran = subprocess.run([sys.executable, "-W", "error", "-c", CODE], capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 0, ran.stderr

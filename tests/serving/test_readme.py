"""The README's examples of our own clients run as they stand, against a server with the tiny model."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import Running, wait_for

README = (Path(__file__).resolve().parents[2] / "README.md").read_text()
EXAMPLES = [code for code in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if "runtime.rpc" in code]


def test_both_clients_have_an_example() -> None:
    assert ["AsyncRuntimeClient" in code for code in EXAMPLES] == [False, True]


@pytest.mark.parametrize("code", EXAMPLES)
def test_an_example_runs(running: Running, code: str) -> None:
    assert code.count("127.0.0.1:50051") == 1
    here = code.replace("127.0.0.1:50051", running.ready.grpc)
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", here],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout
    wait_for(lambda: running.server.admission.num_running == 0)
    assert running.parts.engine.stats().generation_tokens > 0

"""The examples of README and docs/clients.md of our own clients run as they stand, against a server with the tiny model."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import Running, wait_for

ROOT = Path(__file__).resolve().parents[2]
TEXT = "".join((ROOT / name).read_text() for name in ("README.md", "docs/clients.md"))
BLOCKS = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
EXAMPLES = [code for code in BLOCKS if "runtime.rpc" in code]
[STRUCTURED] = [code for code in BLOCKS if "response_format" in code]


def test_both_clients_have_an_example() -> None:
    assert ["AsyncRuntimeClient" in code for code in EXAMPLES] == [False, True]


@pytest.mark.parametrize("code", EXAMPLES)
def test_an_example_runs(running: Running, code: str) -> None:
    assert code.count("127.0.0.1:50051") == 1
    assert output_of(code.replace("127.0.0.1:50051", running.ready.grpc))
    wait_for(lambda: running.server.admission.num_running == 0)
    assert running.parts.engine.stats().generation_tokens > 0


def test_the_example_of_schemas_and_tools_runs(running: Running) -> None:
    assert STRUCTURED.count("http://127.0.0.1:8000") == 1
    here = STRUCTURED.replace("http://127.0.0.1:8000", running.ready.http).replace("smollm2-135m", "tiny")
    parsed, called, _ = output_of(here).split("\n", 2)
    assert re.fullmatch("city='(Paris|Rome)' day='(today|tomorrow)'", parsed)
    assert re.fullmatch("Weather city='(Paris|Rome)' day='(today|tomorrow)'", called)


def output_of(code: str) -> str:
    command, env = [sys.executable, "-W", "error", "-c", code], os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=env)
    assert done.returncode == 0, done.stderr
    return done.stdout

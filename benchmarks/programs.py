"""Our two programs as child processes: start with overrides, logs to a file, wait for the ready line, stop with SIGTERM."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from pathlib import Path

READY = re.compile(r"ready http=(\S+) grpc=(\S+)")


class ProgramFailed(RuntimeError):
    """A program ended, or did not get ready; the message has the end of its log."""


class Program:
    def __init__(self, module: str, overrides: list[str], log: Path) -> None:
        self.name = module
        self.log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("w") as out:
            command = [sys.executable, "-m", module, *overrides]
            self._process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def grpc(self) -> str:
        """The address of a server's gRPC surface, once it is ready."""
        found = READY.search(self.log.read_text())
        assert found is not None, f"{self.name} is not ready"
        return found.group(2)

    def wait_ready(self, timeout_s: float) -> str:
        """The URL of a server's HTTP surface, as soon as it says so."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            found = READY.search(self.log.read_text())
            if found:
                return found.group(1)
            self.check()
            time.sleep(0.2)
        raise ProgramFailed(f"{self.name} was not ready after {timeout_s:g} s:\n{self._tail()}")

    def check(self) -> None:
        """Raise if it has ended."""
        if self._process.poll() is not None:
            raise ProgramFailed(f"{self.name} ended with code {self._process.returncode}:\n{self._tail()}")

    def stop(self, timeout_s: float = 60.0) -> None:
        """SIGTERM, then patience, then SIGKILL."""
        if self._process.poll() is not None:
            return
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _tail(self, lines: int = 20) -> str:
        return "\n".join(self.log.read_text().splitlines()[-lines:])

"""Processes to be killed: the two programs and a producer of rows.

Most are forked from one process that has imported everything: a server or trainer takes seconds to import torch; forked, each is
there at once, and hundreds of deaths fit into minutes. The mother runs no thread, so the forks are clean. Others start cold,
through the door that users take, imports and all. Knows nothing of what is measured.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

import serving.app
import training.app
from runtime.backends import load_target
from runtime.config import BackendConfig, FeaturesConfig, ModelConfig, SessionsConfig, SpeculationConfig
from runtime.drafters.ngram import NgramDrafter
from runtime.engine.local import LocalEngine
from runtime.features import FeatureStore, SampleMeta, SampleRef, open_feature_plane
from runtime.models import Tokenizer, resolve
from runtime.types import Done, Failed, SamplingParams
from serving.config import ServingConfig
from training.config import TrainingConfig
from training.interleaved.producer import TurnBox, row_of

FULL = 64  # pending rows at which the producer waits

_MOTHER = """
import json, os, signal, sys
import torch
import fault_processes

torch.set_num_threads(1)
fault_processes.load_everything()
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
signal.signal(signal.SIGINT, signal.SIG_IGN)
print(flush=True)
for line in sys.stdin:
    program, settings, log = json.loads(line)
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()
        sys.stdin.close()
        out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(out, 1)
        os.dup2(out, 2)
        os._exit(fault_processes.run(program, settings))
    print(pid, flush=True)
"""


_PRODUCER = """
import sys
from pathlib import Path
import fault_processes

sys.exit(fault_processes.produce(*map(Path, sys.argv[1:])))
"""


class Mother:
    """Starts children."""

    def __init__(self) -> None:
        self._environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path]),
        }
        self._process = subprocess.Popen(
            [sys.executable, "-c", _MOTHER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=self._environment
        )
        self._cold: dict[int, subprocess.Popen[bytes]] = {}
        self._line()

    def start_cold(self, program: str, settings: dict[str, Any], log: Path) -> int:
        """A child that imports everything itself, as `python -m serving` and `python -m training` do; its process id."""
        if program == "producer":
            command = ["-c", _PRODUCER, settings["features"], settings["said"]]
        else:
            command = ["-m", program, *_overrides(settings)]
        with log.open("ab") as output:
            child = subprocess.Popen(
                [sys.executable, *command], stdout=output, stderr=output, env=self._environment, start_new_session=True
            )
        self._cold[child.pid] = child
        return child.pid

    def is_alive(self, pid: int) -> bool:
        if pid in self._cold:
            return self._cold[pid].poll() is None
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return False
        return True

    def start(self, program: str, settings: dict[str, Any], log: Path) -> int:
        """A child's process id."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([program, settings, str(log)]) + "\n")
        self._process.stdin.flush()
        return int(self._line())

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the mother of all processes died; its words are above"
        return line

    def close(self) -> None:
        self._process.communicate()


def _overrides(settings: dict[str, Any], prefix: str = "") -> list[str]:
    """As the command line takes them."""
    found: list[str] = []
    for name, value in settings.items():
        if isinstance(value, dict):
            found += _overrides(value, f"{prefix}{name}.")
        else:
            found.append(f"{prefix}{name}={'null' if value is None else value}")
    return found


class Victim:
    """A program that is killed and started again, and the sign by which it is seen to work."""

    def __init__(
        self, name: str, mother: Mother, program: str, settings: dict[str, Any], log: Path, progress: Callable[[], int]
    ) -> None:
        """progress: a count that grows while it works."""
        self.name = name
        self.log = log
        self.num_kills = 0
        self.resumes_s: list[float] = []  # of those that were forked
        self.cold_resumes_s: list[float] = []  # imports and all
        self._mother = mother
        self._program = program
        self.settings = settings
        self._progress = progress
        self._pid: int | None = None
        self._began_at = 0.0
        self._is_cold = False
        self._known = 0

    @property
    def is_started(self) -> bool:
        return self._pid is not None

    def start(self, *, is_cold: bool = False, **settings: Any) -> None:
        self._known = self._progress()
        self._began_at = time.monotonic()
        self._is_cold = is_cold
        begin = self._mother.start_cold if is_cold else self._mother.start
        self._pid = begin(self._program, self.settings | settings, self.log)

    def kill(self) -> None:
        self.num_kills += 1
        self.end(signal.SIGKILL)

    def end(self, number: signal.Signals, within_s: float = 60.0) -> None:
        """Send a signal, and wait until the process is gone."""
        assert self._pid is not None
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, number)
        self.wait_gone(within_s)

    def wait_gone(self, within_s: float) -> None:
        assert self._pid is not None
        deadline = time.monotonic() + within_s
        while self._mother.is_alive(self._pid):
            assert time.monotonic() < deadline, f"{self.name} is still there after {within_s:g} s; see {self.log}"
            time.sleep(0.002)
        self._pid = None

    def wait_at_work(self, within_s: float) -> None:
        """From its start to its first sign of work."""
        assert self._pid is not None
        deadline = self._began_at + within_s
        while self._progress() <= self._known:
            assert time.monotonic() < deadline, f"{self.name} did nothing for {within_s:g} s; see {self.log}"
            assert self._mother.is_alive(self._pid), f"{self.name} ended by itself; see {self.log}"
            time.sleep(0.005)

    def resumed(self, within_s: float) -> None:
        """`wait_at_work`, noting how long that took."""
        self.wait_at_work(within_s)
        (self.cold_resumes_s if self._is_cold else self.resumes_s).append(time.monotonic() - self._began_at)


def lines_with(path: Path, word: str) -> Callable[[], int]:
    """How many lines of a growing file hold the word; each is read once."""
    place, count = 0, 0

    def look() -> int:
        nonlocal place, count
        if path.exists():
            with path.open("rb") as file:
                file.seek(place)
                data = file.read()
            data = data[: data.rfind(b"\n") + 1]
            place += len(data)
            count += data.count(word.encode())
        return count

    return look


# --- in the mother and in the child ---


def load_everything() -> None:
    """What libraries import only when they are first used, a child should not have to."""
    resolved = resolve("tiny")
    Tokenizer.load(resolved.path)
    load_target(BackendConfig(num_threads=1), ModelConfig(name="tiny", device="cpu"), resolved)


def run(program: str, settings: dict[str, Any]) -> int:
    if program == "producer":
        return produce(Path(settings["features"]), Path(settings["said"]))
    schema: Any = {"serving": ServingConfig, "training": TrainingConfig}[program]
    config: Any = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(schema), settings))
    return serving.app.run(config) if program == "serving" else training.app.run(config)


def produce(features: Path, said: Path) -> int:
    """Answers prompts with the tiny model and commits each answer as a row, for ever; goes on where the ledger says."""
    resolved = resolve("tiny")
    target = load_target(BackendConfig(num_threads=1), ModelConfig(name="tiny", device="cpu"), resolved)
    store, ledger = open_feature_plane(features, FeaturesConfig())
    turns, tokenizer = TurnBox(), Tokenizer.load(resolved.path)
    engine = LocalEngine(target, NgramDrafter(), tokenizer, SpeculationConfig(), SessionsConfig(), turns)
    engine.start()
    with said.open("a") as file:
        for number in itertools.count():
            sample_id = f"produced-{number}"
            if not ledger.known([sample_id]):
                ledger.commit(_answer(engine, turns, store, sample_id, number), "train")
            file.write(f"{sample_id}\n")
            file.flush()
            while ledger.status()["pending"] > FULL:
                time.sleep(0.02)
    return 0


def _answer(engine: LocalEngine, turns: TurnBox, store: FeatureStore, sample_id: str, number: int) -> SampleRef:
    session_id = engine.create_session().session_id
    engine.append(session_id, engine.tokenizer.encode(f"Question {number}: what comes next?"))
    ended = threading.Event()
    params = SamplingParams(max_tokens=16, seed=number, ignore_eos=True)
    engine.generate(session_id, params, on_event=lambda event: ended.set() if isinstance(event, Done | Failed) else None)
    ended.wait()
    engine.close_session(session_id)
    turn = turns.fetch(session_id)
    row = None if turn is None else row_of(turn)
    assert row is not None, "an answer of 16 tokens makes a row"
    meta = SampleMeta(
        sample_id=sample_id,
        run_id="producer",
        source=f"prompt/{number}",
        target_fingerprint=engine.info.fingerprint,
        aux_layer_ids=engine.info.aux_layer_ids,
    )
    return store.put(meta, row)

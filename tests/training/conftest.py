"""Small drafters, rows of random features, and a whole state directory of rows that a drafter can learn."""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from runtime.config import FeaturesConfig, ModelConfig
from runtime.eagle3 import DraftVocabulary, Eagle3Config, Eagle3Model
from runtime.features.plane import open_feature_plane
from runtime.features.refs import SampleMeta
from runtime.features.row import FeatureRow
from runtime.hidden_states import HiddenStates
from runtime.models import ResolvedModel, make_tiny, resolve
from training.config import DataConfig, TrainerConfig, TrainingConfig
from training.data.batches import TrainingRow
from training.judging.config import GateConfig
from training.learning.target_weights import TargetWeights, load_target_weights

V, VD, HT = 40, 24, 16
CYCLE = 47


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def make_model() -> Callable[..., Eagle3Model]:
    """A drafter with random weights whose vocabulary is every token but the first V - Vd."""

    def make(seed: int = 0, dtype: torch.dtype = torch.float64, **config: object) -> Eagle3Model:
        generator = torch.Generator().manual_seed(seed)
        values = {
            "hidden_size": HT,
            "intermediate_size": 20,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "vocab_size": V,
            "draft_vocab_size": VD,
            "max_position_embeddings": 512,
        }
        embedding = torch.randn(V, HT, generator=generator, dtype=dtype)
        model = Eagle3Model(Eagle3Config(**(values | config)), DraftVocabulary(torch.arange(V - VD, V), V), embedding)
        for parameter in model.parameters():
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * parameter.shape[-1] ** -0.5)
        return model.to(dtype)

    return make


@pytest.fixture
def make_row() -> Callable[..., TrainingRow]:
    """A row of prompt and generated tokens: make_row("pppggg") or with several turns, "ppggppgg"."""

    def make(pattern: str, seed: int = 0, sample_id: str | None = None, low: int = 0) -> TrainingRow:
        generator = torch.Generator().manual_seed(1000 + seed)
        n = len(pattern) - 1
        features = FeatureRow(
            token_ids=torch.randint(low, V, (n + 1,), generator=generator),
            generated=torch.tensor([letter == "g" for letter in pattern]),
            hidden=HiddenStates(
                torch.randn(n, 3 * HT, generator=generator).bfloat16(), torch.randn(n, HT, generator=generator).bfloat16()
            ),
        )
        return TrainingRow(sample_id or f"row-{seed}", features)

    return make


# --- a whole state directory ---


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> ResolvedModel:
    root = tmp_path_factory.mktemp("models")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLIPSTREAM_HOME", str(root / "home"))
        return resolve(str(make_tiny(root / "tiny", hidden_size=32, num_layers=6)))


@pytest.fixture(scope="session")
def target(tiny: ResolvedModel) -> TargetWeights:
    return load_target_weights(tiny, torch.device("cpu"))


class State:
    """A state directory: its feature plane, and rows put into it.

    Text goes round a cycle of tokens, so a drafter can learn it, and each last state is that of a target sure of the token
    that follows.
    """

    def __init__(self, root: Path, model: ResolvedModel, target: TargetWeights) -> None:
        self.root = root
        self.model = model
        self.target = target
        self.store, self.ledger = open_feature_plane(root / "features", FeaturesConfig(budget_mib=1024))
        generator = torch.Generator().manual_seed(99)
        self.cycle = torch.randperm(target.vocab_size, generator=generator)[:CYCLE].tolist()
        self.channels = torch.randn(target.vocab_size, 3 * target.hidden_size, generator=generator)
        self.channels *= torch.logspace(-2, 3, 3 * target.hidden_size)  # as uneven as real ones

    def row(self, seed: int, num_prompt: int = 6, num_generated: int = 14, salt: int = 0) -> FeatureRow:
        """salt: another rule, so another kind of traffic."""
        start, stride = seed * 7, 2 * salt + 1
        token_ids = torch.tensor([self.cycle[(start + stride * i) % CYCLE] for i in range(num_prompt + num_generated)])
        following = token_ids[1:]
        directions = torch.nn.functional.normalize(self.target.lm_head.float(), dim=-1)
        return FeatureRow(
            token_ids=token_ids,
            generated=torch.arange(len(token_ids)) >= num_prompt,
            hidden=HiddenStates(self.channels[following], 400 * directions[following]),
        )

    def meta(self, sample_id: str, **changes: object) -> SampleMeta:
        values = {
            "sample_id": sample_id,
            "run_id": "server",
            "source": "session/test",
            "target_fingerprint": self.target.fingerprint,
            "aux_layer_ids": self.target.aux_layer_ids,
        }
        return SampleMeta(**(values | changes))

    def add(self, seeds: range, split: str = "train", **shape: int) -> list[str]:
        names = [f"{split}-{seed}" for seed in seeds]
        for seed, name in zip(seeds, names, strict=True):
            self.ledger.commit(self.store.put(self.meta(name), self.row(seed, **shape)), split)
        return names

    def rows(self, seeds: range, **shape: int) -> list[TrainingRow]:
        return [TrainingRow(f"row-{seed}", self.row(seed, **shape)) for seed in seeds]

    def config(self, **changes: object) -> TrainingConfig:
        """A quick run; changes are dotted settings with '__' for the dot."""
        config = TrainingConfig(
            model=ModelConfig(name=str(self.model.path)),
            trainer=TrainerConfig(
                init="scratch",
                draft_vocab_size=128,
                vocabulary_tokens=40,
                num_threads=1,
                niceness=0,
                ttt_steps=5,
                warmup_steps=5,
                checkpoint_every_steps=4,
                evaluate_every_steps=1000,
                settle_s=0.0,
                gate=GateConfig(min_heldout_rows=4),
            ),
            data=DataConfig(batch_rows=4, passes=3, fill_wait_s=0.2, poll_s=0.01),
            state_dir=str(self.root),
        )
        for name, value in changes.items():
            *path, last = name.split("__")
            part: object = config
            for step in path:
                part = getattr(part, step)
            assert hasattr(part, last), name
            setattr(part, last, value)
        return config

    def events(self, kind: str, run_id: str = "default") -> list[dict]:
        path = self.root / "training" / run_id / "metrics.jsonl"
        return [entry for entry in map(json.loads, path.read_text().splitlines()) if entry["event"] == kind]


@pytest.fixture
def state(tmp_path: Path, tiny: ResolvedModel, target: TargetWeights, monkeypatch: pytest.MonkeyPatch) -> State:
    monkeypatch.setenv("SLIPSTREAM_HOME", str(tiny.path.parent / "home"))
    return State(tmp_path / "state", tiny, target)


# --- processes that are really killed ---

# Imports once, then forks a real trainer process for each configuration of a line that it reads: what is killed is a process.
NURSERY = """
import faulthandler, json, os, sys
import torch
torch.set_num_threads(1)
from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf
from training.app import run
from training.config import TrainingConfig

def begin(work):
    if isinstance(work, str):
        exec(work, {})
        return 0
    return run(OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(TrainingConfig), work)))

for line in sys.stdin:
    pids = []
    for work, environment in json.loads(line):
        pids.append(os.fork())
        if pids[-1] == 0:
            os.environ.update(environment)
            faulthandler.dump_traceback_later(120, exit=True)  # one that hangs says where, and fails its test
            os._exit(begin(work))
    print(json.dumps(pids), flush=True)
    print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]), flush=True)
"""


class Nursery:
    def __init__(self, process: subprocess.Popen[str], said: Path) -> None:
        self._process = process
        self.said = said

    def start(self, config: object) -> int:
        """Begin a trainer; its process id."""
        return self._start([(config, {})])[0]

    def start_ranks(self, *works: object) -> list[int]:
        """Begin as many processes as there are works, that find each other as torchrun lets them; their ids. A work is settings
        of a trainer, or Python code."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            size = str(len(works))
            meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": size}
        ranks = [meeting | {"RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": size} for rank in range(len(works))]
        return self._start(list(zip(works, ranks, strict=True)))

    def _start(self, processes: list[tuple[object, dict[str, str]]]) -> list[int]:
        line = [
            [work if isinstance(work, str) else dataclasses.asdict(work), environment]  # type: ignore[call-overload]
            for work, environment in processes
        ]
        self._process.stdin.write(json.dumps(line, default=lambda value: value.value) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def result(self) -> int:
        """Its exit code, once it ended; negative: the signal."""
        return self.results()[0]

    def results(self) -> list[int]:
        """Of all ranks."""
        return json.loads(self._process.stdout.readline())


@pytest.fixture(scope="session")
def nursery(tiny, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    said = tmp_path_factory.mktemp("nursery") / "stderr"
    environment = {**os.environ, "SLIPSTREAM_HOME": str(tiny.path.parent / "home"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", NURSERY]
    with (
        said.open("w") as stderr,
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, text=True, env=environment
        ) as process,
    ):
        yield Nursery(process, said)
        process.stdin.close()

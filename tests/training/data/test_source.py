"""A trainer and the server whose rows it takes, each with a state directory of its own: `source=grpc://HOST:PORT`."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import pytest
import trustme

from runtime.eagle3 import version_id
from runtime.errors import ConfigError, DrafterRejected, EngineUnavailable
from runtime.registry import Origin, Registry, VersionState
from runtime.rpc.drafters_client import DrafterClient
from training.app import run
from training.config import Mode, RemoteConfig, TrainingConfig
from training.data.source import ServerVersions
from training.judging.config import GateConfig
from training.judging.gate import NGRAM, Baseline, Gate
from training.learning.start import from_scratch, row_check

READY = re.compile(r"ready https?=\S+ grpc=127\.0\.0\.1:(\d+)")
KEY = "the-key-of-a-trainer"
MODEST = ["trainer.num_threads=1", "trainer.niceness=0"]  # other tests run beside it


class ServerProcess:
    """A serving program over the rows of a state directory."""

    def __init__(self, state, *settings: str, port: int = 0) -> None:
        ports = ["server.http_port=0", f"server.grpc_port={port}"]
        places = [f"model.name={state.model.path}", f"state_dir={state.root}", *ports]
        command = [sys.executable, "-m", "serving", *places, "backend.num_threads=1", "registry.poll_s=0.05", *settings]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self._said: list[str] = []
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        self._readers = [
            threading.Thread(target=self._said.extend, args=(self.process.stderr,), daemon=True),
        ]
        for reader in self._readers:
            reader.start()
        self.port = self._wait_ready(self.process.stdout)

    def _wait_ready(self, stdout: IO[str]) -> int:
        for line in stdout:
            if found := READY.search(line):
                return int(found[1])
        self._readers[0].join()
        raise AssertionError("".join(self._said))

    @property
    def source(self) -> str:
        return f"grpc://127.0.0.1:{self.port}"

    def end(self, number: signal.Signals) -> None:
        self.process.send_signal(number)
        self.process.wait(30)


@pytest.fixture
def serve(state) -> Iterator[Callable[..., ServerProcess]]:
    servers: list[ServerProcess] = []

    def make(*settings: str, port: int = 0) -> ServerProcess:
        servers.append(ServerProcess(state, *settings, port=port))
        return servers[-1]

    yield make
    for server in servers:
        if server.process.poll() is None:
            server.end(signal.SIGTERM)
        for stream in (server.process.stdout, server.process.stderr):
            assert stream is not None
            stream.close()


def elsewhere(state, **changes: object):
    """A run on another machine, so to say: a state directory of its own."""
    return state.config(state_dir=str(state.root.parent / "elsewhere"), data__lease_timeout_s=600.0, **changes)


def test_it_learns_from_a_server_and_stages_what_is_better_there(state, serve, tmp_path: Path) -> None:
    """With a key and over TLS, from its first row to a version that the server serves."""
    names = state.add(range(24))
    state.add(range(200, 208), split="heldout")
    keys = tmp_path / "keys.json"
    keys.write_text(json.dumps([{"name": "trainer", "key": KEY, "admin": True}]))
    (tmp_path / "key").write_text(f"{KEY}\n")
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(tmp_path / "server.pem")
    tls = [f"tls.{name}={tmp_path / 'server.pem'}" for name in ("certificate", "private_key")]
    server = serve(f"auth.keys_file={keys}", *tls, "drafter=ngram")
    settings = {
        "source": server.source.replace("grpc://", "grpcs://"),
        "remote": RemoteConfig(api_key_file=str(tmp_path / "key"), ca=str(tmp_path / "ca.pem")),
        "data__passes": 12,
        "trainer__learning_rate": 3e-3,
        "trainer__idle_timeout_s": 1.0,
        "trainer__settle_s": 20.0,
    }
    assert run(elsewhere(state, **settings)) == 0
    assert state.ledger.consumption("default") == dict.fromkeys(names, 1)
    assert state.ledger.status()["leased"] == 0
    there = state.root.parent / "elsewhere"
    assert not (there / "features").exists()
    assert not (state.root / "training").exists()
    path = Path(state.ledger.latest_checkpoint("default").path)
    assert path.parent.parent == there / "training" / "default"
    [published] = Registry(state.root / "registry").versions()
    assert published.state is VersionState.ACTIVE, published.reason
    assert published.manifest is not None
    assert published.manifest.metrics["acceptance_length"] > 1.5
    assert Registry(there / "registry").get(published.version).path.is_dir()
    events = [json.loads(line) for line in (there / "training" / "default" / "metrics.jsonl").read_text().splitlines()]
    told = [event["state"] for event in events if event["event"] == "version"]
    assert told[-1] == "active", "the trainer hears what the server decided"

    later = state.add(range(30, 34))
    assert run(elsewhere(state, **settings)) == 0
    assert state.ledger.consumption("default") == dict.fromkeys(names + later, 1)


def test_what_serves_is_fetched_to_be_compared_with(state, serve, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A version that somebody else brought to the server is the baseline here."""
    caplog.set_level("INFO")
    server = serve("drafter=ngram")
    drafter, other = tmp_path / "drafter", tmp_path / "other"
    for seed, directory in enumerate((drafter, other)):
        from_scratch(state.target, state.config(trainer__seed=seed).trainer, state.rows(range(8))).export(directory)
    with DrafterClient(f"127.0.0.1:{server.port}") as client:
        here = Registry(tmp_path / "here")
        versions = ServerVersions(here, client, state.target, patience_s=10.0, address="here:1")
        assert versions.active() is None, "n-gram lookup serves"
        version = client.upload(drafter, Origin(step=7, metrics={"acceptance_length": 2.5})).version
        client.activate(version)
        assert versions.active() == version == version_id(versions.path(version))
        manifest = here.get(version).manifest
        assert manifest is not None
        assert (manifest.step, manifest.metrics["acceptance_length"]) == (7, 2.5)
        assert manifest.target_fingerprint == state.target.fingerprint
        gate = Gate(
            GateConfig(),
            state.store,
            state.ledger,
            versions,
            check=row_check(state.target),
            embedding=state.target.embedding,
            lm_head=state.target.lm_head,
            target_fingerprint=state.target.fingerprint,
            start=Baseline(NGRAM, None),
            seed=0,
        )
        assert gate.baseline() == Baseline(version, here.path(version))

        unread = client.upload(other).version
        client.activate(unread)
        (state.root / "registry" / "versions" / unread / "model.safetensors").write_bytes(b"nothing")
        for _ in range(2):
            assert versions.active() is None
        assert gate.baseline() == Baseline(NGRAM, None), "where the run began"
        assert len([record for record in caplog.records if "cannot be fetched" in record.getMessage()]) == 1
        assert not list((tmp_path / "here").glob(".tmp-*"))


def test_a_run_begins_with_a_version_that_the_server_has(state, serve, tmp_path: Path) -> None:
    state.add(range(8))
    server = serve("drafter=ngram")
    made = from_scratch(state.target, state.config().trainer, state.rows(range(8)))
    made.export(tmp_path / "drafter")
    there = state.root.parent / "elsewhere"
    settings = {"source": server.source, "trainer__max_steps": 1}
    with pytest.raises(DrafterRejected, match=rf"no version 0{{16}} in {there}/registry or the server {server.source}; name one"):
        run(elsewhere(state, **settings, trainer__init="0" * 16))
    with pytest.raises(ConfigError, match=rf"'active', and no version of .*registry or the server {server.source} is active"):
        run(elsewhere(state, **settings, trainer__init="active"))
    assert not (there / "training").exists()
    with DrafterClient(f"127.0.0.1:{server.port}") as client:
        version = client.upload(tmp_path / "drafter", Origin(step=7, target_fingerprint=state.target.fingerprint)).version
        other = client.upload(tmp_path / "drafter", Origin(step=7, target_fingerprint="another"))
        assert other.version == version, "for another target now"
        with pytest.raises(ConfigError, match=f"Version {version} was trained for target another"):
            run(elsewhere(state, **settings, trainer__init=version))
        client.upload(tmp_path / "drafter", Origin(step=7, target_fingerprint=state.target.fingerprint))
        shutil.rmtree(there / "registry")
        assert run(elsewhere(state, **settings, trainer__init=version)) == 0
        events = [json.loads(line) for line in (there / "training" / "default" / "metrics.jsonl").read_text().splitlines()]
        assert f"from drafter {version} ({there}" in events[0]["how"]
        mine = Registry(there / "registry")
        assert (mine.get(version).manifest.step, mine.active()) == (7, None)
        versions = ServerVersions(mine, client, state.target, patience_s=10.0, address="here:1")
        assert versions.get(version).state is client.get(version).state
        (mine.path(version) / "manifest.json").write_text("{")
        assert mine.get(version).manifest is None
        assert versions.get(version).manifest == mine.get(version).manifest is not None, "fetched again"
        shutil.rmtree(state.root / "registry" / "versions" / version)
        gone = versions.get(version)
        assert (gone.state, gone.reason) == (VersionState.REJECTED, "UNKNOWN_VERSION: the server does not have it")


def test_two_trainers_of_one_run_share_the_rows(state, serve) -> None:
    names: list[str] = []
    server = serve()
    settings = ["trainer=scratch", "trainer.vocabulary_tokens=40", "data.batch_rows=2", "data.passes=1", "data.fill_wait_s=0.1"]
    ends = ["trainer.idle_timeout_s=2", "trainer.checkpoint_every_steps=2"]
    places = [*MODEST, f"model.name={state.model.path}", f"source={server.source}"]
    command = [sys.executable, "-m", "training", *places, *settings, *ends]
    trainers = [
        subprocess.Popen(
            [*command, f"trainer.worker={n}", f"state_dir={state.root.parent / f'machine{n}'}"],
            stderr=subprocess.PIPE,
            text=True,
        )
        for n in range(2)
    ]
    deadline = time.monotonic() + 120
    while not all(steps(state.root.parent / f"machine{n}", f"default@{n}") for n in range(2)):  # rows keep coming until both work
        assert time.monotonic() < deadline
        if state.ledger.status()["pending"] < 4:
            names += state.add(range(len(names), len(names) + 4))
        time.sleep(0.05)
    for trainer in trainers:
        _, said = trainer.communicate(timeout=120)
        assert trainer.returncode == 0, said
    shares = [state.ledger.consumption(f"default@{n}") for n in range(2)]
    assert shares[0] | shares[1] == dict.fromkeys(names, 1)
    assert not shares[0].keys() & shares[1].keys()
    assert all(shares), "both got some"


def steps(state_dir: Path, run: str) -> int:
    metrics = state_dir / "training" / run / "metrics.jsonl"
    return metrics.read_text().count('"event": "step"') if metrics.exists() else 0


def test_processes_of_one_run_take_the_rows_of_a_server_together(state, serve, nursery) -> None:
    """Gradients are exchanged, so there is one checkpoint; the rows of all of them are in it, once."""
    names = state.add(range(16))
    server = serve("drafter=ngram")
    quick = {"source": server.source, "data__batch_rows": 2, "data__passes": 2, "trainer__checkpoint_every_steps": 2}
    config = elsewhere(state, **quick, trainer__idle_timeout_s=1.0)
    nursery.start_ranks(config, config)
    assert nursery.results() == [0, 0], nursery.said.read_text()
    assert state.ledger.consumption("default") == dict.fromkeys(names, 1)
    assert state.ledger.status()["leased"] == 0
    assert state.ledger.latest_checkpoint("default/1") is None
    late = state.add(range(16, 20))
    assert run(elsewhere(state, **quick, trainer__idle_timeout_s=1.0)) == 0
    assert state.ledger.consumption("default") == dict.fromkeys(names + late, 1)


def test_rows_of_one_of_two_trainers_that_is_killed_go_to_the_other(state, serve) -> None:
    """kill -9, and it never comes back: what it had made durable counts once, the rest is trained by the one that is left."""
    names = state.add(range(8))
    server = serve()
    settings = ["trainer=scratch", "trainer.vocabulary_tokens=20", "data.batch_rows=2", "data.passes=1", "data.fill_wait_s=0.1"]
    ends = [*MODEST, "trainer.idle_timeout_s=8", "trainer.checkpoint_every_steps=2", "data.lease_timeout_s=3"]
    command = [sys.executable, "-m", "training", f"model.name={state.model.path}", f"source={server.source}", *settings, *ends]
    places = [state.root.parent / f"machine{n}" for n in range(2)]
    trainers = [
        subprocess.Popen([*command, f"trainer.worker={n}", f"state_dir={place}"], stderr=subprocess.PIPE, text=True)
        for n, place in enumerate(places)
    ]
    deadline = time.monotonic() + 120
    while not all(steps(place, f"default@{n}") >= 3 for n, place in enumerate(places)):
        assert time.monotonic() < deadline
        if state.ledger.status()["pending"] < 4:
            names += state.add(range(len(names), len(names) + 4))
        time.sleep(0.02)
    trainers[0].kill()
    trainers[0].communicate()
    had = state.ledger.consumption("default@0")
    names += state.add(range(len(names), len(names) + 6))
    _, said = trainers[1].communicate(timeout=120)
    assert trainers[1].returncode == 0, said
    assert state.ledger.consumption("default@0") == had
    assert had | state.ledger.consumption("default@1") == dict.fromkeys(names, 1)
    assert not had.keys() & state.ledger.consumption("default@1").keys()
    assert state.ledger.status()["durable"] == len(names)


def test_a_trainer_outlives_its_server_and_nothing_is_lost_or_counted_twice(state, serve) -> None:
    """SIGKILL, and a new server on the same port, while the trainer trains on."""
    names = state.add(range(60))
    server = serve()
    metrics = state.root.parent / "elsewhere" / "training" / "default" / "metrics.jsonl"
    killed = threading.Event()

    def kill_and_start_again() -> None:
        while not (metrics.exists() and metrics.read_text().count('"saved"') >= 2):
            if ended.wait(0.01):
                return
        server.end(signal.SIGKILL)
        killed.set()
        serve(port=server.port)

    ended = threading.Event()
    thread = threading.Thread(target=kill_and_start_again)
    thread.start()
    settings = {"data__batch_rows": 2, "data__passes": 2, "trainer__checkpoint_every_steps": 2}
    try:
        assert run(elsewhere(state, source=server.source, **settings, trainer__idle_timeout_s=5.0)) == 0
    finally:
        ended.set()
        thread.join()
    assert killed.is_set()
    assert state.ledger.consumption("default") == dict.fromkeys(names, 1)
    assert state.ledger.status()["durable"] == len(names)


# --- refusals ---


def test_a_server_that_is_not_there_is_one_sentence(state) -> None:
    said = r"source is 'grpc://127\.0\.0\.1:1', which does not answer \(.*\); start that server"
    with pytest.raises(EngineUnavailable, match=said):
        run(elsewhere(state, source="grpc://127.0.0.1:1", remote=RemoteConfig(patience_s=0.5)))


def test_a_server_of_another_model_is_refused_before_it_costs_rows(state, serve) -> None:
    names = state.add(range(4))
    server = serve("model.name=tiny")
    with pytest.raises(ConfigError, match=f"serves model [0-9a-f]+, and model.name is .* which is {state.target.fingerprint}"):
        run(elsewhere(state, source=server.source))
    assert state.ledger.status()["pending"] == len(names)


@pytest.mark.parametrize("source", ["10.0.0.5:50051", "http://10.0.0.5:50051", "grpc://10.0.0.5", "grpc://"])
def test_a_source_of_another_form_is_refused(state, source: str) -> None:
    with pytest.raises(ConfigError, match="it must be grpc://HOST:PORT or grpcs://HOST:PORT"):
        run(elsewhere(state, source=source))


@pytest.mark.parametrize(
    ("source", "files", "said"),
    [
        ("grpc://h:1", {"api_key_file": "/nowhere/key"}, "remote.api_key_file is '/nowhere/key', which cannot be read"),
        ("grpcs://h:1", {"ca": "/nowhere/ca.pem"}, "remote.ca is '/nowhere/ca.pem', which is no file"),
    ],
)
def test_files_of_the_connection_are_looked_at_first(state, source: str, files: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        run(elsewhere(state, source=source, remote=RemoteConfig(**files)))


def test_a_key_file_holds_one_key(state, tmp_path: Path) -> None:
    (tmp_path / "key").write_text("two words\n")
    with pytest.raises(ConfigError, match="holds no key"):
        run(elsewhere(state, source="grpc://h:1", remote=RemoteConfig(api_key_file=str(tmp_path / "key"))))


def test_only_online_runs_have_a_server_as_their_source() -> None:
    with pytest.raises(ConfigError, match="source is 'grpc://h:1'; it must be null unless mode=online"):
        TrainingConfig(source="grpc://h:1", mode=Mode.OFFLINE)

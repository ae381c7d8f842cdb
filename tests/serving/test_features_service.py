"""Training rows over a real channel: leased, fetched, acknowledged once; lost replies, lost runs, restarts, keys."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
import trustme

from runtime.config import CaptureConfig, FeaturesConfig
from runtime.errors import (
    ConfigError,
    EngineUnavailable,
    FeatureError,
    FeatureNotFound,
    InvalidRequest,
    LeaseLost,
    PermissionDenied,
    RunTakenOver,
    Unauthenticated,
)
from runtime.features.refs import SampleMeta, SampleRef
from runtime.features.row import FeatureRow
from runtime.hidden_states import HiddenStates
from runtime.rpc import features_codec as codec
from runtime.rpc.connection import Retry, Tls
from runtime.rpc.features_client import FeatureClient
from runtime.types import SamplingParams, Tokens
from serving.auth import MIN_KEY_CHARS
from serving.config import AuthConfig, ServerConfig, TlsConfig

from .conftest import Running, StartServer, wait_for

SOON_S = 20.0


def make_row(num_tokens: int = 12, hidden_size: int = 8) -> FeatureRow:
    hidden = HiddenStates(torch.randn(num_tokens - 1, 3 * hidden_size), torch.randn(num_tokens - 1, hidden_size))
    return FeatureRow(torch.arange(num_tokens), torch.arange(num_tokens) > num_tokens // 2, hidden, {"kind": "test"})


class Plane:
    """A server's feature plane, filled from inside, and clients of it."""

    def __init__(self, running: Running) -> None:
        self.running = running
        assert running.parts.capture is not None
        self.store, self.ledger = running.parts.capture.store, running.parts.capture.ledger
        self._clients: list[FeatureClient] = []

    def put(self, name: str, split: str = "train", **shape: int) -> SampleRef:
        meta = SampleMeta(sample_id=name, run_id="server", source="s", target_fingerprint="fp", aux_layer_ids=(1, 2, 3))
        ref = self.store.put(meta, make_row(**shape))
        self.ledger.commit(ref, split)  # type: ignore[arg-type]
        return ref

    def client(self, **connection: Any) -> FeatureClient:
        self._clients.append(FeatureClient(self.running.ready.grpc, **{"timeout_s": SOON_S, **connection}))
        return self._clients[-1]

    def close(self) -> None:
        for client in self._clients:
            client.close()


@pytest.fixture
def plane(start_server: StartServer) -> Iterator[Plane]:
    plane = Plane(start_server())
    yield plane
    plane.close()


def ids(refs: list[SampleRef]) -> list[str]:
    return [ref.sample_id for ref in refs]


# --- the way of a row ---


def test_a_row_is_leased_fetched_and_made_durable_once(plane: Plane) -> None:
    refs = [plane.put(f"row{n}") for n in range(3)]
    client = plane.client()
    assert client.recover("run") == 0
    assert client.latest_checkpoint("run") is None
    leased = client.lease("run", 2, 60.0)
    assert leased == refs[:2], "references come through as they are"
    row, lease = client.get(leased[0])
    here, _ = plane.store.get(refs[0])
    assert torch.equal(row.hidden.aux, here.hidden.aux)
    assert torch.equal(row.hidden.last, here.hidden.last)
    assert torch.equal(row.token_ids, here.token_ids)
    assert torch.equal(row.generated, here.generated)
    assert row.labels == {"kind": "test"}
    assert lease.generation == refs[0].generation
    assert client.heartbeat("run", 60.0) == 2
    recorded = client.record_checkpoint("run", Path("step-1"), 1, ids(leased), metrics={"acceptance_length": 2.5})
    assert client.latest_checkpoint("run") == recorded
    assert (recorded.step, dict(recorded.metrics)) == (1, {"acceptance_length": 2.5})
    assert ids(client.durable("run", 10)) == ["row1", "row0"]
    assert plane.ledger.consumption("run") == {"row0": 1, "row1": 1}
    assert client.target_fingerprint() == plane.running.parts.engine.info.fingerprint
    assert client.status() == {"pending": 1, "leased": 0, "durable": 2, "failed": 0, "heldout": 0}
    assert client.watermarks() == plane.ledger.watermarks() is not None
    assert not client.is_shedding()
    plane.ledger.set_shedding(True)
    assert client.is_shedding()


def test_what_a_client_says_becomes_a_row_that_a_trainer_gets(plane: Plane) -> None:
    """The whole way: tokens served over gRPC, captured by the tap, fetched over gRPC."""
    with plane.running.client() as client:
        session = client.create_session()
        client.append(session.session_id, text="Once upon a time")
        params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
        events = [event for event in client.generate(session.session_id, params) if isinstance(event, Tokens)]
    said = [token for event in events for token in event.token_ids]
    rows = plane.client()
    rows.recover("run")
    leased: list[SampleRef] = []

    def look() -> bool:
        leased.extend(rows.lease("run", 1, 60.0) or rows.heldout())
        return bool(leased)

    wait_for(look)
    row, _ = rows.get(leased[0])
    assert row.token_ids[row.generated].tolist() == said
    assert leased[0].target_fingerprint == plane.running.parts.engine.info.fingerprint


def test_held_out_rows_are_listed_and_fetched_but_never_leased(plane: Plane) -> None:
    for name in ("a", "b", "c"):
        plane.put(name, "heldout")
    client = plane.client()
    assert ids(client.heldout()) == ["c", "b", "a"]
    assert ids(client.heldout(2)) == ["c", "b"]
    assert client.get(client.heldout(1)[0])[0].num_tokens == 12
    assert client.lease("run", 9, 60.0) == []


def test_a_row_larger_than_a_message_may_be_is_fetched(plane: Plane) -> None:
    ref = plane.put("large", num_tokens=600, hidden_size=1500)
    assert ref.num_bytes > 6 * codec.CHUNK_BYTES
    row, _ = plane.client().get(ref)
    assert torch.equal(row.hidden.aux, plane.store.get(ref)[0].hidden.aux)


def test_two_trainers_that_share_a_stream_never_get_the_same_row(plane: Plane) -> None:
    names = [plane.put(f"row{n}").sample_id for n in range(40)]
    clients = {f"run@{n}": plane.client() for n in range(2)}
    for run, client in clients.items():
        client.recover(run)
    got: dict[str, list[str]] = {run: [] for run in clients}

    def work(run: str) -> None:
        while refs := clients[run].lease(run, 3, 60.0):
            got[run] += ids(refs)

    threads = [threading.Thread(target=work, args=(run,)) for run in clients]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SOON_S)
    assert sorted(got["run@0"] + got["run@1"]) == sorted(names)
    for run, client in clients.items():
        client.record_checkpoint(run, "one", 1, got[run])
        assert client.latest_checkpoint(run).path == "one"
    assert plane.ledger.status()["durable"] == 40


def test_more_rows_than_one_call_gives_are_leased_in_several(plane: Plane, monkeypatch: pytest.MonkeyPatch) -> None:
    refs = [plane.put(f"row{n}") for n in range(7)]
    monkeypatch.setattr(codec, "MAX_ROWS_PER_CALL", 3)
    client = plane.client()
    client.recover("run")
    assert client.lease("run", 5, 60.0) == refs[:5]
    assert client.lease("run", 10**6, 60.0) == refs[5:]


def test_leased_rows_are_fetched_ahead_several_at_a_time(plane: Plane, monkeypatch: pytest.MonkeyPatch) -> None:
    """The store hands out nothing before three ask at once; a trainer that reads row by row would wait for ever."""
    refs = [plane.put(f"row{n}") for n in range(6)]
    at_once = threading.Barrier(3)
    real = plane.store.get

    def get(ref: SampleRef) -> Any:
        at_once.wait(SOON_S)
        return real(ref)

    monkeypatch.setattr(plane.store, "get", get)
    client = plane.client()
    client.recover("run")
    leased = client.lease("run", 6, 60.0)
    rows = [client.get(ref)[0] for ref in leased]
    assert [torch.equal(row.hidden.last, real(ref)[0].hidden.last) for row, ref in zip(rows, refs, strict=True)] == [True] * 6


# --- what goes wrong ---


def lose_reply(client: FeatureClient, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server does what the next call of this method asks, and its reply is lost on the way."""
    real = getattr(client._stub, method)
    losses = iter([True])

    class Lost(grpc.RpcError):
        def code(self) -> grpc.StatusCode:
            return grpc.StatusCode.UNAVAILABLE

        def details(self) -> str:
            return "connection reset"

        def trailing_metadata(self) -> tuple:
            return ()

    def call(*args: Any, **kwargs: Any) -> Any:
        reply = real(*args, **kwargs)
        if next(losses, False):
            raise Lost
        return reply

    monkeypatch.setattr(client._stub, method, call)


def test_a_lease_whose_reply_was_lost_is_given_again(plane: Plane, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else these rows would be leased for ever: heartbeats keep them, and nobody trains them."""
    for n in range(6):
        plane.put(f"row{n}")
    client = plane.client()
    client.recover("run")
    assert ids(client.lease("run", 2, 60.0)) == ["row0", "row1"]
    lose_reply(client, "Lease", monkeypatch)
    assert ids(client.lease("run", 2, 60.0)) == ["row2", "row3"]
    assert ids(client.lease("run", 9, 60.0)) == ["row4", "row5"]
    assert plane.ledger.status()["leased"] == 6


def test_a_lease_that_failed_for_good_leaves_nothing_behind_that_the_next_one_misses(
    plane: Plane, monkeypatch: pytest.MonkeyPatch
) -> None:
    plane.put("a")
    plane.put("b")
    client = plane.client(retry=Retry(max_attempts=1))
    client.recover("run")
    lose_reply(client, "Lease", monkeypatch)
    with pytest.raises(EngineUnavailable):
        client.lease("run", 1, 60.0)
    assert ids(client.lease("run", 1, 60.0)) == ["a"]


def test_an_ack_whose_reply_was_lost_is_recorded_once(plane: Plane, monkeypatch: pytest.MonkeyPatch) -> None:
    plane.put("a")
    client = plane.client()
    client.recover("run")
    client.lease("run", 1, 60.0)
    lose_reply(client, "Ack", monkeypatch)
    client.record_checkpoint("run", "step-1", 1, ["a"])
    assert plane.ledger.consumption("run") == {"a": 1}


def test_a_process_that_lost_its_run_to_a_newer_one_is_refused(plane: Plane) -> None:
    plane.put("a")
    old, new = plane.client(), plane.client()
    old.recover("run")
    assert ids(old.lease("run", 1, 60.0)) == ["a"]
    assert new.recover("run") == 1
    for call in (
        lambda: old.lease("run", 1, 60.0),
        lambda: old.heartbeat("run", 60.0),
        lambda: old.record_checkpoint("run", "step-1", 1, ["a"]),
        lambda: old.fail("run", "a", "it is damaged", retryable=False),
    ):
        with pytest.raises(RunTakenOver, match="'run' is held by another process"):
            call()
    assert ids(new.lease("run", 1, 60.0)) == ["a"]
    assert old.recover("run") == 0, "at its end it does not take the run back"
    assert new.heartbeat("run", 60.0) == 1
    assert plane.ledger.consumption("run") == {}


def test_a_lease_on_its_way_when_the_run_is_taken_over_takes_nothing(plane: Plane, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows leased behind the new holder's back would be nobody's for ever: its heartbeats would keep them."""
    plane.put("a")
    old, new = plane.client(retry=Retry(max_attempts=1)), plane.client()
    old.recover("run")
    entered, go_on = threading.Event(), threading.Event()
    real = plane.ledger.lease

    def lease(*asked: Any) -> list[SampleRef]:
        entered.set()
        assert go_on.wait(SOON_S)
        return real(*asked)

    monkeypatch.setattr(plane.ledger, "lease", lease)
    late = threading.Thread(target=old.lease, args=("run", 1, 60.0))
    late.start()
    assert entered.wait(SOON_S)
    taken_over: Future[int] = Future()
    taking = threading.Thread(target=lambda: taken_over.set_result(new.recover("run")))
    taking.start()
    with pytest.raises(TimeoutError):
        taken_over.result(0.3)
    go_on.set()
    late.join(SOON_S)
    taking.join(SOON_S)
    assert taken_over.result(SOON_S) == 1
    assert plane.ledger.status()["leased"] == 0


def test_processes_that_train_one_run_together_share_its_holder(plane: Plane) -> None:
    for name in "abc":
        plane.put(name)
    first, second, stranger = plane.client(holder="ours"), plane.client(holder="ours"), plane.client()
    first.recover("run")
    second.recover("run/1")
    assert (ids(first.lease("run", 1, 60.0)), ids(second.lease("run/1", 1, 60.0))) == (["a"], ["b"])
    for call in (
        lambda: stranger.recover("run/1"),
        lambda: stranger.lease("run/1", 1, 60.0),
        lambda: stranger.heartbeat("run", 60.0),
    ):
        with pytest.raises(RunTakenOver, match="'run' is held by another process"):
            call()
    assert second.heartbeat("run/1", 60.0) == 1
    first.record_checkpoint("run", "step-1", 1, ["a", "b"])
    second.recorded(["b"])
    assert second._held == set()
    assert plane.ledger.consumption("run") == {"a": 1, "b": 1}
    assert plane.client().recover("run") == 0
    with pytest.raises(RunTakenOver):
        second.lease("run/1", 1, 60.0)


def test_an_ack_of_rows_that_ran_out_is_refused_whole(plane: Plane) -> None:
    plane.put("a")
    plane.put("b")
    client, other = plane.client(), plane.client()
    client.recover("run")
    other.recover("other")
    client.lease("run", 2, 0.05)
    wait_for(lambda: ids(other.lease("other", 1, 60.0)) == ["a"])
    with pytest.raises(LeaseLost, match=r"does not lease 2 of these rows any more \(a, b\)\. Nothing was recorded") as lost:
        client.record_checkpoint("run", "step-1", 1, ["a", "b"])
    assert lost.value.run_id == "run"
    assert client.latest_checkpoint("run") is None


def test_a_row_that_is_gone_and_one_that_is_damaged_say_so(plane: Plane) -> None:
    gone, damaged = plane.put("gone"), plane.put("damaged")
    plane.store.release(gone)
    [path] = (plane.running.config.features_path / "rows").glob("damaged.*")
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    client = plane.client()
    with pytest.raises(FeatureNotFound):
        client.get(gone)
    with pytest.raises(FeatureError, match="damaged"):
        client.get(damaged)
    client.recover("run")
    assert ids(client.lease("run", 1, 60.0)) == ["damaged"]
    assert client.fail("run", "damaged", "it is damaged", retryable=False)
    assert not client.fail("run", "damaged", "it is damaged", retryable=False)
    assert plane.ledger.failures()["damaged"] == "it is damaged"


def test_a_row_that_cannot_be_read_now_is_waited_for(plane: Plane) -> None:
    ref = plane.put("row")
    [path] = (plane.running.config.features_path / "rows").glob("row.*")
    data = path.read_bytes()
    path.unlink()
    path.mkdir()  # whatever keeps a disk from answering
    with pytest.raises(EngineUnavailable, match="cannot be read"):
        plane.client(retry=Retry(max_attempts=1)).get(ref)
    waiting: Future[int] = Future()
    client = plane.client()
    threading.Thread(target=lambda: waiting.set_result(client.get(ref)[0].num_tokens), daemon=True).start()
    with pytest.raises(TimeoutError):
        waiting.result(0.3)
    path.rmdir()
    path.write_bytes(data)
    assert waiting.result(SOON_S) == ref.num_tokens


@pytest.mark.parametrize(
    ("call", "field"),
    [
        (lambda client: client.lease("run", 0, 60.0), "limit"),
        (lambda client: client.lease("run", 1, 0.0), "timeout_s"),
        (lambda client: client.heartbeat("run", float("nan")), "timeout_s"),
        (lambda client: client.recover(""), "run_id"),
        (lambda client: client.record_checkpoint("run", "", 1, []), "path"),
        (lambda client: client.fail("", "a", "damaged", retryable=False), "run_id"),
    ],
)
def test_what_cannot_be_meant_is_refused_by_name(plane: Plane, call: Callable[[FeatureClient], object], field: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        call(plane.client())
    assert refused.value.param == field


# --- the server goes away ---


def test_a_call_waits_for_a_server_that_is_started_again_and_leases_outlive_it(start_server: StartServer) -> None:
    first = Plane(start_server())
    port = int(first.running.ready.grpc.rpartition(":")[2])
    for n in range(3):
        first.put(f"row{n}")
    client = first.client()
    client.recover("run")
    assert ids(client.lease("run", 1, 600.0)) == ["row0"]
    first.running.stop()
    first.running.ended.result(timeout=30)
    waiting: Future[list[SampleRef]] = Future()
    threading.Thread(target=lambda: waiting.set_result(client.lease("run", 1, 600.0)), daemon=True).start()
    with pytest.raises(TimeoutError):
        waiting.result(0.3)
    again = start_server(
        server=ServerConfig(http_port=0, grpc_port=port), features=FeaturesConfig(root=str(first.running.config.features_path))
    )
    assert ids(waiting.result(SOON_S)) == ["row1"], "and row0 is still ours"
    client.record_checkpoint("run", "step-1", 1, ["row0", "row1"])
    assert Plane(again).ledger.consumption("run") == {"row0": 1, "row1": 1}
    client.close()


def test_a_server_that_stays_away_is_told_in_time() -> None:
    with (
        FeatureClient("127.0.0.1:1", timeout_s=0.5) as client,
        pytest.raises(EngineUnavailable, match=r"cannot be reached|no answer"),
    ):
        client.status()


def test_who_waited_in_vain_once_does_not_wait_again(caplog: pytest.LogCaptureFixture) -> None:
    """A trainer that gives up tells its source so, and should not be held up by that as long as before."""
    with FeatureClient("127.0.0.1:1", timeout_s=1.5) as client:
        with pytest.raises(EngineUnavailable):
            client.status()
        assert caplog.text.count("does not answer; waiting for it, up to 1.5 s") == 1, "told once, not with each attempt"
        began = time.monotonic()
        with pytest.raises(EngineUnavailable):
            client.recover("run")
        assert time.monotonic() - began < 1.0


def test_a_server_without_rows_says_what_to_do(start_server: StartServer) -> None:
    running = start_server(capture=CaptureConfig(enabled=False))
    with FeatureClient(running.ready.grpc) as client, pytest.raises(ConfigError, match="start it with capture=all"):
        client.recover("run")


# --- who may ---


def test_rows_are_for_admins_and_go_over_tls(start_server: StartServer, tmp_path: Path) -> None:
    user, admin = "u" * MIN_KEY_CHARS, "a" * MIN_KEY_CHARS
    keys = tmp_path / "keys.json"
    keys.write_text(json.dumps([{"name": "ann", "key": user}, {"name": "trainer", "key": admin, "admin": True}]))
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    certificate = authority.issue_cert("127.0.0.1")
    certificate.private_key_pem.write_to_path(tmp_path / "key.pem")
    certificate.cert_chain_pems[0].write_to_path(tmp_path / "cert.pem")
    plane = Plane(
        start_server(
            auth=AuthConfig(keys_file=str(keys)),
            tls=TlsConfig(certificate=str(tmp_path / "cert.pem"), private_key=str(tmp_path / "key.pem")),
        )
    )
    tls = Tls(ca=tmp_path / "ca.pem")
    plane.put("a")
    with pytest.raises(Unauthenticated):
        plane.client(tls=tls).lease("run", 1, 60.0)
    with pytest.raises(PermissionDenied):
        plane.client(tls=tls, api_key=user).lease("run", 1, 60.0)
    assert plane.ledger.status()["leased"] == 0
    client = plane.client(tls=tls, api_key=admin)
    [ref] = client.lease("run", 1, 60.0)
    assert client.get(ref)[0].num_tokens == 12
    plane.close()

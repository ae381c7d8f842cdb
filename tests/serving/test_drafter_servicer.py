"""Drafter versions over gRPC: brought in by bytes, path or id, validated, activated, gone back from, listed and watched."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status
from safetensors.torch import load_file, save_file

from runtime.config import RegistryConfig
from runtime.errors import DrafterRejected, EngineUnavailable, InvalidRequest
from runtime.registry import LifecycleEvent, Origin, VersionState
from runtime.rpc.drafters_client import DrafterClient
from runtime.rpc.v1 import drafters_pb2 as pb
from runtime.rpc.v1 import drafters_pb2_grpc
from runtime.types import SamplingParams, Tokens
from serving.app import GOODBYE_S
from serving.config import ServerConfig
from serving.drafter_servicer import MAX_UNREAD_EVENTS

from .conftest import MakeDrafter, Running, StartServer, wait_for

MANUAL = RegistryConfig(poll_s=3600)  # nothing happens but what is asked for
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


@pytest.fixture
def running(start_server: StartServer) -> Running:
    return start_server(registry=MANUAL)


@pytest.fixture
def drafters(running: Running) -> Iterator[DrafterClient]:
    with DrafterClient(running.ready.grpc) as client:
        yield client


@pytest.fixture
def stub(running: Running) -> Iterator[Any]:
    with grpc.insecure_channel(running.ready.grpc) as channel:
        yield drafters_pb2_grpc.DrafterServiceStub(channel)


def damage(directory: Path) -> Path:
    path = directory / "model.safetensors"
    tensors = load_file(path)
    tensors["fc.weight"] = tensors["fc.weight"] * float("nan")
    save_file(tensors, path)
    return directory


def generate(running: Running) -> tuple[list[int], str]:
    """The tokens of a greedy answer and the version that drafted."""
    with running.client() as client:
        session = client.create_session()
        client.append(session.session_id, text="Name three rivers.")
        *events, done = client.generate(session.session_id, GREEDY)
    return [token_id for event in events if isinstance(event, Tokens) for token_id in event.token_ids], done.drafter_versions[-1]


def refusal(call: Callable[[], Any]) -> tuple[grpc.StatusCode, str]:
    """Code and reason."""
    with pytest.raises((DrafterRejected, InvalidRequest)) as refused:
        call()
    cause = refused.value.__cause__
    assert isinstance(cause, grpc.RpcError)
    info = error_details_pb2.ErrorInfo()
    assert rpc_status.from_call(cause).details[0].Unpack(info)
    return cause.code(), info.reason


# --- coming in ---


def test_an_upload_arrives_as_it_was_sent(running: Running, drafters: DrafterClient, make_drafter: MakeDrafter) -> None:
    origin = Origin("0123456789abcdef", 12, metrics={"acceptance_length": 2.5}, notes="by hand")
    entry = drafters.upload(make_drafter(1), origin)
    assert (entry.state, entry.is_active, entry.parent, entry.step) == (VersionState.STAGED, False, "0123456789abcdef", 12)
    assert entry.metrics == {"acceptance_length": 2.5}
    assert entry.created_at == pytest.approx(time.time(), abs=60)
    record = running.parts.registry.get(entry.version)
    for name in ("config.json", "model.safetensors"):
        assert (record.path / name).read_bytes() == (make_drafter(1) / name).read_bytes()
    assert record.manifest is not None
    assert record.manifest.target_fingerprint == running.parts.engine.info.fingerprint
    assert record.manifest.notes == "by hand"
    assert drafters.upload(make_drafter(1)).version == entry.version, "the same content is the same version"
    assert [one.version for one in drafters.list()] == [entry.version]
    assert list((running.config.state_path / "uploads").iterdir()) == []


def test_a_version_comes_from_a_directory(drafters: DrafterClient, make_drafter: MakeDrafter, tmp_path: Path) -> None:
    by_path = drafters.stage_directory(make_drafter(1), Origin(step=3))
    assert by_path.step == 3
    assert by_path.version == drafters.upload(make_drafter(1)).version
    for path in (Path("relative"), tmp_path / "none"):
        with pytest.raises(InvalidRequest, match="no absolute path of a directory") as refused:
            drafters.stage_directory(path)
        assert refused.value.param == "directory.path"
    assert refusal(lambda: drafters.stage_directory(tmp_path)) == (grpc.StatusCode.FAILED_PRECONDITION, "UNREADABLE")


def upload_of(directory: Path, **changes: Any) -> list[pb.StageRequest]:
    parts = [(directory / name).read_bytes() for name in ("config.json", "model.safetensors")]
    digest = hashlib.sha256(b"".join(parts)).hexdigest()
    upload = {"config_bytes": len(parts[0]), "weights_bytes": len(parts[1]), "sha256": digest} | changes
    body = b"".join(parts)
    middle = len(parts[0]) + 100  # cut anywhere
    return [pb.StageRequest(upload=upload), pb.StageRequest(chunk=body[:middle]), pb.StageRequest(chunk=body[middle:])]


def test_chunks_may_be_cut_anywhere(stub: Any, make_drafter: MakeDrafter, drafters: DrafterClient) -> None:
    assert stub.Stage(iter(upload_of(make_drafter(1)))).version == drafters.upload(make_drafter(1)).version


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (lambda sent: [], "upload"),
        (lambda sent: sent[1:], "chunk"),
        (lambda sent: sent[1:2], "upload"),
        (lambda sent: sent[:2], "chunk"),
        (lambda sent: [*sent, pb.StageRequest(chunk=b"x")], "chunk"),
        (lambda sent: [*sent, pb.StageRequest(version="x")], "chunk"),
        (lambda sent: [*sent[:2], pb.StageRequest(), sent[2]], "chunk"),
        (lambda sent: [sent[0], sent[2], sent[1]], "upload.sha256"),
        (lambda sent: [pb.StageRequest(upload={"config_bytes": 0}), *sent[1:]], "upload.config_bytes"),
        (lambda sent: [pb.StageRequest(upload={"config_bytes": 2**21}), *sent[1:]], "upload.config_bytes"),
        (lambda sent: [pb.StageRequest(upload={"config_bytes": 9, "weights_bytes": 2**21}), *sent[1:]], "upload.weights_bytes"),
        (lambda sent: [pb.StageRequest(version="0" * 16), sent[1]], "chunk"),
        (lambda sent: [pb.StageRequest.FromString(b"\x98\x06\x01")], "StageRequest#99"),
    ],
)
def test_an_upload_that_is_not_whole_leaves_nothing(
    start_server: StartServer, make_drafter: MakeDrafter, change: Callable[[list[pb.StageRequest]], Any], field: str
) -> None:
    ports = ServerConfig(http_port=0, grpc_port=0, shutdown_grace_s=0.5, max_upload_mib=1)
    running = start_server(registry=MANUAL, server=ports)
    with grpc.insecure_channel(running.ready.grpc) as channel, pytest.raises(grpc.RpcError) as refused:
        drafters_pb2_grpc.DrafterServiceStub(channel).Stage(iter(change(upload_of(make_drafter(1)))))
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    violation = error_details_pb2.BadRequest()
    assert any(detail.Unpack(violation) for detail in rpc_status.from_call(refused.value).details)
    assert violation.field_violations[0].field == field
    assert running.parts.registry.versions() == []
    uploads = running.config.state_path / "uploads"
    assert not uploads.exists() or list(uploads.iterdir()) == []


def test_an_upload_that_is_broken_off_leaves_nothing(running: Running, stub: Any, make_drafter: MakeDrafter) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def messages() -> Iterator[pb.StageRequest]:
        yield from upload_of(make_drafter(1))[:2]
        begun.set()
        go_on.wait(10)

    call = stub.Stage.future(messages())
    begun.wait(10)
    uploads = running.config.state_path / "uploads"
    wait_for(lambda: uploads.exists() and any(uploads.iterdir()))
    call.cancel()
    wait_for(lambda: not any(uploads.iterdir()))
    go_on.set()
    assert running.parts.registry.versions() == []


# --- validate, activate, roll back ---


def test_a_version_is_validated_and_serves_when_it_is_asked_to(
    running: Running, drafters: DrafterClient, make_drafter: MakeDrafter
) -> None:
    plain, _ = generate(running)
    version = drafters.upload(make_drafter(1)).version
    assert drafters.validate(version).state is VersionState.VALIDATED
    assert drafters.active_version() == "ngram"
    event = drafters.activate(version)
    assert (event.kind, event.version, event.previous) == ("activated", version, "ngram")
    assert event.seconds is not None
    assert event.seconds < 5
    assert drafters.get(version).is_active
    assert drafters.active_version() == version
    assert generate(running) == (plain, version), "a drafter changes speed, never output"


def test_what_must_not_serve_says_why_and_is_never_loaded(
    running: Running, drafters: DrafterClient, make_drafter: MakeDrafter
) -> None:
    version = drafters.upload(damage(make_drafter(1))).version
    for call in (drafters.validate, drafters.activate, drafters.validate):
        assert refusal(lambda call=call: call(version)) == (grpc.StatusCode.FAILED_PRECONDITION, "NON_FINITE")
    entry = drafters.get(version)
    assert entry.state is VersionState.REJECTED
    assert entry.reason.startswith("NON_FINITE: ")
    assert drafters.active_version() == "ngram"
    assert drafters.stage_again(version).state is VersionState.STAGED
    other = drafters.upload(make_drafter(2), Origin(target_fingerprint="another")).version
    assert refusal(lambda: drafters.validate(other)) == (grpc.StatusCode.FAILED_PRECONDITION, "TARGET_FINGERPRINT")


def test_a_version_that_is_not_here_is_not_found(drafters: DrafterClient) -> None:
    for version in ("0" * 16, "no id", ""):
        for call in (drafters.get, drafters.validate, drafters.activate, drafters.stage_again):
            if call == drafters.stage_again and not version:
                continue  # an empty one is no version at all, and so no first message
            assert refusal(lambda call=call, version=version: call(version)) == (grpc.StatusCode.NOT_FOUND, "UNKNOWN_VERSION")


def test_going_back_to_the_version_before(running: Running, drafters: DrafterClient, make_drafter: MakeDrafter) -> None:
    assert refusal(drafters.rollback) == (grpc.StatusCode.NOT_FOUND, "UNKNOWN_VERSION")
    good, bad = drafters.upload(make_drafter(1)).version, drafters.upload(make_drafter(2)).version
    drafters.activate(good)
    assert refusal(drafters.rollback) == (grpc.StatusCode.NOT_FOUND, "UNKNOWN_VERSION"), "ngram is no version"
    assert drafters.get(good).is_active
    drafters.activate(bad)
    event = drafters.rollback("slow on Tuesdays")
    assert (event.kind, event.version, event.previous) == ("activated", good, bad)
    assert generate(running)[1] == good
    taken_back = drafters.get(bad)
    assert taken_back.state is VersionState.ROLLED_BACK
    assert taken_back.reason == "ROLLED_BACK: slow on Tuesdays"
    running.parts.lifecycle.poll()
    assert drafters.active_version() == good, "the watcher does not take up what was rolled back"
    assert refusal(drafters.rollback) == (grpc.StatusCode.NOT_FOUND, "UNKNOWN_VERSION"), "what did worse is not gone back to"
    assert (drafters.active_version(), drafters.get(good).state) == (good, VersionState.ACTIVE)


def test_going_back_twice_goes_further_back(drafters: DrafterClient, make_drafter: MakeDrafter) -> None:
    first, second, third = (drafters.upload(make_drafter(seed)).version for seed in (1, 2, 3))
    for version in (first, second, third):
        drafters.activate(version)
    assert [drafters.rollback().version for _ in range(2)] == [second, first]
    drafters.activate(third)  # by name
    assert drafters.rollback().version == first


def test_after_a_restart_the_version_before_is_the_parent(
    start_server: StartServer, make_drafter: MakeDrafter, tmp_path: Path
) -> None:
    registry = RegistryConfig(root=str(tmp_path / "registry"), poll_s=3600)
    first = start_server(registry=registry)
    with DrafterClient(first.ready.grpc) as drafters:
        parent = drafters.upload(make_drafter(1)).version
        child = drafters.upload(make_drafter(2), Origin(parent=parent)).version
        drafters.activate(child)
    first.stop()
    first.ended.result(timeout=30)
    with DrafterClient(start_server(registry=registry).ready.grpc) as drafters:
        assert drafters.active_version() == child
        assert drafters.rollback().version == parent


# --- going out ---


def test_a_version_comes_back_as_it_was_brought_in(drafters: DrafterClient, make_drafter: MakeDrafter, tmp_path: Path) -> None:
    directory = make_drafter(1)
    origin = Origin(parent="0" * 16, step=7, metrics={"acceptance_length": 2.5}, notes="by hand")
    version = drafters.upload(directory, origin).version
    said = drafters.download(version, tmp_path)
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / name).read_bytes() == (directory / name).read_bytes()
    assert (said.parent, said.step, dict(said.metrics), said.notes) == ("0" * 16, 7, {"acceptance_length": 2.5}, "by hand")
    assert said.target_fingerprint, "the model that the server serves"


def test_what_is_not_there_or_damaged_is_not_sent_as_a_version(
    running: Running, drafters: DrafterClient, make_drafter: MakeDrafter, tmp_path: Path
) -> None:
    for version in ("0" * 16, "ngram", "../../etc"):
        assert refusal(lambda version=version: drafters.download(version, tmp_path)) == (
            grpc.StatusCode.NOT_FOUND,
            "UNKNOWN_VERSION",
        )
    version = drafters.upload(make_drafter(1)).version
    path = running.parts.lifecycle.checkpoint(version)[0] / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(DrafterRejected, match=f"What came as version {version} is"):
        drafters.download(version, tmp_path)
    path.write_bytes(data[:100])
    assert refusal(lambda: drafters.download(version, tmp_path)) == (grpc.StatusCode.FAILED_PRECONDITION, "UNREADABLE")


# --- watching ---


def test_a_watcher_hears_what_happens_as_it_happens(drafters: DrafterClient, make_drafter: MakeDrafter) -> None:
    first, broken = drafters.upload(make_drafter(1)).version, drafters.upload(damage(make_drafter(2))).version
    with drafters.watch() as events:
        heard = iter(events)
        drafters.activate(first)
        activated = next(heard)
        assert (activated.kind, activated.version, activated.previous) == ("activated", first, "ngram")
        with pytest.raises(DrafterRejected):
            drafters.validate(broken)
        rejected = next(heard)
        assert (rejected.kind, rejected.version, rejected.reason) == ("rejected", broken, "NON_FINITE")
        assert rejected.message
    with drafters.watch(include_history=True) as events:
        heard = iter(events)
        assert [next(heard), next(heard)] == [activated, rejected]


def test_watchers_do_not_hold_up_a_server_that_stops(running: Running) -> None:
    with DrafterClient(running.ready.grpc) as drafters, drafters.watch() as events:
        began = time.monotonic()
        running.stop()
        with pytest.raises(EngineUnavailable, match="shutting down"):
            list(events)
        running.ended.result(timeout=30)
        assert time.monotonic() - began < GOODBYE_S


def test_a_watcher_that_does_not_read_is_let_go(running: Running, stub: Any) -> None:
    call = stub.Watch(pb.WatchRequest())
    call.initial_metadata()
    event = LifecycleEvent("failed", "v", reason="UNREADABLE", message="m" * 1000)
    for _ in range(8 * MAX_UNREAD_EVENTS):  # more than the window of the connection and the queue hold
        running.parts.lifecycle._note(event)
    with pytest.raises(grpc.RpcError) as ended:
        list(call)
    assert ended.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED

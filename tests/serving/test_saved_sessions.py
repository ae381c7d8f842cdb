"""Sessions forked, saved and restored over a real gRPC channel, across restarts of the server too."""

from __future__ import annotations

import errno
import logging
import os
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from runtime import files
from runtime.config import ModelConfig, RegistryConfig
from runtime.errors import DrafterNotFound, DrafterRejected, InvalidRequest, SavedSessionRejected, SessionBusy, SessionNotFound
from runtime.registry import Origin
from runtime.rpc.client import RuntimeClient
from runtime.rpc.drafters_client import DrafterClient
from runtime.rpc.v1 import runtime_pb2 as pb
from runtime.rpc.v1 import runtime_pb2_grpc
from runtime.sessions import saved
from runtime.types import CachePolicy, DrafterPolicy, HistoryTruncated, SamplingParams, SessionInfo, SessionOptions, Tokens
from serving.saved_sessions import SavedSessions

from .conftest import MakeDrafter, Running, StartServer, make_config, start, wait_for

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
ENDLESS = SamplingParams(temperature=0, ignore_eos=True, speculate=False)
SINK_WINDOW = CachePolicy(sink=4, window=32)


def tokens_of(events: Any) -> list[int]:
    return [token_id for event in events if isinstance(event, Tokens) for token_id in event.token_ids]


def open_with(client: RuntimeClient, options: SessionOptions | None = None) -> SessionInfo:
    session = client.create_session(options)
    client.append(session.session_id, text="Name three rivers.")
    return client.get_session(session.session_id)


def code_of(error: BaseException) -> grpc.StatusCode:
    cause = error.__cause__
    assert isinstance(cause, grpc.RpcError)
    return cause.code()


# --- fork ---


def test_a_fork_goes_on_by_itself_and_computes_nothing_again(client: RuntimeClient) -> None:
    session = open_with(client, SessionOptions("ann", 60.0, labels={"task": "x"}))
    first = tokens_of(client.generate(session.session_id, GREEDY))
    fork = client.fork_session(session.session_id)
    assert fork.session_id != session.session_id
    assert fork.options == client.get_session(session.session_id).options
    assert fork.history_length == fork.cached_tokens == session.history_length + 24
    *events, done = client.generate(fork.session_id, GREEDY)
    assert done.usage.cached_tokens >= fork.history_length - 1
    assert client.get_session(session.session_id).history_length == session.history_length + 24, "the parent stays as it was"
    assert tokens_of(client.generate(session.session_id, GREEDY)) == tokens_of(events)
    back = client.fork_session(session.session_id, history_length=session.history_length)
    assert back.history_length == session.history_length
    assert tokens_of(client.generate(back.session_id, GREEDY)) == first


def test_a_fork_may_have_other_options_but_the_same_cache_policy(client: RuntimeClient) -> None:
    session = open_with(client, SessionOptions(cache_policy=SINK_WINDOW))
    plain = client.fork_session(
        session.session_id, options=SessionOptions("bob", cache_policy=SINK_WINDOW, drafter_policy=DrafterPolicy("off"))
    )
    assert (plain.options.client_label, plain.options.drafter_policy.kind) == ("bob", "off")
    with pytest.raises(InvalidRequest) as refused:
        client.fork_session(session.session_id, options=SessionOptions())
    assert refused.value.param == "options.cache_policy"
    with pytest.raises(InvalidRequest) as refused:
        client.fork_session(session.session_id, history_length=10_000)
    assert refused.value.param == "history_length"
    with pytest.raises(SessionNotFound):
        client.fork_session("none")


def test_a_fork_is_made_once_per_request_id_and_not_of_a_busy_session(running: Running, client: RuntimeClient) -> None:
    session = open_with(client)
    fork = client.fork_session(session.session_id, request_id="fork-1")
    assert client.fork_session(session.session_id, request_id="fork-1").session_id == fork.session_id
    assert client.fork_session(session.session_id).session_id != fork.session_id
    running.target.delay_s = 0.02
    stream = client.generate(session.session_id, ENDLESS)
    next(iter(stream))
    for call in (
        lambda: client.fork_session(session.session_id),
        lambda: client.save_session(session.session_id, "busy"),
    ):
        with pytest.raises(SessionBusy):
            call()
    stream.cancel()
    assert client.list_saved_sessions() == []


# --- save and restore ---


def test_a_saved_session_survives_the_server(home: Path, tmp_path: Path) -> None:
    config = make_config(tmp_path / "state")
    first = start(config)
    with first.client() as client:
        session = open_with(client, SessionOptions("ann", labels={"task": "x"}))
        list(client.generate(session.session_id, GREEDY))
        kept = client.save_session(session.session_id, "rivers-1")
        assert (kept.name, client.list_saved_sessions()) == ("rivers-1", [kept])
        assert kept.num_bytes > 1000
        expected = tokens_of(client.generate(session.session_id, GREEDY))
    first.stop()
    first.ended.result(timeout=30)
    second = start(config)
    with second.client() as client:
        restored = client.restore_session("rivers-1", request_id="r")
        assert client.restore_session("rivers-1", request_id="r").session_id == restored.session_id
        assert restored.session_id != session.session_id
        assert restored.options.labels == {"task": "x"}
        assert restored.history_length == session.history_length + 24
        *events, done = client.generate(restored.session_id, GREEDY)
        assert done.usage.cached_tokens >= restored.history_length - 1
        assert tokens_of(events) == expected
        client.delete_saved_session("rivers-1")
        assert client.list_saved_sessions() == []
        with pytest.raises(SavedSessionRejected) as gone:
            client.restore_session("rivers-1")
        assert (gone.value.reason, code_of(gone.value)) == ("SAVED_NOT_FOUND", grpc.StatusCode.NOT_FOUND)
    second.stop()
    second.ended.result(timeout=30)


def test_a_name_is_taken_once(running: Running, client: RuntimeClient) -> None:
    session = open_with(client)
    client.save_session(session.session_id, "taken")
    with pytest.raises(SavedSessionRejected) as refused:
        client.save_session(session.session_id, "taken")
    assert (refused.value.reason, code_of(refused.value)) == ("SAVED_EXISTS", grpc.StatusCode.ALREADY_EXISTS)
    client.delete_saved_session("taken")
    client.save_session(session.session_id, "taken")
    client.delete_saved_session("taken")


def test_a_name_is_taken_from_the_moment_that_its_session_is_being_written(
    running: Running, client: RuntimeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody sees it before it is whole, and nobody takes it away from under the writer."""
    writing, may_finish = threading.Event(), threading.Event()
    write = saved.write

    def slow(directory: Path, record: saved.SavedSession) -> None:
        writing.set()
        assert may_finish.wait(60)
        write(directory, record)

    monkeypatch.setattr(saved, "write", slow)
    first, second = open_with(client), open_with(client)
    client.append(second.session_id, text="And three lakes.")
    saver = threading.Thread(target=client.save_session, args=(first.session_id, "twice"))
    saver.start()
    assert writing.wait(60)
    reasons = []
    for call in (
        lambda: client.save_session(second.session_id, "twice"),
        lambda: client.restore_session("twice"),
        lambda: client.delete_saved_session("twice"),
    ):
        with pytest.raises(SavedSessionRejected) as refused:
            call()
        reasons.append(refused.value.reason)
    assert reasons == ["SAVED_EXISTS", "SAVED_NOT_FOUND", "SAVED_NOT_FOUND"]
    assert client.list_saved_sessions() == []
    may_finish.set()
    saver.join(60)
    assert [one.name for one in client.list_saved_sessions()] == ["twice"]
    assert client.restore_session("twice").history_length == first.history_length
    client.delete_saved_session("twice")


def test_a_caller_who_leaves_takes_no_half_of_a_session_along(
    running: Running, client: RuntimeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    writing, may_finish = threading.Event(), threading.Event()
    write_atomic = saved.write_atomic

    def slow(path: Path, data: bytes) -> None:
        if path.name == saved.RECORD:  # its tensors are there
            writing.set()
            assert may_finish.wait(60)
        write_atomic(path, data)

    monkeypatch.setattr(saved, "write_atomic", slow)
    session = open_with(client)
    with grpc.insecure_channel(running.ready.grpc) as channel:
        request = pb.SaveSessionRequest(session_id=session.session_id, name="left")
        call = runtime_pb2_grpc.RuntimeServiceStub(channel).SaveSession.future(request)
        assert writing.wait(60)
        call.cancel()
        client.list_saved_sessions()  # behind the cancellation
        may_finish.set()
        wait_for(lambda: client.get_session(session.session_id).state == "idle")
    wait_for(lambda: [one.name for one in client.list_saved_sessions()] == ["left"])
    assert client.restore_session("left").history_length == session.history_length
    client.delete_saved_session("left")


DIES_WHILE_IT_SAVES = """
import sys, time
from pathlib import Path
from serving.saved_sessions import SavedSessions

def write(directory):
    directory.mkdir()
    (directory / "tensors-0.safetensors").write_bytes(b"half")
    print("writing", flush=True)
    time.sleep(600)

SavedSessions(Path(sys.argv[1])).save("rivers", write)
"""


def whole(directory: Path) -> None:
    directory.mkdir()
    (directory / "session.json").write_text("{}")


def test_what_a_killed_server_had_not_finished_is_unseen_and_removed_by_the_next(
    home: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = make_config(tmp_path / "state")
    root = config.saved_sessions_path
    here = SavedSessions(root)
    command = [sys.executable, "-c", DIES_WHILE_IT_SAVES, str(root)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "writing\n"
        assert here.list() == []
        here.remove_unfinished()
        assert [*root.glob(".tmp-*/rivers")], "it lives, and will go on"
        process.send_signal(signal.SIGKILL)
    here.save("lakes", whole)
    assert [one.name for one in here.list()] == ["lakes"]
    with caplog.at_level(logging.WARNING):
        running = start(config)
    assert "saved session rivers: a server died" in caplog.text
    assert sorted(path.name for path in root.iterdir()) == [".lock", "lakes"]
    with running.client() as client:
        session = open_with(client)
        client.save_session(session.session_id, "rivers")
        assert client.restore_session("rivers").history_length == session.history_length
    running.stop()
    running.ended.result(timeout=30)


def test_leftovers_that_cannot_be_removed_hold_no_server_up(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    sessions = SavedSessions(tmp_path)
    sessions.save("lakes", whole)
    (tmp_path / ".tmp-strange").touch()  # no directory
    with caplog.at_level(logging.WARNING):
        sessions.remove_unfinished()
    assert "is not removed: [Errno" in caplog.text
    assert [one.name for one in sessions.list()] == ["lakes"]


def test_of_two_servers_that_save_one_name_the_first_to_finish_has_it(tmp_path: Path) -> None:
    here, beside = SavedSessions(tmp_path), SavedSessions(tmp_path)

    def slow(directory: Path) -> None:
        beside.save("rivers", whole)
        directory.mkdir()
        (directory / "late").touch()

    with pytest.raises(SavedSessionRejected) as refused:
        here.save("rivers", slow)
    assert refused.value.reason == "SAVED_EXISTS"
    assert [path.name for path in (tmp_path / "rivers").iterdir()] == ["session.json"]
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "rivers"]


def test_of_two_that_delete_one_name_the_second_is_told_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sessions = SavedSessions(tmp_path)
    sessions.save("rivers", whole)
    existing = sessions.existing

    def overtaken(name: str) -> Path:
        path = existing(name)
        monkeypatch.undo()
        sessions.delete(name)
        return path

    monkeypatch.setattr(sessions, "existing", overtaken)
    with pytest.raises(SavedSessionRejected) as refused:
        sessions.delete("rivers")
    assert refused.value.reason == "SAVED_NOT_FOUND"
    assert sessions.list() == []


# --- a disk that refuses ---


def test_a_place_that_cannot_be_written_is_told_and_changes_nothing(
    start_server: StartServer, caplog: pytest.LogCaptureFixture
) -> None:
    running = start_server()
    root = running.config.saved_sessions_path
    root.touch()  # where the directory would be
    with running.client() as client:
        session = open_with(client)
        before = client.get_session(session.session_id)
        with pytest.raises(SavedSessionRejected) as refused:
            client.save_session(session.session_id, "rivers")
        assert (refused.value.reason, code_of(refused.value)) == ("SAVED_STORAGE", grpc.StatusCode.FAILED_PRECONDITION)
        assert str(refused.value) == (
            "The server cannot save 'rivers': its directory of saved sessions refuses (File exists). Nothing has changed; "
            "whoever runs it finds more in its log."
        )
        assert str(root) in caplog.text
        answer = httpx.post(f"{running.ready.http}/v1/sessions/{session.session_id}/save", json={"name": "rivers"}, timeout=30)
        assert answer.status_code == 507
        error = answer.json()["error"]
        assert (error["code"], error["message"]) == ("saved_storage", str(refused.value))
        after = client.get_session(session.session_id)
        assert replace(after, last_used_at=0) == replace(before, last_used_at=0)
        assert client.list_saved_sessions() == []
        root.unlink()
        client.save_session(session.session_id, "rivers")
        assert client.restore_session("rivers").history_length == session.history_length


def test_a_disk_that_is_full_at_any_moment_keeps_nothing_of_a_session(
    running: Running, client: RuntimeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = open_with(client)
    client.save_session(session.session_id, "before")
    root, fsync = running.config.saved_sessions_path, os.fsync
    there = sorted(root.iterdir())
    left = 0

    def fills(descriptor: int) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(descriptor)

    monkeypatch.setattr(files.os, "fsync", fills)
    for written in range(100):
        left = written
        try:
            client.save_session(session.session_id, "after")
            break
        except SavedSessionRejected as error:
            refused = error
        assert refused.reason == "SAVED_STORAGE"
        assert "(No space left on device). Nothing has changed; delete saved sessions that nobody needs" in str(refused)
        assert client.get_session(session.session_id).state == "idle"
        assert sorted(root.iterdir()) == there
    assert written > 4
    monkeypatch.undo()
    assert client.restore_session("after").history_length == session.history_length
    for name in ("before", "after"):
        client.delete_saved_session(name)


def test_other_calls_tell_of_a_disk_that_refuses_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sessions = SavedSessions(tmp_path)
    sessions.save("rivers", whole)

    def refuses(*given: object, **named: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(Path, "is_dir", refuses)
    for call in (sessions.list, lambda: sessions.existing("rivers"), lambda: sessions.delete("rivers")):
        with pytest.raises(SavedSessionRejected, match=r"refuses \(Permission denied\)") as refused:
            call()
        assert refused.value.reason == "SAVED_STORAGE"
        assert str(tmp_path) not in str(refused.value)
    monkeypatch.undo()
    monkeypatch.setattr("runtime.files.tempfile.mkdtemp", refuses)
    with pytest.raises(SavedSessionRejected, match="cannot delete 'rivers'"):
        sessions.delete("rivers")
    assert [one.name for one in sessions.list()] == ["rivers"]


@pytest.mark.parametrize("name", ["", ".", "..", "../x", "a/b", ".hidden", "a" * 65, "a b", "\u00e4", "a\0"])
def test_a_name_stays_inside_its_directory(running: Running, client: RuntimeClient, name: str) -> None:
    session = open_with(client)
    for call in (
        lambda: client.save_session(session.session_id, name),
        lambda: client.restore_session(name),
        lambda: client.delete_saved_session(name),
    ):
        with pytest.raises(InvalidRequest, match="no name for a saved session") as refused:
            call()
        assert refused.value.param == "name"
    assert client.list_saved_sessions() == []


def test_what_is_damaged_is_refused_and_opens_nothing(running: Running, client: RuntimeClient) -> None:
    session = open_with(client)
    list(client.generate(session.session_id, GREEDY))
    client.save_session(session.session_id, "damaged")
    for file in (running.config.saved_sessions_path / "damaged").glob("*.json"):
        file.write_text("{")
    with pytest.raises(SavedSessionRejected) as refused:
        client.restore_session("damaged")
    assert (refused.value.reason, code_of(refused.value)) == ("SAVED_UNREADABLE", grpc.StatusCode.FAILED_PRECONDITION)
    assert [one.session_id for one in client.list_sessions()] == [session.session_id]
    client.delete_saved_session("damaged")


def test_a_session_of_another_model_is_refused(
    running: Running, client: RuntimeClient, start_server: StartServer, tmp_path: Path
) -> None:
    from runtime.models import make_tiny

    other_model = make_tiny(tmp_path / "other", seed=9)
    other = start_server(model=ModelConfig(name=str(other_model), device="cpu"))
    session = open_with(client)
    list(client.generate(session.session_id, GREEDY))
    client.save_session(session.session_id, "foreign")
    place = other.config.saved_sessions_path / "foreign"
    place.parent.mkdir(parents=True)
    (running.config.saved_sessions_path / "foreign").rename(place)
    with other.client() as stranger, pytest.raises(SavedSessionRejected) as refused:
        stranger.restore_session("foreign")
    assert (refused.value.reason, code_of(refused.value)) == ("SAVED_OTHER_TARGET", grpc.StatusCode.FAILED_PRECONDITION)


# --- policies ---


def test_a_window_is_told_once_when_it_first_drops(client: RuntimeClient) -> None:
    session = open_with(client, SessionOptions(cache_policy=SINK_WINDOW))
    params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
    first = [*client.generate(session.session_id, params)]
    [truncated] = [event for event in first if isinstance(event, HistoryTruncated)]
    assert truncated.dropped > 0
    assert first.index(truncated) not in (0, len(first) - 1)
    assert not [event for event in client.generate(session.session_id, params) if isinstance(event, HistoryTruncated)]
    now = client.get_session(session.session_id)
    assert now.history_length == session.history_length + 128, "the history keeps what the K/V drops"
    assert now.dropped_tokens > truncated.dropped


def test_a_session_keeps_to_the_drafter_that_it_is_pinned_to(start_server: StartServer, make_drafter: MakeDrafter) -> None:
    running = start_server()
    fingerprint, registry = running.parts.engine.info.fingerprint, running.parts.registry
    publish = {"parent": None, "step": 0, "target_fingerprint": fingerprint, "metrics": {}}
    old = registry.publish(make_drafter(1), **publish)  # type: ignore[arg-type]
    wait_for(lambda: running.parts.engine.drafter_version == old)
    with running.client() as client:
        pinned = open_with(client, SessionOptions(drafter_policy=DrafterPolicy("pinned", old)))
        following = open_with(client)
        new = registry.publish(make_drafter(2), **publish)  # type: ignore[arg-type]
        wait_for(lambda: running.parts.engine.drafter_version == new)
        for session, version in ((pinned, old), (following, new)):
            *_, done = client.generate(session.session_id, GREEDY)
            assert done.drafter_versions == (version,)
        for version in ("0" * 16, "no id"):
            with pytest.raises(DrafterNotFound) as refused:
                client.create_session(SessionOptions(drafter_policy=DrafterPolicy("pinned", version)))
            assert code_of(refused.value) is grpc.StatusCode.NOT_FOUND


def test_a_version_is_loaded_when_a_session_is_first_pinned_to_it(start_server: StartServer, make_drafter: MakeDrafter) -> None:
    running = start_server(registry=RegistryConfig(poll_s=3600))
    with running.client() as client, DrafterClient(running.ready.grpc) as drafters:
        version = drafters.upload(make_drafter(1)).version
        pinned = SessionOptions(drafter_policy=DrafterPolicy("pinned", version))
        first = open_with(client, pinned)
        *_, done = client.generate(first.session_id, GREEDY)
        assert done.drafter_versions == (version,)
        assert drafters.active_version() == "ngram"
        client.save_session(first.session_id, "pinned")
        client.close_session(first.session_id)
        *_, done = client.generate(client.restore_session("pinned").session_id, GREEDY)
        assert done.drafter_versions == (version,)
        following = open_with(client)
        fork = client.fork_session(following.session_id, options=pinned)
        *_, done = client.generate(fork.session_id, GREEDY)
        assert done.drafter_versions == (version,)
        other = drafters.upload(make_drafter(2), Origin(target_fingerprint="another")).version
        with pytest.raises(DrafterRejected) as refused:
            client.create_session(SessionOptions(drafter_policy=DrafterPolicy("pinned", other)))
        assert (refused.value.reason, code_of(refused.value)) == ("TARGET_FINGERPRINT", grpc.StatusCode.FAILED_PRECONDITION)

"""The life of drafter versions in a running server: validated, activated under load, refused with a reason, gone back to."""

from __future__ import annotations

import errno
import json
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest
from safetensors.torch import load_file, save_file

import serving.assembly
from runtime.config import DrafterConfig, DrafterKind, RegistryConfig
from runtime.eagle3 import version_id
from runtime.errors import DrafterRejected
from runtime.registry import Registry, VersionState
from runtime.types import SamplingParams, Started, Tokens

from .conftest import MakeDrafter, Running, StartServer, wait_for

SLOW_S = 0.02


@pytest.fixture
def running(start_server: StartServer) -> Running:
    return start_server()


def publish(running: Running, directory: Path, fingerprint: str | None = None) -> str:
    """As a trainer does: through its own view of the registry's directory."""
    registry = Registry(running.config.registry_path)
    target = fingerprint or running.parts.engine.info.fingerprint
    return registry.publish(directory, parent=None, step=7, target_fingerprint=target, metrics={"acceptance_length": 1.5})


def listed(running: Running) -> dict[str, Any]:
    answer = httpx.get(f"{running.ready.http}/v1/drafters", timeout=10)
    assert answer.status_code == 200
    return answer.json()


def entry(running: Running, version: str) -> dict[str, Any]:
    return next(one for one in listed(running)["data"] if one["version"] == version)


def activate(running: Running, version: str) -> httpx.Response:
    return httpx.post(f"{running.ready.http}/v1/drafters/{version}/activate", timeout=30)


def ask(running: Running, **more: Any) -> dict[str, Any]:
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "Hi"}],
        "max_tokens": 24,
        "temperature": 0,
        "ignore_eos": True,
    }
    return httpx.post(f"{running.ready.http}/v1/chat/completions", json=body | more, timeout=30).json()


def damage(directory: Path, name: str) -> None:
    """Make one tensor of a checkpoint unusable."""
    path = directory / "model.safetensors"
    tensors = load_file(path)
    tensors[name] = tensors[name] * float("nan")
    save_file(tensors, path)


def test_a_staged_version_goes_live_by_itself_and_is_stamped_on_answers(running: Running, make_drafter: MakeDrafter) -> None:
    before = ask(running)
    assert before["speculation"]["drafter_version"] == "ngram"
    version = publish(running, make_drafter(1))
    wait_for(lambda: listed(running)["active"] == version)
    after = ask(running)
    assert after["speculation"]["drafter_version"] == version
    assert after["choices"] == before["choices"], "a drafter changes speed, never output"
    one = entry(running, version)
    assert one["state"] == "active"
    assert one["active"] is True
    assert one["step"] == 7
    assert one["metrics"] == {"acceptance_length": 1.5}
    validated, activated = listed(running)["history"]
    assert (validated["event"], validated["version"]) == ("validated", version)
    assert (activated["event"], activated["previous"]) == ("activated", "ngram")
    assert activated["seconds"] < 1


def test_a_swap_in_the_middle_of_a_stream_changes_no_token(running: Running, make_drafter: MakeDrafter) -> None:
    params = SamplingParams(temperature=0, max_tokens=120, ignore_eos=True)
    with running.client() as client:

        def generate() -> list[Any]:
            session = client.create_session()
            client.append(session.session_id, text="Name three rivers.")
            events = []
            for event in client.generate(session.session_id, params):
                events.append(event)
                if isinstance(event, Started):
                    begun.set()
            return events

        begun = threading.Event()
        alone = generate()
        running.target.delay_s = SLOW_S
        begun.clear()
        streamed: list[Any] = []
        thread = threading.Thread(target=lambda: streamed.extend(generate()))
        thread.start()
        assert begun.wait(10)
        first = publish(running, make_drafter(1))
        wait_for(lambda: listed(running)["active"] == first)
        second = publish(running, make_drafter(2))
        wait_for(lambda: listed(running)["active"] == second)
        assert thread.is_alive(), "the stream ended before the swaps"
        thread.join()
    tokens, expected = (
        [one for event in events if isinstance(event, Tokens) for one in event.token_ids] for events in (streamed, alone)
    )
    assert tokens == expected
    assert streamed[-1].drafter_versions[-2:] == (first, second)
    assert entry(running, first)["state"] == "retired"


@pytest.mark.parametrize(
    ("break_it", "reason"),
    [
        (lambda directory: damage(directory, "fc.weight"), "NON_FINITE"),
        (
            lambda directory: (directory / "config.json").write_text(
                (directory / "config.json").read_text().replace("2048", "512")
            ),
            "MAX_POSITIONS",
        ),
    ],
)
def test_a_version_that_must_not_serve_is_rejected_with_its_reason(
    running: Running, make_drafter: MakeDrafter, break_it: Any, reason: str
) -> None:
    good = publish(running, make_drafter(1))
    wait_for(lambda: listed(running)["active"] == good)
    directory = make_drafter(2)
    break_it(directory)
    bad = publish(running, directory)
    wait_for(lambda: entry(running, bad)["state"] == "rejected")
    assert entry(running, bad)["reason"].startswith(f"{reason}: ")
    assert listed(running)["history"][-1] | {"at": 0, "message": ""} == {
        "event": "rejected",
        "version": bad,
        "previous": None,
        "reason": reason,
        "message": "",
        "seconds": None,
        "at": 0,
    }
    assert ask(running)["speculation"]["drafter_version"] == good
    refused = activate(running, bad)
    assert refused.status_code == 409
    assert refused.json()["error"]["code"] == reason.lower()
    assert ask(running)["speculation"]["drafter_version"] == good


def test_what_nobody_thought_of_is_a_rejection_and_the_next_version_is_taken_up(
    running: Running, make_drafter: MakeDrafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise ArithmeticError("far too large")

    with monkeypatch.context() as patch:
        patch.setattr(serving.assembly, "validate", fail)
        bad = publish(running, make_drafter(1))
        wait_for(lambda: entry(running, bad)["state"] == "rejected")
    assert entry(running, bad)["reason"].startswith("UNREADABLE: Loading it failed with ArithmeticError: far too large.")
    good = publish(running, make_drafter(2))
    wait_for(lambda: listed(running)["active"] == good)


def test_the_watcher_outlives_a_registry_that_cannot_be_read(
    running: Running, make_drafter: MakeDrafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = threading.Event()

    def fail(_: Registry) -> None:
        failed.set()
        raise RecursionError("maximum recursion depth exceeded")

    with monkeypatch.context() as patch:
        patch.setattr(Registry, "versions", fail)
        assert failed.wait(10)
    version = publish(running, make_drafter(1))
    wait_for(lambda: listed(running)["active"] == version)


def test_where_the_pointer_cannot_be_moved_nothing_changes(
    start_server: StartServer, make_drafter: MakeDrafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = start_server(registry=RegistryConfig(poll_s=0.05, auto_activate=False))
    version = publish(running, make_drafter(1))
    wait_for(lambda: entry(running, version)["state"] == "validated")

    def fail(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Registry, "activate", fail)
        assert activate(running, version).status_code == 500
    assert listed(running)["active"] == "ngram"
    assert ask(running)["speculation"]["drafter_version"] == "ngram"
    assert activate(running, version).status_code == 200


def test_a_version_that_another_server_took_up_meanwhile_is_left_to_it(
    start_server: StartServer, make_drafter: MakeDrafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = start_server(registry=RegistryConfig(poll_s=3600.0))
    registry = Registry(running.config.registry_path)
    first, second = (publish(running, make_drafter(seed)) for seed in (1, 2))
    as_listed = registry.versions()  # both staged
    registry.activate(first)
    registry.activate(second)
    with monkeypatch.context() as patch:
        patch.setattr(Registry, "versions", lambda _: as_listed)
        running.parts.lifecycle.poll()
    assert registry.active() == second
    assert listed(running)["active"] == second
    assert [event["version"] for event in listed(running)["history"]] == [second]


def test_a_drafter_of_another_target_is_rejected(running: Running, make_drafter: MakeDrafter) -> None:
    version = publish(running, make_drafter(1), fingerprint="another")
    wait_for(lambda: entry(running, version)["state"] == "rejected")
    assert entry(running, version)["reason"].startswith("TARGET_FINGERPRINT: ")
    assert listed(running)["active"] == "ngram"


def test_what_a_server_of_another_target_found_sound_is_refused_and_left_alone(
    running: Running, make_drafter: MakeDrafter
) -> None:
    running.parts.lifecycle.stop()  # the other server's watcher is the faster one
    version = publish(running, make_drafter(1), fingerprint="another")
    registry = Registry(running.config.registry_path)
    registry.set_state(version, VersionState.VALIDATED)
    refused = activate(running, version)
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "target_fingerprint")
    assert registry.get(version).state is VersionState.VALIDATED
    assert listed(running)["active"] == "ngram"
    assert [event["event"] for event in listed(running)["history"]] == ["failed"]


def test_files_that_were_cut_short_after_publishing_are_listed_as_rejected(running: Running, make_drafter: MakeDrafter) -> None:
    good = publish(running, make_drafter(1))
    wait_for(lambda: listed(running)["active"] == good)
    other = publish(running, make_drafter(2))
    wait_for(lambda: listed(running)["active"] == other)
    weights = running.config.registry_path / "versions" / good / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    assert entry(running, good)["state"] == "rejected"
    assert activate(running, good).status_code == 409
    assert listed(running)["active"] == other


def test_going_back_and_forth(running: Running, make_drafter: MakeDrafter) -> None:
    first = publish(running, make_drafter(1))
    wait_for(lambda: listed(running)["active"] == first)
    second = publish(running, make_drafter(2))
    wait_for(lambda: listed(running)["active"] == second)
    back = activate(running, first)
    assert back.status_code == 200
    assert back.json() | {"at": 0, "seconds": 0} == {
        "object": "drafter.activation",
        "event": "activated",
        "version": first,
        "previous": second,
        "reason": None,
        "message": None,
        "seconds": 0,
        "at": 0,
    }
    assert ask(running)["speculation"]["drafter_version"] == first
    assert Registry(running.config.registry_path).active() == first
    again = activate(running, first)
    assert (again.status_code, again.json()["previous"]) == (200, first)
    assert [one["event"] for one in listed(running)["history"]].count("activated") == 3


@pytest.mark.parametrize("version", ["0123456789abcdef", "nothing", "..%2F..%2Fsecrets", "ngram"])
def test_an_unknown_version_is_404(running: Running, version: str) -> None:
    refused = activate(running, version)
    assert refused.status_code == 404
    assert refused.json()["error"]["code"] in ("drafter_not_found", "not_found")


def test_the_pointer_of_the_registry_is_followed(running: Running, make_drafter: MakeDrafter) -> None:
    """Another server, or a tool, moved it."""
    versions = []
    for seed in (1, 2):
        versions.append(publish(running, make_drafter(seed)))
        wait_for(lambda: listed(running)["active"] == versions[-1])
    Registry(running.config.registry_path).activate(versions[0])
    wait_for(lambda: listed(running)["active"] == versions[0])
    assert ask(running)["speculation"]["drafter_version"] == versions[0]


def test_without_auto_activate_a_version_waits_for_a_word(start_server: StartServer, make_drafter: MakeDrafter) -> None:
    running = start_server(registry=RegistryConfig(poll_s=0.05, auto_activate=False))
    version = publish(running, make_drafter(1))
    wait_for(lambda: entry(running, version)["state"] == "validated")
    assert listed(running)["active"] == "ngram"
    assert activate(running, version).status_code == 200
    assert listed(running)["active"] == version


def test_a_server_told_not_to_draft_validates_only(start_server: StartServer, make_drafter: MakeDrafter) -> None:
    running = start_server(drafter=DrafterConfig(kind=DrafterKind.NONE))
    version = publish(running, make_drafter(1))
    wait_for(lambda: entry(running, version)["state"] == "validated")
    answer = ask(running)
    assert answer["speculation"]["drafter_version"] == "none"
    assert answer["speculation"]["drafted"] == 0


def test_the_next_server_starts_with_the_active_version(start_server: StartServer, make_drafter: MakeDrafter) -> None:
    first = start_server()
    version = publish(first, make_drafter(1))
    wait_for(lambda: listed(first)["active"] == version)
    root = str(first.config.registry_path)
    second = start_server(registry=RegistryConfig(root=root))
    assert listed(second)["active"] == version
    third = start_server(registry=RegistryConfig(root=root), drafter=DrafterConfig(kind=DrafterKind.NGRAM))
    assert listed(third)["active"] == "ngram"


def test_a_damaged_active_version_does_not_stop_the_next_server(start_server: StartServer, make_drafter: MakeDrafter) -> None:
    first = start_server()
    version = publish(first, make_drafter(1))
    wait_for(lambda: listed(first)["active"] == version)
    first.stop()
    first.ended.result(timeout=20)
    path = first.config.registry_path / "versions" / version / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"rms_norm_eps": 1e-4}))
    second = start_server(registry=RegistryConfig(root=str(first.config.registry_path)))
    assert listed(second)["active"] == "ngram"


def test_a_named_checkpoint_serves_and_is_published(start_server: StartServer, make_drafter: MakeDrafter) -> None:
    running = start_server(drafter=DrafterConfig(kind=DrafterKind.EAGLE3, path=str(make_drafter(3))))
    [one] = listed(running)["data"]
    assert listed(running)["active"] == one["version"]
    assert one["state"] == VersionState.ACTIVE.value
    assert ask(running)["speculation"]["drafter_version"] == one["version"]


def test_a_named_checkpoint_that_is_unsound_ends_the_start(start_server: StartServer, make_drafter: MakeDrafter) -> None:
    directory = make_drafter(3)
    damage(directory, "lm_head.weight")
    with pytest.raises(DrafterRejected, match="finite"):
        start_server(drafter=DrafterConfig(kind=DrafterKind.EAGLE3, path=str(directory)))


def test_the_embedded_drafter_serves_first_and_can_be_gone_back_to(
    start_server: StartServer, make_drafter: MakeDrafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    embedded = make_drafter(4)
    monkeypatch.setattr(serving.assembly, "path_for", lambda name: embedded if name == "tiny" else None)
    running = start_server()
    first = version_id(embedded)
    assert listed(running)["active"] == first
    assert entry(running, first)["embedded"] is True
    second = publish(running, make_drafter(5))
    wait_for(lambda: listed(running)["active"] == second)
    assert entry(running, second)["embedded"] is False
    assert activate(running, first).status_code == 200
    assert ask(running)["speculation"]["drafter_version"] == first
    again = start_server(registry=RegistryConfig(root=str(running.config.registry_path)))
    assert listed(again)["active"] == first


@pytest.mark.parametrize("asked", ["ngram", "eagle3"])
def test_the_embedded_drafter_does_not_push_out_the_one_that_was_asked_for(
    start_server: StartServer, make_drafter: MakeDrafter, monkeypatch: pytest.MonkeyPatch, asked: str
) -> None:
    embedded = make_drafter(4)
    monkeypatch.setattr(serving.assembly, "path_for", lambda name: embedded)
    named = make_drafter(3)
    config = DrafterConfig(kind=DrafterKind.EAGLE3, path=str(named)) if asked == "eagle3" else DrafterConfig(DrafterKind.NGRAM)
    running = start_server(drafter=config)
    assert listed(running)["active"] == (version_id(named) if asked == "eagle3" else "ngram")
    news = publish(running, make_drafter(5))
    wait_for(lambda: listed(running)["active"] == news)
    assert {event["version"] for event in listed(running)["history"]} == {news}
    assert activate(running, version_id(embedded)).status_code == 200

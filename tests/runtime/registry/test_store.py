"""The registry on disk: states, the pointer, damage, several processes, publishers that die."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from runtime.eagle3 import Eagle3Config, version_id
from runtime.errors import DrafterRejected
from runtime.registry import Registry, VersionState

Publish = Callable[..., str]
MakeCheckpoint = Callable[..., Path]


def states(registry: Registry) -> dict[str, VersionState]:
    return {record.version: record.state for record in registry.versions()}


def names(directory: Path) -> list[str]:
    return sorted(entry.name for entry in directory.iterdir())


def test_a_published_version_is_staged_and_says_what_it_is(
    registry: Registry, publish: Publish, make_checkpoint: MakeCheckpoint
) -> None:
    version = publish(parent="fedcba9876543210")
    assert version == version_id(make_checkpoint())
    [record] = registry.versions()
    assert record == registry.get(version)
    assert (record.version, record.state, record.reason) == (version, VersionState.STAGED, "")
    assert record.path == registry.path(version)
    assert names(record.path) == ["config.json", "manifest.json", "model.safetensors"]
    assert version_id(record.path) == version
    manifest = record.manifest
    assert manifest is not None
    assert (manifest.version, manifest.parent, manifest.step) == (version, "fedcba9876543210", 10)
    assert (manifest.target_fingerprint, manifest.aux_layer_ids, manifest.dtype) == ("0123456789abcdef", (1, 3, 4), "bfloat16")
    assert manifest.metrics == {"acceptance_length": 2.5}
    assert abs(manifest.created_at - time.time()) < 60
    assert registry.active() is None


def test_the_same_content_is_the_same_version(registry: Registry, publish: Publish) -> None:
    version = publish()
    registry.set_state(version, VersionState.REJECTED, "NON_FINITE: no")
    before = registry.get(version)
    assert publish() == version
    assert registry.versions() == [before]  # its first manifest and its state stay


def test_the_same_content_for_another_target_is_staged_anew(registry: Registry, publish: Publish) -> None:
    """As the drafter that ships is, once its model was made again in another form."""
    version = publish(fingerprint="before")
    registry.set_state(version, VersionState.REJECTED, "TARGET_FINGERPRINT: no")
    assert publish(fingerprint="now") == version
    [record] = registry.versions()
    assert record.manifest is not None
    assert (record.manifest.target_fingerprint, record.state, record.reason) == ("now", VersionState.STAGED, "")
    registry.activate(version)
    assert publish(fingerprint="later") == registry.active() == version


@pytest.mark.parametrize("removed", [".", "versions", "states"])
def test_directories_removed_under_its_feet_leave_an_empty_registry_that_goes_on(
    registry: Registry, publish: Publish, removed: str
) -> None:
    registry.activate(publish(seed=0))
    shutil.rmtree(registry.root / removed)
    assert len(registry.versions()) == (1 if removed == "states" else 0)
    assert (registry.active() is None) == (removed != "states")
    shutil.rmtree(registry.root / removed)
    version = publish(seed=1)
    shutil.rmtree(registry.root / "states")
    registry.set_state(version, VersionState.VALIDATED)
    registry.activate(version)
    assert registry.active() == version


def test_versions_are_listed_oldest_first(registry: Registry, publish: Publish) -> None:
    published = [publish(seed) for seed in range(4)]
    assert [record.version for record in registry.versions()] == published


def test_activation_moves_the_pointer_and_retires_the_one_before(registry: Registry, publish: Publish) -> None:
    first, second = publish(0), publish(1)
    registry.set_state(first, VersionState.VALIDATED)
    registry.activate(first)
    assert (registry.active(), states(registry)) == (first, {first: VersionState.ACTIVE, second: VersionState.STAGED})
    registry.activate(second)
    assert states(registry) == {first: VersionState.RETIRED, second: VersionState.ACTIVE}
    registry.activate(first)  # going back is activating
    registry.set_state(second, VersionState.ROLLED_BACK, "live acceptance fell to 1.2")
    assert states(registry) == {first: VersionState.ACTIVE, second: VersionState.ROLLED_BACK}
    assert registry.get(second).reason == "live acceptance fell to 1.2"
    registry.activate(first)
    assert registry.active() == first


def test_another_process_sees_the_same(registry: Registry, publish: Publish) -> None:
    version = publish()
    registry.set_state(version, VersionState.ACTIVE)
    assert Registry(registry.root).active() == version
    assert Registry(registry.root).versions() == registry.versions()


@pytest.mark.parametrize("state", [VersionState.REJECTED, VersionState.RETIRED, VersionState.ROLLED_BACK])
def test_taking_the_active_version_away_leaves_none_active(registry: Registry, publish: Publish, state: VersionState) -> None:
    version = publish()
    registry.activate(version)
    registry.set_state(version, state, "HASH: changed")
    assert registry.active() is None
    assert (registry.get(version).state, registry.get(version).reason) == (state, "HASH: changed")


def test_validating_the_active_version_again_leaves_it_active(registry: Registry, publish: Publish) -> None:
    version = publish()
    registry.activate(version)
    registry.set_state(version, VersionState.VALIDATED)
    assert registry.active() == version
    assert registry.get(version).state is VersionState.ACTIVE


def test_a_rejected_version_cannot_be_activated(registry: Registry, publish: Publish) -> None:
    first, second = publish(0), publish(1)
    registry.activate(first)
    registry.set_state(second, VersionState.REJECTED, "MAX_POSITIONS: too short a context")
    with pytest.raises(DrafterRejected, match="too short a context") as caught:
        registry.activate(second)
    assert caught.value.reason == "MAX_POSITIONS"
    assert registry.active() == first


@pytest.mark.parametrize(
    "version", ["", "..", "../../etc", "0123456789ABCDEF", "0123456789abcde", "0123456789abcdef0", "/", "0123456789abcdef\n"]
)
def test_what_is_no_version_id_leads_nowhere(registry: Registry, version: str) -> None:
    for call in (registry.get, registry.path, registry.activate, lambda v: registry.set_state(v, VersionState.RETIRED)):
        with pytest.raises(DrafterRejected, match="is no version id") as caught:
            call(version)
        assert caught.value.reason == "UNKNOWN_VERSION"


def test_an_unknown_version_is_named(registry: Registry) -> None:
    with pytest.raises(DrafterRejected, match="There is no version 0123456789abcdef"):
        registry.activate("0123456789abcdef")
    assert registry.active() is None
    assert names(registry.root / "states") == []


def test_a_checkpoint_that_is_none_is_not_published(registry: Registry, tmp_path: Path, make_checkpoint: MakeCheckpoint) -> None:
    path = make_checkpoint()
    (path / "model.safetensors").unlink()
    for directory in (path, tmp_path / "nowhere"):
        with pytest.raises(DrafterRejected, match="is no drafter checkpoint") as caught:
            registry.publish(directory, parent=None, step=0, target_fingerprint="f", metrics={})
        assert caught.value.reason == "UNREADABLE"
    assert names(registry.root / "versions") == []


def test_a_checkpoint_without_layer_ids_is_not_published(
    registry: Registry, make_checkpoint: MakeCheckpoint, config: Eagle3Config
) -> None:
    path = make_checkpoint(config=dataclasses.replace(config, aux_layer_ids=None))
    with pytest.raises(DrafterRejected, match=r"names no auxiliary layers; .* mode=import stage it") as caught:
        registry.publish(path, parent=None, step=0, target_fingerprint="f", metrics={})
    assert caught.value.reason == "LAYER_IDS"


class TestDamage:
    """A damaged entry is listed as rejected, with its reason, and everything else works on."""

    @pytest.mark.parametrize(
        ("damage", "reason"),
        [
            (lambda path: (path / "manifest.json").unlink(), "MANIFEST"),
            (lambda path: (path / "manifest.json").write_text("{}"), "MANIFEST"),
            (lambda path: (path / "config.json").write_text("{"), "UNREADABLE"),
            (lambda path: (path / "model.safetensors").unlink(), "UNREADABLE"),
            (lambda path: os.truncate(path / "model.safetensors", 4000), "UNREADABLE"),
            (lambda path: os.truncate(path / "model.safetensors", 3), "UNREADABLE"),
        ],
    )
    def test_files(self, registry: Registry, publish: Publish, damage: Callable[[Path], object], reason: str) -> None:
        broken, whole = publish(0), publish(1)
        registry.activate(whole)
        damage(registry.path(broken))
        assert states(registry) == {broken: VersionState.REJECTED, whole: VersionState.ACTIVE}
        record = registry.get(broken)
        assert record.manifest is None
        assert record.reason.startswith(f"{reason}: ")
        with pytest.raises(DrafterRejected) as caught:
            registry.activate(broken)
        assert caught.value.reason == reason
        assert registry.active() == whole
        assert publish(0) == broken  # publishing the same content again heals it
        assert registry.get(broken).state is VersionState.STAGED

    def test_changed_weights_are_healed_by_publishing_again(self, registry: Registry, publish: Publish) -> None:
        version = publish()
        file = registry.path(version) / "model.safetensors"
        whole = file.read_bytes()
        file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        assert publish() == version
        assert file.read_bytes() == whole

    def test_entries_of_other_names(self, registry: Registry, publish: Publish) -> None:
        version = publish()
        (registry.root / "versions" / "my-drafter").mkdir()
        (registry.root / "versions" / "notes.txt").write_text("hello")
        listed = {record.version: record.state for record in registry.versions()}
        assert listed == {
            "my-drafter": VersionState.REJECTED,
            "notes.txt": VersionState.REJECTED,
            version: VersionState.STAGED,
        }

    def test_a_version_under_another_versions_name(self, registry: Registry, publish: Publish) -> None:
        path = registry.path(publish())
        path.rename(path.with_name("0" * 16))
        [record] = registry.versions()
        assert record.reason.startswith("HASH: ")

    @pytest.mark.parametrize(
        "content", ["", "{", "[]", "[" * 100_000, '{"version": 3}', '{"version": "../x"}', '{"version": "0000000000000000"}']
    )
    def test_a_pointer_that_points_nowhere(self, registry: Registry, publish: Publish, content: str) -> None:
        version = publish()
        (registry.root / "active.json").write_text(content)
        assert registry.active() is None
        registry.activate(version)
        assert registry.active() == version

    @pytest.mark.parametrize("content", ["", "{", "[]", "[" * 100_000, '{"state": "flying"}'])
    def test_a_state_that_says_nothing(self, registry: Registry, publish: Publish, content: str) -> None:
        version = publish()
        (registry.root / "states" / f"{version}.json").write_text(content)
        assert registry.get(version).state is VersionState.STAGED  # it will be validated again before it serves


KILLED_PUBLISHER = """
import sys, time
from pathlib import Path
from runtime.registry import Registry, store

real_version_id = store.version_id
def wait_here(directory):  # the copy is there, the version is not
    print("copied", flush=True)
    time.sleep(60)
    return real_version_id(directory)
store.version_id = wait_here
Registry(Path(sys.argv[1])).publish(Path(sys.argv[2]), parent=None, step=1, target_fingerprint="f", metrics={})
"""


def test_a_publisher_killed_midway_leaves_no_version(
    registry: Registry, publish: Publish, make_checkpoint: MakeCheckpoint
) -> None:
    command = [sys.executable, "-c", KILLED_PUBLISHER, str(registry.root), str(make_checkpoint(3))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "copied\n"
        process.send_signal(signal.SIGKILL)
    [leftover] = names(registry.root / "versions")
    assert leftover.startswith(".tmp-")
    assert registry.versions() == []
    version = publish()  # the dead one's lock is free, and what it left is removed
    assert names(registry.root / "versions") == [version]


WORKER = """
import sys
from pathlib import Path
from runtime.registry import Registry, VersionState

root, checkpoints = Path(sys.argv[1]), [Path(name) for name in sys.argv[2:]]
registry = Registry(root)
sys.stdin.readline()
for _ in range(3):
    for checkpoint in checkpoints:
        version = registry.publish(checkpoint, parent=None, step=1, target_fingerprint="f", metrics={"x": 1.0})
        registry.set_state(version, VersionState.VALIDATED)
        registry.activate(version)
        assert registry.active() is not None
        assert all(record.state is not VersionState.REJECTED for record in registry.versions())
"""


def test_two_processes_publish_and_activate_at_once(registry: Registry, make_checkpoint: MakeCheckpoint) -> None:
    checkpoints = [str(make_checkpoint(seed)) for seed in range(3)]
    commands = [[sys.executable, "-c", WORKER, str(registry.root), *order] for order in (checkpoints, checkpoints[::-1])]
    active_seen = 0
    with (
        subprocess.Popen(commands[0], stdin=subprocess.PIPE, text=True) as one,
        subprocess.Popen(commands[1], stdin=subprocess.PIPE, text=True) as other,
    ):
        for process in (one, other):
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.close()
        while one.poll() is None or other.poll() is None:
            pointer = registry.root / "active.json"
            if pointer.exists():
                assert json.loads(pointer.read_text())["version"] is not None  # a reader never meets a half pointer
                active_seen += 1
            assert [record.version for record in registry.versions() if record.state is VersionState.REJECTED] == []
            time.sleep(0.01)
    assert (one.returncode, other.returncode) == (0, 0)
    assert active_seen > 0
    assert len(registry.versions()) == 3
    assert list(states(registry).values()).count(VersionState.ACTIVE) == 1
    assert [name for name in names(registry.root / "versions") if name.startswith(".")] == []

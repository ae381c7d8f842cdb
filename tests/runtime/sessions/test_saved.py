"""Saved sessions on disk: what is written is read, and what is damaged, foreign or unknown is refused with its reason."""

from __future__ import annotations

import json
import threading
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch

from runtime.errors import SavedSessionRejected
from runtime.hidden_states import HiddenStates
from runtime.sessions import saved
from runtime.sessions.saved import SavedSession
from runtime.types import CachePolicy, DrafterPolicy, SessionOptions, Switch

OPTIONS = SessionOptions(
    client_label="größer",
    ttl_s=12.5,
    eos_token_ids=(2, 3),
    stop_token_ids=(7,),
    capture=Switch.OFF,
    cache_policy=CachePolicy(4, 100),
    drafter_policy=DrafterPolicy("pinned", "abc"),
    labels={"slice": "a"},
)


def record(options: SessionOptions = OPTIONS, history: tuple[int, ...] = (1, 2, 3, 4)) -> SavedSession:
    kv = {"keys": torch.arange(12, dtype=torch.bfloat16).reshape(3, 4), "values": torch.ones(2)}
    features = HiddenStates(torch.arange(9.0).reshape(3, 3), torch.arange(3.0)[:, None])
    return SavedSession(list(history), options, "target", "tokenizer", cached=3, kv=kv, features=features)


def read(directory: Path, target: str = "target", tokenizer: str = "tokenizer") -> SavedSession:
    return saved.read(directory, target_fingerprint=target, tokenizer_hash=tokenizer, vocab_size=50)


def reason(directory: Path, **of: str) -> str:
    with pytest.raises(SavedSessionRejected) as caught:
        read(directory, **of)
    assert directory.name in str(caught.value) or "cache policy" in str(caught.value)
    assert str(directory) not in str(caught.value), "where things lie is nobody's business"
    return caught.value.reason


@pytest.mark.parametrize("options", [OPTIONS, SessionOptions()])
def test_what_is_written_is_read(tmp_path: Path, options: SessionOptions) -> None:
    saved.write(tmp_path / "a", record(options))
    found = read(tmp_path / "a")
    assert (found.history, found.options, found.cached) == ([1, 2, 3, 4], options, 3)
    assert set(found.kv) == {"keys", "values"}
    assert torch.equal(found.kv["keys"], record().kv["keys"])
    assert found.kv["keys"].dtype == torch.bfloat16
    assert found.features is not None
    assert torch.equal(found.features.aux, torch.arange(9.0).reshape(3, 3))


def test_ids_alone_are_a_session_too(tmp_path: Path) -> None:
    saved.write(tmp_path / "a", SavedSession([1, 2], SessionOptions(), "target", "tokenizer"))
    found = read(tmp_path / "a")
    assert (found.history, found.cached, found.kv, found.features) == ([1, 2], 0, {}, None)


def test_a_later_save_replaces_the_earlier_and_an_interrupted_one_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved.write(tmp_path / "a", record())
    write_atomic = saved.write_atomic

    def interrupted(path: Path, data: bytes) -> None:
        if path.name == saved.RECORD:
            raise OSError("disk full")
        write_atomic(path, data)

    longer = SavedSession([1, 2, 3, 4, 5], OPTIONS, "target", "tokenizer", 5, {"keys": torch.zeros(5)})
    monkeypatch.setattr(saved, "write_atomic", interrupted)
    with pytest.raises(OSError, match="disk full"):
        saved.write(tmp_path / "a", longer)
    assert read(tmp_path / "a").history == [1, 2, 3, 4]
    monkeypatch.undo()
    saved.write(tmp_path / "a", longer)
    assert read(tmp_path / "a").history == [1, 2, 3, 4, 5]
    assert len(list((tmp_path / "a").iterdir())) == 3  # with its lock


def test_of_two_saves_at_once_the_last_one_stays_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one has yet to clear away the tensors of others when the second one comes."""
    has_record, waits, goes_on = threading.Event(), threading.Event(), threading.Event()
    write_atomic, locked = saved.write_atomic, saved.locked

    def paused(path: Path, data: bytes) -> None:
        write_atomic(path, data)
        if path.name == saved.RECORD and not has_record.is_set():
            has_record.set()
            assert goes_on.wait(60)

    def told(path: Path) -> AbstractContextManager[None]:
        if has_record.is_set():
            waits.set()
        return locked(path)

    monkeypatch.setattr(saved, "write_atomic", paused)
    monkeypatch.setattr(saved, "locked", told)
    longer = SavedSession([1, 2, 3, 4, 5], OPTIONS, "target", "tokenizer", 5, {"keys": torch.zeros(5)})
    first = threading.Thread(target=saved.write, args=(tmp_path / "a", record()))
    second = threading.Thread(target=saved.write, args=(tmp_path / "a", longer))
    first.start()
    assert has_record.wait(60)
    second.start()
    assert waits.wait(60)
    assert read(tmp_path / "a").history == [1, 2, 3, 4]
    goes_on.set()
    first.join(60)
    second.join(60)
    found = read(tmp_path / "a")
    assert (found.history, found.cached, set(found.kv)) == ([1, 2, 3, 4, 5], 5, {"keys"})


def test_who_reads_while_another_one_is_saved_gets_one_of_them_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved.write(tmp_path / "a", record())
    longer = SavedSession([1, 2, 3, 4, 5], OPTIONS, "target", "tokenizer", 5, {"keys": torch.zeros(5)})
    check = saved.check_token_ids

    def saving(*args: Any, **more: Any) -> None:  # between record and tensors
        monkeypatch.undo()
        saved.write(tmp_path / "a", longer)
        check(*args, **more)

    monkeypatch.setattr(saved, "check_token_ids", saving)
    assert read(tmp_path / "a").history == [1, 2, 3, 4, 5]


def test_nothing_there(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    assert {reason(tmp_path / name) for name in ("nowhere", "empty", "file")} == {"SAVED_NOT_FOUND"}


def test_of_something_else(tmp_path: Path) -> None:
    saved.write(tmp_path / "a", record())
    assert reason(tmp_path / "a", target="another") == "SAVED_OTHER_TARGET"
    assert reason(tmp_path / "a", target="another", tokenizer="another") == "SAVED_OTHER_TOKENIZER"


@pytest.mark.parametrize(
    "policy", [{"sink": 1, "window": None}, {"sink": 0, "window": 0}, {"sink": 0}, {"sink": "a", "window": 3}, {"ring": 3}, 3]
)
def test_unknown_cache_policies(tmp_path: Path, policy: Any) -> None:
    saved.write(tmp_path / "a", record())
    change(tmp_path / "a", options={**json.loads((tmp_path / "a" / saved.RECORD).read_text())["options"], "cache_policy": policy})
    if policy == {"sink": 0}:  # what is left out has its default
        assert read(tmp_path / "a").options.cache_policy == CachePolicy()
    else:
        assert reason(tmp_path / "a") == "SAVED_OTHER_CACHE_POLICY"


def change(directory: Path, **changes: Any) -> None:
    file = directory / saved.RECORD
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


@pytest.mark.parametrize(
    "changes",
    [
        {"format": 2},
        {"history": [1, 50, 3, 4]},
        {"history": [1, -1, 3, 4]},
        {"history": [1.0, 2, 3, 4]},
        {"history": "1234"},
        {"history": [True, 2, 3, 4]},
        {"cached": 5},
        {"cached": -1},
        {"cached": None},
        {"tensors": "../tensors.safetensors"},
        {"tensors": "other.safetensors"},
        {"tensors_sha256": "0" * 64},
        {"options": {}},
        {"options": []},
        {"tokenizer_hash": None},
    ],
)
def test_damage_is_told_from_health(tmp_path: Path, changes: dict[str, Any]) -> None:
    saved.write(tmp_path / "a", record())
    change(tmp_path / "a", **changes)
    assert reason(tmp_path / "a") == "SAVED_UNREADABLE"


@pytest.mark.parametrize("field", ["format", "history", "options", "target_fingerprint", "cached", "tensors", "tensors_sha256"])
def test_a_missing_field_is_named(tmp_path: Path, field: str) -> None:
    saved.write(tmp_path / "a", record())
    file = tmp_path / "a" / saved.RECORD
    content = json.loads(file.read_text())
    del content[field]
    file.write_text(json.dumps(content))
    with pytest.raises(SavedSessionRejected, match=f"'{field}' is missing"):
        read(tmp_path / "a")


@pytest.mark.parametrize("name", ["capture", "drafter_policy", "ttl_s", "labels", "eos_token_ids"])
def test_options_that_nobody_wrote_are_refused(tmp_path: Path, name: str) -> None:
    saved.write(tmp_path / "a", record())
    options = json.loads((tmp_path / "a" / saved.RECORD).read_text())["options"]
    for value in ({"kind": "pinned", "version": ""}, {"kind": "x", "version": ""}, "x"):
        if name == "labels" and isinstance(value, dict):
            continue
        change(tmp_path / "a", options={**options, name: value})
        assert reason(tmp_path / "a") == "SAVED_UNREADABLE"


def test_every_byte_of_the_tensors_counts(tmp_path: Path) -> None:
    saved.write(tmp_path / "a", record())
    [path] = (tmp_path / "a").glob("*.safetensors")
    data = bytearray(path.read_bytes())
    for place in (0, len(data) // 2, len(data) - 1):
        path.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        assert reason(tmp_path / "a") == "SAVED_UNREADABLE"
    path.write_bytes(data[:-1])
    assert reason(tmp_path / "a") == "SAVED_UNREADABLE"
    path.unlink()
    assert reason(tmp_path / "a") == "SAVED_UNREADABLE"
    (tmp_path / "a" / saved.RECORD).write_text("{")
    assert reason(tmp_path / "a") == "SAVED_UNREADABLE"

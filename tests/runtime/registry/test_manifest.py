"""Manifests come back as they were, and nothing else is taken for one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from runtime.errors import DrafterRejected
from runtime.registry import Manifest

MANIFEST = Manifest(
    version="0123456789abcdef",
    parent=None,
    step=7,
    target_fingerprint="f" * 16,
    vocabulary_hash="a" * 16,
    aux_layer_ids=(1, 14, 26),
    dtype="bfloat16",
    metrics={"acceptance_length": 2.75, "rows": 40},
    created_at=1.5,
    notes="ünïcode",
)


def test_it_comes_back_as_it_was() -> None:
    assert Manifest.from_json(MANIFEST.to_json()) == MANIFEST
    child = Manifest.from_json(MANIFEST.to_json().replace(b"null", b'"fedcba9876543210"'))
    assert child.parent == "fedcba9876543210"


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"version": 3}, "its version is 3"),
        ({"parent": 3}, "its parent is 3"),
        ({"step": -1}, "its step is -1"),
        ({"step": 1.5}, "its step is 1.5"),
        ({"step": True}, "its step is True"),
        ({"aux_layer_ids": [1, 2]}, "its aux_layer_ids is"),
        ({"aux_layer_ids": "123"}, "its aux_layer_ids is"),
        ({"metrics": {"loss": "low"}}, "its metrics is"),
        ({"metrics": [1]}, "its metrics is"),
        ({"created_at": None}, "its created_at is"),
        ({"created_at": 10**400}, "its created_at is"),
        ({"metrics": {"loss": 10**400}}, "its metrics is"),
        ({"extra": 1}, r"unknown \['extra'\]"),
    ],
)
def test_wrong_values_and_unknown_keys_are_refused(changes: dict[str, Any], what: str) -> None:
    with pytest.raises(DrafterRejected, match=what) as caught:
        Manifest.from_json(json.dumps(json.loads(MANIFEST.to_json()) | changes))
    assert caught.value.reason == "MANIFEST"


def test_a_missing_key_is_named() -> None:
    raw = json.loads(MANIFEST.to_json())
    del raw["vocabulary_hash"]
    with pytest.raises(DrafterRejected, match=r"lacks \['vocabulary_hash'\]"):
        Manifest.from_json(json.dumps(raw))


@pytest.mark.parametrize("content", [None, "", "{", "[]", "\x80", "[" * 100_000])
def test_an_unreadable_file_is_one_sentence(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "manifest.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(DrafterRejected, match=r"manifest\.json is not usable") as caught:
        Manifest.read(tmp_path)
    assert caught.value.reason == "MANIFEST"


def test_numbers_that_are_none_are_never_written() -> None:
    import dataclasses

    with pytest.raises(ValueError, match="JSON compliant"):
        dataclasses.replace(MANIFEST, metrics={"loss": float("nan")}).to_json()

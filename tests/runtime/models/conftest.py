"""A tiny model for the room, and homes of the tests' own."""

from __future__ import annotations

from pathlib import Path

import pytest

from runtime.models import Tokenizer, make_tiny


@pytest.fixture
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty SLIPSTREAM_HOME of the test's own."""
    directory = tmp_path / "home"
    monkeypatch.setenv("SLIPSTREAM_HOME", str(directory))
    return directory


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def tiny_tokenizer(tiny_path: Path) -> Tokenizer:
    return Tokenizer.load(tiny_path)

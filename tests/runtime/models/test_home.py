"""Where home is."""

from __future__ import annotations

from pathlib import Path

import pytest

from runtime.errors import ConfigError
from runtime.models import home


def test_the_variable_moves_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SLIPSTREAM_HOME", str(tmp_path / "elsewhere"))
    assert home() == tmp_path / "elsewhere"
    assert not home().exists()


def test_a_tilde_and_a_relative_path_are_made_absolute(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SLIPSTREAM_HOME", "~/here")
    assert home() == Path.home() / "here"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SLIPSTREAM_HOME", "here")
    assert home() == tmp_path / "here"


def test_the_home_of_nobody_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIPSTREAM_HOME", "~nobody-here/cache")
    with pytest.raises(ConfigError, match="SLIPSTREAM_HOME is '~nobody-here/cache'"):
        home()


@pytest.mark.parametrize("value", [None, "", "  "])
def test_without_it_the_users_cache_is_used(monkeypatch: pytest.MonkeyPatch, value: str | None) -> None:
    if value is None:
        monkeypatch.delenv("SLIPSTREAM_HOME", raising=False)
    else:
        monkeypatch.setenv("SLIPSTREAM_HOME", value)
    assert home() == Path.home() / ".cache" / "slipstream"

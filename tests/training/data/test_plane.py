from __future__ import annotations

from pathlib import Path

import pytest

from runtime.config import FeaturesConfig, StoreKind
from runtime.errors import ConfigError
from training.data.plane import open_plane, plane_root


def test_rows_lie_in_the_state_directory_unless_told_otherwise(tmp_path: Path) -> None:
    elsewhere = FeaturesConfig(root=str(tmp_path / "rows"))
    assert plane_root(FeaturesConfig(), tmp_path) == tmp_path / "features"
    assert plane_root(elsewhere, tmp_path / "state") == tmp_path / "rows"
    store, ledger = open_plane(elsewhere, tmp_path / "state")
    store.close()
    ledger.close()
    assert (tmp_path / "rows" / "ledger.sqlite").is_file()
    assert not (tmp_path / "state").exists()


def test_a_store_that_nobody_else_sees_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"features\.store is 'memory'; it must be directory or mooncake"):
        open_plane(FeaturesConfig(store=StoreKind.MEMORY), tmp_path)

"""Checkpoints on disk: whole or refused, and only as many as asked for."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from runtime.errors import ModelError
from training.app import run
from training.learning import checkpoint


def test_round_trip(tmp_path: Path) -> None:
    tensors = {"weight": torch.randn(3, 2), "mask": torch.tensor([True, False]), "step": torch.tensor(3.0)}
    path = checkpoint.save(tmp_path, 12, tensors, {"passes": [["a", 2]], "name": "é"})
    assert path.name == "step-00000012"
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]
    read, state = checkpoint.load(path)
    assert all(torch.equal(read[name], tensor) for name, tensor in tensors.items())
    assert (state["passes"], state["name"]) == ([["a", 2]], "é")


def test_a_step_saved_again_leaves_the_one_that_counts_until_the_ledger_knows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run saves before it publishes, often at a step that was just saved: killed while it moves, it must find the first."""
    first = checkpoint.save(tmp_path, 1, {"a": torch.zeros(1)}, {})
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "move_directory", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            checkpoint.save(tmp_path, 1, {"a": torch.ones(1)}, {})
    assert checkpoint.load(first)[0]["a"].item() == 0.0
    second = checkpoint.save(tmp_path, 1, {"a": torch.ones(1)}, {})
    assert [checkpoint.load(path)[0]["a"].item() for path in (first, second)] == [0.0, 1.0]
    checkpoint.prune(tmp_path, 1, second)
    assert list(tmp_path.iterdir()) == [second]


def test_prune_keeps_the_newest_and_removes_leftovers(tmp_path: Path) -> None:
    paths = [checkpoint.save(tmp_path, step, {"a": torch.zeros(1)}, {}) for step in (1, 2, 3, 4)]
    (tmp_path / ".tmp-dead").mkdir()
    checkpoint.prune(tmp_path, 2, paths[2])  # the ledger knows of step 3; step 4 is of a run that died before it was told
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["step-00000002", "step-00000003"]


@pytest.mark.parametrize("damage", ["truncated", "flipped", "no json", "gone", "another number"])
def test_damaged_checkpoint_is_one_clear_sentence(state, damage: str) -> None:
    state.add(range(8))
    run(state.config(trainer__max_steps=2))
    path = Path(state.ledger.latest_checkpoint("default").path)
    tensors, described = path / checkpoint.TENSORS_FILE, path / checkpoint.STATE_FILE
    data = tensors.read_bytes()
    if damage == "truncated":
        tensors.write_bytes(data[: len(data) // 2])
    elif damage == "flipped":
        tensors.write_bytes(data[:-5] + bytes([data[-5] ^ 1]) + data[-4:])
    elif damage == "no json":
        described.write_text("{")
    elif damage == "another number":
        described.write_text(described.read_text().replace('"num_steps": 2', '"num_steps": 3'))
    else:
        described.unlink()
    with pytest.raises(ModelError, match=r"Checkpoint .* cannot be used: .*\. Start another run"):
        run(state.config(trainer__max_steps=4))


def test_only_the_newest_checkpoints_stay(state) -> None:
    state.add(range(12))
    run(state.config(trainer__max_steps=9, trainer__checkpoint_every_steps=1, trainer__keep_checkpoints=2))
    kept = sorted(entry.name for entry in (state.root / "training" / "default" / "checkpoints").iterdir())
    assert kept == ["step-00000008", "step-00000009"]

"""Checkpoints of a run: a directory that appears at once, with every tensor in one safetensors file and the rest in JSON.

    <run dir>/checkpoints/step-00000120/{state.safetensors, state.json}

state.json carries the hash of the tensors and its own, so a damaged checkpoint is noticed before anything is built from it. Which
checkpoint counts is the ledger's to say: a directory that it does not know is a leftover. Nothing is ever replaced: a step
that is saved again goes to step-00000120.01, and until the ledger knows of that, the one before it counts. Knows no network.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from runtime.errors import ModelError
from runtime.files import dump_json, move_directory, sha256_of, temporary_directory

TENSORS_FILE = "state.safetensors"
STATE_FILE = "state.json"
FORMAT = 2
OWN_HASH = "state_sha256"  # of everything else in state.json


def save(parent: Path, step: int, tensors: Mapping[str, torch.Tensor], state: Mapping[str, Any]) -> Path:
    """Write a checkpoint under parent and return its directory; durable when this returns. state: JSON values only."""
    with temporary_directory(parent) as unfinished:
        save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, unfinished / TENSORS_FILE)
        digest = sha256_of(unfinished / TENSORS_FILE)
        told = {"format": FORMAT, "sha256": digest, **state}
        (unfinished / STATE_FILE).write_bytes(dump_json({**told, OWN_HASH: _hash_of(told)}))
        directory = _free_place(parent, step)
        move_directory(unfinished, directory)
    return directory


def load(directory: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """(tensors, state). ModelError with one sentence if anything of it is missing or damaged."""
    state = load_state(directory)
    try:
        if sha256_of(directory / TENSORS_FILE) != state["sha256"]:
            raise _damaged(directory, f"{TENSORS_FILE} does not have the recorded hash")
        return load_file(directory / TENSORS_FILE), state
    except (OSError, SafetensorError) as error:
        raise _damaged(directory, str(error)) from error


def load_state(directory: Path) -> dict[str, Any]:
    """The state without the tensors. ModelError with one sentence if it is missing or damaged."""
    try:
        state = json.loads((directory / STATE_FILE).read_text(encoding="utf-8"))
        if not isinstance(state, dict) or state.get("format") != FORMAT:
            raise _damaged(directory, f"{STATE_FILE} is not of format {FORMAT}")
        if state.pop(OWN_HASH, None) != _hash_of(state):
            raise _damaged(directory, f"{STATE_FILE} does not have the recorded hash")
        return state
    except (OSError, ValueError, RecursionError) as error:
        if isinstance(error, ModelError):
            raise
        raise _damaged(directory, str(error)) from error


def finished(parent: Path) -> list[Path]:
    """The checkpoints there, by step; whether they count, the ledger says."""
    return sorted(parent.glob("step-*"))


def prune(parent: Path, keep: int, current: Path) -> None:
    """Remove all but the newest `keep` checkpoints up to `current`, and leftovers of runs that died."""
    if not parent.is_dir():
        return
    kept = [entry for entry in finished(parent) if entry.name <= current.name][-keep:]
    for entry in parent.iterdir():
        if entry not in kept:
            shutil.rmtree(entry, ignore_errors=True)


def _hash_of(state: Mapping[str, Any]) -> str:
    return hashlib.sha256(dump_json(state)).hexdigest()


def _free_place(parent: Path, step: int) -> Path:
    name = f"step-{step:08d}"
    names = itertools.chain([name], (f"{name}.{again:02d}" for again in itertools.count(1)))
    return next(parent / free for free in names if not (parent / free).exists())


def _damaged(directory: Path, what: str) -> ModelError:
    return ModelError(
        f"Checkpoint {directory} cannot be used: {what}. Start another run with trainer.run_id=..., or restore the directory."
    )

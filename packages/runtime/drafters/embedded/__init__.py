"""Drafters that travel inside the package, so that a model of ours speculates from its first token.

Each directory beside this file is an EAGLE3 checkpoint named after its model. Knows no tensor.
"""

from __future__ import annotations

from pathlib import Path

_ROOT = Path(__file__).parent


def path_for(model_name: str) -> Path | None:
    """The checkpoint directory of the drafter that ships for this model name; None if there is none."""
    shipped = {directory.name: directory for directory in _ROOT.iterdir() if (directory / "config.json").is_file()}
    return shipped.get(model_name)

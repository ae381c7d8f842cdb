"""The table of failures in docs/life-of-a-row.md names tests that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def test_each_line_of_the_table_is_held_by_a_test() -> None:
    lines = (ROOT / "docs" / "life-of-a-row.md").read_text().splitlines()
    named = [match.groups() for line in lines if (match := re.fullmatch(r"\|.*\| `(\S+\.py)::(\w+)` \|", line))]
    assert len(named) == sum(line.startswith("|") for line in lines) - 2
    for file, name in named:
        tree = ast.parse((ROOT / "tests" / file).read_text())
        assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, f"{file} has no {name}"

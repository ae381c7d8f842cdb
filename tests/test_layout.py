"""The rules of the repository that no other tool holds: who may import whom, sizes, words, and fresh stubs."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ROOT / "packages"
TEXT_SUFFIXES = {".py", ".pyi", ".md", ".yaml", ".yml", ".toml", ".proto", ".txt", ".json", ".html", ".css", ".js", ""}
MADE_BY_TOOLS = {".git", ".venv", "build", "dist", "demo", "outputs", "multirun", "__pycache__"}
FORBIDDEN_IMPORTS = {"runtime": {"serving", "training"}, "serving": {"training"}, "training": {"serving"}}
MAX_FILE_LINES = 400
MAX_TEST_FILE_LINES = 600  # it mirrors one module, cases and all
MAX_FUNCTION_LINES = 80

# Written so that this file does not contain what it looks for.
FORBIDDEN_WORDS = ["NotImplemented" + "Error", "TO" + "DO", "FIX" + "ME"]
FORBIDDEN_PLACES = [
    r"py" + r"pi\.org",
    r"python" + r"hosted\.org",
    r"download\.pytorch\." + "org",
    r"huggingface\.c" + "o/",
    r"(?<![\w.~])/(work|root|home|Users)" + "/",
    r"\.\./shar" + "ed",
]


def _is_generated(path: Path) -> bool:
    return path.stem.endswith(("_pb2", "_pb2_grpc"))


def _files() -> Iterator[Path]:
    """Every text file a person wrote here, each once (configs are also linked into the runtime package)."""
    for path in sorted(ROOT.rglob("*")):
        parts = path.relative_to(ROOT).parts
        is_hidden = any(part.startswith(".") and part not in (".ci", ".gitignore") for part in parts)
        is_made = any(part in MADE_BY_TOOLS or part.endswith(".egg-info") for part in parts) or _is_generated(path)
        is_linked = any(parent.is_symlink() for parent in [path, *path.parents])
        is_text = path.suffix in TEXT_SUFFIXES and path.name != "LICENSE"
        if is_text and path.is_file() and not (is_hidden or is_made or is_linked):
            yield path


FILES = list(_files())
MODULES = [path for path in FILES if path.suffix == ".py"]


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def _imports(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            yield node.module


def test_the_walk_finds_the_repository() -> None:
    names = {_name(path) for path in FILES}
    assert {"README.md", "Makefile", "pyproject.toml", ".ci/run", "packages/runtime/types.py", "tests/test_layout.py"} <= names
    assert "configs/model/tiny.yaml" in names
    assert not any(name.startswith("packages/runtime/configs") for name in names)


@pytest.mark.parametrize("package", sorted(FORBIDDEN_IMPORTS))
def test_imports_point_one_way(package: str) -> None:
    wrong = [
        f"{_name(path)} imports {module}"
        for path in sorted((PACKAGES / package).rglob("*.py"))
        for module in _imports(ast.parse(path.read_text()))
        if module.split(".")[0] in FORBIDDEN_IMPORTS[package]
    ]
    assert not wrong, wrong


def test_every_module_opens_with_a_paragraph() -> None:
    written = [path for path in MODULES if not _name(path).startswith("tests/") and path.read_text().strip()]
    silent = [_name(path) for path in written if not ast.get_docstring(ast.parse(path.read_text()))]
    assert not silent, f"no docstring in {silent}"


def test_files_stay_small() -> None:
    sizes = {_name(path): len(path.read_text().splitlines()) for path in MODULES}
    limits = {name: MAX_TEST_FILE_LINES if name.startswith("tests/") else MAX_FILE_LINES for name in sizes}
    large = {name: size for name, size in sizes.items() if size > limits[name]}
    assert not large, f"too long: {large}"


def test_functions_stay_small() -> None:
    large = [
        f"{_name(path)}:{node.lineno} {node.name} has {node.end_lineno - node.lineno + 1} lines"
        for path in MODULES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.end_lineno is not None
        and node.end_lineno - node.lineno >= MAX_FUNCTION_LINES
    ]
    assert not large, f"over {MAX_FUNCTION_LINES} lines: {large}"


def test_tests_are_no_package() -> None:
    """A tests/runtime/__init__.py would shadow the runtime package."""
    assert not list((ROOT / "tests").rglob("__init__.py"))


@pytest.mark.parametrize("word", FORBIDDEN_WORDS)
def test_nothing_is_left_for_later(word: str) -> None:
    found = [_name(path) for path in FILES if word in path.read_text()]
    assert not found, f"{word} in {found}"


@pytest.mark.parametrize("pattern", FORBIDDEN_PLACES)
def test_no_file_names_a_host_or_a_machine(pattern: str) -> None:
    found = [f"{_name(path)}: {match.group()}" for path in FILES for match in re.finditer(pattern, path.read_text())]
    assert not found, found


def test_stubs_are_fresh(tmp_path: Path) -> None:
    """The committed stubs are what `make proto` writes now."""
    protos = sorted(str(path) for path in (ROOT / "proto").rglob("*.proto"))
    outputs = [f"--{kind}={tmp_path}" for kind in ("python_out", "pyi_out", "grpc_python_out")]
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{ROOT / 'proto'}", *outputs, *protos]
    subprocess.run(command, check=True, capture_output=True, text=True)
    made = {path.relative_to(tmp_path): path.read_text() for path in tmp_path.rglob("*_pb2*")}
    kept = {
        path.relative_to(PACKAGES): path.read_text() for path in PACKAGES.rglob("*_pb2*.py*") if path.suffix in (".py", ".pyi")
    }
    assert protos
    assert set(made) == set(kept), "run `make proto`"
    stale = [str(name) for name in made if made[name] != kept[name]]
    assert not stale, f"run `make proto`: {stale} are stale"

"""A wheel built from this tree works elsewhere: both programs start from any directory, with their configs and data inside."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ["pyproject.toml", "README.md", "LICENSE", "packages", "configs"]


def _run(*command: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=cwd, env=os.environ | environment, capture_output=True, text=True, timeout=240)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built as `python -m build` does it: a source distribution first, then a wheel from that alone."""
    source = tmp_path_factory.mktemp("source")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            ignore = shutil.ignore_patterns("__pycache__", "*.egg-info")
            shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=ignore)
        else:
            shutil.copy(ROOT / name, source / name)
    built = _run(sys.executable, "-m", "build", "--no-isolation", "--outdir", "dist", cwd=source)
    assert built.returncode == 0, built.stdout + built.stderr
    [path] = (source / "dist").glob("*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("installed")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(target), str(wheel)]
    done = _run(*pip, cwd=target)
    assert done.returncode == 0, done.stderr
    return target


def test_the_wheel_carries_what_the_programs_read(wheel: Path) -> None:
    inside = set(zipfile.ZipFile(wheel).namelist())
    configs = {f"runtime/{path.relative_to(ROOT)}" for path in (ROOT / "configs").rglob("*.yaml")}
    embedded = ROOT / "packages/runtime/drafters/embedded"
    drafters = {
        str(path.relative_to(ROOT / "packages")) for path in embedded.glob("*/*") if path.suffix in (".json", ".safetensors")
    }
    assert configs
    assert drafters
    assert configs | drafters <= inside
    assert {"runtime/py.typed", "serving/py.typed", "training/py.typed"} <= inside
    assert not any(name.startswith(("tests/", "benchmarks/")) for name in inside)


@pytest.mark.parametrize("program", ["serving", "training"])
def test_programs_start_from_anywhere(installed: Path, tmp_path: Path, program: str) -> None:
    where = _run(sys.executable, "-c", f"import {program}; print({program}.__file__)", cwd=tmp_path, PYTHONPATH=str(installed))
    assert where.stdout.startswith(str(installed)), where.stdout + where.stderr
    helped = _run(sys.executable, "-m", program, "--help", cwd=tmp_path, PYTHONPATH=str(installed))
    assert helped.returncode == 0, helped.stderr
    assert "smollm2-135m" in helped.stdout
    refused = _run(sys.executable, "-m", program, "registry.pol=1", cwd=tmp_path, PYTHONPATH=str(installed))
    assert refused.returncode == 2
    assert refused.stderr.splitlines() == ["slipstream: there is no setting 'registry.pol'; did you mean 'registry.poll_s'?"]
    assert not list(tmp_path.iterdir())

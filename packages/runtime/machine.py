"""The machine that a number was measured on, in words."""

from __future__ import annotations

import os
import platform
from importlib.metadata import version
from pathlib import Path

import torch


def describe() -> dict[str, str]:
    """CPU, cores, GPU if any, memory, system and the versions that matter to a speed."""
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    gpu = {"GPU": torch.cuda.get_device_name()} if torch.cuda.is_available() else {}
    packages = [f"{name} {version(name)}" for name in ("torch", "transformers")]
    return {
        "CPU": f"{_cpu_model()}, {os.cpu_count()} logical cores",
        **gpu,
        "memory": f"{memory_gib:.1f} GiB",
        "system": f"{platform.system()} {platform.release()}, {platform.machine()}",
        "versions": ", ".join([f"Python {platform.python_version()}", *packages]),
    }


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()

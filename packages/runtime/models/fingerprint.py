"""The content hash of a model: equal fingerprints mean the same weights, the same configuration, the same tokenizer.

Independent of how the weights are cut into files, of the order of keys, and of what a library notes about itself in
config.json. Hashing reads every byte once; the result is remembered under home(), keyed by the files' sizes and times.
"""

from __future__ import annotations

import hashlib
import json
import mmap
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from runtime.errors import ModelError
from runtime.files import write_atomic
from runtime.models.home import home

_CONFIG_FILES = ("config.json", "tokenizer.json")
_NOTES = ("transformers_version", "_name_or_path", "_model_name_or_path")  # in config.json, no part of the model


def fingerprint(path: Path) -> str:
    """16 hexadecimal digits. ModelError if a file is missing or damaged."""
    path = path.resolve()
    weights = weight_files(path)
    stamps = {file.name: _stamp(file) for file in [*weights, *(path / name for name in _CONFIG_FILES)]}
    memory = home() / "fingerprints" / f"{hashlib.sha256(str(path).encode()).hexdigest()[:16]}.json"
    known = _recall(memory)
    if known.get("files") == stamps:
        return str(known["fingerprint"])
    value = _compute(path, weights)
    try:
        memory.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(memory, json.dumps({"path": str(path), "files": stamps, "fingerprint": value}).encode())
    except OSError as error:
        raise ModelError(f"{memory.parent} cannot be written ({error}); set SLIPSTREAM_HOME to a directory that can.") from error
    return value


def weight_files(path: Path) -> list[Path]:
    """The safetensors files of a model directory, sorted; those named by the index if there is one."""
    index = path / "model.safetensors.index.json"
    if index.is_file():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
            raise ModelError(f"{index} is damaged: it does not say which file holds which tensor; fetch the model again.")
        names = set(weight_map.values())
    else:
        names = {file.name for file in path.glob("*.safetensors")}
    files = [path / name for name in sorted(names)]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise ModelError(f"{path} lacks {', '.join(missing)}, named by its index; fetch the model again.")
    if not files:
        raise ModelError(f"{path} holds no *.safetensors; models are read from safetensors only, never from pickles.")
    return files


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object, or ModelError."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read as JSON ({error}); fetch the model again.") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} holds {type(value).__name__}, not an object; fetch the model again.")
    return value


def read_header(file: Path) -> tuple[dict[str, dict[str, Any]], int]:
    """A safetensors file's table of tensors and where their bytes begin; ModelError if the file is cut short or damaged."""
    try:
        with safe_open(file, framework="numpy"), file.open("rb") as stream:  # opening holds the header against the file's size
            length = int.from_bytes(stream.read(8), "little")
            table = json.loads(stream.read(length))
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{file} is damaged ({error}); fetch the model again.") from error
    table.pop("__metadata__", None)
    return table, 8 + length


def _compute(path: Path, weights: list[Path]) -> str:
    digest = hashlib.sha256()
    for name in _CONFIG_FILES:
        value = {key: item for key, item in read_json(path / name).items() if key not in _NOTES}
        digest.update(json.dumps([name, value], sort_keys=True).encode())
    tensors = []
    for file in weights:
        table, start = read_header(file)
        tensors += [(name, entry, file, start) for name, entry in table.items()]
    maps = {}
    for file in weights:
        with file.open("rb") as stream:
            maps[file] = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
    for name, entry, file, start in sorted(tensors, key=lambda item: item[0]):
        first, last = entry["data_offsets"]
        digest.update(json.dumps([name, entry["dtype"], entry["shape"]]).encode())
        with memoryview(maps[file]) as view:
            digest.update(view[start + first : start + last])
    for mapped in maps.values():
        mapped.close()
    return digest.hexdigest()[:16]


def _stamp(file: Path) -> list[int]:
    try:
        stat = file.stat()
    except OSError as error:
        raise ModelError(f"{file} is missing; fetch the model again.") from error
    return [stat.st_size, stat.st_mtime_ns]


def _recall(memory: Path) -> dict[str, Any]:
    """What was remembered; nothing if there is nothing, or if it cannot be read (it is only a memory)."""
    try:
        value = json.loads(memory.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}

"""Tensors as the bytes of a safetensors file, for those who write many of them.

The library's own `save` makes a ctypes array type for each number of bytes that a tensor has, and ctypes keeps every one of them
for ever: some KiB for each length of history that a server ever wrote. What it writes and what this writes are the same bytes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

import torch

_NAMES = {  # in the library's order; files hold them backwards, the widest first
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int32: "I32",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.int64: "I64",
}
_RANKS = {dtype: rank for rank, dtype in enumerate(_NAMES)}


def to_bytes(tensors: Mapping[str, torch.Tensor]) -> bytes:
    """What safetensors.torch.load reads. On the CPU, of the types above; all of a tensor is written, whatever its strides."""
    names = sorted(tensors, key=lambda name: (-_RANKS[tensors[name].dtype], name))
    header: dict[str, object] = {}
    parts: list[memoryview] = []
    end = 0
    for name in names:
        tensor = tensors[name]
        begin, end = end, end + tensor.nbytes
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
        parts.append(tensor.detach().reshape(-1).view(torch.uint8).numpy().data)
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return b"".join([len(text).to_bytes(8, "little"), text, *parts])

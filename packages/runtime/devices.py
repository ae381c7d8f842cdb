"""From the setting `model.device` to a device that is here. Imports no model: a trainer starts without them."""

from __future__ import annotations

import torch

from runtime.errors import ConfigError


def choose_device(device: str) -> torch.device:
    """What `model.device` means; `auto` is CUDA where there is one. ConfigError for a device that is none, or is not here."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
    except RuntimeError as error:
        raise ConfigError(f"model.device is {device!r}; it must be auto, cpu, cuda or cuda:<index>.") from error
    if chosen.type not in ("cpu", "cuda"):
        raise ConfigError(f"model.device is {device!r}; it must be auto, cpu, cuda or cuda:<index>.")
    if chosen.type == "cuda" and (chosen.index or 0) >= torch.cuda.device_count():
        raise ConfigError(
            f"model.device is {device!r}, but torch sees {torch.cuda.device_count()} CUDA devices; use auto or cpu."
        )
    return chosen

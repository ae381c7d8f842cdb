"""From a model's name to a directory that can be loaded: our own names, a local Hugging Face directory, or a hub id.

What comes out has been looked at: configuration, weights (whole, safetensors only) and tokenizer are there. Loading them
into an engine is a backend's business.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from runtime.errors import ModelError
from runtime.models.cache import Recipe, made_once
from runtime.models.fingerprint import fingerprint, read_header, read_json, weight_files
from runtime.models.home import absolute, home
from runtime.models.smollm2 import SOURCE as SMOLLM2_SOURCE
from runtime.models.smollm2 import make_smollm2


@dataclass(frozen=True)
class ResolvedModel:
    name: str
    path: Path  # Hugging Face directory: config.json, *.safetensors, tokenizer.json, chat template
    fingerprint: str


def resolve(name: str) -> ResolvedModel:
    """Find the model, fetching or making it if need be. ModelError says in one sentence why that failed."""
    if not name.strip():
        raise ModelError(f"The model's name is empty; use {_own_names()}, a local directory or a hub id.")
    if name in _RECIPES:
        path = made_once(home() / "models" / name, _RECIPES[name]())
    elif name.startswith((".", "/", "~")) or _is_there(name):
        path = _local(absolute("model.name", name))
    else:
        path = _from_hub(name)
    _check(path)
    return ResolvedModel(name, path, fingerprint(path))


def _smollm2() -> Recipe:
    return Recipe(SMOLLM2_SOURCE, make_smollm2)


def _tiny() -> Recipe:
    from runtime.models.tiny import make_tiny

    return Recipe("random weights, seed 0, form 1", make_tiny)


_RECIPES: dict[str, Callable[[], Recipe]] = {"smollm2-135m": _smollm2, "tiny": _tiny}


def _own_names() -> str:
    return ", ".join(_RECIPES)


def _is_there(name: str) -> bool:
    try:
        return Path(name).exists()
    except (OSError, ValueError):  # no name that a file could have
        return False


def _local(directory: Path) -> Path:
    if not _is_there(str(directory)):
        raise ModelError(f"There is no directory {directory}; name an existing one, {_own_names()}, or a hub id.")
    if not directory.is_dir():
        raise ModelError(f"{directory} is a file; name the Hugging Face directory that holds config.json and the weights.")
    return directory.resolve()


def _from_hub(name: str) -> Path:
    from httpx import HTTPError
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=["*.json", "*.safetensors", "*.jinja"]))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, HTTPError, OSError) as error:
        said = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelError(
            f"Model {name!r} is none of ours ({_own_names()}), no local directory, and could not be fetched from the hub: {said}"
        ) from error


def _check(path: Path) -> None:
    """Refuse a directory that no backend could load, before anything slow starts."""
    config = read_json(path / "config.json")
    found = config.get("architectures")
    architectures = [str(name) for name in found] if isinstance(found, list) else []
    if not any(name.endswith("ForCausalLM") for name in architectures):
        raise ModelError(f"{path} is a {', '.join(architectures) or 'nameless model'}; a *ForCausalLM model is needed.")
    for file in weight_files(path):
        read_header(file)
    if not (path / "tokenizer.json").is_file():
        raise ModelError(f"{path} has no tokenizer.json; save the model's tokenizer there with transformers' save_pretrained.")

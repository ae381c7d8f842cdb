"""The backends by name. Each is imported only when it is asked for, so none has to be installed for another to run."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, cast

from runtime.errors import ConfigError

if TYPE_CHECKING:
    from runtime.backends.base import Target
    from runtime.config import BackendConfig, ModelConfig
    from runtime.models import ResolvedModel

# name -> module with `load(backend, model, resolved) -> Target`
BACKENDS = {
    "mlx": "runtime.backends.mlx.loading",
    "transformers": "runtime.backends.transformers.loading",
}


def load_target(backend: BackendConfig, model: ModelConfig, resolved: ResolvedModel) -> Target:
    """The model of `resolved` on the backend named by `backend.name`. ConfigError for a name that is not in the table."""
    if backend.name not in BACKENDS:
        raise ConfigError(f"backend.name is {backend.name!r}; it must be one of: {', '.join(sorted(BACKENDS))}.")
    return cast("Target", import_module(BACKENDS[backend.name]).load(backend, model, resolved))

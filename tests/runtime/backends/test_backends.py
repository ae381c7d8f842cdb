from __future__ import annotations

import pytest

from runtime.backends import load_target
from runtime.config import BackendConfig, ModelConfig
from runtime.errors import ConfigError
from runtime.models import ResolvedModel


def test_an_unknown_backend_is_refused_with_the_names(tiny: ResolvedModel) -> None:
    with pytest.raises(ConfigError, match=r"backend\.name is 'vllm'; it must be one of: mlx, transformers\."):
        load_target(BackendConfig(name="vllm"), ModelConfig(), tiny)

"""What only MLX's target can get wrong: shared memory, and a forward that fails between two sequences."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from runtime.backends import load_target
from runtime.backends.base import Segment
from runtime.backends.mlx.target import MlxTarget
from runtime.config import BackendConfig, ModelConfig
from runtime.models import ResolvedModel
from runtime.types import CachePolicy

TEXT = torch.randint(0, 320, (60,), generator=torch.Generator().manual_seed(11)).tolist()


@pytest.fixture
def target(tiny: ResolvedModel) -> MlxTarget:
    loaded = load_target(BackendConfig(name="mlx"), ModelConfig(), tiny)
    assert isinstance(loaded, MlxTarget)
    return loaded


def filled(target: MlxTarget, num_tokens: int) -> int:
    cache = target.new_cache()
    target.forward([Segment(cache, TEXT[:num_tokens])])
    target.commit(cache, range(num_tokens))
    return cache


class Failing:
    """A layer of the model that fails at its second call."""

    def __init__(self, layer: Any) -> None:
        self._layer, self._num_calls = layer, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._num_calls += 1
        if self._num_calls == 2:
            raise RuntimeError("the device is gone")
        return self._layer(*args, **kwargs)


def test_a_forward_that_fails_leaves_every_history_as_it_was(target: MlxTarget, oracle: Callable[..., Any]) -> None:
    first, second = filled(target, 20), filled(target, 33)
    layers = target._model._decoder.layers
    layers[6] = Failing(layers[6])
    with pytest.raises(RuntimeError, match="the device is gone"):
        target.forward([Segment(first, [1, 2, 3]), Segment(second, [4])])
    for cache, length in ((first, 20), (second, 33)):
        with pytest.raises(ValueError, match="left 0 tentative rows"):
            target.commit(cache, [0])
        [output] = target.forward([Segment(cache, TEXT[length:], num_logits=len(TEXT) - length)])
        expected = oracle(TEXT).logits[length:]
        assert (output.logits - expected).abs().max() < 1e-4 * expected.abs().max()


def test_outputs_stay_what_they_are_as_the_sequence_goes_on(target: MlxTarget) -> None:
    """They share memory with MLX, which must not use it again."""
    cache = filled(target, 20)
    [output] = target.forward([Segment(cache, TEXT[20:30], num_logits=10)])
    kept = [tensor.clone() for tensor in (output.logits, output.hidden.aux, output.hidden.last)]
    target.commit(cache, range(10))
    for token_id in TEXT[30:]:
        target.forward([Segment(cache, [token_id])])
        target.commit(cache, [0])
    for tensor, before in zip((output.logits, output.hidden.aux, output.hidden.last), kept, strict=True):
        assert torch.equal(tensor, before)


def test_the_embedding_is_the_models_own_memory(target: MlxTarget) -> None:
    own = np.array(target._model._decoder.embed_tokens.weight, copy=False)
    assert target.embedding.data_ptr() == target.lm_head.data_ptr() == own.ctypes.data


@pytest.mark.parametrize("policy", [CachePolicy(), CachePolicy(sink=4, window=10)], ids=str)
@pytest.mark.parametrize("way", ["from transformers", "to transformers"])
def test_saved_keys_and_values_mean_the_same_on_both_backends(
    target: MlxTarget, tiny: ResolvedModel, oracle: Callable[..., Any], policy: CachePolicy, way: str
) -> None:
    """They have the same names and shapes, so a saved session does not tell which backend it came from."""
    other = load_target(BackendConfig(), ModelConfig(device="cpu"), tiny)
    old, new = (other, target) if way == "from transformers" else (target, other)
    cache = old.new_cache(policy)
    old.forward([Segment(cache, TEXT[:50])])
    old.commit(cache, range(50))
    restored = new.restore(old.save(cache), 50, policy)
    [output] = new.forward([Segment(restored, TEXT[50:], num_logits=10)])
    expected = oracle(TEXT, policy).logits[50:]
    assert (output.logits - expected).abs().max() < 1e-4 * expected.abs().max()

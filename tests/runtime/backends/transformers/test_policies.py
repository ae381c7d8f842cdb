"""Cache policies against the plain model under an explicit mask, however the history came, and what they hold in memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from runtime.backends.base import Segment, Target
from runtime.backends.transformers.cache import BLOCK_TOKENS, drop_step
from runtime.types import CachePolicy

TEXT = torch.randint(0, 320, (150,), generator=torch.Generator().manual_seed(3)).tolist()
POLICIES = [
    CachePolicy(),
    CachePolicy(window=1),
    CachePolicy(window=20),
    CachePolicy(sink=1, window=1),
    CachePolicy(sink=4, window=20),
    CachePolicy(sink=30, window=7),
    CachePolicy(sink=200, window=5),
    CachePolicy(window=500),
]
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"num_hidden_layers": 4},
    "mistral": {"num_hidden_layers": 4, "sliding_window": 12},  # in all layers
    "gemma3_text": {"num_hidden_layers": 6, "sliding_window": 12},  # in all but the last
}


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest, random_model: Callable[..., Any]) -> Any:
    return random_model(request.param, **MODELS[request.param])


@pytest.fixture(scope="module")
def target(model: Any) -> Target:
    built: Target = model.target()
    return built


def feed(target: Target, cache: int, token_ids: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
    """Logits of all tokens, committed in pieces of these sizes, the last one as often as needed."""
    logits, start, index = [], 0, 0
    while start < len(token_ids):
        piece = token_ids[start : start + sizes[min(index, len(sizes) - 1)]]
        [output] = target.forward([Segment(cache, piece, num_logits=len(piece))])
        target.commit(cache, range(len(piece)))
        logits.append(output.logits)
        start, index = start + len(piece), index + 1
    return torch.cat(logits)


def assert_near(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert (actual - expected).abs().max() < 1e-4 * expected.abs().max()


@pytest.mark.parametrize("sizes", [[150], [1], [7], [64, 3]], ids=str)
@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_tokens_see_what_the_policy_says(model: Any, target: Target, policy: CachePolicy, sizes: list[int]) -> None:
    cache = target.new_cache(policy)
    assert_near(feed(target, cache, TEXT, sizes), model.logits(TEXT, policy))
    assert target.length(cache) == len(TEXT)


# history - 0 - 2 - 5 - 6 - 7; 0, 2, 5, 6, 7 continue the text
#        \   \ 3
#         1 - 4
PARENTS = [-1, -1, 0, 0, 1, 2, 5, 6]
PATHS = [[0, 2, 5, 6, 7], [0, 3], [1, 4]]


@pytest.mark.parametrize("length", [3, 40, 100])
@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_trees_see_what_the_policy_says(model: Any, target: Target, policy: CachePolicy, length: int) -> None:
    cache, other = target.new_cache(policy), target.new_cache(CachePolicy(sink=2, window=9))
    feed(target, cache, TEXT[:length], [11])
    feed(target, other, TEXT[:30], [30])
    tree = [TEXT[length], 11, TEXT[length + 1], 12, 13, *TEXT[length + 2 : length + 5]]
    output, beside = target.forward([Segment(cache, tree, PARENTS, num_logits=8), Segment(other, [5])])
    for path in PATHS:
        expected = model.logits(TEXT[:length] + [tree[node] for node in path], policy)
        assert_near(output.logits[path], expected[length:])
    assert_near(beside.logits, model.logits([*TEXT[:30], 5], CachePolicy(sink=2, window=9))[-1:])
    target.commit(cache, PATHS[0])
    rest = TEXT[length + 5 : length + 40]
    assert_near(feed(target, cache, rest, [1]), model.logits(TEXT[: length + 40], policy)[length + 5 :])


@pytest.fixture(scope="module")
def llama(random_model: Callable[..., Any]) -> Any:
    return random_model("llama", max_position_embeddings=4096)


@pytest.mark.parametrize("policy", [CachePolicy(sink=4, window=64), CachePolicy(window=200), CachePolicy(window=1)], ids=str)
def test_memory_is_bounded_and_as_foretold(llama: Any, policy: CachePolicy) -> None:
    target = llama.target()
    cache = target.new_cache(policy)
    assert policy.window is not None
    step = drop_step(policy.window)
    held, token_bytes = [], 8 * 2 * 2 * 16 * 4
    text = TEXT * 20
    for start in range(0, 3000, 50):
        feed(target, cache, text[start : start + 50], [50])
        length = start + 50
        in_sight = min(length, policy.sink + policy.window - 1)
        assert in_sight <= length - target.dropped(cache) < in_sight + 2 * step
        held.append(target.cache_bytes())
        assert held[-1] <= target.cache_bytes(length, policy)
        assert held[-1] % (BLOCK_TOKENS * token_bytes) == 0
    # Within a block and the steps by which buffers grow.
    assert max(held) <= (1.25 * (policy.sink + policy.window + 2 * step + 50) + BLOCK_TOKENS) * token_bytes
    feed(target, cache, text[:1000], [1000])
    assert target.cache_bytes() <= target.cache_bytes(4000, policy)  # what a long forward took is given back
    target.drop(cache)
    assert target.cache_bytes() == 0


def test_what_is_dropped_depends_on_the_length_alone(llama: Any) -> None:
    target, policy = llama.target(), CachePolicy(sink=4, window=64)
    caches = [target.new_cache(policy) for _ in range(3)]
    for cache, size in zip(caches, (1, 7, 300), strict=True):
        feed(target, cache, TEXT * 2, [size])
    assert len({target.dropped(cache) for cache in caches}) == 1
    assert target.dropped(caches[0]) > 0


def test_nothing_is_dropped_under_the_full_policy(llama: Any) -> None:
    target = llama.target()
    cache = target.new_cache()
    feed(target, cache, TEXT, [50])
    assert target.dropped(cache) == 0


POLICY = CachePolicy(sink=4, window=20)  # drops 16 at a time


@pytest.fixture
def past(llama: Any) -> tuple[Target, int]:
    """A target and a cache of 150 tokens, of which the policy dropped 4..111."""
    target = llama.target()
    cache = target.new_cache(POLICY)
    feed(target, cache, TEXT, [50])
    assert target.dropped(cache) == 96
    return target, cache


@pytest.mark.parametrize("length", [150, 134, 119, 4, 2, 0])
def test_a_cache_goes_back_as_far_as_it_holds_what_is_needed(llama: Any, past: tuple[Target, int], length: int) -> None:
    target, cache = past
    expected = llama.logits(TEXT[:length] + TEXT[20:60], POLICY)[length:]
    fork = target.fork(cache, length)
    target.truncate(cache, length)
    for each in (cache, fork):
        assert target.length(each) == length
        assert target.dropped(each) == (96 if length > 4 else 0)
        assert_near(feed(target, each, TEXT[20:60], [13]), expected)


@pytest.mark.parametrize("length", [118, 100, 50, 5])
def test_a_cache_does_not_go_back_to_what_it_dropped(llama: Any, past: tuple[Target, int], length: int) -> None:
    target, cache = past
    for go_back in (target.truncate, target.fork):
        with pytest.raises(ValueError, match=f"truncate to {length} tokens; the cache dropped 96 of them behind the first 4"):
            go_back(cache, length)
    assert (target.length(cache), target.dropped(cache)) == (150, 96)
    assert_near(feed(target, cache, TEXT[:9], [9]), llama.logits(TEXT + TEXT[:9], POLICY)[150:])


def test_a_window_of_one_needs_nothing_back(llama: Any) -> None:
    target, policy = llama.target(), CachePolicy(window=1)
    cache = target.new_cache(policy)
    feed(target, cache, TEXT, [50])
    target.truncate(cache, 77)
    assert_near(feed(target, cache, TEXT[77:], [9]), llama.logits(TEXT, policy)[77:])


@pytest.mark.parametrize("policy", [CachePolicy(), POLICY], ids=str)
def test_what_is_saved_is_restored(llama: Any, policy: CachePolicy) -> None:
    target, other = llama.target(), llama.target()
    cache = target.new_cache(policy)
    feed(target, cache, TEXT, [50])
    target.forward([Segment(cache, [1, 2])])  # tentative
    tensors = target.save(cache)
    assert all(tensor.is_contiguous() and tensor.device.type == "cpu" for tensor in tensors.values())
    feed(target, cache, [7], [1])  # the saved tensors are copies
    target.drop(cache)
    restored = other.restore(tensors, 150, policy)
    assert other.length(restored) == 150
    assert other.cache_bytes() <= other.cache_bytes(150, policy)
    assert_near(feed(other, restored, TEXT[:9], [4]), llama.logits(TEXT + TEXT[:9], policy)[150:])


BAD_SAVES: dict[str, tuple[Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]], int, str]] = {
    "a name": (lambda saved: {"keys": saved["keys"]}, 10, r"saved tensors are \['keys'\]"),
    "rows": (lambda saved: saved | {"values": saved["values"][:, :, 1:]}, 10, "saved values are"),
    "heads": (lambda saved: {name: tensor[:, :1] for name, tensor in saved.items()}, 10, "saved keys are"),
    "rank": (lambda saved: saved | {"keys": saved["keys"][0]}, 10, "saved keys are"),
    "dtype": (lambda saved: saved | {"keys": saved["keys"].half()}, 10, r"torch\.float16"),
    "too few": (lambda saved: saved, 11, "10 rows of K/V were saved; 11 tokens need 11 to 11"),
    "too many": (lambda saved: saved, 9, "10 rows of K/V were saved; 9 tokens need 9 to 9"),
}


@pytest.mark.parametrize("case", BAD_SAVES)
def test_what_was_not_saved_here_is_refused(llama: Any, case: str) -> None:
    damage, length, message = BAD_SAVES[case]
    target = llama.target()
    cache = target.new_cache()
    feed(target, cache, TEXT[:10], [10])
    held = target.cache_bytes()
    with pytest.raises(ValueError, match=message):
        target.restore(damage(target.save(cache)), length, CachePolicy())
    assert target.cache_bytes() == held

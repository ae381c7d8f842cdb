"""The contract of `Target`, for every backend: a further one joins by a line in `BACKENDS`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from runtime.backends import load_target
from runtime.backends.base import FULL, Segment, SegmentOutput, Target
from runtime.config import BackendConfig, Dtype, ModelConfig
from runtime.models import ResolvedModel
from runtime.types import CachePolicy

BACKENDS = [
    pytest.param(("transformers", "cpu"), id="transformers-cpu"),
    pytest.param(("mlx", "auto"), id="mlx"),
    pytest.param(("transformers", "cuda"), id="transformers-cuda", marks=pytest.mark.cuda),
]
TOLERANCE = 1e-4  # of the largest value; kernels of CUDA and of MLX round differently from one shape to the next
GENERATOR = torch.Generator().manual_seed(7)
TEXT = torch.randint(0, 320, (60,), generator=GENERATOR).tolist()
OTHER = torch.randint(0, 320, (60,), generator=GENERATOR).tolist()


@pytest.fixture(scope="module", params=BACKENDS)
def load(request: pytest.FixtureRequest, tiny: ResolvedModel) -> Callable[[], Target]:
    name, device = request.param
    return lambda: load_target(BackendConfig(name=name), ModelConfig(dtype=Dtype.FLOAT32, device=device), tiny)


@pytest.fixture(scope="module")
def shared(load: Callable[[], Target]) -> Target:
    return load()


@pytest.fixture
def target(shared: Target) -> Target:
    assert shared.cache_bytes() == 0, "an earlier test left caches behind"
    return shared


@pytest.fixture(autouse=True)
def _drops_its_caches(monkeypatch: pytest.MonkeyPatch, shared: Target) -> Any:
    """Drops what a test left, by noting every handle that was given out."""
    handles: list[int] = []
    for name in ("new_cache", "fork", "restore"):
        give = getattr(shared, name)
        monkeypatch.setattr(shared, name, lambda *args, give=give: handles.append(give(*args)) or handles[-1])
    yield
    for handle in handles:
        try:
            shared.drop(handle)
        except ValueError:
            continue  # the test dropped it itself


def run(target: Target, cache: int, token_ids: Sequence[int], commit: bool = True, **fields: Any) -> SegmentOutput:
    """One segment with logits for all rows; committed whole unless told otherwise."""
    [output] = target.forward([Segment(cache, token_ids, **{"num_logits": len(token_ids), **fields})])
    if commit:
        target.commit(cache, range(len(token_ids)))
    return output


def filled(target: Target, token_ids: Sequence[int], policy: CachePolicy = FULL, size: int = 64) -> int:
    """A cache with these tokens, committed in pieces of `size`."""
    cache = target.new_cache(policy)
    for start in range(0, len(token_ids), size):
        run(target, cache, token_ids[start : start + size])
    return cache


def assert_near(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual.cpu(), expected.cpu(), atol=TOLERANCE * float(expected.abs().max()), rtol=0)


def assert_same(output: SegmentOutput, plain: Any, rows: slice | list[int]) -> None:
    assert_near(output.logits, plain.logits[rows])
    assert_near(output.hidden.aux, plain.aux[rows])
    assert_near(output.hidden.last, plain.last[rows])


def test_info_describes_the_model(target: Target, tiny: ResolvedModel) -> None:
    info = target.info
    assert (info.name, info.fingerprint) == ("tiny", tiny.fingerprint)
    assert (info.vocab_size, info.hidden_size, info.num_layers, info.max_positions) == (320, 64, 8, 512)
    assert info.aux_layer_ids == (1, 3, 4)
    assert info.eos_token_ids == (257,)
    assert info.dtype == "float32"
    assert target.embedding.shape == target.lm_head.shape == (320, 64)


def test_prefill_equals_the_plain_model(target: Target, oracle: Any) -> None:
    output = run(target, target.new_cache(), TEXT)
    assert output.logits.dtype is torch.float32
    assert_same(output, oracle(TEXT), slice(None))


def test_the_head_of_last_gives_the_logits(target: Target) -> None:
    output = run(target, target.new_cache(), TEXT)
    assert_near(output.hidden.last @ target.lm_head.T, output.logits)


@pytest.mark.parametrize("sizes", [[1] * 60, [7, 1, 30, 22], [59, 1]], ids=lambda sizes: f"{len(sizes)} chunks")
def test_chunked_prefill_equals_one_shot(target: Target, oracle: Any, sizes: list[int]) -> None:
    plain, cache, start = oracle(TEXT), target.new_cache(), 0
    for size in sizes:
        assert_same(run(target, cache, TEXT[start : start + size]), plain, slice(start, start + size))
        start += size
        assert target.length(cache) == start


def test_prefill_grows_over_many_buffers(target: Target, oracle: Any) -> None:
    text = (TEXT + OTHER) * 4
    cache = filled(target, text[:100])
    for start in range(100, 460, 90):
        run(target, cache, text[start : start + 90])
    assert_same(run(target, cache, text[460:480]), oracle(text), slice(460, 480))


@pytest.mark.parametrize("num_logits", [0, 1, 5])
def test_logits_are_those_of_the_last_rows(target: Target, oracle: Any, num_logits: int) -> None:
    output = run(target, target.new_cache(), TEXT, num_logits=num_logits)
    assert output.logits.shape == (num_logits, 320)
    assert len(output.hidden) == len(TEXT)
    if num_logits:
        assert_near(output.logits, oracle(TEXT).logits[-num_logits:])


def test_a_ragged_batch_equals_each_alone(target: Target, oracle: Any) -> None:
    first, second, third = filled(target, TEXT[:20]), filled(target, OTHER[:41]), target.new_cache()
    outputs = target.forward(
        [
            Segment(first, TEXT[20:24], num_logits=4),
            Segment(second, OTHER[41:42], num_logits=0),
            Segment(third, OTHER[:13], num_logits=13),
        ]
    )
    one, two, three = oracle(TEXT[:24]), oracle(OTHER[:42]), oracle(OTHER[:13])
    assert_same(outputs[0], one, slice(20, 24))
    assert outputs[1].logits.shape == (0, 320)
    assert_near(outputs[1].hidden.aux, two.aux[41:42])
    assert_same(outputs[2], three, slice(None))


# A tree behind TEXT[:20]; the path 0, 2, 5 continues the text itself.
#
#         history
#        /       \
#       0         1
#      / \         \
#     2   3         4
#     |
#     5
TREE = [TEXT[20], 11, TEXT[21], 12, 13, TEXT[22]]
PARENTS = [-1, -1, 0, 0, 1, 2]
PATHS = [[0, 2, 5], [0, 3], [1, 4]]


def test_a_tree_equals_each_of_its_paths(target: Target, oracle: Any) -> None:
    cache = filled(target, TEXT[:20])
    output = run(target, cache, TREE, commit=False, parents=PARENTS)
    for path in PATHS:
        plain = oracle(TEXT[:20] + [TREE[node] for node in path])
        assert_near(output.logits[path], plain.logits[20:])
        assert_near(output.hidden[torch.tensor(path)].aux, plain.aux[20:])


@pytest.mark.parametrize("rows", [[], [0], [0, 2], [0, 2, 5], [1, 4]], ids=str)
def test_a_committed_path_is_history(target: Target, oracle: Any, rows: list[int]) -> None:
    cache = filled(target, TEXT[:20])
    run(target, cache, TREE, commit=False, parents=PARENTS)
    target.commit(cache, rows)
    history = TEXT[:20] + [TREE[row] for row in rows]
    assert target.length(cache) == len(history)
    assert_same(run(target, cache, OTHER[:5]), oracle(history + OTHER[:5]), slice(len(history), None))


def test_a_chain_prefix_is_history(target: Target, oracle: Any) -> None:
    cache = filled(target, TEXT[:20])
    run(target, cache, TEXT[20:23] + OTHER[:3], commit=False)
    target.commit(cache, [0, 1, 2])
    assert_same(run(target, cache, TEXT[23:]), oracle(TEXT), slice(23, None))


def test_trees_of_several_sequences_at_once(target: Target, oracle: Any) -> None:
    first, second = filled(target, TEXT[:20]), filled(target, OTHER[:8])
    one, two = target.forward([Segment(first, TREE, PARENTS, num_logits=6), Segment(second, [1, 2, 3], [-1, 0, 0], num_logits=3)])
    assert_near(one.logits[PATHS[0]], oracle(TEXT[:23]).logits[20:])
    assert_near(two.logits[[0, 2]], oracle([*OTHER[:8], 1, 3]).logits[8:])


def test_tentative_rows_are_overwritten(target: Target, oracle: Any) -> None:
    cache = filled(target, TEXT[:20])
    run(target, cache, OTHER, commit=False)
    assert target.length(cache) == 20
    assert_same(run(target, cache, TEXT[20:]), oracle(TEXT), slice(20, None))


def test_truncate_forgets_the_end(target: Target, oracle: Any) -> None:
    cache = filled(target, TEXT[:20] + OTHER)
    target.truncate(cache, 20)
    assert target.length(cache) == 20
    assert_same(run(target, cache, TEXT[20:]), oracle(TEXT), slice(20, None))


def test_truncate_forgets_tentative_rows(target: Target) -> None:
    cache = filled(target, TEXT[:20])
    run(target, cache, TEXT[20:], commit=False)
    target.truncate(cache, 10)
    with pytest.raises(ValueError, match="left 0 tentative rows"):
        target.commit(cache, [0])


def test_a_fork_lives_apart(target: Target, oracle: Any) -> None:
    cache = filled(target, TEXT[:20])
    fork = target.fork(cache)
    run(target, cache, OTHER[:10])
    target.drop(cache)
    assert target.length(fork) == 20
    assert_same(run(target, fork, TEXT[20:]), oracle(TEXT), slice(20, None))


@pytest.mark.parametrize("length", [0, 1, 20, 79, 80])
def test_a_fork_of_a_prefix_has_just_that(target: Target, oracle: Any, length: int) -> None:
    history = TEXT[:20] + OTHER
    cache = filled(target, history)
    fork = target.fork(cache, length)
    assert (target.length(fork), target.length(cache)) == (length, 80)
    most = target.cache_bytes(80) + (target.cache_bytes(length) if length else 0)
    assert target.cache_bytes(80) <= target.cache_bytes() <= most  # forks may share
    assert_same(run(target, fork, TEXT[20:25]), oracle(history[:length] + TEXT[20:25]), slice(length, None))
    assert_same(run(target, cache, TEXT[20:25]), oracle(history + TEXT[20:25]), slice(80, None))


@pytest.mark.parametrize("length", [-1, 21])
def test_a_fork_only_of_what_is_there(target: Target, length: int) -> None:
    cache = filled(target, TEXT[:20])
    before = target.cache_bytes()
    with pytest.raises(ValueError, match=f"to {length} tokens; the cache holds 20"):
        target.fork(cache, length)
    assert target.cache_bytes() == before


def test_a_fork_leaves_tentative_rows_behind(target: Target) -> None:
    cache = filled(target, TEXT[:20])
    run(target, cache, TEXT[20:], commit=False)
    fork = target.fork(cache)
    with pytest.raises(ValueError, match="Row 0 cannot be committed"):
        target.commit(fork, [0])
    target.commit(cache, [0])
    assert (target.length(cache), target.length(fork)) == (21, 20)


LONG = torch.randint(0, 320, (400,), generator=GENERATOR).tolist()
POLICIES = [
    CachePolicy(window=1),
    CachePolicy(window=30),
    CachePolicy(sink=1, window=1),
    CachePolicy(sink=4, window=30),
    CachePolicy(sink=300, window=5),
    CachePolicy(window=500),
]
POLICY = CachePolicy(sink=4, window=30)


@pytest.mark.parametrize("sizes", [[400], [64], [150, 7], [1]], ids=str)
@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_tokens_see_what_the_policy_says(target: Target, oracle: Any, policy: CachePolicy, sizes: list[int]) -> None:
    text = LONG if sizes != [1] else LONG[:130]
    plain, cache, start = oracle(text, policy), target.new_cache(policy), 0
    while start < len(text):
        piece = text[start : start + (sizes[0] if start == 0 else sizes[-1])]
        assert_same(run(target, cache, piece), plain, slice(start, start + len(piece)))
        start += len(piece)
        assert target.length(cache) == start


@pytest.mark.parametrize("length", [2, 28, 100, 250])
@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_trees_see_what_the_policy_says(target: Target, oracle: Any, policy: CachePolicy, length: int) -> None:
    cache, full = filled(target, LONG[:length], policy), filled(target, OTHER[:8])
    tree = [LONG[length], 11, LONG[length + 1], 12, 13, LONG[length + 2]]
    output, beside = target.forward([Segment(cache, tree, PARENTS, num_logits=6), Segment(full, [1])])
    for path in PATHS:
        plain = oracle(LONG[:length] + [tree[node] for node in path], policy)
        assert_near(output.logits[path], plain.logits[length:])
    assert_near(beside.logits, oracle([*OTHER[:8], 1]).logits[8:])
    target.commit(cache, PATHS[0])
    text = LONG[: length + 43]
    assert_same(run(target, cache, text[length + 3 :]), oracle(text, policy), slice(length + 3, None))


def test_what_is_dropped_is_bounded_and_depends_on_the_length_alone(target: Target) -> None:
    dropped: list[list[int]] = []
    for size in (1, 10, 50):
        cache = target.new_cache(POLICY)
        dropped.append([])
        for start in range(0, 400, size):
            run(target, cache, LONG[start : start + size])
            length = start + size
            held, needed = length - target.dropped(cache), min(length, 33)
            assert needed <= held <= needed + 64
            assert target.cache_bytes() <= target.cache_bytes(length, POLICY)
            if length % 50 == 0:
                dropped[-1].append(target.dropped(cache))
        assert target.cache_bytes() < target.cache_bytes(400)
        target.drop(cache)
    assert dropped[0] == dropped[1] == dropped[2]
    assert dropped[0][-1] > 300


def test_nothing_is_dropped_while_all_is_in_sight(target: Target) -> None:
    assert target.dropped(filled(target, LONG)) == 0
    assert target.dropped(filled(target, LONG[:33], POLICY)) == 0


@pytest.mark.parametrize("length", [400, 398, 4, 3, 0])
def test_a_cache_goes_back_to_what_it_holds(target: Target, oracle: Any, length: int) -> None:
    cache = filled(target, LONG, POLICY)
    plain = oracle(LONG[:length] + TEXT, POLICY)
    fork = target.fork(cache, length)
    target.truncate(cache, length)
    for each in (cache, fork):
        assert target.length(each) == length
        assert_same(run(target, each, TEXT), plain, slice(length, None))


@pytest.mark.parametrize("length", [5, 30, 200, 330])
def test_a_cache_does_not_go_back_to_what_it_dropped(target: Target, oracle: Any, length: int) -> None:
    cache = filled(target, LONG, POLICY)
    before = target.dropped(cache), target.cache_bytes()
    for go_back in (target.truncate, target.fork):
        with pytest.raises(ValueError, match=f"to {length} tokens; the cache dropped"):
            go_back(cache, length)
    assert (target.dropped(cache), target.cache_bytes()) == before
    assert_same(run(target, cache, TEXT), oracle(LONG + TEXT, POLICY), slice(400, None))


@pytest.mark.parametrize("policy", [FULL, POLICY], ids=str)
@pytest.mark.parametrize("length", [0, 1, 129, 400])
def test_what_is_saved_is_restored(target: Target, oracle: Any, length: int, policy: CachePolicy) -> None:
    cache = filled(target, LONG[:length], policy)
    run(target, cache, [1, 2], commit=False)
    saved = target.save(cache)
    assert all(tensor.device.type == "cpu" and tensor.is_contiguous() for tensor in saved.values())
    run(target, cache, OTHER)
    target.drop(cache)
    restored = target.restore(saved, length, policy)
    for tensor in saved.values():
        tensor.zero_()  # they are copies, on both ways
    assert target.length(restored) == length
    assert target.cache_bytes() <= (target.cache_bytes(length, policy) if length else 0)
    with pytest.raises(ValueError, match="left 0 tentative rows"):
        target.commit(restored, [0])
    assert_same(run(target, restored, TEXT), oracle(LONG[:length] + TEXT, policy), slice(length, None))


Saved = dict[str, torch.Tensor]
DAMAGE: dict[str, tuple[Callable[[Saved], Saved], int]] = {
    "one missing": (lambda saved: dict(list(saved.items())[1:]), 40),
    "none": (lambda saved: {}, 40),
    "one too many": (lambda saved: saved | {"more": torch.zeros(1)}, 40),
    "another dtype": (lambda saved: {name: tensor.half() for name, tensor in saved.items()}, 40),
    "fewer layers": (lambda saved: {name: tensor[1:] for name, tensor in saved.items()}, 40),
    "another rank": (lambda saved: {name: tensor[0] for name, tensor in saved.items()}, 40),
    "longer": (lambda saved: saved, 41),
    "shorter": (lambda saved: saved, 39),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_what_was_not_saved_is_not_restored(target: Target, case: str) -> None:
    damage, length = DAMAGE[case]
    saved = damage(target.save(filled(target, LONG[:40])))
    before = target.cache_bytes()
    with pytest.raises(ValueError, match=r"saved"):
        target.restore(saved, length, FULL)
    assert target.cache_bytes() == before


def test_bytes_are_counted_exactly_and_return_to_zero(target: Target) -> None:
    token_bytes = 8 * 2 * 2 * 16 * 4  # layers, keys and values, K/V heads, head size, float32
    assert target.cache_bytes(1) >= token_bytes
    assert 1000 * token_bytes <= target.cache_bytes(1000) < 2000 * token_bytes  # states may lie beside keys and values
    cache = target.new_cache()
    assert target.cache_bytes() == 0
    run(target, cache, TEXT * 3)
    fork = target.fork(cache)
    assert target.cache_bytes(180) <= target.cache_bytes() <= 2 * target.cache_bytes(180)  # forks may share
    target.drop(cache)
    assert target.cache_bytes() == target.cache_bytes(180)
    target.drop(fork)
    assert target.cache_bytes() == 0


def test_no_segments_no_outputs(target: Target) -> None:
    assert target.forward([]) == []


BAD_SEGMENTS: dict[str, tuple[Callable[[int], list[Segment]], str]] = {
    "unknown cache": (lambda cache: [Segment(cache + 1000, [1])], r"Cache \d+ is not here"),
    "cache twice": (lambda cache: [Segment(cache, [1]), Segment(cache, [2])], "occurs twice"),
    "empty": (lambda cache: [Segment(cache, [], num_logits=0)], "is empty"),
    "id too high": (lambda cache: [Segment(cache, [1, 320])], "Token id 320 is not in this model's vocabulary"),
    "id negative": (lambda cache: [Segment(cache, [-1])], "Token id -1 is not in"),
    "too many logits": (lambda cache: [Segment(cache, [1, 2], num_logits=3)], "num_logits is 3"),
    "negative logits": (lambda cache: [Segment(cache, [1, 2], num_logits=-1)], "num_logits is -1"),
    "parents too few": (lambda cache: [Segment(cache, [1, 2], [-1])], "1 parents were given for 2 tokens"),
    "own parent": (lambda cache: [Segment(cache, [1, 2], [-1, 1])], "parent of node 1 is 1"),
    "later parent": (lambda cache: [Segment(cache, [1, 2, 3], [-1, 2, 0])], "parent of node 1 is 2"),
    "parent below -1": (lambda cache: [Segment(cache, [1], [-2])], "parent of node 0 is -2"),
    "past the context": (lambda cache: [Segment(cache, [1] * 493)], "would reach 513 tokens; this model takes 512"),
}


@pytest.mark.parametrize("case", BAD_SEGMENTS)
def test_a_bad_segment_changes_nothing(target: Target, oracle: Any, case: str) -> None:
    make, message = BAD_SEGMENTS[case]
    cache, bystander = filled(target, TEXT[:20]), filled(target, OTHER[:5])
    before = target.cache_bytes()
    with pytest.raises(ValueError, match=message):
        target.forward([Segment(bystander, [1]), *make(cache)])
    assert target.cache_bytes() == before
    assert_same(run(target, cache, TEXT[20:]), oracle(TEXT), slice(20, None))


def test_the_last_position_can_be_used(target: Target, oracle: Any) -> None:
    text = (TEXT + OTHER) * 5
    cache = filled(target, text[:510])
    run(target, cache, [1, 2, 3, text[510], 4, text[511]], commit=False, parents=[-1, -1, -1, -1, 3, 3])
    target.commit(cache, [3, 5])
    assert target.length(cache) == 512


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([6], "Row 6 cannot be committed; the cache's last forward left 6 tentative rows"),
        ([-1], "Row -1 cannot be committed"),
        ([2], "no root path: the parent of row 2 is 0, not -1"),
        ([0, 4], "no root path: the parent of row 4 is 1, not 0"),
        ([2, 0], "no root path"),
        ([0, 0], "no root path"),
    ],
    ids=str,
)
def test_only_a_root_path_can_be_committed(target: Target, rows: list[int], message: str) -> None:
    cache = filled(target, TEXT[:20])
    run(target, cache, TREE, commit=False, parents=PARENTS)
    with pytest.raises(ValueError, match=message):
        target.commit(cache, rows)
    assert target.length(cache) == 20
    target.commit(cache, [0, 2, 5])
    assert target.length(cache) == 23


def test_rows_are_committed_once(target: Target) -> None:
    cache = target.new_cache()
    run(target, cache, TEXT[:3])
    with pytest.raises(ValueError, match="left 0 tentative rows"):
        target.commit(cache, [0])


@pytest.mark.parametrize("length", [-1, 21])
def test_truncate_only_to_what_is_there(target: Target, length: int) -> None:
    cache = filled(target, TEXT[:20])
    with pytest.raises(ValueError, match=f"Cannot truncate to {length} tokens; the cache holds 20"):
        target.truncate(cache, length)
    assert target.length(cache) == 20


def test_a_dropped_handle_is_dead(target: Target) -> None:
    cache = filled(target, TEXT[:3])
    target.drop(cache)
    for use in (
        lambda: target.length(cache),
        lambda: target.drop(cache),
        lambda: target.fork(cache),
        lambda: target.commit(cache, []),
        lambda: target.truncate(cache, 0),
        lambda: target.forward([Segment(cache, [1])]),
    ):
        with pytest.raises(ValueError, match=f"Cache {cache} is not here"):
            use()
    assert target.new_cache() != cache


def test_several_targets_on_several_threads(load: Callable[[], Target], oracle: Any) -> None:
    """Each its own model and caches, their forwards interleaved as the threads happen to run."""
    targets = [load(), load()]
    results: list[list[SegmentOutput]] = [[], []]

    def work(index: int, text: list[int]) -> None:
        cache = targets[index].new_cache()
        for start in range(0, 60, 4):
            results[index].append(run(targets[index], cache, text[start : start + 4]))

    threads = [threading.Thread(target=work, args=pair) for pair in ((0, TEXT), (1, OTHER))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for outputs, text in zip(results, (TEXT, OTHER), strict=True):
        assert_near(torch.cat([output.logits for output in outputs]), oracle(text).logits)

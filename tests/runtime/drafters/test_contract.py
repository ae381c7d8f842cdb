"""The contract of `Drafter`, for every drafter: a further one joins by a line in `DRAFTERS`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from runtime.drafters import Draft, Drafter, DraftRequest, Eagle3Drafter, NgramDrafter, NoDrafter, ScriptedDrafter
from runtime.eagle3 import DraftVocabulary, Eagle3Config, Eagle3Model

V, VD, H = 40, 24, 16
MAX_POSITIONS = 128


def eagle3() -> Drafter:
    config = Eagle3Config(
        hidden_size=H,
        intermediate_size=24,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        vocab_size=V,
        draft_vocab_size=VD,
        max_position_embeddings=MAX_POSITIONS,
    )
    generator = torch.Generator().manual_seed(0)
    vocabulary = DraftVocabulary(torch.randperm(V, generator=generator)[:VD].sort().values, V)
    model = Eagle3Model(config, vocabulary, torch.randn(V, H, generator=generator))
    model.init_from_target(torch.randn(V, H, generator=generator), torch.ones(H) * 2, generator)
    return Eagle3Drafter(model.requires_grad_(False), "eagle3-random")


def scripted() -> Drafter:
    return ScriptedDrafter(lambda history, depth: [(history[-1] + k) % V for k in range(1, depth + 3)])


DRAFTERS: dict[str, Callable[[], Drafter]] = {
    "eagle3": eagle3,
    "ngram": lambda: NgramDrafter(max_ngram=3, min_ngram=1),
    "none": NoDrafter,
    "scripted": scripted,
}


@pytest.fixture(params=DRAFTERS)
def make(request: pytest.FixtureRequest) -> Callable[[], Drafter]:
    return DRAFTERS[request.param]


@pytest.fixture
def drafter(make: Callable[[], Drafter]) -> Drafter:
    return make()


@dataclass
class Text:
    """A sequence whose tokens and states its seed alone decides."""

    seed: int
    tokens: list[int] = field(init=False)
    aux: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.seed)
        # Of few tokens, so that endings repeat.
        self.tokens = torch.randint(6, (2 * MAX_POSITIONS,), generator=generator).tolist()
        self.aux = torch.randn(2 * MAX_POSITIONS, 3 * H, generator=generator)

    def request(self, state: int, position: int, num_rows: int, depth: int, **more: Any) -> DraftRequest:
        end = position + num_rows
        return DraftRequest(state, position, self.aux[position:end], self.tokens[: end + 1], depth, **more)

    def uniforms(self, depth: int, seed: int) -> torch.Tensor:
        return torch.rand(depth, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def propose(drafter: Drafter, *requests: DraftRequest) -> list[Draft]:
    drafts = drafter.propose(requests)
    assert len(drafts) == len(requests)
    for draft, request in zip(drafts, requests, strict=True):
        check(draft, request)
    return drafts


def check(draft: Draft, request: DraftRequest) -> None:
    """What holds for every draft."""
    assert all(type(token_id) is int and 0 <= token_id < V for token_id in draft.token_ids)
    assert all(depth < request.depth for depth in draft.depths())
    assert draft.parents is None or request.width > 1
    if draft.parents is not None:
        assert len(draft.parents) == len(draft.token_ids)
        assert all(-1 <= parent < node for node, parent in enumerate(draft.parents))
    for children in draft.children():
        tokens = [draft.token_ids[node] for node in children]
        assert len(set(tokens)) == len(tokens) <= request.width
    if draft.probs is not None:
        assert request.temperature > 0
        assert len(draft.probs) == len(draft.token_ids)
        for token_id, q in zip(draft.token_ids, draft.probs, strict=True):
            ids = q.token_ids.tolist()
            assert len(set(ids)) == len(ids) == len(q.probs)
            assert all(0 <= each < V for each in ids)
            assert (q.token_ids.dtype, q.probs.dtype) == (torch.int64, torch.float32)
            assert float(q.probs.min()) >= 0
            assert float(q.probs.sum()) == pytest.approx(1, abs=1e-5)
            assert float(q.probs[ids.index(token_id)]) > 0


def assert_same(one: Draft, other: Draft) -> None:
    assert (one.token_ids, one.parents) == (other.token_ids, other.parents)
    assert (one.probs is None) == (other.probs is None)
    for q, p in zip(one.probs or [], other.probs or [], strict=True):
        assert q.token_ids.tolist() == p.token_ids.tolist()
        torch.testing.assert_close(q.probs, p.probs, rtol=1e-4, atol=1e-6)


def steps(drafter: Drafter, text: Text, sizes: Sequence[int], depth: int, **more: Any) -> list[Draft]:
    """Drafts after pieces of these sizes, on a state of its own."""
    state, position, drafts = drafter.new_state(), 0, []
    for size in sizes:
        drafts += propose(drafter, text.request(state, position, size, depth, **more))
        position += size
    drafter.drop_state(state)
    return drafts


def test_its_version_is_a_name(drafter: Drafter) -> None:
    assert drafter.version
    assert drafter.version == drafter.version


@pytest.mark.parametrize("depth", [0, 1, 2, 5, 16])
def test_a_chain_is_no_longer_than_asked(drafter: Drafter, depth: int) -> None:
    for draft in steps(drafter, Text(1), (9, 1, 3, 1, 6, 2), depth):
        assert draft.parents is None
        assert len(draft.token_ids) <= depth


@pytest.mark.parametrize("depth", [1, 2, 4])
@pytest.mark.parametrize("width", [2, 3, 7])
def test_a_tree_is_no_deeper_and_no_wider_than_asked(drafter: Drafter, depth: int, width: int) -> None:
    steps(drafter, Text(1), (9, 1, 3, 1), depth, width=width)  # each is checked


@pytest.mark.parametrize("num_nodes", [0, 1, 4, 9])
def test_a_tree_has_no_more_nodes_than_asked(drafter: Drafter, num_nodes: int) -> None:
    for draft in steps(drafter, Text(1), (9, 1, 3, 1), 4, width=3, num_nodes=num_nodes):
        assert len(draft.token_ids) <= max(num_nodes, 4)  # a drafter that knows no trees answers with a chain


@pytest.mark.parametrize("width", [1, 3])
def test_depth_0_drafts_nothing_and_catches_up(drafter: Drafter, width: int) -> None:
    """What was taken in without drafting, in pieces or with drafts in between shows in no later draft."""
    text, lone = Text(2), {"width": width}
    [expected] = steps(drafter, text, [30], 4, **lone)
    state = drafter.new_state()
    for position in range(29):
        [nothing] = propose(drafter, text.request(state, position, 1, 0, **lone))
        assert nothing.token_ids == []
    [draft] = propose(drafter, text.request(state, 29, 1, 4, **lone))
    assert_same(draft, expected)
    assert_same(steps(drafter, text, (7, 1, 1, 20, 1), 4, **lone)[-1], expected)


def test_no_new_rows_are_fine_where_nothing_is_drafted(drafter: Drafter) -> None:
    text, state = Text(2), drafter.new_state()
    propose(drafter, text.request(state, 0, 0, 0))
    propose(drafter, text.request(state, 0, 5, 3))
    [draft] = propose(drafter, text.request(state, 5, 0, 0))
    assert draft.token_ids == []
    assert_same(propose(drafter, text.request(state, 5, 4, 3))[0], steps(drafter, text, (5, 4), 3)[-1])


def test_a_gap_is_fine(drafter: Drafter) -> None:
    """As after a swap, or where rows were dropped: the draft may be worse, but is one."""
    text, state = Text(3), drafter.new_state()
    propose(drafter, text.request(state, 0, 6, 4))
    propose(drafter, text.request(state, 20, 5, 4))
    fresh = drafter.new_state()
    propose(drafter, text.request(fresh, 50, 3, 4, width=2))


def test_going_back_forgets_what_was_behind(drafter: Drafter) -> None:
    """The history may have been cut, and have gone on otherwise."""
    old, new = Text(4), Text(5)
    new.tokens[:11], new.aux[:10] = old.tokens[:11], old.aux[:10]
    state = drafter.new_state()
    propose(drafter, old.request(state, 0, 10, 4), old.request(drafter.new_state(), 0, 3, 4))
    propose(drafter, old.request(state, 10, 15, 4))
    [draft] = propose(drafter, new.request(state, 10, 12, 4))
    assert_same(draft, steps(drafter, new, (10, 12), 4)[-1])


@pytest.mark.parametrize("position", [MAX_POSITIONS - 3, MAX_POSITIONS, MAX_POSITIONS + 40])
def test_positions_beyond_what_it_knows_end_the_drafting(drafter: Drafter, position: int) -> None:
    text, state = Text(1), drafter.new_state()
    propose(drafter, text.request(state, 0, position, 8))
    propose(drafter, text.request(state, position, 2, 8))


def test_a_batch_drafts_what_each_of_its_sequences_drafts_alone(make: Callable[[], Drafter]) -> None:
    kinds: list[dict[str, Any]] = [
        {"depth": 5},
        {"depth": 2},
        {"depth": 0},
        {"depth": 4, "temperature": 0.7},
        {"depth": 3, "width": 2},
        {"depth": 2, "width": 4, "temperature": 1.0},
        {"depth": 5, "temperature": 1.0},
    ]
    together, alone = make(), [make() for _ in kinds]
    states, lone_states = [together.new_state() for _ in kinds], [drafter.new_state() for drafter in alone]
    positions = [0] * len(kinds)
    for step in range(4):
        requests, expected = [], []
        for i, kind in enumerate(kinds):
            text, size = Text(i), 1 + (3 * i + step) % 5
            more = {**kind, "uniforms": text.uniforms(kind["depth"], step)}
            requests.append(text.request(states[i], positions[i], size, **more))
            expected += propose(alone[i], text.request(lone_states[i], positions[i], size, **more))
            positions[i] += size
        for draft, other in zip(propose(together, *requests), expected, strict=True):
            assert_same(draft, other)


def test_a_state_that_goes_takes_nothing_of_the_others_along(drafter: Drafter) -> None:
    one, other = Text(6), Text(7)
    first, second = drafter.new_state(), drafter.new_state()
    assert first != second
    propose(drafter, one.request(first, 0, 8, 3), other.request(second, 0, 8, 3))
    drafter.drop_state(first)
    assert drafter.new_state() not in (first, second)
    [draft] = propose(drafter, other.request(second, 8, 3, 3))
    assert_same(draft, steps(drafter, other, (8, 3), 3)[-1])


@pytest.mark.parametrize("width", [1, 2])
def test_the_same_numbers_give_the_same_draft(make: Callable[[], Drafter], width: int) -> None:
    text = Text(8)
    more = {"temperature": 0.9, "uniforms": text.uniforms(5, seed=3), "width": width}
    one, other = (steps(make(), text, (9, 2), 5, **more) for _ in range(2))
    for a, b in zip(one, other, strict=True):
        assert_same(a, b)


def test_drafts_are_drawn_from_just_the_distribution_that_is_told(drafter: Drafter) -> None:
    """Chi-square over many draws of the first two nodes; a certain node is the same one every time."""
    text, num_draws = Text(9), 2000
    grid = torch.rand(num_draws, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    state = drafter.new_state()
    propose(drafter, text.request(state, 0, 12, 0))
    drafts = [propose(drafter, text.request(state, 11, 1, 2, temperature=1.0, uniforms=uniforms))[0] for uniforms in grid]
    if drafts[0].probs is None:
        assert all(draft.probs is None and draft.token_ids == drafts[0].token_ids for draft in drafts)
        return
    first = Counter(draft.token_ids[0] for draft in drafts)
    assert_drawn_from(first, drafts[0].probs[0])
    most_common = first.most_common(1)[0][0]
    behind = [draft for draft in drafts if draft.token_ids[0] == most_common]
    assert behind[0].probs is not None
    assert_drawn_from(Counter(draft.token_ids[1] for draft in behind), behind[0].probs[1])


def assert_drawn_from(counts: Counter[int], q: Any) -> None:
    expected = {token_id: p * counts.total() for token_id, p in zip(q.token_ids.tolist(), q.probs.tolist(), strict=True)}
    assert set(counts) <= {token_id for token_id, number in expected.items() if number > 0}
    # Rare ones together, so that each cell expects at least 5.
    cells = [(counts[token_id], number) for token_id, number in expected.items() if number >= 5]
    rest = counts.total() - sum(seen for seen, _ in cells), counts.total() - sum(number for _, number in cells)
    if rest[1] >= 5:
        cells.append(rest)
    assert len(cells) > 3
    statistic = sum((seen - number) ** 2 / number for seen, number in cells)
    degrees = len(cells) - 1
    assert statistic < degrees + 5 * (2 * degrees) ** 0.5, (statistic, degrees)


def test_what_it_is_given_stays_as_it_is(drafter: Drafter) -> None:
    text, state = Text(10), drafter.new_state()
    request = text.request(state, 0, 12, 4, temperature=1.0, uniforms=text.uniforms(4, 0))
    before = list(request.history), request.aux.clone(), text.uniforms(4, 0)
    propose(drafter, request)
    assert list(request.history) == before[0]
    assert torch.equal(request.aux, before[1])
    assert request.uniforms is not None
    assert torch.equal(request.uniforms, before[2])


def test_nobody_asks_nobody_answers(drafter: Drafter) -> None:
    assert drafter.propose([]) == []

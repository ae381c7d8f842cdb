import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.drafters import DraftRequest, NgramDrafter

NO_AUX = torch.zeros(0, 6)


def request(state, history, depth, position=None):
    position = len(history) - 1 if position is None else position
    return DraftRequest(state, position, torch.zeros(len(history) - 1 - position, 6), history, depth)


def propose(history, depth, **sizes):
    drafter = NgramDrafter(**sizes)
    [draft] = drafter.propose([request(drafter.new_state(), history, depth, position=0)])
    assert draft.probs is None
    return draft.token_ids


def oracle(history, depth, max_ngram=4, min_ngram=2):
    """Look at every place, the latest first, for the longest ending; a loop is unrolled by appending what was drafted."""
    for size in range(max_ngram, min_ngram - 1, -1):
        for place in range(len(history) - 1, size - 1, -1):
            if history[place - size : place] == history[-size:]:
                grown = list(history)
                for k in range(depth):
                    grown.append(grown[place + k])
                return grown[len(history) :]
    return []


@pytest.mark.parametrize(
    ("history", "depth", "expected"),
    [
        ([1, 2, 3, 4, 9, 1, 2], 2, [3, 4]),
        ([1, 2, 3, 4, 9, 1, 2], 9, [3, 4, 9, 1, 2, 3, 4, 9, 1]),  # past its own end
        ([5, 1, 2, 7, 6, 1, 2, 8, 5, 1, 2], 1, [7]),  # three tokens beat the later two
        ([1, 2, 7, 1, 2, 8, 1, 2], 1, [8]),  # the latest of equals
        ([4, 4, 4], 3, [4, 4, 4]),
        ([1, 2, 3], 4, []),
        ([1, 2, 3, 1], 4, []),  # one token is not enough
        ([1], 4, []),
    ],
)
def test_cases(history, depth, expected):
    assert propose(history, depth) == expected


def test_one_token_is_enough_when_asked_for():
    assert propose([1, 2, 3, 1], 2, min_ngram=1) == [2, 3]


@settings(max_examples=200, deadline=None)
@given(tokens=st.lists(st.integers(0, 3), min_size=1, max_size=40), data=st.data())
def test_an_index_grown_step_by_step_finds_what_a_search_of_the_whole_history_finds(tokens, data):
    drafter = NgramDrafter()
    state, length = drafter.new_state(), 0
    while length < len(tokens):
        position = max(length - 1, 0)
        length += data.draw(st.integers(1, 6))
        history = tokens[:length]
        [draft] = drafter.propose([request(state, history, 5, position=min(position, len(history) - 1))])
        assert draft.token_ids == oracle(history, 5)


def test_a_changed_history_leaves_nothing_behind():
    drafter = NgramDrafter()
    state = drafter.new_state()
    drafter.propose([request(state, [1, 2, 3, 4, 5, 6], 2, position=0)])
    history = [1, 2, 7, 1, 2]  # tokens from the third on are others
    assert drafter.propose([request(state, history, 2, position=1)])[0].token_ids == [7, 1]
    history = [1, 2, 7, 3, 4]
    assert drafter.propose([request(state, history, 2, position=2)])[0].token_ids == []  # "3 4 -> 5" is forgotten


def test_sequences_do_not_mix_and_depth_0_only_reads():
    drafter = NgramDrafter()
    a, b = drafter.new_state(), drafter.new_state()
    drafts = drafter.propose([request(a, [1, 2, 3, 1, 2], 0, position=0), request(b, [7, 1, 2], 3, position=0)])
    assert [draft.token_ids for draft in drafts] == [[], []]
    assert drafter.propose([request(a, [1, 2, 3, 1, 2], 2)])[0].token_ids == [3, 1]
    drafter.drop_state(a)
    with pytest.raises(KeyError):
        drafter.propose([request(a, [1, 2], 1)])


@pytest.mark.parametrize("sizes", [{"min_ngram": 0}, {"min_ngram": 3, "max_ngram": 2}])
def test_sizes_that_cannot_work_are_refused(sizes):
    with pytest.raises(ValueError, match="min_ngram"):
        NgramDrafter(**sizes)


def test_a_step_costs_the_new_tokens_only():
    """Every history token is read a bounded number of times, however many steps it took."""

    class Counting(list):
        num_reads = 0

        def __getitem__(self, key):
            Counting.num_reads += 1
            return super().__getitem__(key)

    drafter, history = NgramDrafter(), Counting()
    state = drafter.new_state()
    generator = torch.Generator().manual_seed(0)
    for _ in range(400):
        history.append(int(torch.randint(1000, (1,), generator=generator)))
        drafter.propose([request(state, history, 4)])
    assert Counting.num_reads < 400 * 12

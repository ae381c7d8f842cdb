"""The draft vocabulary: its two tables always describe one set of tokens, or it is refused."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from runtime.eagle3 import DraftVocabulary
from runtime.errors import DrafterRejected


def offsets(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def test_the_most_frequent_tokens_in_ascending_order() -> None:
    vocabulary = DraftVocabulary.from_token_counts(torch.tensor([5, 0, 9, 1, 7, 0]), 3)
    assert vocabulary.target_ids.tolist() == [0, 2, 4]
    assert vocabulary.d2t.tolist() == [0, 1, 2]  # offsets, not ids
    assert vocabulary.t2d.tolist() == [True, False, True, False, True, False]
    assert vocabulary.to_draft.tolist() == [0, -1, 1, -1, 2, -1]
    assert len(vocabulary) == 3


def test_equally_frequent_tokens_are_taken_by_id() -> None:
    assert DraftVocabulary.from_token_counts(torch.tensor([1, 2, 1, 1]), 3).target_ids.tolist() == [0, 1, 2]


@pytest.mark.parametrize("size", [0, 7])
def test_a_size_that_cannot_be_is_refused(size: int) -> None:
    with pytest.raises(ValueError, match=f"{size} tokens cannot be taken"):
        DraftVocabulary.from_token_counts(torch.ones(6), size)


@given(counts=st.lists(st.integers(0, 5), min_size=1, max_size=40), share=st.floats(0, 1))
def test_both_tables_describe_the_same_vocabulary(counts: list[int], share: float) -> None:
    size = max(1, round(share * len(counts)))
    made = DraftVocabulary.from_token_counts(torch.tensor(counts), size)
    read = DraftVocabulary.from_tensors(made.d2t, made.t2d)
    assert torch.equal(read.target_ids, made.target_ids)
    assert read.hash == made.hash
    draft_ids = torch.arange(size)
    assert torch.equal(made.target_ids, made.d2t + draft_ids)
    assert torch.equal(made.to_draft[made.target_ids], draft_ids)
    assert int(made.t2d.sum()) == size
    assert int((made.to_draft >= 0).sum()) == size
    kept = [counts[token] for token in made.target_ids.tolist()]
    left = [count for token, count in enumerate(counts) if not made.t2d[token]]
    assert not left or min(kept) >= max(left)


def test_the_hash_tells_vocabularies_apart() -> None:
    hashes = {
        DraftVocabulary(torch.tensor(ids), size).hash for ids, size in [([0, 1], 4), ([0, 2], 4), ([0, 1], 5), ([0, 1, 2], 4)]
    }
    assert len(hashes) == 4
    assert DraftVocabulary(torch.tensor([0, 1]), 4).hash in hashes


def test_all_tokens() -> None:
    vocabulary = DraftVocabulary.full(4)
    assert vocabulary.target_ids.tolist() == [0, 1, 2, 3]
    assert not vocabulary.d2t.any()


@pytest.mark.parametrize(
    ("d2t", "t2d", "what"),
    [
        (offsets(0, 0, 5), [1, 1, 0, 0, 0, 0], "run from 0 to 7"),
        (offsets(-1, 0), [1, 1, 0], "run from -1"),
        (offsets(1, 0), [0, 1, 1], "do not ascend"),
        (offsets(2, 0), [1, 0, 1], "do not ascend"),
        (offsets(0, 1), [1, 1, 0, 0], "not the same ones"),
        (offsets(0, 1), [1, 0, 1, 1], "marks 3"),
        (offsets(0, 0), [0, 1, 1, 0], "not the same ones"),  # a table never filled in
        (offsets(), [1, 0], r"shape \[0\]"),
        (torch.zeros(2), [1, 1, 0], "float32"),
        (torch.zeros(1, 2, dtype=torch.int64), [1, 1, 0], r"shape \[1, 2\]"),
    ],
)
def test_tables_that_cannot_be_are_refused(d2t: torch.Tensor, t2d: list[int], what: str) -> None:
    with pytest.raises(DrafterRejected, match=what) as caught:
        DraftVocabulary.from_tensors(d2t, torch.tensor(t2d, dtype=torch.bool))
    assert caught.value.reason == "VOCABULARY"


def test_a_mask_of_another_type_is_refused() -> None:
    with pytest.raises(DrafterRejected, match="t2d has shape"):
        DraftVocabulary.from_tensors(offsets(0), torch.tensor([1, 0]))


def test_offsets_alone() -> None:
    assert DraftVocabulary.from_d2t(offsets(0, 2), 5).target_ids.tolist() == [0, 3]
    assert DraftVocabulary.from_d2t(offsets(0, 0), 2).target_ids.tolist() == [0, 1]
    with pytest.raises(DrafterRejected, match="never filled in"):
        DraftVocabulary.from_d2t(offsets(0, 0), 5)

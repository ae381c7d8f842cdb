"""Many rows of tokens in a few tensors: what goes in comes out, and what does not fit is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.errors import FeatureError
from training.data.tokens import Corpus, TokenRow, clipped, heldout_fraction, is_heldout, sample_id_of, teaches

ROWS = [
    TokenRow("a", "", [5, 6, 7, 8, 9], ((1, 3), (4, 5)), 0.7, "chat"),
    TokenRow("b", "1.2", [3], ((0, 1),)),
    TokenRow("c", "", [1, 2, 3, 4], ((1, 2), (2, 3)), 0.0),
]


def test_what_goes_in_comes_out() -> None:
    corpus = Corpus.of(ROWS, 100)
    assert (len(corpus), corpus.num_tokens, corpus.num_generated) == (3, 10, 6)
    assert corpus.token_ids.dtype == torch.uint16
    assert [corpus.name(r) for r in range(3)] == ["a", "b#1.2", "c"]
    assert [corpus.spans_of(r) for r in range(3)] == [row.spans for row in ROWS]
    assert corpus.lengths.tolist() == [5, 1, 3]  # of the last row, the last token teaches nothing
    assert corpus.token_ids_of(2).tolist() == [1, 2, 3]
    assert corpus.generated_of(0).tolist() == [False, True, True, False, True]
    assert corpus.generated_of(2).tolist() == [False, True, True]
    assert corpus.temperatures[0] == pytest.approx(0.7)
    assert corpus.temperatures[1].isnan()


def test_ids_are_as_wide_as_the_vocabulary_needs() -> None:
    assert Corpus.of([TokenRow("a", "", [70_000, 1], ((0, 2),))], 70_001).token_ids_of(0).tolist() == [70_000, 1]
    assert Corpus.of([TokenRow("a", "", [65_535, 1], ((0, 2),))], 65_536).token_ids_of(0).tolist() == [65_535, 1]


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.tuples(st.lists(st.integers(0, 99), min_size=1, max_size=9), st.integers(0, 8)), min_size=1, max_size=6),
    st.data(),
)
def test_parts_make_a_whole_and_a_file_gives_it_back(shapes: list, data: st.DataObject) -> None:
    rows = []
    for n, (ids, first) in enumerate(shapes):
        first = min(first, len(ids) - 1)
        middle = data.draw(st.integers(first + 1, len(ids)))
        spans = ((first, middle), (middle, len(ids))) if middle < len(ids) else ((first, middle),)
        rows.append(TokenRow(f"r{n}", str(n), ids, spans))
    whole = Corpus.of(rows, 100)
    cut = data.draw(st.integers(0, len(rows)))
    joined = Corpus.concat([Corpus.of(rows[:cut], 100), Corpus.of(rows[cut:], 100)])
    assert joined.digest == whole.digest
    assert Corpus.from_tensors(whole.tensors()).digest == whole.digest
    counts = whole.token_counts(100)
    assert int(counts.sum()) == whole.num_generated == sum(row.num_generated for row in rows)
    for r, row in enumerate(rows):
        assert whole.token_ids_of(r).tolist() == row.token_ids
        assert whole.generated_of(r).nonzero().flatten().tolist() == [i for span in row.spans for i in range(*span)]


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda t: t.pop("spans"), "it holds"),
        (lambda t: t.update(token_ids=t["token_ids"].long()), "its token_ids are torch.int64"),
        (lambda t: t.update(token_ids=t["token_ids"].int() - 9), "an id of its tokens is below 0"),
        (lambda t: t.update(labels=t["labels"][:-1]), "its labels are damaged"),
        (lambda t: t.update(temperatures=t["temperatures"][:-1]), "do not fit each other"),
        (lambda t: t.update(row_offsets=t["row_offsets"] + 1), "row offsets"),
        (lambda t: t.update(spans=t["spans"].flip(0)), "not ordered by row"),
        (lambda t: t["spans"][0].__setitem__(2, 6), "do not lie in their rows"),
        (lambda t: t["spans"][1].__setitem__(1, 2), "do not lie in their rows"),
        (lambda t: t["spans"][0].__setitem__(1, -1), "do not lie in their rows"),
    ],
)
def test_damage_is_said(damage: Callable[[dict], object], said: str) -> None:
    tensors = {name: tensor.clone() for name, tensor in Corpus.of(ROWS, 100).tensors().items()}
    damage(tensors)
    with pytest.raises(FeatureError, match=said):
        Corpus.from_tensors(tensors)


def test_what_teaches() -> None:
    assert teaches([(1, 3)])
    assert not teaches([(0, 2)])  # nothing before the first token, so nothing drafts the second
    assert teaches([(0, 3)])
    assert not teaches([(4, 5), (6, 7)])
    assert Corpus.of([*ROWS, TokenRow("d", "", [1, 2, 3], ((0, 2),))], 100).teaches.tolist() == [True, False, False, False]
    assert clipped([(1, 3), (5, 9), (9, 12)], 7) == ((1, 3), (5, 7))


def test_rows_of_a_source_are_held_out_together_and_always_the_same() -> None:
    rows = [TokenRow(f"p{n // 3}", str(n % 3), [1, 2, 3], ((0, 3),)) for n in range(3000)]
    heldout = Corpus.of(rows, 100).is_heldout(0.1).reshape(-1, 3)
    assert (heldout.any(1) == heldout.all(1)).all()
    assert 60 < heldout[:, 0].sum() < 140
    assert (Corpus.of(rows[::-1], 100).is_heldout(0.1)[::-1].reshape(-1, 3) == heldout).all()
    assert len({sample_id_of(row.name) for row in rows}) == 3000


def test_a_small_corpus_holds_out_what_the_gate_needs_and_a_large_one_a_hundredth() -> None:
    def num_heldout(num_sources: int, enough: int = 8, share: float | None = None) -> int:
        sources = [f"p{n}" for n in range(num_sources)]
        fraction = heldout_fraction(share, sources, enough)
        assert fraction == heldout_fraction(share, [*sources[::-1], *sources], enough)
        return sum(is_heldout(source, fraction) for source in sources)

    assert [num_heldout(n) for n in (100, 200, 400)] == [8, 8, 8]
    assert 160 < num_heldout(20_000) < 240
    assert num_heldout(20_000, enough=1000) == 1000
    assert num_heldout(20, enough=8) <= 0.4 * 20  # a fifth, by chance
    assert heldout_fraction(None, [f"p{n}" for n in range(20)], 18) == 0.2
    assert heldout_fraction(None, ["a", "b"], 8) == 0.01
    assert num_heldout(200, share=0.0) == 0
    assert 60 < num_heldout(200, share=0.4) < 100

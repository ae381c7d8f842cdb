"""Epochs over token rows: every row once an epoch, in an order that a position resumes; states as the target computes them."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch

from runtime.backends.transformers.packed import PackedForward, load_packed
from runtime.errors import ConfigError, FeatureNotFound
from runtime.features.sampling import sampling_of
from runtime.hidden_states import HiddenStates
from training.config import DataConfig
from training.data.prefill import CorpusLedger, HeldoutRows, Prefill
from training.data.token_stream import TokenStream
from training.data.tokens import Corpus, TokenRow, sample_id_of
from training.learning.start import row_check

NUM_ROWS = 40


@pytest.fixture(scope="module")
def forward(tiny) -> PackedForward:
    return load_packed(tiny, torch.device("cpu"))


@pytest.fixture
def corpus(target) -> Corpus:
    generator = np.random.default_rng(0)
    rows = []
    for n in range(NUM_ROWS):
        length = int(generator.integers(6, 30))
        ids = generator.integers(0, target.vocab_size, length).tolist()
        rows.append(TokenRow(f"p{n // 2}", str(n % 2), ids, ((3, length - 1),), float(n % 2), slice=f"s{n % 3}"))
    return Corpus.of(rows, target.vocab_size)


def make(
    forward: PackedForward, corpus: Corpus, seed: int = 0, *, rank: int = 0, num_ranks: int = 1, ahead: bool = False, **data: int
) -> TokenStream:
    config = DataConfig(**({"max_batch_tokens": 64, "passes": 2} | data))
    prefill = Prefill(forward, corpus, config.max_batch_tokens)
    return TokenStream(prefill, range(len(corpus)), "run", config, seed, rank=rank, num_ranks=num_ranks, looks_ahead=ahead)


def drain(stream: TokenStream, steps: int = 10**6) -> list[list[str]]:
    batches = []
    while not stream.is_exhausted() and len(batches) < steps:
        batch = stream.next_batch()
        stream.look_ahead()
        stream.trained(batch)
        batches.append([row.sample_id for row in batch])
    return batches


def test_each_epoch_has_every_row_once_in_batches_that_are_full(forward: PackedForward, corpus: Corpus) -> None:
    stream = make(forward, corpus)
    batches = drain(stream)
    names = [sample_id_of(corpus.name(r)) for r in range(len(corpus))]
    half = next(n for n in range(len(batches)) if sum(map(len, batches[: n + 1])) == NUM_ROWS) + 1
    for epoch in (batches[:half], batches[half:]):
        assert Counter(name for batch in epoch for name in batch) == dict.fromkeys(names, 1)
    assert [sorted(map(tuple, batches[:half]))] != [sorted(map(tuple, batches[half:]))]  # another order each time
    sizes = dict(zip(names, corpus.lengths.tolist(), strict=True))
    filled = [sum(sizes[name] for name in batch) for batch in batches]
    assert max(filled) <= 64
    assert np.mean(filled) > 45
    assert stream.figures() == {"rows": 40, "rows_trained": 80, "epoch": 2, "step_of_epoch": 0, "steps_of_epoch": 0}


def test_a_longer_row_is_a_batch_of_its_own(forward: PackedForward, corpus: Corpus) -> None:
    batches = drain(make(forward, corpus, max_batch_tokens=16, passes=1))
    assert sum(map(len, batches)) == NUM_ROWS
    sizes = {sample_id_of(corpus.name(r)): int(corpus.lengths[r]) for r in range(NUM_ROWS)}
    assert all(len(batch) == 1 or sum(sizes[name] for name in batch) <= 16 for batch in batches)
    assert max(sizes.values()) > 16


def test_a_position_resumes_at_any_step_and_with_any_number_of_ranks(forward: PackedForward, corpus: Corpus) -> None:
    whole = drain(make(forward, corpus))
    for steps in (0, 3, len(whole) // 2, len(whole) - 1):
        first = make(forward, corpus)
        before = drain(first, steps)
        second = make(forward, corpus)
        second.restore([first.state()])
        assert before + drain(second) == whole
    ranks = [make(forward, corpus, rank=rank, num_ranks=2) for rank in range(2)]
    halves = [drain(stream, 2) for stream in ranks]
    assert halves[0] == whole[0:4:2]
    assert halves[1] == whole[1:4:2]
    alone = make(forward, corpus)
    alone.restore([stream.state() for stream in ranks])
    assert drain(alone) == whole[4:]
    assert alone.figures()["rows_trained"] == 2 * NUM_ROWS


def test_looking_ahead_changes_no_batch_and_reads_no_row_twice(forward: PackedForward, corpus: Corpus) -> None:
    calls: list[int] = []

    class Counting:
        device, dtype = forward.device, forward.dtype

        def __call__(self, token_ids: torch.Tensor, lengths: list[int]) -> HiddenStates:
            calls.append(len(lengths))
            return forward(token_ids, lengths)

    ahead = make(Counting(), corpus, ahead=True)
    plain = make(forward, corpus)
    while not plain.is_exhausted():
        for ours, theirs in zip(ahead.next_batch(), plain.next_batch(), strict=True):
            assert ours.sample_id == theirs.sample_id
            assert torch.equal(ours.features.hidden.aux, theirs.features.hidden.aux)
        for stream in (ahead, plain):
            stream.look_ahead()
            stream.trained([])
    assert ahead.is_exhausted()
    assert sum(calls) == 2 * NUM_ROWS
    for num_ranks in (1, 2):
        streams = [make(forward, corpus, rank=rank, num_ranks=num_ranks, ahead=True) for rank in range(num_ranks)]
        together = [drain(stream, 4) for stream in streams]
        assert [batch for step in zip(*together, strict=True) for batch in step] == drain(make(forward, corpus), 4 * num_ranks)


def test_more_passes_go_on_and_other_rows_are_refused(forward: PackedForward, corpus: Corpus) -> None:
    first, more = make(forward, corpus, passes=1), make(forward, corpus, passes=2)
    before = drain(first)
    more.restore([first.state()])
    assert before + drain(more) == drain(make(forward, corpus))
    for other in (make(forward, corpus, seed=1), make(forward, corpus, max_batch_tokens=65)):
        with pytest.raises(ConfigError, match="began with, so its place in the rows is lost"):
            other.restore([first.state()])


def test_rows_carry_the_targets_states_and_how_they_were_sampled(forward: PackedForward, corpus: Corpus) -> None:
    prefill = Prefill(forward, corpus, 64)
    rows = prefill.rows([5, 2, 9, 0, 30])
    for index, row in zip([5, 2, 9, 0, 30], rows, strict=True):
        ids = corpus.token_ids_of(index)
        assert torch.equal(row.features.token_ids, ids)
        assert row.features.generated.nonzero().flatten().tolist() == list(range(3, len(ids)))
        alone = forward(ids[:-1], [len(ids) - 1])
        torch.testing.assert_close(row.features.hidden.aux, alone.aux, atol=2e-5, rtol=1e-4)
        torch.testing.assert_close(row.features.hidden.last, alone.last, atol=2e-5, rtol=1e-4)
        assert row.features.labels["slice"] == f"s{index % 3}"
        sampled = sampling_of(row.features.labels)
        assert (None if sampled is None else sampled.temperature) == (1.0 if index % 2 else None)


def test_preview_shows_what_comes_first_and_no_more_than_was_asked(forward: PackedForward, corpus: Corpus) -> None:
    stream = make(forward, corpus)
    rows = stream.preview(8, 30)
    assert [row.sample_id for row in rows] == [name for batch in drain(make(forward, corpus), 2) for name in batch][: len(rows)]
    seen = [int(row.features.generated.sum()) for row in rows]
    assert sum(seen[:-1]) < 30 <= sum(seen)
    assert len(stream.preview(3, 10**6)) == 3


def test_held_out_rows_are_whole_sources_and_read_when_asked_for(
    forward: PackedForward, corpus: Corpus, target, tmp_path
) -> None:
    is_heldout = corpus.is_heldout(0.4)
    assert 0 < is_heldout.sum() < NUM_ROWS
    assert (is_heldout[::2] == is_heldout[1::2]).all()  # both answers to a prompt
    prefill = Prefill(forward, corpus, 64)
    heldout = HeldoutRows(prefill, np.flatnonzero(is_heldout).tolist())
    refs = heldout.refs("run", target)
    ledger = CorpusLedger(tmp_path / "ledger.sqlite", refs)
    assert ledger.heldout(3) == refs[:3]
    assert len(refs) == is_heldout.sum()
    check = row_check(target)
    for ref in refs[:4]:
        row, _ = heldout.get(ref)
        assert check(ref) is None
        assert ref.features["aux"].shape == tuple(row.hidden.aux.shape)
        assert ref.num_tokens == row.num_tokens
    other = HeldoutRows(prefill, [int(np.flatnonzero(~is_heldout)[0])]).refs("run", target)[0]
    with pytest.raises(FeatureNotFound):
        heldout.get(other)
    ledger.close()


def test_tokens_are_counted_over_all_rows(forward: PackedForward, corpus: Corpus, target) -> None:
    counts = make(forward, corpus).token_counts(target.vocab_size)
    expected = Counter(int(i) for r in range(NUM_ROWS) for i in corpus.token_ids_of(r)[corpus.generated_of(r)])
    assert {i: int(count) for i, count in enumerate(counts) if count} == expected

"""The teacher against the plain formula, and what it remembers."""

from __future__ import annotations

import torch

from runtime.eagle3 import DraftVocabulary
from training.data.batches import pack
from training.learning.teacher import Teacher


def test_covered_is_whether_the_greedy_token_can_be_drafted(make_row, monkeypatch) -> None:
    monkeypatch.setattr("training.learning.teacher.VOCABULARY_CHUNK", 7)
    lm_head = torch.randn(40, 16, generator=torch.Generator().manual_seed(0))
    vocabulary = DraftVocabulary(torch.arange(3, 40, 2), 40)
    batch = pack([make_row("pp" + "g" * 30, seed) for seed in range(3)], 2)
    teacher = Teacher(lm_head.bfloat16(), vocabulary, torch.device("cpu"))
    expected = vocabulary.t2d[(batch.last @ lm_head.bfloat16().float().T).argmax(-1)]
    assert 0 < expected.sum() < len(expected)
    assert torch.equal(teacher.lesson(batch).covered, expected)
    labels = teacher.lesson(batch).labels
    drawn = batch.chain_ids[labels >= 0]
    assert torch.equal(vocabulary.target_ids[labels[labels >= 0]], drawn)
    assert bool((labels[batch.chain_ids < 0] == -1).all())
    assert bool((drawn % 2 == 1).all())


def test_rows_seen_before_are_not_computed_again(make_row) -> None:
    lm_head = torch.randn(40, 16)
    teacher = Teacher(lm_head, DraftVocabulary(torch.arange(20), 40), torch.device("cpu"))
    rows = [make_row("pp" + "g" * 10, seed) for seed in range(3)]
    first = teacher.lesson(pack(rows[:2], 2)).covered
    lm_head.zero_()  # whatever is computed from now on is computed from this
    assert torch.equal(teacher.lesson(pack(rows[1::-1], 2)).covered, torch.cat([first[9:], first[:9]]))
    assert bool(teacher.lesson(pack(rows[2:], 2)).covered.all())  # all logits equal: token 0 wins, and it can be drafted

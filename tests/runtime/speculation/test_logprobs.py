import math

import pytest
import torch
from runtime.speculation import token_logprobs

LOGITS = torch.tensor([[0.5, 0.25, 0.125, 0.125], [0.1, 0.2, 0.3, 0.4]]).log() + 7.0  # any shift: raw logits are not normalised


def test_the_logprob_of_each_rows_token():
    first, second = token_logprobs(LOGITS, [1, 3])
    assert (first.token_id, second.token_id) == (1, 3)
    assert first.logprob == pytest.approx(math.log(0.25), abs=1e-5)
    assert second.logprob == pytest.approx(math.log(0.4), abs=1e-5)
    assert first.top == second.top == ()


def test_the_alternatives_come_best_first_and_may_lack_the_token_itself():
    [record] = token_logprobs(LOGITS[1:], [0], top=3)
    assert [token_id for token_id, _ in record.top] == [3, 2, 1]
    assert [math.exp(logprob) for _, logprob in record.top] == pytest.approx([0.4, 0.3, 0.2], abs=1e-5)


def test_more_alternatives_than_tokens_are_all_tokens():
    [record] = token_logprobs(LOGITS[:1], [0], top=20)
    assert len(record.top) == 4

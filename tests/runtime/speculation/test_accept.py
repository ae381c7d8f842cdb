import torch
from runtime.drafters.base import Draft
from runtime.speculation import Processor, new_generator, verify_chain
from runtime.types import SamplingParams


def test_greedy_keeps_the_matching_prefix_and_adds_the_targets_token():
    logits = torch.zeros(4, 8)
    for row, token_id in enumerate([3, 1, 4, 5]):
        logits[row, token_id] = 1.0
    processor = Processor(SamplingParams(temperature=0.0), [0], 8)
    for draft_ids, expected, num_accepted in (
        ([3, 1, 4], [3, 1, 4, 5], 3),
        ([3, 1, 0], [3, 1, 4], 2),
        ([3, 0, 4], [3, 1], 1),
        ([0, 1, 4], [3], 0),
    ):
        verdict = verify_chain(logits, Draft(draft_ids), processor, None)
        assert (verdict.token_ids, verdict.num_accepted) == (expected, num_accepted)


def test_an_empty_draft_picks_one_token():
    logits = torch.zeros(1, 8)
    logits[0, 6] = 50.0
    assert verify_chain(logits, Draft([]), Processor(SamplingParams(temperature=0.0), [0], 8), None).token_ids == [6]
    assert verify_chain(logits, Draft([]), Processor(SamplingParams(), [0], 8), new_generator(0)).token_ids == [6]

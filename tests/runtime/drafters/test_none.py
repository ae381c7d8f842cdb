import torch

from runtime.drafters import Draft, DraftRequest, NoDrafter


def test_it_never_drafts():
    drafter = NoDrafter()
    a, b = drafter.new_state(), drafter.new_state()
    assert a != b
    requests = [DraftRequest(state, 0, torch.zeros(2, 6), [1, 2, 3], depth) for state, depth in ((a, 5), (b, 0))]
    assert drafter.propose(requests) == [Draft([]), Draft([])]
    drafter.drop_state(a)
    assert drafter.version == "none"

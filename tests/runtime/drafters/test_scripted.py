import torch

from runtime.drafters import Draft, DraftRequest, ScriptedDrafter


def test_it_says_what_the_script_says_up_to_the_depth():
    drafter = ScriptedDrafter(lambda history, depth: [history[-1] + k for k in range(1, 9)], version="up")
    aux = torch.zeros(1, 6)
    state = drafter.new_state()
    drafts = drafter.propose([DraftRequest(state, 0, aux, [4, 5], 3), DraftRequest(drafter.new_state(), 0, aux, [7, 1], 0)])
    assert [draft.token_ids for draft in drafts] == [[6, 7, 8], []]
    assert all(draft.probs is None for draft in drafts)
    assert drafter.version == "up"
    drafter.drop_state(state)


def test_a_script_may_say_a_whole_tree():
    tree = Draft([1, 2, 3], None, [-1, -1, 0])
    drafter = ScriptedDrafter(lambda history, depth: tree)
    requests = [DraftRequest(drafter.new_state(), 0, torch.zeros(1, 6), [4, 5], depth) for depth in (2, 0)]
    assert drafter.propose(requests) == [tree, Draft([])]

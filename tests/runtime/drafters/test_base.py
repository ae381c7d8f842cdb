"""The arithmetic of chains and trees."""

import torch

from runtime.drafters.base import Draft, SparseProbs

#  history --+-- 0 (a) --+-- 2 (c)
#            |           +-- 3 (d) --- 5 (f)
#            +-- 1 (b) ----- 4 (e)
TREE = Draft([10, 11, 12, 13, 14, 15], None, [-1, -1, 0, 0, 1, 3], [0.3, 0.6, 0.5, 0.4, 0.9, 1.0])
CHAIN = Draft([7, 8, 9])


def test_relations_in_a_tree() -> None:
    assert TREE.children() == [[0, 1], [2, 3], [4], [], [5], [], []]
    assert TREE.depths() == [0, 0, 1, 1, 1, 2]
    assert TREE.depth == 3
    assert TREE.paths() == [[], [10], [11], [10, 12], [10, 13], [11, 14], [10, 13, 15]]
    assert TREE.likeliest_chain() == [1, 4]
    assert Draft(TREE.token_ids, None, TREE.parents).likeliest_chain() == [0, 2]


def test_a_chain_is_a_tree_with_one_child_each() -> None:
    as_tree = Draft(CHAIN.token_ids, None, [-1, 0, 1])
    for draft in (CHAIN, as_tree):
        assert draft.children() == [[0], [1], [2], []]
        assert draft.depths() == draft.likeliest_chain() == [0, 1, 2]
        assert draft.paths() == [[], [7], [7, 8], [7, 8, 9]]
    assert (Draft([]).depth, Draft([]).paths(), Draft([]).likeliest_chain()) == (0, [[]], [])


def test_some_nodes_of_a_draft() -> None:
    assert TREE.only([0, 3, 5]) == Draft([10, 13, 15], None, [-1, 0, 1], [0.3, 0.4, 1.0])
    assert TREE.only([]) == Draft([], None, [], [])
    q = [SparseProbs(torch.tensor([k]), torch.ones(1)) for k in range(3)]
    assert Draft([7, 8, 9], q).only([0, 1]) == Draft([7, 8], q[:2])

"""The served drafter against a slow oracle: the whole sequence again from its first row for every single draft."""

import math
from dataclasses import dataclass, field, replace

import pytest
import torch

from runtime.drafters import DraftRequest, Eagle3Drafter
from runtime.eagle3 import DraftVocabulary, Eagle3Config, Eagle3Model
from runtime.speculation import Uniforms, pick

V, VD, H = 40, 24, 16
MAX_POSITIONS = 300


def make_model(seed=0, **changes):
    config = Eagle3Config(
        **{
            "hidden_size": H,
            "intermediate_size": 24,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "vocab_size": V,
            "draft_vocab_size": VD,
            "max_position_embeddings": MAX_POSITIONS,
            **changes,
        }
    )
    generator = torch.Generator().manual_seed(seed)
    vocabulary = DraftVocabulary(torch.randperm(V, generator=generator)[:VD].sort().values, V)
    model = Eagle3Model(config, vocabulary, torch.randn(V, H, generator=generator))
    model.init_from_target(torch.randn(V, H, generator=generator), torch.ones(H) * 2, generator)
    return model.requires_grad_(False)


MODEL = make_model()


def causal(q, k, v):
    """q [S, heads, D], k and v [S, kv_heads, D]: every row sees itself and those before it, by the definition."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    scores = torch.einsum("ihd,jhd->hij", q, k) / q.shape[-1] ** 0.5
    scores += torch.full(scores.shape[1:], -math.inf).triu(1)
    return torch.einsum("hij,jhd->ihd", scores.softmax(-1), v)


def numbers(seed, depth):
    return Uniforms(seed).at(0, depth)[:, 0]


@dataclass
class Sequence:
    """A sequence and the rows that a drafter was shown of it."""

    seed: int
    history: list[int] = field(default_factory=list)
    shown: list[int] = field(default_factory=list)  # positions, ascending

    def __post_init__(self):
        generator = torch.Generator().manual_seed(self.seed)
        self.aux = torch.randn(2 * MAX_POSITIONS, 3 * H, generator=generator)
        self.tokens = torch.randint(V, (2 * MAX_POSITIONS,), generator=generator).tolist()

    def request(self, state, position, num_rows, depth, **more):
        """The next rows; remembers them as shown."""
        self.history = self.tokens[: position + num_rows + 1]
        self.shown = [p for p in self.shown if p < position] + list(range(position, position + num_rows))
        return DraftRequest(state, position, self.aux[position : position + num_rows], self.history, depth, **more)

    def oracle(self, drafted, model=MODEL):
        """Draft logits [Vd] of the draft that follows those `drafted`."""
        ids = [self.history[p + 1] for p in self.shown]
        positions, h = list(self.shown), model.project(self.aux[self.shown])
        for token_id in [*drafted, None]:
            out = model.layer(torch.tensor(ids), h, torch.tensor(positions), causal)
            if token_id is not None:
                ids, positions, h = [*ids, token_id], [*positions, positions[-1] + 1], torch.cat([h, out[-1:]])
        return model.draft_logits(out[-1])

    def check(self, draft, depth, temperature=0.0, model=MODEL):
        assert len(draft.token_ids) == depth
        for k, token_id in enumerate(draft.token_ids):
            logits = self.oracle(draft.token_ids[:k], model)
            if temperature == 0.0:
                best = logits.max()
                index = int(model.vocabulary.to_draft[token_id])
                assert index >= 0
                assert float(logits[index]) >= float(best) - 1e-4
            else:
                q = draft.probs[k]
                assert q.token_ids.tolist() == model.vocabulary.target_ids.tolist()
                torch.testing.assert_close(q.probs, (logits / temperature).softmax(-1), rtol=1e-4, atol=1e-5)
                assert float(q.probs[q.token_ids == token_id]) > 0
        assert (draft.probs is None) == (temperature == 0.0)


def test_drafts_equal_a_recomputation_from_scratch_over_many_steps():
    drafter, sequence = Eagle3Drafter(MODEL, "v"), Sequence(1)
    state, position = drafter.new_state(), 0
    for num_rows in (9, 1, 3, 6, 1, 120, 2, 1, 70, 4):  # a prompt, accepted chains, and growth past what was reserved
        [draft] = drafter.propose([sequence.request(state, position, num_rows, depth=5)])
        sequence.check(draft, 5)
        position += num_rows


@pytest.mark.parametrize(
    "changes", [{"fc_norm": True}, {"norm_output": True}, {"norm_before_residual": True}, {"num_key_value_heads": 4}]
)
def test_the_variants_of_the_network_are_drafted_alike(changes):
    model = make_model(seed=3, **changes)
    drafter, sequence = Eagle3Drafter(model, "v"), Sequence(1)
    state = drafter.new_state()
    for position, num_rows in ((0, 7), (7, 2)):
        [draft] = drafter.propose([sequence.request(state, position, num_rows, depth=4)])
        sequence.check(draft, 4, model=model)


def test_drafts_differ_when_any_input_differs():
    """Guards the oracle test: positions, tokens, states and order all show in the logits."""
    sequence = Sequence(1)
    sequence.request(0, 0, 8, 0)
    truth = sequence.oracle([3])
    for change in ("history", "aux", "shown", "draft"):
        other = Sequence(1)
        other.request(0, 0, 8, 0)
        if change == "history":
            other.history[3] = (other.history[3] + 1) % V
        elif change == "aux":
            other.aux[2] += 1.0
        elif change == "shown":
            other.shown.remove(4)
        assert not torch.allclose(other.oracle([4] if change == "draft" else [3]), truth, atol=1e-3)


def test_a_batch_drafts_what_each_of_its_sequences_drafts_alone():
    plans = [(0, 5, 0.0), (1, 2, 0.0), (2, 5, 1.0), (3, 0, 0.0), (4, 3, 0.7), (5, 4, 0.0)]  # seed, depth, temperature
    together = Eagle3Drafter(MODEL, "v")
    states = [together.new_state() for _ in plans]
    alone = [Eagle3Drafter(MODEL, "v") for _ in plans]
    lone_states = [drafter.new_state() for drafter in alone]
    sequences = [Sequence(seed) for seed, _, _ in plans]
    positions = [0] * len(plans)
    for step in range(4):
        requests, singles = [], []
        for i, (seed, depth, temperature) in enumerate(plans):
            num_rows = 4 + seed if step == 0 else 1 + (seed + step) % 3
            more = {"temperature": temperature, "uniforms": numbers(10 * step + i, depth)}
            requests.append(sequences[i].request(states[i], positions[i], num_rows, depth, **more))
            singles.append(sequences[i].request(lone_states[i], positions[i], num_rows, depth, **more))
            positions[i] += num_rows
        drafts = together.propose(requests)
        for i, (_, depth, temperature) in enumerate(plans):
            [single] = alone[i].propose([singles[i]])
            assert drafts[i].token_ids == single.token_ids
            if depth:
                sequences[i].check(drafts[i], depth, temperature)
            for a, b in zip(drafts[i].probs or [], single.probs or [], strict=True):
                torch.testing.assert_close(a.probs, b.probs, rtol=1e-4, atol=1e-6)


def expected_tree(sequence, width, depth, num_nodes, model=MODEL):
    """The nodes of EAGLE-2, one forward from scratch each: {path of tokens: log q of the path}."""
    frontier, candidates = {(): 0.0}, {}
    for _ in range(depth):
        level = {}
        for path, score in frontier.items():
            log_q = sequence.oracle(list(path), model).log_softmax(-1)
            for value, index in zip(*log_q.topk(width), strict=True):
                level[*path, int(model.vocabulary.target_ids[index])] = score + float(value)
        candidates |= level
        frontier = dict(sorted(level.items(), key=lambda item: -item[1])[:width])
    return dict(sorted(candidates.items(), key=lambda item: -item[1])[:num_nodes])


def paths_of(draft):
    """{path of tokens: product of confidences}"""
    paths = {(): 1.0}
    keys = [()]
    for token_id, parent, confidence in zip(draft.token_ids, draft.parents, draft.confidences, strict=True):
        key = (*keys[parent + 1], token_id)
        paths[key] = paths[keys[parent + 1]] * confidence
        keys.append(key)
    del paths[()]
    return paths


@pytest.mark.parametrize(("width", "depth", "num_nodes"), [(2, 3, 5), (3, 1, 3), (3, 4, 12), (4, 3, None)])
def test_a_tree_holds_the_nodes_with_the_most_likely_paths(width, depth, num_nodes):
    drafter, sequence = Eagle3Drafter(MODEL, "v"), Sequence(5)
    state = drafter.new_state()
    for position, num_rows in ((0, 7), (7, 2), (9, 1)):  # the tree before leaves nothing behind
        request = sequence.request(state, position, num_rows, depth, width=width, num_nodes=num_nodes)
        [draft] = drafter.propose([request])
        assert draft.probs is None
        assert all(-1 <= parent < node for node, parent in enumerate(draft.parents))
        expected = expected_tree(sequence, width, depth, num_nodes)
        found = paths_of(draft)
        assert set(found) == set(expected)
        for path, log_q in expected.items():
            assert found[path] == pytest.approx(math.exp(log_q), rel=1e-3)


def test_trees_and_chains_of_many_sequences_are_drafted_together():
    plans = [(0, 4, 3, 0.0), (1, 2, 1, 0.0), (2, 3, 3, 1.0), (3, 5, 1, 0.7), (4, 0, 3, 0.0), (5, 2, 2, 0.0)]
    together, sequences = Eagle3Drafter(MODEL, "v"), [Sequence(seed) for seed, *_ in plans]
    states = [together.new_state() for _ in plans]
    for position, num_rows in ((0, 5), (5, 3)):
        requests, expected = [], []
        for i, (seed, depth, width, temperature) in enumerate(plans):
            more = {"width": width, "num_nodes": 7, "temperature": temperature, "uniforms": numbers(seed, depth)}
            requests.append(sequences[i].request(states[i], position, num_rows, depth, **more))
            alone = Eagle3Drafter(MODEL, "v")
            handle = alone.new_state()
            if position:
                alone.propose([Sequence(seed).request(handle, 0, position, 0)])
            [draft] = alone.propose([replace(requests[-1], state=handle)])
            expected.append(draft)
        for draft, single in zip(together.propose(requests), expected, strict=True):
            assert (draft.token_ids, draft.parents) == (single.token_ids, single.parents)
            assert (draft.confidences or []) == pytest.approx(single.confidences or [], rel=1e-3)
            assert (draft.probs is None) == (single.probs is None)


def test_a_width_beyond_the_vocabulary_and_a_broken_network_give_what_there_is():
    drafter, sequence = Eagle3Drafter(MODEL, "v"), Sequence(5)
    size = len(MODEL.vocabulary.target_ids)
    [draft] = drafter.propose([sequence.request(drafter.new_state(), 0, 3, 1, width=size + 5)])
    assert len(draft.token_ids) == size
    model = make_model(seed=6)
    model.lm_head.weight.fill_(math.nan)
    broken = Eagle3Drafter(model, "v")
    [draft] = broken.propose([Sequence(1).request(broken.new_state(), 0, 4, depth=3, width=3, num_nodes=6)])
    assert draft.token_ids == []


def test_sampled_tokens_are_drawn_from_the_very_distribution_that_is_returned():
    drafter, sequence = Eagle3Drafter(MODEL, "v"), Sequence(7)
    [draft] = drafter.propose([sequence.request(drafter.new_state(), 0, 6, depth=5, temperature=1.5, uniforms=numbers(3, 5))])
    uniforms = numbers(3, 5)
    for k, (token_id, q) in enumerate(zip(draft.token_ids, draft.probs, strict=True)):
        assert int(q.token_ids[pick(q.probs.unsqueeze(0), uniforms[k : k + 1])]) == token_id
    assert len(set(draft.token_ids)) > 1


def test_first_drafts_of_many_seeds_follow_the_draft_distribution():
    drafter, sequence, num = Eagle3Drafter(MODEL, "v"), Sequence(8), 800
    requests = [
        sequence.request(drafter.new_state(), 0, 1, depth=1, temperature=1.0, uniforms=numbers(seed, 1)) for seed in range(num)
    ]
    drafted = torch.tensor([draft.token_ids[0] for draft in drafter.propose(requests)])
    expected = sequence.oracle([]).softmax(-1)
    seen = torch.bincount(drafted, minlength=V)[MODEL.vocabulary.target_ids] / num
    assert float((seen - expected).abs().sum()) < 0.12  # noise alone is about 0.05


def test_a_tiny_temperature_drafts_greedily():
    drafter, sequence = Eagle3Drafter(MODEL, "v"), Sequence(9)
    state = drafter.new_state()
    [greedy] = drafter.propose([sequence.request(state, 0, 6, depth=4)])
    for temperature in (1e-6, 5e-324):
        request = sequence.request(state, 0, 6, depth=4, temperature=temperature, uniforms=numbers(0, 4))
        [sampled] = drafter.propose([request])
        assert sampled.token_ids == greedy.token_ids


def test_chains_end_where_all_of_a_batch_have_enough():
    def propose(*more):
        """Drafts of depth 5 of a drafter of its own, a sequence for each set of fields."""
        drafter = Eagle3Drafter(MODEL, "v")
        requests = [Sequence(n).request(drafter.new_state(), 0, 6, 5, **fields) for n, fields in enumerate(more)]
        return drafter.propose(requests)

    seen = []

    def after(num_nodes):
        return {"is_enough": lambda confidences: seen.append(list(confidences)) or len(confidences) >= num_nodes}

    whole = propose({}, {})
    assert [len(draft.token_ids) for draft in propose(after(1), after(1))] == [1, 1]
    short = propose(after(2), after(3))
    assert [draft.token_ids for draft in short] == [draft.token_ids[:3] for draft in whole]
    assert short[1].confidences == pytest.approx(whole[1].confidences[:3])
    assert seen[-1] == pytest.approx(whole[1].confidences[:3])
    assert [len(draft.token_ids) for draft in propose(after(1), {})] == [5, 5]
    sampled = {"temperature": 1.0, "uniforms": numbers(3, 5)}
    assert [len(draft.token_ids) for draft in propose(after(1), after(1) | sampled)] == [5, 5], "nothing drawn decides"


def test_rows_may_be_missing():
    drafter, sequence = Eagle3Drafter(MODEL, "v"), Sequence(2)
    state = drafter.new_state()
    for position, num_rows in ((0, 5), (9, 3), (14, 1), (15, 2)):
        [draft] = drafter.propose([sequence.request(state, position, num_rows, depth=3)])
        sequence.check(draft, 3)
    assert sequence.shown == [0, 1, 2, 3, 4, 9, 10, 11, 14, 15, 16]


def test_rows_of_a_truncated_history_are_dropped_first():
    drafter, sequence = Eagle3Drafter(MODEL, "v"), Sequence(3)
    state = drafter.new_state()
    for position, num_rows in ((0, 12), (5, 2), (6, 3), (0, 4)):
        tail = sequence.tokens[position + 1 :]  # x[p+1] and aux[p] make row p: others from here on
        sequence.tokens[position + 1 :] = tail[1:] + tail[:1]
        sequence.aux[position:] += 0.5
        [draft] = drafter.propose([sequence.request(state, position, num_rows, depth=3)])
        sequence.check(draft, 3)


def test_catching_up_without_drafting_leaves_the_same_state():
    drafter, sequence = Eagle3Drafter(MODEL, "v"), Sequence(4)
    state = drafter.new_state()
    for position, num_rows in ((0, 6), (6, 0), (6, 3)):
        [draft] = drafter.propose([sequence.request(state, position, num_rows, depth=0)])
        assert draft.token_ids == []
    [draft] = drafter.propose([sequence.request(state, 9, 1, depth=4)])
    sequence.check(draft, 4)


def test_drafting_stops_at_the_positions_that_the_network_knows():
    drafter, sequence = Eagle3Drafter(MODEL, "v"), Sequence(5)
    state, position = drafter.new_state(), MAX_POSITIONS - 6
    for num_rows, depth in ((2, 5), (2, 3), (1, 2), (1, 1), (1, 0), (4, 0)):
        [draft] = drafter.propose([sequence.request(state, position, num_rows, depth=5)])
        assert len(draft.token_ids) == depth  # draft k sits at position last + k
        if depth:
            sequence.check(draft, depth)
        position += num_rows
    [draft] = drafter.propose([sequence.request(state, MAX_POSITIONS - 6, 3, depth=5)])  # truncated: it drafts again
    sequence.check(draft, 4)


def test_a_prompt_beyond_the_known_positions_is_no_error():
    drafter, sequence = Eagle3Drafter(MODEL, "v"), Sequence(6)
    requests = [sequence.request(drafter.new_state(), 0, MAX_POSITIONS + 20, depth=5)]
    other = Sequence(7)
    requests.append(other.request(drafter.new_state(), 0, 4, depth=2))
    drafts = drafter.propose(requests)
    assert drafts[0].token_ids == []
    other.check(drafts[1], 2)


def test_the_drafter_is_a_snapshot_of_the_model():
    model = make_model(seed=5)
    drafter, sequence = Eagle3Drafter(model, "abc"), Sequence(1)
    state = drafter.new_state()
    [before] = drafter.propose([sequence.request(state, 0, 6, depth=5)])
    names = set(model.state_dict())
    for parameter in model.parameters():
        parameter.mul_(-3.0)
    [after] = drafter.propose([sequence.request(state, 0, 6, depth=5)])
    assert after.token_ids == before.token_ids
    assert set(model.state_dict()) == names  # and the model is left as it was
    assert drafter.version == "abc"


def test_a_broken_network_drafts_nothing_it_could_not_account_for():
    model = make_model(seed=6)
    model.lm_head.weight.fill_(math.nan)
    drafter, sequence = Eagle3Drafter(model, "v"), Sequence(1)
    request = sequence.request(drafter.new_state(), 0, 4, depth=3, temperature=1.0, uniforms=numbers(0, 3))
    [draft] = drafter.propose([request])
    assert (draft.token_ids, draft.probs) == ([], [])


def test_states_are_separate_and_end():
    drafter, first, second = Eagle3Drafter(MODEL, "v"), Sequence(1), Sequence(2)
    a, b = drafter.new_state(), drafter.new_state()
    drafter.propose([first.request(a, 0, 5, 2)])
    drafter.propose([second.request(b, 0, 5, 2)])
    drafter.drop_state(a)
    [draft] = drafter.propose([second.request(b, 5, 1, 4)])
    second.check(draft, 4)
    with pytest.raises(KeyError):
        drafter.propose([first.request(a, 5, 1, 2)])
    c = drafter.new_state()
    assert c not in (a, b)
    first.shown = []
    [draft] = drafter.propose([first.request(c, 5, 2, 2)])
    first.check(draft, 2)


def test_a_history_that_does_not_end_behind_the_rows_is_the_callers_mistake():
    drafter, sequence = Eagle3Drafter(MODEL, "v"), Sequence(1)
    request = sequence.request(drafter.new_state(), 0, 5, 2)
    for history in (request.history[:-1], [*request.history, 1]):
        with pytest.raises(AssertionError, match="history"):
            drafter.propose([DraftRequest(request.state, 0, request.aux, history, 2)])


def test_no_requests_no_drafts():
    assert Eagle3Drafter(MODEL, "v").propose([]) == []


@pytest.mark.cuda
def test_cuda_drafts_what_the_cpu_drafts():
    on_cuda = make_model()
    on_cuda.embedding = on_cuda.embedding.cuda()
    drafters = [Eagle3Drafter(MODEL, "cpu"), Eagle3Drafter(on_cuda.cuda(), "cuda")]
    sequences = [(Sequence(seed), temperature) for seed, temperature in ((1, 0.0), (2, 1.0))]
    states = [[drafter.new_state() for _ in sequences] for drafter in drafters]
    position = 0
    for num_rows in (9, 1, 150, 3):
        drafts = [
            drafter.propose(
                [
                    sequence.request(states[d][i], position, num_rows, 5, temperature=temperature, uniforms=numbers(i, 5))
                    for i, (sequence, temperature) in enumerate(sequences)
                ]
            )
            for d, drafter in enumerate(drafters)
        ]
        assert [draft.token_ids for draft in drafts[0]] == [draft.token_ids for draft in drafts[1]]
        for cpu, cuda in zip(drafts[0][1].probs, drafts[1][1].probs, strict=True):
            torch.testing.assert_close(cuda.probs.cpu(), cpu.probs, rtol=1e-3, atol=1e-4)
        position += num_rows

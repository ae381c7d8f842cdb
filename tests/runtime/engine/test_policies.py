"""Cache policies of sessions: far past the window the output depends on the history and the policy, on nothing else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from runtime.backends.base import Segment, Target
from runtime.drafters.base import Drafter
from runtime.drafters.eagle3 import Eagle3Drafter
from runtime.drafters.ngram import NgramDrafter
from runtime.drafters.none import NoDrafter
from runtime.drafters.scripted import ScriptedDrafter
from runtime.eagle3.config import Eagle3Config
from runtime.eagle3.model import Eagle3Model
from runtime.eagle3.vocab import DraftVocabulary
from runtime.engine.holdings import MIN_DRAFT_ROWS
from runtime.errors import InvalidRequest
from runtime.types import CachePolicy, Done, HistoryTruncated, SamplingParams, SessionOptions, Started

from .conftest import GREEDY, KeepingTap, Listener, MakeEngine, audit, prompt_of, random_drafter, run

POLICY = CachePolicy(sink=4, window=48)
OPTIONS = SessionOptions(cache_policy=POLICY)


def reference(target: Target, prompt: Sequence[int], num_tokens: int, policy: CachePolicy = POLICY) -> list[int]:
    """The target's own greedy continuation under the policy, one token and one forward at a time, the prompt too."""
    cache = target.new_cache(policy)
    history = list(prompt)
    for place in range(len(prompt) + num_tokens - 1):
        [output] = target.forward([Segment(cache, [history[place]])])
        target.commit(cache, [0])
        if place + 1 == len(history):
            history.append(int(output.logits[-1].argmax()))
    target.drop(cache)
    return history[len(prompt) :]


def eagle(target: Target) -> Eagle3Drafter:
    """A draft network with K/V of its own; untrained."""
    torch.manual_seed(0)
    info = target.info
    vocabulary = DraftVocabulary.full(info.vocab_size)
    config = Eagle3Config(
        hidden_size=info.hidden_size,
        intermediate_size=96,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=info.vocab_size,
        draft_vocab_size=info.vocab_size,
        max_position_embeddings=info.max_positions,
        dtype="float32",
    )
    return Eagle3Drafter(Eagle3Model(config, vocabulary, target.embedding), "eagle")


DRAFTERS: dict[str, Callable[[Target, Sequence[int]], Drafter]] = {
    "none": lambda target, full: NoDrafter(),
    "perfect": lambda target, full: ScriptedDrafter(lambda h, depth: list(full[len(h) : len(h) + depth]), version="perfect"),
    "random": lambda target, full: random_drafter(),
    "ngram": lambda target, full: NgramDrafter(),
    "eagle": lambda target, full: eagle(target),
}


@pytest.mark.parametrize("chunk", [1, 7, 64])
@pytest.mark.parametrize("kind", DRAFTERS)
def test_the_output_is_the_same_however_the_history_came(make_engine: MakeEngine, target: Target, chunk: int, kind: str) -> None:
    prompt = prompt_of(1, 300)
    expected = reference(target, prompt, 40)
    engine = make_engine(DRAFTERS[kind](target, [*prompt, *expected, *expected]), prefill_chunk_tokens=64)
    session_id = engine.create_session(OPTIONS).session_id
    for start in range(0, len(prompt), chunk):
        engine.append(session_id, prompt[start : start + chunk])
    listener, done = run(engine, [], GREEDY, session_id, append=False)
    assert listener.token_ids == expected
    if kind == "perfect":
        assert done.speculation.mean_acceptance_length > 5


@pytest.mark.parametrize("chunk", [16, 256])
def test_turns_give_what_one_prompt_gives(make_engine: MakeEngine, target: Target, chunk: int) -> None:
    """The K/V grows turn by turn here, and at once there; every turn begins far past the window."""
    engine = make_engine(random_drafter(), prefill_chunk_tokens=chunk, prefix_reuse=False)
    session_id = engine.create_session(OPTIONS).session_id
    history: list[int] = []
    for seed, length in enumerate((100, 1, 30, 64)):
        history += prompt_of(seed, length)
        listener, done = run(engine, prompt_of(seed, length), GREEDY, session_id)
        assert listener.token_ids == reference(target, history, 40)
        history += listener.token_ids
        info = engine.get_session(session_id)
        assert info.history_length == info.cached_tokens == len(history) == done.history_length
    again, _ = run(engine, [], GREEDY, session_id)  # with nothing new: the last token is computed once more
    assert again.token_ids == reference(target, history, 40)


@pytest.mark.parametrize("policy", [CachePolicy(0, 1), CachePolicy(3, 1), CachePolicy(0, 2), CachePolicy(1, 16)])
def test_small_windows(make_engine: MakeEngine, target: Target, policy: CachePolicy) -> None:
    engine = make_engine(random_drafter())
    session_id = engine.create_session(SessionOptions(cache_policy=policy)).session_id
    history: list[int] = []
    for seed, length in enumerate((30, 0, 30, 30)):  # nothing new: the last token is computed once more
        prompt = prompt_of(seed, length)
        history += prompt
        listener, _ = run(engine, prompt, GREEDY, session_id)
        assert listener.token_ids == reference(target, history, 40, policy)
        history += listener.token_ids
        audit(engine, target)


def test_truncation_is_told_once_between_start_and_end(make_engine: MakeEngine) -> None:
    engine = make_engine(random_drafter())
    session_id = engine.create_session(OPTIONS).session_id
    told: list[tuple[int, HistoryTruncated]] = []
    for turn in range(3):
        engine.append(session_id, prompt_of(turn, 30))
        listener = Listener()
        engine.generate(session_id, GREEDY, on_event=listener)
        events = []
        while not events or not isinstance(events[-1], Done):
            events.append(listener.next())
        assert isinstance(events[0], Started)
        told += [(turn, event) for event in events[1:-1] if isinstance(event, HistoryTruncated)]
    assert len(told) == 1
    [(turn, event)] = told
    assert turn == 0 or turn == 1
    assert event.dropped > 0
    info = engine.get_session(session_id)
    assert info.dropped_tokens >= event.dropped
    full = engine.create_session().session_id
    run(engine, prompt_of(1, 200), GREEDY, full)
    assert engine.get_session(full).dropped_tokens == 0


def test_k_v_features_and_draft_state_stay_bounded(make_engine: MakeEngine, target: Target) -> None:
    engine = make_engine(eagle(target), prefill_chunk_tokens=64)
    session_id = engine.create_session(OPTIONS).session_id
    params = SamplingParams(temperature=0.0, max_tokens=1200, ignore_eos=True)
    run(engine, prompt_of(1, 500), params, session_id)
    session = engine._store.get(session_id)
    assert len(session.history) == 1700
    assert target.cache_bytes() <= target.cache_bytes(1700, POLICY) < target.cache_bytes(1700) / 4
    assert session.cached - session.first_kept <= 2 * 48 + 64
    assert (
        sum(part.aux.untyped_storage().nbytes() for part in session.features) <= 4 * (2 * 48 + 64) * 3 * target.info.hidden_size
    )
    assert session.draft is not None
    assert session.draft.first > 0  # it has begun again
    assert session.draft.position - session.draft.first <= MIN_DRAFT_ROWS + 64
    audit(engine, target)


def test_a_drafter_that_rested_for_more_than_a_window_goes_on_with_what_is_kept(make_engine: MakeEngine, target: Target) -> None:
    engine = make_engine(eagle(target))
    session_id = engine.create_session(OPTIONS).session_id
    history: list[int] = []
    for seed, speculate in enumerate((True, False, True)):
        params = SamplingParams(temperature=0.0, max_tokens=70, ignore_eos=True, speculate=speculate)
        listener, done = run(engine, prompt_of(seed, 10), params, session_id)
        history += prompt_of(seed, 10)
        assert listener.token_ids == reference(target, history, 70)
        assert (done.speculation.num_drafted > 0) is speculate
        history += listener.token_ids
    assert engine.stats().num_drafter_failures == 0


def test_the_tap_hears_that_states_were_dropped(make_engine: MakeEngine) -> None:
    tap = KeepingTap()
    engine = make_engine(random_drafter(), tap=tap)
    session_id = engine.create_session(OPTIONS).session_id
    run(engine, prompt_of(1, 10), SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True), session_id)
    run(engine, prompt_of(1, 200), GREEDY, session_id)
    assert [turn.first_position > 0 for turn in tap.turns] == [False, True]
    assert [turn.num_unseen > 0 for turn in tap.turns] == [False, True]


def test_a_session_that_dropped_tokens_is_forked_and_saved_whole(make_engine: MakeEngine, target: Target, tmp_path: Path) -> None:
    engine = make_engine(random_drafter())
    session_id = engine.create_session(OPTIONS).session_id
    first, _ = run(engine, prompt_of(1, 200), GREEDY, session_id)
    history = [*prompt_of(1, 200), *first.token_ids]
    engine.save_session(session_id, tmp_path / "s")
    copies = [engine.fork_session(session_id), engine.restore_session(tmp_path / "s")]
    for copy in copies:
        assert (copy.cached_tokens, copy.options.cache_policy) == (240, POLICY)
        assert copy.dropped_tokens == engine.get_session(session_id).dropped_tokens > 0
        listener, done = run(engine, prompt_of(2), GREEDY, copy.session_id)
        assert done.usage.cached_tokens == 240
        assert listener.token_ids == reference(target, [*history, *prompt_of(2)], 40)
    part = engine.fork_session(session_id, history_length=150)
    assert (part.history_length, part.cached_tokens) == (150, 0)  # its window has been dropped: it is computed anew
    listener, _ = run(engine, [7], GREEDY, part.session_id)
    assert listener.token_ids == reference(target, [*history[:150], 7], 40)


def test_a_policy_that_makes_no_sense_is_refused(make_engine: MakeEngine) -> None:
    engine = make_engine()
    for policy in (CachePolicy(4, None), CachePolicy(0, 0), CachePolicy(-1, 8)):
        with pytest.raises(InvalidRequest):
            engine.create_session(SessionOptions(cache_policy=policy))
    assert engine.list_sessions() == []

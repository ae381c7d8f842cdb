"""LocalEngine: lossless whatever the drafter, isolated sessions, stops, cancellation, swaps, failures, accounting."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch

from runtime.backends.base import Segment, Target
from runtime.drafters.base import Draft, DraftRequest
from runtime.drafters.none import NoDrafter
from runtime.drafters.scripted import ScriptedDrafter
from runtime.errors import (
    CapacityExhausted,
    ContextLengthExceeded,
    EngineUnavailable,
    HistoryMismatch,
    InvalidRequest,
    SessionBusy,
    SessionNotFound,
)
from runtime.models import Tokenizer
from runtime.types import Done, Event, SamplingParams, SessionOptions, Started, Switch, Tokens

from .conftest import (
    GREEDY,
    KeepingTap,
    Listener,
    MakeEngine,
    adversarial,
    assert_greedy,
    endless,
    greedy_reference,
    perfect,
    prompt_of,
    random_drafter,
    run,
)


@pytest.mark.parametrize("kind", ["none", "perfect", "random", "adversarial"])
def test_greedy_output_is_the_targets_own_whatever_the_drafter(make_engine: MakeEngine, target: Target, kind: str) -> None:
    prompt = prompt_of(1)
    reference = greedy_reference(target, prompt, 40)
    drafter = {
        "none": NoDrafter,
        "perfect": lambda: perfect(target, prompt),
        "random": random_drafter,
        "adversarial": lambda: adversarial(target, prompt),
    }[kind]()
    listener, done = run(make_engine(drafter), prompt, GREEDY)
    assert listener.token_ids == reference
    assert done.finish_reason == "length"
    assert done.usage.completion_tokens == 40
    assert done.history_length == len(prompt) + 40
    length = done.speculation.mean_acceptance_length
    if kind == "perfect":
        assert length > 5
        assert all(listener.drafted[1:6])
    if kind == "none":
        assert length == 1.0
    if kind == "adversarial":
        assert 1.5 < length <= 2.0


def raising(requests: Sequence[DraftRequest]) -> list[Draft]:
    raise RuntimeError("broken")


@pytest.mark.parametrize("propose", [raising, lambda requests: [], lambda requests: [None for _ in requests]])
def test_a_drafter_that_fails_costs_speed_only(
    make_engine: MakeEngine, target: Target, propose: Callable[[Sequence[DraftRequest]], list[Draft]]
) -> None:
    class Broken(NoDrafter):
        def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
            return propose(requests)

    engine = make_engine(Broken())
    listener, _ = run(engine, prompt_of(2), GREEDY)
    assert listener.token_ids == greedy_reference(target, prompt_of(2), 40)
    assert engine.stats().num_drafter_failures > 0


def test_drafts_without_their_distribution_are_not_verified(make_engine: MakeEngine) -> None:
    class Short(NoDrafter):
        def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
            return [Draft([1] * request.depth, []) for request in requests]

    sampled = SamplingParams(max_tokens=10, ignore_eos=True, seed=1)
    listener, done = run(make_engine(Short()), prompt_of(2), sampled)
    assert len(listener.token_ids) == 10
    assert done.speculation.num_drafted == 0


def test_sessions_in_one_batch_give_what_each_gives_alone(make_engine: MakeEngine, target: Target) -> None:
    engine = make_engine(random_drafter(), max_batch_sessions=4)
    prompts = [prompt_of(seed, length) for seed, length in enumerate([3, 40, 1, 17, 70, 9])]
    listeners = []
    for prompt in prompts:
        session = engine.create_session()
        engine.append(session.session_id, prompt)
        listeners.append(Listener())
        engine.generate(session.session_id, GREEDY, on_event=listeners[-1])
    for prompt, listener in zip(prompts, listeners, strict=True):
        listener.wait()
        assert listener.token_ids == greedy_reference(target, prompt, 40)


def test_history_gives_the_same_output_however_it_was_appended(make_engine: MakeEngine) -> None:
    engine = make_engine(random_drafter(), prefill_chunk_tokens=16)
    prompt = prompt_of(5, 100)
    whole, _ = run(engine, prompt, GREEDY)
    session_id = engine.create_session().session_id
    for start in range(0, 100, 7):
        engine.append(session_id, prompt[start : start + 7])
    pieces, done = run(engine, [], GREEDY, session_id)
    assert pieces.token_ids == whole.token_ids
    assert done.usage.prompt_tokens == 100


def test_a_second_turn_continues_the_cached_history(make_engine: MakeEngine, target: Target) -> None:
    engine = make_engine(random_drafter())
    session_id = engine.create_session().session_id
    first, done = run(engine, prompt_of(6), GREEDY, session_id)
    assert done.history_length == 64
    second, done = run(engine, prompt_of(7), GREEDY, session_id)
    history = [*prompt_of(6), *first.token_ids, *prompt_of(7)]
    assert second.token_ids == greedy_reference(target, history, 40)
    assert done.usage.cached_tokens == 64  # the whole turn before, its last token included
    third, done = run(engine, [], GREEDY, session_id)  # going on without anything new is a turn like any other
    assert third.token_ids == greedy_reference(target, [*history, *second.token_ids], 40)


def test_chunked_prefill_lets_running_sessions_keep_their_pace(make_engine: MakeEngine) -> None:
    engine = make_engine(prefill_chunk_tokens=16)
    order: list[str] = []
    short, long = engine.create_session().session_id, engine.create_session().session_id
    engine.append(short, prompt_of(1))
    engine.append(long, prompt_of(2, 400))
    listeners = Listener(), Listener()

    def note(name: str, listener: Listener) -> object:
        def on_event(event: object) -> None:
            if isinstance(event, Tokens):
                order.append(name)
            listener(event)  # type: ignore[arg-type]

        return on_event

    engine.generate(short, GREEDY, on_event=note("short", listeners[0]))  # type: ignore[arg-type]
    engine.generate(long, GREEDY, on_event=note("long", listeners[1]))  # type: ignore[arg-type]
    for listener in listeners:
        listener.wait()
    assert order.index("long") >= 400 // 16 - 5  # the short one went on while the long prompt was read


# --- stops, lengths, text ---


def test_the_terminal_token_is_history_and_nothing_behind_it(make_engine: MakeEngine, target: Target) -> None:
    prompt = prompt_of(1)
    reference = greedy_reference(target, prompt, 40)
    stop = reference[9]
    first = reference.index(stop)
    engine = make_engine(perfect(target, prompt))
    session_id = engine.create_session(SessionOptions(stop_token_ids=(stop,))).session_id
    listener, done = run(engine, prompt, GREEDY, session_id)
    assert listener.token_ids == reference[: first + 1]
    assert (done.finish_reason, done.matched_stop) == ("stop", stop)
    assert done.history_length == len(prompt) + first + 1 == engine.get_session(session_id).history_length
    assert engine.get_session(session_id).cached_tokens == done.history_length


def test_eos_ends_a_turn_unless_ignored(make_engine: MakeEngine, target: Target) -> None:
    prompt = prompt_of(1)
    reference = greedy_reference(target, prompt, 20)
    engine = make_engine(perfect(target, prompt))
    options = SessionOptions(eos_token_ids=(reference[4],))
    params = SamplingParams(temperature=0.0, max_tokens=20)
    _, done = run(engine, prompt, params, engine.create_session(options).session_id)
    assert done.finish_reason == "stop"
    assert done.usage.completion_tokens == reference.index(reference[4]) + 1


def test_a_stop_string_inside_an_accepted_batch_cuts_ids_text_logprobs_alike(
    make_engine: MakeEngine, target: Target, tokenizer: object
) -> None:
    prompt = prompt_of(1)
    engine = make_engine(perfect(target, prompt))
    plain, _ = run(engine, prompt, GREEDY)
    at = next(i for i in range(6, len(plain.text) - 2) if plain.text[i : i + 2].isascii())
    stop = plain.text[at : at + 2]
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, stop=(stop,), logprobs=True)
    listener, done = run(engine, prompt, params)
    assert (done.finish_reason, done.matched_stop) == ("stop", stop)
    assert listener.text == plain.text[: plain.text.index(stop)]
    assert len(listener.token_ids) == len(listener.logprobs) == done.usage.completion_tokens
    assert listener.token_ids == plain.token_ids[: len(listener.token_ids)]
    assert done.history_length == len(prompt) + len(listener.token_ids)
    last, done = run(engine, prompt, replace(params, max_tokens=len(listener.token_ids)))
    assert (done.finish_reason, done.matched_stop, last.text) == ("stop", stop, listener.text), "the cap hides no stop"


def test_who_wants_token_ids_only_gets_no_text_and_the_same_tokens(make_engine: MakeEngine, target: Target) -> None:
    prompt = prompt_of(1)
    engine = make_engine(perfect(target, prompt))
    plain, _ = run(engine, prompt, GREEDY)
    silent, done = run(engine, prompt, replace(GREEDY, detokenize=False))
    assert (silent.token_ids, silent.text, done.finish_reason) == (plain.token_ids, "", "length")
    stop = plain.token_ids[7]
    silent, done = run(engine, prompt, replace(GREEDY, detokenize=False, stop_token_ids=(stop,)))
    assert silent.token_ids == plain.token_ids[: plain.token_ids.index(stop) + 1]
    assert (done.finish_reason, done.matched_stop, silent.text) == ("stop", stop, "")
    with pytest.raises(InvalidRequest, match="leave detokenize on"):
        run(engine, prompt, replace(GREEDY, detokenize=False, stop=("x",)))


def test_a_stop_on_the_last_allowed_token_is_a_stop(make_engine: MakeEngine, target: Target) -> None:
    prompt = prompt_of(1)
    reference = greedy_reference(target, prompt, 40)
    first = reference.index(reference[7])
    params = SamplingParams(temperature=0.0, max_tokens=first + 1, ignore_eos=True, stop_token_ids=(reference[7],))
    _, done = run(make_engine(perfect(target, prompt)), prompt, params)
    assert done.finish_reason == "stop"


def test_streamed_text_is_the_decoded_tokens(make_engine: MakeEngine, tokenizer: object) -> None:
    engine = make_engine(random_drafter())
    for seed in range(4):
        listener, _ = run(engine, prompt_of(seed), SamplingParams(max_tokens=60, seed=seed, ignore_eos=True))
        assert listener.text == engine.tokenizer.decode(listener.token_ids)


def test_logprobs_equal_those_of_plain_decoding(make_engine: MakeEngine, target: Target) -> None:
    prompt = prompt_of(1)
    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True, logprobs=True, top_logprobs=3)
    plain, _ = run(make_engine(), prompt, params)
    drafted, _ = run(make_engine(adversarial(target, prompt)), prompt, params)
    assert len(drafted.logprobs) == 30
    for a, b in zip(plain.logprobs, drafted.logprobs, strict=True):
        assert a.token_id == b.token_id == a.top[0][0]
        assert a.logprob == pytest.approx(b.logprob, abs=1e-3)
        assert len(a.top) == 3


def test_a_seed_gives_the_same_tokens_whatever_else_runs(make_engine: MakeEngine) -> None:
    engine = make_engine(random_drafter())
    params = SamplingParams(max_tokens=30, seed=7, ignore_eos=True)
    alone, _ = run(engine, prompt_of(3), params)
    others = [Listener() for _ in range(3)]
    for index, other in enumerate(others):
        session = engine.create_session()
        engine.append(session.session_id, prompt_of(index))
        engine.generate(session.session_id, SamplingParams(max_tokens=60, ignore_eos=True), on_event=other)
    together, _ = run(engine, prompt_of(3), params)
    assert together.token_ids == alone.token_ids
    for other in others:
        other.wait()


# --- cancelling, closing, limits ---


def test_cancel_keeps_the_session_and_what_was_committed(make_engine: MakeEngine, target: Target) -> None:
    engine = make_engine(random_drafter())
    session_id, listener, generation = endless(engine)
    generation.cancel()  # type: ignore[attr-defined]
    done = listener.wait()
    assert done.finish_reason == "cancelled"
    assert done.history_length == 24 + len(listener.token_ids) == engine.get_session(session_id).history_length
    after, _ = run(engine, prompt_of(9), GREEDY, session_id)
    assert after.token_ids == greedy_reference(target, [*prompt_of(0), *listener.token_ids, *prompt_of(9)], 40)


def test_a_cancelled_turn_shows_the_text_that_might_have_become_a_stop(make_engine: MakeEngine, tokenizer: Tokenizer) -> None:
    class Leaving(Listener):
        def __call__(self, event: Event) -> None:
            super().__call__(event)
            if isinstance(event, Tokens) and event.token_ids and not event.text:
                raise ConnectionError("the client has left")  # which cancels

    engine = make_engine()
    plain, _ = run(engine, prompt_of(1), GREEDY)
    params = SamplingParams(temperature=0.0, max_tokens=1900, ignore_eos=True, stop=(plain.text[6:] + "never",))
    session_id = engine.create_session().session_id
    engine.append(session_id, prompt_of(1))
    listener = Leaving()
    engine.generate(session_id, params, on_event=listener)
    assert listener.wait().finish_reason == "cancelled"
    assert listener.text == tokenizer.decode(listener.token_ids)


def test_close_while_generating_cancels_and_frees(make_engine: MakeEngine, target: Target) -> None:
    engine = make_engine(random_drafter())
    session_id, listener, _ = endless(engine)
    engine.close_session(session_id)
    assert listener.wait().finish_reason == "cancelled"
    with pytest.raises(SessionNotFound) as caught:
        engine.close_session(session_id)
    assert caught.value.reason == "CLOSED"
    deadline = time.monotonic() + 10
    while engine.stats().kv_bytes and time.monotonic() < deadline:
        time.sleep(0.01)
    assert engine.stats().kv_bytes == 0
    assert engine.stats().num_running == 0


def test_a_waiting_generation_can_be_cancelled(make_engine: MakeEngine) -> None:
    engine = make_engine(max_batch_sessions=1)
    _, running, first = endless(engine)
    session = engine.create_session()
    engine.append(session.session_id, [1, 2, 3])
    waiting = Listener()
    engine.generate(session.session_id, GREEDY, on_event=waiting).cancel()
    done = waiting.wait()
    assert (done.finish_reason, done.usage.completion_tokens, done.history_length) == ("cancelled", 0, 3)
    first.cancel()  # type: ignore[attr-defined]
    running.wait()


def test_one_operation_per_session(make_engine: MakeEngine) -> None:
    engine = make_engine()
    session_id, listener, generation = endless(engine)
    before = engine.get_session(session_id)
    assert before.state == "generating"
    with pytest.raises(SessionBusy):
        engine.append(session_id, [1])
    with pytest.raises(SessionBusy):
        engine.generate(session_id, GREEDY, on_event=Listener())
    generation.cancel()  # type: ignore[attr-defined]
    listener.wait()
    assert engine.get_session(session_id).state == "idle"


def test_bad_calls_change_nothing(make_engine: MakeEngine) -> None:
    engine = make_engine()
    session_id = engine.create_session().session_id
    with pytest.raises(InvalidRequest, match="empty history"):
        engine.generate(session_id, GREEDY, on_event=Listener())
    engine.append(session_id, [1, 2, 3], request_id="a")
    for call, error in (
        (lambda: engine.append(session_id, [5, 320]), InvalidRequest),
        (lambda: engine.append(session_id, [5, -1]), InvalidRequest),
        (lambda: engine.append(session_id, [0] * 2045), ContextLengthExceeded),
        (lambda: engine.append(session_id, [1], expected_history_length=2), HistoryMismatch),
        (lambda: engine.generate(session_id, SamplingParams(max_tokens=0), on_event=Listener()), InvalidRequest),
        (lambda: engine.generate(session_id, SamplingParams(max_tokens=2046), on_event=Listener()), ContextLengthExceeded),
        (lambda: engine.generate(session_id, SamplingParams(temperature=float("nan")), on_event=Listener()), InvalidRequest),
        (lambda: engine.generate(session_id, SamplingParams(logit_bias={999: 1.0}), on_event=Listener()), InvalidRequest),
        (lambda: engine.generate(session_id, GREEDY, on_event=Listener(), expected_history_length=9), HistoryMismatch),
        (lambda: engine.generate("nobody", GREEDY, on_event=Listener()), SessionNotFound),
    ):
        with pytest.raises(error):
            call()
        info = engine.get_session(session_id)
        assert (info.history_length, info.state) == (3, "idle")
    assert engine.append(session_id, [1, 2, 3], request_id="a").history_length == 3
    assert engine.stats().num_target_forwards == 0


def test_the_whole_context_can_be_used_and_no_more(make_engine: MakeEngine) -> None:
    engine = make_engine(random_drafter(), prefill_chunk_tokens=512)
    listener, done = run(engine, prompt_of(1, 2030), SamplingParams(temperature=0.0, ignore_eos=True))
    assert done.finish_reason == "length"
    assert done.history_length == 2048
    assert len(listener.token_ids) == 18


def test_full_of_busy_sessions_asks_to_come_back(make_engine: MakeEngine) -> None:
    engine = make_engine(max_sessions=1)
    _, listener, generation = endless(engine)
    with pytest.raises(CapacityExhausted) as caught:
        engine.create_session()
    assert caught.value.retry_after_s > 0
    generation.cancel()  # type: ignore[attr-defined]
    listener.wait()
    assert engine.create_session().session_id


# --- swaps, failures, the tap ---


def test_a_swap_in_the_middle_changes_no_token(make_engine: MakeEngine, target: Target) -> None:
    prompt = prompt_of(0)
    engine = make_engine(random_drafter())
    reference = greedy_reference(target, prompt, 300)
    script = [*prompt, *reference]
    good = ScriptedDrafter(lambda history, depth: script[len(history) : len(history) + depth], version="good")
    session = engine.create_session()
    engine.append(session.session_id, prompt)
    listener = Listener()
    engine.generate(session.session_id, SamplingParams(temperature=0.0, max_tokens=300, ignore_eos=True), on_event=listener)
    while len(listener.token_ids) < 20:
        listener.next()
    assert engine.swap_drafter(good) < 1.0
    done = listener.wait()
    assert listener.token_ids == reference
    assert done.drafter_versions == ("random", "good")
    assert engine.drafter_version == "good"
    by_version = engine.stats().speculation
    assert by_version["good"].mean_acceptance_length > 5 > by_version["random"].mean_acceptance_length


def test_a_forward_that_raises_fails_its_requests_and_nothing_else(
    make_engine: MakeEngine, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine()
    session_id, listener, _ = endless(engine)
    forward = target.forward
    monkeypatch.setattr(target, "forward", lambda segments: (_ for _ in ()).throw(RuntimeError("out of memory")))
    with pytest.raises(EngineUnavailable, match="out of memory"):
        listener.wait()
    monkeypatch.setattr(target, "forward", forward)
    info = engine.get_session(session_id)
    assert info.state == "idle"
    assert info.history_length == 24 + len(listener.token_ids)
    after, _ = run(engine, [], GREEDY, session_id)
    assert after.token_ids == greedy_reference(target, [*prompt_of(0), *listener.token_ids], 40)


def test_a_commit_that_raises_fails_its_request_and_nothing_else(
    make_engine: MakeEngine, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(max_batch_sessions=2)
    session_id, listener, _ = endless(engine, 0)
    _, other, generation = endless(engine, 1)
    mine, commit = engine._store.get(session_id).cache, target.commit

    def broken(cache: int, rows: Sequence[int]) -> None:
        if cache == mine:
            raise RuntimeError("out of memory")
        commit(cache, rows)

    monkeypatch.setattr(target, "commit", broken)
    with pytest.raises(EngineUnavailable, match="out of memory"):
        listener.wait()
    monkeypatch.setattr(target, "commit", commit)
    assert isinstance(other.next(), Tokens)
    generation.cancel()  # type: ignore[attr-defined]
    assert other.wait().finish_reason == "cancelled"
    assert engine.get_session(session_id).history_length == 24 + len(listener.token_ids)
    after, _ = run(engine, [], GREEDY, session_id)
    assert_greedy(target, [*prompt_of(0), *listener.token_ids], after.token_ids)


def test_unusable_logits_fail_one_request(make_engine: MakeEngine, target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine()
    forward = target.forward

    def poisoned(segments: Sequence[Segment]) -> object:
        outputs = forward(segments)
        for output in outputs:
            output.logits.fill_(torch.nan)
        return outputs

    monkeypatch.setattr(target, "forward", poisoned)
    with pytest.raises(ValueError, match="unusable"):
        run(engine, prompt_of(0), GREEDY)
    monkeypatch.setattr(target, "forward", forward)
    listener, _ = run(engine, prompt_of(0), GREEDY)
    assert listener.token_ids == greedy_reference(target, prompt_of(0), 40)


def test_stopping_ends_running_streams_with_an_error(make_engine: MakeEngine) -> None:
    engine = make_engine()
    _, listener, _ = endless(engine)
    engine.stop()
    with pytest.raises(EngineUnavailable, match="shutting down"):
        listener.wait()
    with pytest.raises(EngineUnavailable):
        engine.create_session()


def test_a_listener_that_raises_loses_its_generation_only(make_engine: MakeEngine, target: Target) -> None:
    engine = make_engine()
    session = engine.create_session()
    engine.append(session.session_id, prompt_of(0))

    def bad(event: object) -> None:
        raise RuntimeError("listener")

    engine.generate(session.session_id, GREEDY, on_event=bad)
    listener, _ = run(engine, prompt_of(1), GREEDY)
    assert listener.token_ids == greedy_reference(target, prompt_of(1), 40)


def test_the_tap_gets_every_turn_with_the_states_of_the_whole_history(make_engine: MakeEngine, target: Target) -> None:
    tap = KeepingTap()
    engine = make_engine(random_drafter(), tap=tap, prefill_chunk_tokens=16)
    session_id = engine.create_session(SessionOptions(labels={"slice": "a"})).session_id
    for seed in (1, 2):
        run(engine, prompt_of(seed), GREEDY, session_id)
    run(engine, prompt_of(3), GREEDY, engine.create_session(SessionOptions(capture=Switch.OFF)).session_id)
    assert len(tap.turns) == 2
    turn = tap.turns[1]
    assert len(turn.token_ids) == 128
    assert [index for index, flag in enumerate(turn.generated) if flag] == list(range(88, 128))
    cache = target.new_cache()
    [output] = target.forward([Segment(cache, turn.token_ids)])
    target.drop(cache)
    aux = torch.cat([part.aux for part in turn.hidden])
    last = torch.cat([part.last for part in turn.hidden])
    assert torch.allclose(aux, output.hidden.aux, atol=1e-4)
    assert torch.allclose(last, output.hidden.last, atol=1e-4)
    assert turn.labels == {"slice": "a"}


def test_events_come_in_order(make_engine: MakeEngine) -> None:
    engine = make_engine()
    session = engine.create_session()
    engine.append(session.session_id, prompt_of(1))
    listener = Listener()
    engine.generate(session.session_id, GREEDY, on_event=listener, request_id="mine")
    started = listener.next()
    assert isinstance(started, Started)
    assert (started.request_id, started.history_length) == ("mine", 24)
    kinds = [type(listener.next()) for _ in range(41)]
    assert kinds == [Tokens] * 40 + [Done]


def test_random_use_from_many_threads_leaves_nothing_behind(make_engine: MakeEngine) -> None:
    engine = make_engine(random_drafter(), max_sessions=6, max_batch_sessions=3)
    errors: list[BaseException] = []

    def client(seed: int) -> None:
        rng = random.Random(seed)
        try:
            for _ in range(12):
                try:
                    session_id = engine.create_session().session_id
                    engine.append(session_id, prompt_of(rng.randrange(99), rng.randrange(1, 60)))
                    listener = Listener()
                    generation = engine.generate(
                        session_id, SamplingParams(max_tokens=rng.randrange(1, 30), seed=seed), on_event=listener
                    )
                    if rng.random() < 0.3:
                        generation.cancel()
                    if rng.random() < 0.3:
                        engine.close_session(session_id)
                    listener.wait()
                    if rng.random() < 0.5:
                        engine.close_session(session_id)
                except (SessionNotFound, CapacityExhausted):
                    continue
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=client, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert errors == []
    assert engine.stats().num_running == engine.stats().num_waiting == 0
    assert all(session.state == "idle" for session in engine.list_sessions())

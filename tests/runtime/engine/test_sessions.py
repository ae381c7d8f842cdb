"""Sessions through the engine's door: forks, saved files, sessions opened by their token ids, pinned drafters."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from runtime.backends.base import Segment, Target
from runtime.drafters.ngram import NgramDrafter
from runtime.drafters.scripted import ScriptedDrafter
from runtime.errors import (
    CapacityExhausted,
    ContextLengthExceeded,
    DrafterNotFound,
    EngineUnavailable,
    InvalidRequest,
    SavedSessionRejected,
    SessionBusy,
    SessionNotFound,
)
from runtime.types import CachePolicy, DrafterPolicy, SamplingParams, SessionOptions, Switch

from .conftest import (
    GREEDY,
    KeepingTap,
    Listener,
    MakeEngine,
    audit,
    endless,
    greedy_reference,
    prompt_of,
    random_drafter,
    run,
)

SHORT = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)


# --- fork ---


def test_a_fork_has_the_history_and_goes_its_own_way(make_engine: MakeEngine, target: Target) -> None:
    engine = make_engine(random_drafter())
    parent = engine.create_session(SessionOptions(client_label="a", labels={"slice": "x"})).session_id
    first, _ = run(engine, prompt_of(1), GREEDY, parent)
    history = [*prompt_of(1), *first.token_ids]
    child = engine.fork_session(parent)
    assert (child.state, child.history_length, child.cached_tokens) == ("idle", 64, 64)
    assert (child.options.client_label, child.options.labels) == ("a", {"slice": "x"})
    of_child, done = run(engine, prompt_of(2), GREEDY, child.session_id)
    of_parent, _ = run(engine, prompt_of(3), GREEDY, parent)
    assert done.usage.cached_tokens == 64
    assert of_child.token_ids == greedy_reference(target, [*history, *prompt_of(2)], 40)
    assert of_parent.token_ids == greedy_reference(target, [*history, *prompt_of(3)], 40)
    engine.close_session(parent)
    again, _ = run(engine, [], GREEDY, child.session_id)
    assert again.token_ids == greedy_reference(target, [*history, *prompt_of(2), *of_child.token_ids], 40)
    audit(engine, target)


@pytest.mark.parametrize("length", [0, 1, 30, 64])
def test_a_fork_may_take_a_beginning_only(make_engine: MakeEngine, target: Target, length: int) -> None:
    engine = make_engine()
    parent = engine.create_session().session_id
    first, _ = run(engine, prompt_of(1), GREEDY, parent)
    history = [*prompt_of(1), *first.token_ids][:length]
    child = engine.fork_session(parent, history_length=length, options=SessionOptions(capture=Switch.OFF))
    assert (child.history_length, child.cached_tokens, child.options.capture) == (length, length, Switch.OFF)
    more, _ = run(engine, [7], GREEDY, child.session_id)
    assert more.token_ids == greedy_reference(target, [*history, 7], 40)


def test_a_fork_that_cannot_be_changes_nothing(make_engine: MakeEngine) -> None:
    engine = make_engine()
    parent = engine.create_session().session_id
    engine.append(parent, [1, 2, 3])
    pinned = SessionOptions(drafter_policy=DrafterPolicy("pinned", "nowhere"))
    for error, arguments in (
        (InvalidRequest, {"history_length": 4}),
        (InvalidRequest, {"history_length": -1}),
        (InvalidRequest, {"options": SessionOptions(cache_policy=CachePolicy(0, 64))}),
        (InvalidRequest, {"options": SessionOptions(ttl_s=-1.0)}),
        (DrafterNotFound, {"options": pinned}),
    ):
        with pytest.raises(error):
            engine.fork_session(parent, **arguments)  # type: ignore[arg-type]
        assert [info.state for info in engine.list_sessions()] == ["idle"]
    with pytest.raises(SessionNotFound):
        engine.fork_session("nobody")


def test_only_an_idle_session_is_forked_or_saved(make_engine: MakeEngine, tmp_path: Path) -> None:
    engine = make_engine()
    session_id, listener, generation = endless(engine)
    with pytest.raises(SessionBusy):
        engine.fork_session(session_id)
    with pytest.raises(SessionBusy):
        engine.save_session(session_id, tmp_path / "s")
    generation.cancel()  # type: ignore[attr-defined]
    listener.wait()
    engine.fork_session(session_id)


def test_a_fork_is_made_once_for_a_request_id(make_engine: MakeEngine) -> None:
    engine = make_engine()
    parent = engine.create_session(request_id="p").session_id
    engine.append(parent, [1, 2, 3])
    child = engine.fork_session(parent, request_id="c").session_id
    engine.append(parent, [4])
    again = engine.fork_session(parent, request_id="c")
    assert (again.session_id, again.history_length) == (child, 3)
    assert engine.create_session(request_id="p").session_id == parent
    made: list[str] = []
    threads = [
        threading.Thread(target=lambda: made.append(engine.fork_session(parent, request_id="d").session_id)) for _ in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(made) == 6
    assert len(set(made)) == 1
    assert len(engine.list_sessions()) == 3


def test_a_fork_never_pushes_out_its_own_parent(make_engine: MakeEngine) -> None:
    engine = make_engine(max_sessions=1)
    parent = engine.create_session().session_id
    engine.append(parent, [1, 2, 3])
    with pytest.raises(CapacityExhausted):
        engine.fork_session(parent)
    assert engine.get_session(parent).state == "idle"


def test_rows_of_a_fork_have_no_holes(make_engine: MakeEngine, target: Target) -> None:
    tap = KeepingTap()
    engine = make_engine(random_drafter(), tap=tap)
    parent = engine.create_session().session_id
    first, _ = run(engine, prompt_of(1), GREEDY, parent)
    child = engine.fork_session(parent, history_length=50).session_id
    run(engine, prompt_of(2), GREEDY, child)
    turn = tap.turns[-1]
    assert turn.token_ids[:50] == tuple([*prompt_of(1), *first.token_ids][:50])
    assert turn.first_position == 0
    cache = target.new_cache()
    [output] = target.forward([Segment(cache, turn.token_ids)])
    target.drop(cache)
    aux = torch.cat([part.aux for part in turn.hidden])
    assert torch.allclose(aux, output.hidden.aux[: len(aux)], atol=1e-4)
    assert len(aux) >= len(turn.token_ids) - 1


# --- saved and restored ---


def test_a_saved_session_goes_on_in_another_engine(make_engine: MakeEngine, target: Target, tmp_path: Path) -> None:
    tap = KeepingTap()
    options = SessionOptions(client_label="mine", stop_token_ids=(300,), labels={"a": "b"}, ttl_s=50.0)
    first_engine = make_engine(NgramDrafter())
    session_id = first_engine.create_session(options).session_id
    first, _ = run(first_engine, prompt_of(1), GREEDY, session_id)
    saved = first_engine.save_session(session_id, tmp_path / "deep" / "s")
    assert (saved.session_id, saved.state, saved.history_length) == (session_id, "idle", 64)
    first_engine.stop()

    engine = make_engine(NgramDrafter(), tap=tap)
    restored = engine.restore_session(tmp_path / "deep" / "s")
    assert restored.session_id != session_id
    assert (restored.state, restored.history_length, restored.cached_tokens) == ("idle", 64, 64)
    assert restored.options == options
    more, done = run(engine, prompt_of(2), GREEDY, restored.session_id)
    assert done.usage.cached_tokens == 64
    assert more.token_ids == greedy_reference(target, [*prompt_of(1), *first.token_ids, *prompt_of(2)], 40)
    assert (len(tap.turns), tap.turns[0].first_position) == (1, 0)


def test_a_restored_session_lives_no_longer_than_the_server_allows(make_engine: MakeEngine, tmp_path: Path) -> None:
    generous, strict = make_engine(), make_engine(ttl_s=10.0)
    for ttl_s in (3000.0, 5.0, None):
        session_id = generous.create_session(SessionOptions(ttl_s=ttl_s)).session_id
        generous.save_session(session_id, tmp_path / str(ttl_s))
        expected = None if ttl_s is None else min(ttl_s, 10.0)
        assert strict.restore_session(tmp_path / str(ttl_s)).options.ttl_s == expected


def test_a_session_without_cache_is_saved_as_its_ids(make_engine: MakeEngine, target: Target, tmp_path: Path) -> None:
    engine = make_engine()
    session_id = engine.create_session(SessionOptions(cache_policy=CachePolicy(2, 8))).session_id
    engine.append(session_id, prompt_of(1))
    engine.save_session(session_id, tmp_path / "s")
    restored = engine.restore_session(tmp_path / "s")
    assert (restored.history_length, restored.cached_tokens) == (24, 0)
    assert restored.options.cache_policy == CachePolicy(2, 8)


def test_saving_again_replaces_what_was_there(make_engine: MakeEngine, tmp_path: Path) -> None:
    engine = make_engine()
    session_id = engine.create_session().session_id
    for seed in (1, 2):
        run(engine, prompt_of(seed), SHORT, session_id)
        engine.save_session(session_id, tmp_path / "s")
    assert engine.restore_session(tmp_path / "s").history_length == 56
    assert sorted(path.suffix for path in (tmp_path / "s").iterdir()) == ["", ".json", ".safetensors"]  # and its lock


def test_a_restore_is_made_once_for_a_request_id(make_engine: MakeEngine, tmp_path: Path) -> None:
    engine = make_engine()
    session_id = engine.create_session().session_id
    run(engine, prompt_of(1), SHORT, session_id)
    engine.save_session(session_id, tmp_path / "s")
    first = engine.restore_session(tmp_path / "s", request_id="r")
    assert engine.restore_session(tmp_path / "s", request_id="r").session_id == first.session_id
    assert engine.restore_session(tmp_path / "s").session_id != first.session_id


def test_what_this_target_cannot_use_is_computed_anew(make_engine: MakeEngine, target: Target, tmp_path: Path) -> None:
    """As when the model is served in another precision than the one that the session was saved in."""
    from safetensors.torch import load_file, save_file

    from runtime.files import sha256_of

    engine = make_engine()
    session_id = engine.create_session().session_id
    first, _ = run(engine, prompt_of(1), GREEDY, session_id)
    engine.save_session(session_id, tmp_path / "s")
    [path] = (tmp_path / "s").glob("*.safetensors")
    save_file({name: tensor.bfloat16() for name, tensor in load_file(path).items()}, path)
    record = json.loads((tmp_path / "s" / "session.json").read_text())
    (tmp_path / "s" / "session.json").write_text(json.dumps({**record, "tensors_sha256": sha256_of(path)}))
    restored = engine.restore_session(tmp_path / "s")
    assert (restored.history_length, restored.cached_tokens) == (64, 0)
    more, _ = run(engine, [], GREEDY, restored.session_id)
    assert more.token_ids == greedy_reference(target, [*prompt_of(1), *first.token_ids], 40)


def test_a_saved_session_of_something_else_is_refused(make_engine: MakeEngine, tmp_path: Path) -> None:
    engine = make_engine()
    session_id = engine.create_session().session_id
    run(engine, prompt_of(1), SHORT, session_id)
    engine.save_session(session_id, tmp_path / "s")
    file = tmp_path / "s" / "session.json"
    record = json.loads(file.read_text())

    def refusal(changes: dict[str, object]) -> str:
        file.write_text(json.dumps({**record, **changes}))
        with pytest.raises(SavedSessionRejected) as caught:
            engine.restore_session(tmp_path / "s")
        return caught.value.reason

    assert refusal({"target_fingerprint": "0" * 16}) == "SAVED_OTHER_TARGET"
    assert refusal({"tokenizer_hash": "0", "target_fingerprint": "0"}) == "SAVED_OTHER_TOKENIZER"
    assert refusal({"history": [320]}) == "SAVED_UNREADABLE"
    assert len(engine.list_sessions()) == 1


def test_a_closed_or_stopped_engine_saves_and_restores_nothing(make_engine: MakeEngine, tmp_path: Path) -> None:
    engine = make_engine()
    session_id = engine.create_session().session_id
    run(engine, prompt_of(1), SHORT, session_id)
    engine.save_session(session_id, tmp_path / "s")
    engine.stop()
    with pytest.raises(EngineUnavailable):
        engine.restore_session(tmp_path / "s")
    with pytest.raises(EngineUnavailable):
        engine.save_session(session_id, tmp_path / "s")
    with pytest.raises(EngineUnavailable):
        engine.fork_session(session_id)


# --- sessions opened by their token ids ---


def test_a_growing_conversation_is_one_session_and_computes_only_what_is_new(make_engine: MakeEngine, target: Target) -> None:
    engine = make_engine(random_drafter())
    prompt = prompt_of(1)
    first = engine.open_session(prompt)
    assert (first.state, first.history_length) == ("reserved", 24)
    listener, _ = run(engine, [], GREEDY, first.session_id, append=False)
    longer = [*prompt, *listener.token_ids, *prompt_of(2)]
    second = engine.open_session(longer)
    assert (second.session_id, second.history_length, second.cached_tokens) == (first.session_id, 88, 64)
    more, done = run(engine, [], GREEDY, second.session_id, append=False)
    assert done.usage.cached_tokens == 64
    assert more.token_ids == greedy_reference(target, longer, 40)


def test_the_longest_beginning_is_continued_and_nothing_else(make_engine: MakeEngine) -> None:
    engine = make_engine()
    named = engine.create_session().session_id
    engine.append(named, [1, 2, 3, 4, 5])
    ids = {}
    for history in ([1, 2], [1, 2, 3], [1, 2, 3, 9], [1, 2, 3, 4, 5, 6, 7]):
        ids[len(history)] = engine.open_session(history).session_id
        run(engine, [], SamplingParams(temperature=0.0, max_tokens=1, logit_bias={8: 100.0}), ids[len(history)], append=False)
    assert len({named, *ids.values()}) == 5
    assert engine.open_session([1, 2, 3, 8, 4]).session_id == ids[3]  # its answer was 8
    assert engine.open_session([1, 2, 8, 8, 4]).session_id == ids[2]
    assert engine.open_session([1, 2, 3, 4, 5, 6]).session_id not in ids.values()  # longer ones, and what a client named, are not


def test_a_reserved_session_is_taken_once_and_given_back(make_engine: MakeEngine) -> None:
    engine = make_engine(max_sessions=3)
    opened = engine.open_session([1, 2, 3])
    assert engine.open_session([1, 2, 3, 4]).session_id != opened.session_id
    with pytest.raises(SessionBusy):
        engine.append(opened.session_id, [4])
    with pytest.raises(SessionBusy):
        engine.fork_session(opened.session_id)
    with pytest.raises(ContextLengthExceeded):
        engine.generate(opened.session_id, SamplingParams(max_tokens=5000), on_event=Listener())
    assert engine.get_session(opened.session_id).state == "idle"
    assert engine.open_session([1, 2, 3, 4]).session_id == opened.session_id
    engine.close_session(opened.session_id)
    assert engine.open_session([1, 2, 3, 4]).session_id != opened.session_id


def test_other_options_are_another_conversation(make_engine: MakeEngine) -> None:
    engine = make_engine()
    plain = SessionOptions(labels={"user": "a"})
    first = engine.open_session([1, 2, 3], plain).session_id
    run(engine, [], SHORT, first, append=False)
    for other in (
        SessionOptions(labels={"user": "b"}),
        SessionOptions(labels={"user": "a"}, capture=Switch.OFF),
        SessionOptions(labels={"user": "a"}, cache_policy=CachePolicy(0, 64)),
        SessionOptions(labels={"user": "a"}, drafter_policy=DrafterPolicy("off")),
    ):
        longer = [1, 2, 3, *greedy_ids(engine, first), 5]
        assert engine.open_session(longer, other).session_id != first
    assert engine.open_session([1, 2, 3, *greedy_ids(engine, first), 5], SessionOptions(labels={"user": "a"})).session_id == first


def greedy_ids(engine: object, session_id: str) -> list[int]:
    session = engine._store.get(session_id)  # type: ignore[attr-defined]
    return list(session.history[3:])


def test_anonymous_sessions_are_the_first_to_go(make_engine: MakeEngine) -> None:
    engine = make_engine(max_sessions=2)
    named = engine.create_session().session_id
    anonymous = engine.open_session([1, 2, 3]).session_id
    run(engine, [], SHORT, anonymous, append=False)  # used later than the named one
    engine.create_session()
    assert engine.get_session(named).state == "idle"
    with pytest.raises(SessionNotFound, match="EVICTED_LRU"):
        engine.get_session(anonymous)


def test_an_opened_session_is_checked_before_anything_changes(make_engine: MakeEngine) -> None:
    engine = make_engine()
    for token_ids, error in (([], InvalidRequest), ([320], InvalidRequest), ([1] * 2048, ContextLengthExceeded)):
        with pytest.raises(error):
            engine.open_session(token_ids)
    with pytest.raises(InvalidRequest, match="sink"):
        engine.open_session([1], SessionOptions(cache_policy=CachePolicy(4, None)))
    assert engine.list_sessions() == []


# --- drafters that sessions are pinned to ---


def scripted(target: Target, prompt: Sequence[int], version: str) -> ScriptedDrafter:
    full = [*prompt, *greedy_reference(target, prompt, 80)]
    return ScriptedDrafter(lambda history, depth: full[len(history) : len(history) + depth], version=version)


def test_a_pinned_session_keeps_its_drafter_through_swaps(make_engine: MakeEngine, target: Target) -> None:
    prompt = prompt_of(1)
    engine = make_engine(random_drafter())
    options = SessionOptions(drafter_policy=DrafterPolicy("pinned", "good"))
    with pytest.raises(DrafterNotFound):
        engine.create_session(options)
    engine.add_drafter(scripted(target, prompt, "good"))
    pinned = engine.create_session(options)
    assert pinned.drafter_version == "good"
    listener, done = run(engine, prompt, GREEDY, pinned.session_id)
    assert done.drafter_versions == ("good",)
    assert done.speculation.mean_acceptance_length > 5
    _, done = run(engine, prompt, GREEDY)
    assert done.drafter_versions == ("random",)
    engine.swap_drafter(scripted(target, prompt, "better"))
    _, done = run(engine, [], SHORT, pinned.session_id)
    assert done.drafter_versions == ("good",)
    off = engine.create_session(SessionOptions(drafter_policy=DrafterPolicy("off"))).session_id
    plain, done = run(engine, prompt, GREEDY, off)
    assert (done.drafter_versions, plain.token_ids) == ((), listener.token_ids)
    audit(engine, target)


def test_an_old_drafter_lives_until_its_last_user_is_gone(make_engine: MakeEngine, target: Target) -> None:
    engine = make_engine(NgramDrafter())
    options = SessionOptions(drafter_policy=DrafterPolicy("pinned", "ngram"))
    first, second = engine.create_session(options).session_id, engine.create_session(options).session_id
    run(engine, prompt_of(1), SHORT, first)
    engine.swap_drafter(random_drafter())
    engine.close_session(first)
    _, done = run(engine, prompt_of(2), SHORT, second)
    assert done.drafter_versions == ("ngram",)
    engine.close_session(second)
    audit(engine, target)  # waits until the closed session is buried
    with pytest.raises(DrafterNotFound):
        engine.create_session(options)
    assert engine.create_session(SessionOptions(drafter_policy=DrafterPolicy("pinned", "random"))).drafter_version == "random"


# --- what the loop does meanwhile ---


def test_others_go_on_while_a_session_is_written(
    make_engine: MakeEngine, target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from runtime.sessions import saved

    engine = make_engine()
    session_id = engine.create_session().session_id
    run(engine, prompt_of(1), SHORT, session_id)
    writing, may_finish = threading.Event(), threading.Event()
    write = saved.write

    def slow(directory: Path, record: saved.SavedSession) -> None:
        writing.set()
        assert may_finish.wait(60)
        write(directory, record)

    monkeypatch.setattr(saved, "write", slow)
    saver = threading.Thread(target=engine.save_session, args=(session_id, tmp_path / "s"))
    saver.start()
    assert writing.wait(60)
    assert engine.get_session(session_id).state == "generating"
    with pytest.raises(SessionBusy):
        engine.append(session_id, [1])
    with pytest.raises(SessionBusy):
        engine.generate(session_id, SHORT, on_event=Listener())
    other, _ = run(engine, prompt_of(2), GREEDY)
    assert other.token_ids == greedy_reference(target, prompt_of(2), 40)
    may_finish.set()
    saver.join(60)
    assert engine.get_session(session_id).state == "idle"
    assert engine.restore_session(tmp_path / "s").history_length == 28


def test_a_copy_that_fails_leaves_no_session(make_engine: MakeEngine, target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine()
    parent = engine.create_session().session_id
    run(engine, prompt_of(1), SHORT, parent)

    def fail(cache: int, length: int | None = None) -> int:
        raise MemoryError("no room")

    monkeypatch.setattr(target, "fork", fail)
    with pytest.raises(MemoryError):
        engine.fork_session(parent)
    assert [(info.session_id, info.state) for info in engine.list_sessions()] == [(parent, "idle")]
    monkeypatch.undo()
    run(engine, [], SHORT, parent)


def test_closing_while_copies_are_made_frees_everything(make_engine: MakeEngine, target: Target, tmp_path: Path) -> None:
    engine = make_engine()
    for seed in range(20):
        parent = engine.create_session().session_id
        run(engine, prompt_of(seed), SHORT, parent)
        threads = [
            threading.Thread(target=quietly, args=(engine.fork_session, parent)),
            threading.Thread(target=quietly, args=(engine.save_session, parent, tmp_path / "s")),
            threading.Thread(target=quietly, args=(engine.close_session, parent)),
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        audit(engine, target)
        for info in engine.list_sessions():
            engine.close_session(info.session_id)
    audit(engine, target)
    assert target.cache_bytes() == 0


def quietly(call: Callable[..., object], *arguments: object) -> None:
    with contextlib.suppress(SessionBusy, SessionNotFound):
        call(*arguments)


def test_a_loop_that_falls_tells_everybody(make_engine: MakeEngine, target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine()
    session_id = engine.create_session().session_id
    run(engine, prompt_of(1), SHORT, session_id)

    def fall(batch: Sequence[object]) -> None:
        if batch:
            raise RuntimeError("a bug")

    monkeypatch.setattr(engine._stepper, "step", fall)
    listener = Listener()
    engine.append(session_id, [1])
    engine.generate(session_id, SHORT, on_event=listener)
    with pytest.raises(EngineUnavailable):
        listener.wait()
    engine._loop._thread.join(30)
    assert not engine.is_running
    for call in (engine.create_session, lambda: engine.fork_session(session_id), lambda: engine.open_session([1])):
        with pytest.raises(EngineUnavailable):
            call()
    assert engine.get_session(session_id).state == "idle"
    assert target.cache_bytes() == 0

"""Many sessions, many calls, in any order and from many threads: afterwards everything is where it was."""

from __future__ import annotations

import contextlib
import gc
import random
import threading
from collections.abc import Callable
from pathlib import Path

import torch

from runtime.backends.base import Target
from runtime.drafters.ngram import NgramDrafter
from runtime.engine.local import LocalEngine
from runtime.errors import CapacityExhausted, DrafterNotFound, InvalidRequest, SavedSessionRejected, SessionBusy, SessionNotFound
from runtime.types import CachePolicy, DrafterPolicy, SamplingParams, SessionOptions

from .conftest import Listener, MakeEngine, audit, prompt_of, random_drafter, run


def in_threads(num_threads: int, work: Callable[[random.Random], None]) -> None:
    errors: list[BaseException] = []

    def guarded(seed: int) -> None:
        try:
            work(random.Random(seed))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(seed,)) for seed in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert errors == []


def live_tensors() -> int:
    gc.collect()
    return sum(issubclass(type(each), torch.Tensor) for each in gc.get_objects())


def test_many_short_requests_leave_nothing_behind(make_engine: MakeEngine, target: Target) -> None:
    """64 sessions share 1,500 requests; what is held after them is what was held before, to the tensor."""
    engine = make_engine(random_drafter(), max_sessions=64)

    def requests(each: int) -> Callable[[random.Random], None]:
        def work(rng: random.Random) -> None:
            session_ids = [engine.create_session().session_id for _ in range(8)]
            for _ in range(each):
                params = SamplingParams(max_tokens=rng.randrange(1, 5), seed=rng.randrange(99), ignore_eos=True)
                run(engine, prompt_of(rng.randrange(50), rng.randrange(1, 6)), params, rng.choice(session_ids))
            for session_id in session_ids:
                engine.close_session(session_id)

        return work

    in_threads(8, requests(20))
    audit(engine, target)
    tensors = live_tensors()
    assert engine.stats().kv_bytes == target.cache_bytes() == 0
    in_threads(8, requests(170))
    audit(engine, target)
    assert engine.stats().kv_bytes == target.cache_bytes() == 0
    assert live_tensors() <= tensors + 20
    assert len(engine.list_sessions()) == engine.stats().num_running == engine.stats().num_waiting == 0


def test_any_calls_in_any_order_keep_the_books(make_engine: MakeEngine, target: Target, tmp_path: Path) -> None:
    engine = make_engine(random_drafter(), max_sessions=12, max_batch_sessions=4, prefill_chunk_tokens=16)
    engine._stepper.holdings.budget_bytes = 6 * target.cache_bytes(128)
    engine.add_drafter(NgramDrafter())
    known: list[str] = []

    def work(rng: random.Random) -> None:
        for _ in range(40):
            try:
                one_call(engine, rng, known, tmp_path)
            except (SessionNotFound, SessionBusy, CapacityExhausted, DrafterNotFound, SavedSessionRejected):
                continue

    in_threads(6, work)
    audit(engine, target)
    infos = engine.list_sessions()
    assert all(info.state in ("idle", "reserved") for info in infos)
    assert engine.stats().kv_bytes == target.cache_bytes() <= engine._stepper.holdings.budget_bytes
    for info in infos:
        engine.close_session(info.session_id)
    audit(engine, target)
    assert engine.stats().kv_bytes == 0


OPTIONS = (
    SessionOptions(),
    SessionOptions(),
    SessionOptions(cache_policy=CachePolicy(2, 24)),
    SessionOptions(drafter_policy=DrafterPolicy("pinned", "ngram")),
    SessionOptions(drafter_policy=DrafterPolicy("off")),
)


def one_call(engine: LocalEngine, rng: random.Random, known: list[str], directory: Path) -> None:
    some = rng.choice(known) if known else ""
    prompt = prompt_of(rng.randrange(4), rng.choice([3, 40, 90]))  # beginnings recur
    match rng.randrange(9):
        case 0 | 1:
            known.append(engine.create_session(rng.choice(OPTIONS)).session_id)
            engine.append(known[-1], prompt)
        case 2:
            known.append(engine.open_session(prompt, rng.choice(OPTIONS)).session_id)
            generate(engine, rng, known[-1])
        case 3 | 4:
            engine.append(some, prompt[:20])
            generate(engine, rng, some)
        case 5:
            with contextlib.suppress(InvalidRequest):  # a fork of a fork of nothing has no three tokens
                known.append(engine.fork_session(some, history_length=rng.choice([None, 0, 3])).session_id)
        case 6:
            engine.save_session(some, directory / str(rng.randrange(3)))
        case 7:
            known.append(engine.restore_session(directory / str(rng.randrange(3))).session_id)
        case 8:
            engine.swap_drafter(random_drafter()) if rng.random() < 0.5 else engine.close_session(some)


def generate(engine: LocalEngine, rng: random.Random, session_id: str) -> None:
    listener = Listener()
    params = SamplingParams(max_tokens=rng.randrange(1, 20), seed=rng.randrange(9), ignore_eos=True)
    generation = engine.generate(session_id, params, on_event=listener)
    if rng.random() < 0.2:
        generation.cancel()
    if rng.random() < 0.2:
        engine.close_session(session_id)
    listener.wait()

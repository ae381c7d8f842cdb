"""The soak: its verdict can fail in each way, its clients notice a server that does otherwise, and one short run of it."""

from __future__ import annotations

import asyncio
import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import soak
from soak import Figures, Sample
from soak_chatter import Chatter
from soak_notes import Notes
from soak_worker import Held, Worker

from runtime.errors import CapacityExhausted, EngineUnavailable, SessionNotFound
from runtime.types import Done, SamplingParams, SessionInfo, SessionOptions, SpeculationStats, Started, Tokens, Usage

REST = Figures(threads=20, descriptors=30, resident_mib=500.0)
FLAT = [Sample(float(second), second * 100, 0.1, 500.0 + second % 2) for second in range(400)]


def test_a_server_that_is_as_it_was_passes() -> None:
    held = soak.judge(Notes(), REST, REST, FLAT)
    assert len(held) == 7
    assert all(held.values())


@pytest.mark.parametrize(
    ("change", "broken"),
    [
        ({"sessions": 1}, "no session is left"),
        ({"saved": 1}, "no session is left"),
        ({"kv_usage": 0.01}, "no K/V is left"),
        ({"running": 1}, "no permit is left"),
        ({"waiting": 1}, "no permit is left"),
        ({"threads": 20 + soak.SPARE + 1}, "no thread is left"),
        ({"descriptors": 30 + soak.SPARE + 1}, "no descriptor is left"),
    ],
)
def test_what_is_left_is_told(change: dict[str, Any], broken: str) -> None:
    held = soak.judge(Notes(), REST, replace(REST, **change), FLAT)
    assert [name for name, is_held in held.items() if not is_held] == [broken]


def test_memory_is_judged_by_the_second_half_of_a_long_round() -> None:
    growing = [Sample(float(second), second * 100, 0.1, 500.0 + second / 5) for second in range(400)]
    filling = [Sample(float(second), second * 100, 0.1, min(500.0 + second, 680.0)) for second in range(400)]
    assert not soak.judge(Notes(), REST, REST, growing)["memory is flat"]
    assert soak.judge(Notes(), REST, REST, filling)["memory is flat"]
    assert "memory is flat" not in soak.judge(Notes(), REST, REST, growing[:200])
    assert soak.memory(growing)["mib_per_minute"] == pytest.approx(12.0)
    assert soak.memory(growing)["bytes_per_operation"] == pytest.approx(2**20 / 500, abs=0.01)


def test_sessions_may_lose_their_kv_where_there_is_no_room_for_it() -> None:
    notes = Notes(num_given_up=1)
    pressed = [*FLAT, Sample(400.0, 40_000, 0.95, 500.0)]
    assert not soak.judge(notes, REST, REST, FLAT)["the clients saw what they expected"]
    assert soak.judge(notes, REST, REST, pressed)["the clients saw what they expected"]


def test_cancellations_are_told_in_milliseconds() -> None:
    assert soak.spread_ms([0.001 * number for number in range(1, 101)]) == {"count": 100, "p50": 50.5, "p99": 100.0, "max": 100.0}
    assert soak.spread_ms([]) == {"count": 0}


# --- clients ---

HELD = Held("s", SessionOptions(), 10)
PARAMS = SamplingParams(max_tokens=2)


def turn(**changes: Any) -> list[Any]:
    done = Done("length", None, Usage(10, 2, 9), SpeculationStats(), (), 12)
    return [Started("r", "s", "ngram", "t", 10), Tokens((1, 2), "ab", (), (False, False)), replace(done, **changes)]


def worker(notes: Notes) -> Worker:
    return Worker(0, random.Random(0), "127.0.0.1:1", notes)


def test_a_turn_as_it_should_be_is_no_fault() -> None:
    notes, held = Notes(), replace(HELD)
    worker(notes)._take_turn(held, PARAMS, turn())
    assert (notes.num_faults, held.length) == (0, 12)


@pytest.mark.parametrize(
    "events",
    [
        turn(history_length=13),
        turn(finish_reason="cancelled"),
        turn(usage=Usage(11, 2, 9)),
        turn(usage=Usage(10, 3, 9)),
        [Started("r", "s", "ngram", "t", 9), *turn()[1:]],
        [*turn()[:1], Tokens((1,), "a", (), (False,)), *turn(history_length=11, usage=Usage(10, 1, 9))[2:]],  # one short
    ],
)
def test_a_turn_that_is_otherwise_is_a_fault(events: list[Any]) -> None:
    notes = Notes()
    worker(notes)._take_turn(replace(HELD), PARAMS, events)
    assert notes.num_faults == 1


class Saying:
    """A client whose server says this of every session."""

    def __init__(self, info: SessionInfo) -> None:
        self._info = info

    async def get_session(self, session_id: str) -> SessionInfo:
        return self._info


@pytest.mark.parametrize(
    ("said", "num_faults"),
    [({}, 0), ({"cached_tokens": 0}, 0), ({"cached_tokens": 9}, 1), ({"history_length": 11}, 1), ({"state": "generating"}, 1)],
)
def test_a_session_that_is_otherwise_is_a_fault(said: dict[str, Any], num_faults: int) -> None:
    notes, info = Notes(), SessionInfo("s", "idle", 10, 10, SessionOptions(), "t", "ngram", 2048, 0.0, 0.0)
    client = worker(notes)
    client._client = Saying(replace(info, **said))  # type: ignore[assignment]
    asyncio.run(client._check(HELD, is_after_turn=True))
    assert notes.num_faults == num_faults
    assert notes.num_given_up == (said.get("cached_tokens") == 0)


@pytest.mark.parametrize(
    ("error", "num_faults"),
    [
        (CapacityExhausted("full", 0.0), 0),
        (SessionNotFound("s", "EVICTED_LRU"), 0),
        (SessionNotFound("s", "UNKNOWN"), 1),
        (EngineUnavailable("gone"), 1),
    ],
)
def test_only_want_of_room_is_no_fault(error: Exception, num_faults: int) -> None:
    async def work() -> None:
        raise error

    notes = Notes()
    asyncio.run(worker(notes)._guard("work", work()))
    assert notes.num_faults == num_faults


def chatted(*changes: tuple[int, str]) -> list[str]:
    """The data of a chat of two tokens, some of its lines changed."""
    said = [{"choices": [{"delta": {"content": text}, "finish_reason": None}]} for text in ("a", "b")]
    last = {"choices": [{"delta": {}, "finish_reason": "length"}]}
    data = [json.dumps(chunk) for chunk in (*said, last, {"choices": [], "usage": {"completion_tokens": 2}})]
    data.append("[DONE]")
    for place, line in changes:
        data[place] = line
    return data


@pytest.mark.parametrize(
    ("data", "num_faults"),
    [
        (chatted(), 0),
        ([], 1),
        (chatted()[:-1], 1),
        (chatted((-1, '{"error": {}}')), 1),
        (chatted((3, '{"choices": [], "usage": {"completion_tokens": 1}}')), 1),
        (chatted((2, '{"choices": []}')), 1),
    ],
)
def test_an_answer_that_is_not_whole_is_a_fault(data: list[str], num_faults: int) -> None:
    notes = Notes()
    Chatter(0, random.Random(0), "http://127.0.0.1:1", "tiny", notes)._read(data, 2)
    assert notes.num_faults == num_faults


# --- all of it ---


def test_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("SLIPSTREAM_HOME", str(tmp_path / "home"))
    out = tmp_path / "out.json"
    small = ["--minutes", "0.17", "--workers", "16", "--server", "backend.num_threads=1", "--json", str(out)]
    assert soak.main(small) == 0, capsys.readouterr().out
    result = json.loads(out.read_text())
    assert result["num_faults"] == 0
    assert result["operations"] > 100
    assert {outcome.partition(":")[0] for outcome in result["outcomes"]} >= {"append", "cancel", "chat", "create", "generate"}
    assert result["cancel_ms"]["count"] > 0
    assert len(result["held"]) == 6  # too short to speak of memory
    assert "From a cancelled call to a free session" in capsys.readouterr().out

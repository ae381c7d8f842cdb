"""From a request over the wire to a row for the trainer: labels, slices, hooks by name, prefixes that were not computed again."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from runtime.backends import load_target
from runtime.backends.base import Segment
from runtime.config import BackendConfig, CaptureConfig, ModelConfig
from runtime.errors import ConfigError
from runtime.features import FeatureRow, SampleRef
from runtime.types import CachePolicy, SamplingParams, SessionOptions, Switch

from .conftest import Running, StartServer, make_config, start, wait_for

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
HOOKS = """
def redact(token_ids, text):
    return "secret" in text

def classify(token_ids, text):
    return "greeting" if "Hello" in text else "other"
"""


@pytest.fixture
def hooks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module of an operator's own."""
    (tmp_path / "plugins").mkdir()
    (tmp_path / "plugins" / "operators_hooks.py").write_text(HOOKS)
    monkeypatch.syspath_prepend(str(tmp_path / "plugins"))
    return "operators_hooks"


def _counts(running: Running) -> dict[str, int]:
    assert running.parts.capture is not None
    return {name: count for name, count in running.parts.capture.counters().items() if count}


def _rows(running: Running) -> list[tuple[SampleRef, FeatureRow]]:
    capture = running.parts.capture
    assert capture is not None
    return [(ref, capture.store.get(ref)[0]) for ref in capture.ledger.lease("reader", 99, 600)]


def _say(running: Running, text: str, options: SessionOptions | None = None) -> int:
    """One turn; returns how many of its prompt's tokens were cached."""
    with running.client() as client:
        session = client.create_session(options or SessionOptions())
        client.append(session.session_id, text=text)
        done = list(client.generate(session.session_id, GREEDY))[-1]
        cached: int = done.usage.cached_tokens
        return cached


def test_a_request_becomes_a_row_that_says_where_it_comes_from(start_server: StartServer, hooks: str) -> None:
    running = start_server(capture=CaptureConfig(heldout_fraction=0.0, classify=f"{hooks}.classify"))
    with running.openai() as openai:
        openai.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": "Hello"}],
            max_tokens=12,
            temperature=0,
            metadata={"slice": "support", "team": "a"},
            extra_body={"ignore_eos": True},
        )
    _say(running, "Hello there")
    _say(running, "Good-bye", SessionOptions(labels={"team": "b"}))
    wait_for(lambda: _counts(running).get("captured") == 3)
    refs = [ref for ref, _ in _rows(running)]
    assert [dict(ref.labels) for ref in refs] == [
        {"slice": "support", "team": "a"},
        {"slice": "greeting"},
        {"team": "b", "slice": "other"},
    ]
    tokenizer = running.parts.tokenizer
    for ref in refs:
        assert (ref.tokenizer_hash, ref.vocabulary_hash) == (tokenizer.hash, tokenizer.vocabulary_hash)
        assert ref.target_fingerprint == running.parts.engine.info.fingerprint
        assert ref.source.startswith("session/")


def test_a_redaction_hook_by_name_keeps_rows_out(start_server: StartServer, hooks: str) -> None:
    running = start_server(capture=CaptureConfig(redact=f"{hooks}.redact", heldout_fraction=0.0))
    _say(running, "this is a secret")
    _say(running, "this is none")
    wait_for(lambda: _counts(running).get("captured") == 1)
    assert _counts(running) == {"offered": 2, "redacted": 1, "captured": 1}
    assert running.parts.capture is not None
    assert running.parts.capture.store.health().num_rows == 1


def test_only_those_who_ask_are_captured_where_that_is_the_rule(start_server: StartServer) -> None:
    running = start_server(capture=CaptureConfig(by_default=False, heldout_fraction=0.0))
    for switch in Switch:
        _say(running, f"capture {switch.value}", SessionOptions(capture=switch))
    wait_for(lambda: _counts(running).get("captured") == 1)
    [(_, row)] = _rows(running)
    assert "capture on" in running.parts.tokenizer.decode(row.token_ids.tolist())


def test_a_hook_that_is_not_there_stops_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"capture\.redact is 'nowhere\.hook'"):
        start(make_config(tmp_path, capture=CaptureConfig(redact="nowhere.hook")))


def test_a_prefix_from_the_cache_makes_no_hole_in_a_row(start_server: StartServer) -> None:
    """The second session computes only its end; its row has the states of the whole history all the same."""
    running = start_server(capture=CaptureConfig(heldout_fraction=0.0))
    story = "Once upon a time there was a cat who sat on a mat and thought about the sea. " * 3
    assert _say(running, story + "One") == 0
    assert _say(running, story + "Two") > 100
    wait_for(lambda: _counts(running).get("captured") == 2)
    for _, row in _rows(running):
        assert len(row.hidden) == row.num_tokens - 1
        plain = _recomputed(running, row.token_ids.tolist())
        assert torch.allclose(row.hidden.aux.float(), plain[0], atol=0.05, rtol=0.05)
        assert torch.allclose(row.hidden.last.float(), plain[1], atol=0.05, rtol=0.05)


def _recomputed(running: Running, token_ids: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """States of a plain forward, as a fresh target gives them."""
    target = load_target(BackendConfig(num_threads=1), ModelConfig(name="tiny", device="cpu"), running.parts.resolved)
    with torch.inference_mode():
        [output] = target.forward([Segment(target.new_cache(), token_ids[:-1])])
    return output.hidden.aux, output.hidden.last


def test_rows_of_forked_and_restored_sessions_are_whole(start_server: StartServer, tmp_path: Path) -> None:
    """A fork in the middle of a history, a session saved and taken up again, and the child of that one."""
    running = start_server(capture=CaptureConfig(heldout_fraction=0.0))
    with running.client() as client:
        parent = client.create_session()
        client.append(parent.session_id, text="Once upon a time there was a cat who sat on a mat and thought about the sea.")
        list(client.generate(parent.session_id, GREEDY))
        fork = client.fork_session(parent.session_id, history_length=40)
        client.save_session(parent.session_id, "kept")
        restored = client.restore_session("kept")
        child = client.fork_session(restored.session_id)
        for number, session in enumerate((fork, restored, child)):
            client.append(session.session_id, text=f" And then {number}")
            list(client.generate(session.session_id, GREEDY))
        histories = [client.get_session(session.session_id).history_length for session in (parent, fork, restored, child)]
    wait_for(lambda: _counts(running).get("captured") == 4)
    rows = [row for _, row in _rows(running)]
    assert [row.num_tokens for row in rows] == histories
    for row in rows:
        assert row.generated.sum() == GREEDY.max_tokens, "an earlier turn is context"
        aux, last = _recomputed(running, row.token_ids.tolist())
        assert torch.allclose(row.hidden.aux.float(), aux, atol=0.05, rtol=0.05)
        assert torch.allclose(row.hidden.last.float(), last, atol=0.05, rtol=0.05)


def test_sessions_that_forgot_their_beginning_are_refused_with_the_reason(start_server: StartServer) -> None:
    running = start_server(capture=CaptureConfig(heldout_fraction=0.0))
    with running.client() as client:
        session = client.create_session(SessionOptions(cache_policy=CachePolicy(sink=4, window=64)))
        for _ in range(3):
            client.append(session.session_id, text="the cat sat on the mat. ")
            list(client.generate(session.session_id, GREEDY))
    wait_for(lambda: sum(_counts(running).values()) == 2 * 3)
    assert _counts(running) == {"offered": 3, "captured": 1, "shed_dropped": 2}


def test_what_a_session_may_not_leave_behind_stays_out_when_it_lives_on(start_server: StartServer) -> None:
    """Saved and taken up again, or forked with another wish, it is the same conversation."""
    running = start_server(capture=CaptureConfig(heldout_fraction=0.0))
    with running.client() as client:
        private = client.create_session(SessionOptions(capture=Switch.OFF))
        client.append(private.session_id, text="between us")
        list(client.generate(private.session_id, GREEDY))
        client.save_session(private.session_id, "private")
        restored = client.restore_session("private")
        fork = client.fork_session(restored.session_id, options=SessionOptions(capture=Switch.ON))
        for session in (private, restored, fork):
            client.append(session.session_id, text=" and on")
            list(client.generate(session.session_id, GREEDY))
    _say(running, "in public")
    wait_for(lambda: _counts(running).get("captured") == 1)
    assert _counts(running) == {"offered": 1, "captured": 1}

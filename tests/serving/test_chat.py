"""The terminal chat: as a process against a real server, and what it draws on a terminal."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from rich.console import Console

from runtime.rpc.client import RuntimeClient
from runtime.types import Done, SamplingParams, SpeculationStats, Started, Tokens, Usage
from serving.chat import Conversation, Screen, main

from .conftest import Running, wait_for

GREEDY = SamplingParams(temperature=0, max_tokens=24)


def chat(running: Running, home: Path, said: str, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "serving.chat", running.ready.grpc, "--model", "tiny", "--temperature", "0", *options]
    environment = os.environ | {"SLIPSTREAM_HOME": str(home), "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, input=said, capture_output=True, text=True, timeout=120, env=environment)


def harmless(text: str) -> str:
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", "\ufffd", text)


def answer_of(running: Running, messages: list[dict[str, str]], max_tokens: int = 24) -> str:
    """What the OpenAI surface says to it."""
    body: dict[str, Any] = {"model": "tiny", "messages": messages, "temperature": 0, "max_tokens": max_tokens}
    reply = httpx.post(f"{running.ready.http}/v1/chat/completions", json=body, timeout=30).json()
    return str(reply["choices"][0]["message"]["content"])


def test_a_conversation_through_pipes(running: Running, home: Path) -> None:
    done = chat(running, home, "Hi\nAnd then?\n\n/new\nHi\n", "--max-tokens", "24", "--system", "Be brief.")
    assert done.returncode == 0, done.stderr
    opening = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    said = answer_of(running, opening)
    first = harmless(said)
    second = answer_of(running, [*opening, {"role": "assistant", "content": said}, {"role": "user", "content": "And then?"}])
    statuses = [line for line in done.stdout.splitlines() if line.startswith("[") and "acceptance length" in line]
    assert len(statuses) == 3
    assert done.stdout.startswith(f"{first}\n[")
    assert done.stdout.endswith(f"\n{first}\n{statuses[2]}\n"), "a new conversation begins where the first one did"
    assert harmless(second) in done.stdout
    assert statuses[0].endswith("drafter ngram]")
    assert "\x1b" not in done.stdout, "no colours in a pipe"


def test_what_cannot_be_is_one_sentence(running: Running, home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    done = chat(running, home, "Hi\n", "--max-tokens", "0")
    assert (done.returncode, done.stderr) == (1, "slipstream: max_tokens must be at least 1, got 0.\n")
    assert main([running.ready.grpc, "--model", "nothing/here/at/all"]) == 1
    assert capsys.readouterr().err.startswith("slipstream: ")


def conversation_of(running: Running, client: RuntimeClient, fingerprint: str | None = None) -> Conversation:
    expected = fingerprint or running.parts.engine.info.fingerprint
    return Conversation(client, running.parts.tokenizer, expected, GREEDY, "")


def test_a_conversation_keeps_what_it_computed(running: Running, client: RuntimeClient) -> None:
    conversation = conversation_of(running, client)
    *_, first = conversation.say("Hi")
    *_, second = conversation.say("And then?")
    assert isinstance(first, Done)
    assert isinstance(second, Done)
    assert second.usage.cached_tokens >= first.usage.prompt_tokens
    assert len(client.list_sessions()) == 1


def test_a_conversation_goes_on_after_its_session_is_gone_or_its_answer_was_stopped(
    running: Running, client: RuntimeClient
) -> None:
    undisturbed = conversation_of(running, client)
    expected = []
    for said in ("Hi", "And then?"):
        expected = [event for event in undisturbed.say(said) if isinstance(event, Tokens)]
    conversation = conversation_of(running, client)
    list(conversation.say("Hi"))
    for session in client.list_sessions():
        client.close_session(session.session_id)
    assert [e.token_ids for e in conversation.say("And then?") if isinstance(e, Tokens)] == [e.token_ids for e in expected]
    running.target.delay_s = 0.02
    stopped = conversation.say("More")
    while not isinstance(next(stopped), Tokens):
        pass
    stopped.close()  # type: ignore[attr-defined]
    running.target.delay_s = 0.0
    *_, done = conversation.say("Yes?")
    assert isinstance(done, Done)
    wait_for(lambda: running.server.admission.num_running == 0)


def test_another_model_is_told(running: Running, client: RuntimeClient) -> None:
    with pytest.raises(ValueError, match="name the one that it serves"):
        list(conversation_of(running, client, "another").say("Hi"))


def show(running: Running, **console: Any) -> str:
    """An answer of three tokens, the second from a draft."""
    ids = running.parts.tokenizer.encode("a b\nc")
    stats = SpeculationStats(1, 5, 1, [1], [1])
    events = [
        Started("r", "s", "0123456789abcdef", "t", 9),
        Tokens(tuple(ids[:1]), "", (), (False,)),
        Tokens(tuple(ids[1:]), "", (), (True,) + (False,) * (len(ids) - 2)),
        Done("stop", None, Usage(), stats, ("0123456789abcdef",), 12),
    ]
    file = io.StringIO()
    Screen(Console(file=file, width=120, highlight=False, markup=False, **console), running.parts.tokenizer).show(iter(events))
    return file.getvalue()


def test_accepted_draft_tokens_are_green_on_a_terminal(running: Running) -> None:
    drawn = show(running, force_terminal=True, color_system="standard")
    drafted = running.parts.tokenizer.decode(running.parts.tokenizer.encode("a b\nc")[:2])[1:]
    assert f"\x1b[32m{drafted}\x1b[0m" in drawn
    assert "acceptance length 2.00; drafter 0123456789abcdef]" in drawn
    assert "\x1b[32m" not in show(running, force_terminal=True, color_system="standard", no_color=True)


def test_what_a_terminal_would_obey_is_only_shown(running: Running) -> None:
    ids = running.parts.tokenizer.encode("a\x1b[31mb\x07\x9b2Jc")
    events = [Started("r", "s", "none", "t", 9), Tokens(tuple(ids), "", (), (False,) * len(ids))]
    events.append(Done("stop", None, Usage(), SpeculationStats(), (), 12))
    file = io.StringIO()
    Screen(Console(file=file, width=120, highlight=False, markup=False), running.parts.tokenizer).show(iter(events))
    assert file.getvalue().startswith("a\ufffd[31mb\ufffd\ufffd2Jc\n[")


def test_in_a_file_there_is_text_alone(running: Running) -> None:
    num = len(running.parts.tokenizer.encode("a b\nc"))
    status = f"[{num} tokens, 1 of them drafted; acceptance length 2.00; drafter 0123456789abcdef]"
    assert show(running) == f"a b\nc\n{status}\n"

"""A chat in the terminal, over gRPC: accepted draft tokens in colour, the acceptance length and the drafter version live.

    python -m serving.chat                                   # a server on this machine, its default model
    python -m serving.chat HOST:50051 --model DIR --ca ca.pem        # the key is read from SLIPSTREAM_API_KEY

The gRPC surface knows token ids only, so the chat template is applied here: --model names the model that the server serves,
as the server was told it. /new begins another conversation, Ctrl-C stops an answer, Ctrl-D ends.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from runtime.errors import ConfigError, SessionNotFound, SlipstreamError
from runtime.models import Tokenizer, resolve
from runtime.models.tokenizer import StreamDecoder
from runtime.rpc.client import GenerationStream, RuntimeClient
from runtime.rpc.connection import Tls
from runtime.types import Done, SamplingParams, SessionInfo, SessionOptions, SpeculationStats, Started, Tokens

DRAFTED = "green"
QUIET = "dim"
SETTLE_POLL_S = 0.02
# A model may say what a terminal obeys; here it is only shown that there was something.
HARMLESS = {code: "\N{REPLACEMENT CHARACTER}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


class Conversation:
    """Messages, and the session whose history is their template."""

    def __init__(
        self, client: RuntimeClient, tokenizer: Tokenizer, fingerprint: str, params: SamplingParams, system: str
    ) -> None:
        self._client = client
        self._tokenizer = tokenizer
        self._fingerprint = fingerprint
        self._params = params
        self._system = system
        self.start_over()

    def start_over(self) -> None:
        self._messages = [{"role": "system", "content": self._system}] if self._system else []
        self._history: list[int] = []
        self._session_id: str | None = None

    def say(self, text: str) -> Iterator[Started | Tokens | Done]:
        """The answer as it comes. Closing this iterator stops it; what was said till then stays said."""
        self._messages.append({"role": "user", "content": text})
        prompt = self._tokenizer.encode_chat(self._messages)
        try:
            session_id = self._reach(prompt)
        except SessionNotFound:  # evicted meanwhile; everything that it knew is here
            self._session_id, self._history = None, []
            session_id = self._reach(prompt)
        answer: list[str] = []
        try:
            with self._client.generate(session_id, self._params, expected_history_length=len(prompt)) as stream:
                yield from self._listen(stream, answer)
        finally:
            self._messages.append({"role": "assistant", "content": "".join(answer)})

    def _listen(self, stream: GenerationStream, answer: list[str]) -> Iterator[Started | Tokens | Done]:
        for event in stream:
            if isinstance(event, Tokens):
                self._history += event.token_ids
                answer.append(event.text)
            if isinstance(event, Started | Tokens | Done):
                yield event

    def _reach(self, prompt: Sequence[int]) -> str:
        """A session that holds exactly these ids, made from what the latest one holds of them."""
        pairs = zip(self._history, prompt, strict=False)
        common = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
        if self._session_id is None:
            session = self._client.create_session(SessionOptions(client_label="chat"))
            if session.target_fingerprint != self._fingerprint:
                raise ConfigError(
                    f"The server serves model {session.target_fingerprint}, and --model names {self._fingerprint}; name the "
                    "one that it serves."
                )
            self._session_id, common = session.session_id, 0
        elif self._settled(self._session_id).history_length != common:
            fork = self._client.fork_session(self._session_id, history_length=common)
            self._client.close_session(self._session_id)
            self._session_id = fork.session_id
        self._client.append(self._session_id, prompt[common:], expected_history_length=common)
        self._history = list(prompt)
        return self._session_id

    def _settled(self, session_id: str) -> SessionInfo:
        """The session once it is idle: an answer that was stopped takes one more step of the server to end."""
        while (session := self._client.get_session(session_id)).state != "idle":
            time.sleep(SETTLE_POLL_S)
        return session


class Screen:
    """Where an answer is shown. On a terminal the state of speculation stands below it while it grows."""

    def __init__(self, console: Console, tokenizer: Tokenizer) -> None:
        self._console = console
        self._tokenizer = tokenizer

    def show(self, events: Iterator[Started | Tokens | Done]) -> None:
        shown = Shown(self._tokenizer.stream())
        if not self._console.is_terminal:
            for event in events:
                self._console.print(shown.take(event), end="", soft_wrap=True)
            self._console.print(f"\n{shown.status()}", style=QUIET, highlight=False)
            return
        with Live(console=self._console, refresh_per_second=12, transient=True) as live:
            for event in events:
                *lines, shown.line = (shown.line + shown.take(event)).split("\n", allow_blank=True)
                for line in lines:  # what is finished scrolls away above
                    live.console.print(line)
                live.update(Group(shown.line, Text(shown.status(), QUIET)))
        self._console.print(shown.line)
        self._console.print(shown.status(), style=QUIET, highlight=False)


class Shown:
    """What is known of one answer so far."""

    def __init__(self, decoder: StreamDecoder) -> None:
        self.line = Text()
        self._decoder = decoder
        self._version = ""
        self._num_tokens = 0
        self._num_drafted = 0
        self._stats = SpeculationStats()

    def take(self, event: Started | Tokens | Done) -> Text:
        """The text that came with an event: what a draft foresaw is coloured."""
        text = Text()
        if isinstance(event, Started):
            self._version = event.drafter_version
        elif isinstance(event, Tokens):
            for token_id, drafted in zip(event.token_ids, event.drafted, strict=True):
                text.append(self._decoder.push(token_id).translate(HARMLESS), DRAFTED if drafted else None)
            if self._num_tokens:  # the first token is the prefill's own
                self._stats.record(0, sum(event.drafted))
            self._num_tokens += len(event.token_ids)
            self._num_drafted += sum(event.drafted)
        else:
            text.append(self._decoder.flush().translate(HARMLESS))
            self._stats = event.speculation
            self._version = (event.drafter_versions or (self._version,))[-1]
        return text

    def status(self) -> str:
        return (
            f"[{self._num_tokens} tokens, {self._num_drafted} of them drafted; "
            f"acceptance length {self._stats.mean_acceptance_length:.2f}; drafter {self._version}]"
        )


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    console = Console(no_color=options.no_color, highlight=False, markup=False)
    try:
        return _chat(options, console)
    except SlipstreamError as error:
        print(f"slipstream: {error}", file=sys.stderr)
        return 1


def _chat(options: argparse.Namespace, console: Console) -> int:
    resolved = resolve(options.model)
    tokenizer = Tokenizer.load(resolved.path)
    params = SamplingParams(max_tokens=options.max_tokens, temperature=options.temperature, seed=options.seed)
    tls = Tls(options.ca) if options.tls or options.ca else None
    with RuntimeClient(options.address, api_key=os.environ.get("SLIPSTREAM_API_KEY", ""), tls=tls) as client:
        conversation = Conversation(client, tokenizer, resolved.fingerprint, params, options.system)
        screen = Screen(console, tokenizer)
        for line in _lines():
            if line == "/new":
                conversation.start_over()
            elif line:
                _answer(screen, conversation, line)
    return 0


def _answer(screen: Screen, conversation: Conversation, line: str) -> None:
    answer = conversation.say(line)
    try:
        screen.show(answer)
    except KeyboardInterrupt:
        answer.close()  # type: ignore[attr-defined]


def _lines() -> Iterator[str]:
    """What the person says, to the end of the input."""
    prompt = "> " if sys.stdin.isatty() else ""
    while True:
        try:
            yield input(prompt).strip()
        except (EOFError, KeyboardInterrupt):
            return


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m serving.chat", description="A chat in the terminal, over gRPC.")
    parser.add_argument("address", nargs="?", default="127.0.0.1:50051", help="HOST:PORT of a server (%(default)s)")
    parser.add_argument("--model", default="smollm2-135m", help="the model that it serves, for its tokenizer (%(default)s)")
    parser.add_argument("--system", default="", help="a system message")
    parser.add_argument("--max-tokens", type=int, default=512, help="of one answer (%(default)s)")
    parser.add_argument("--temperature", type=float, default=0.7, help="0 is greedy (%(default)s)")
    parser.add_argument("--seed", type=int, help="the same seed gives the same answers")
    parser.add_argument("--no-color", action="store_true", help="do not mark accepted draft tokens")
    parser.add_argument("--tls", action="store_true", help="speak TLS, and trust the system's authorities")
    parser.add_argument("--ca", type=Path, help="speak TLS, and trust this authority (a PEM file)")
    return parser


if __name__ == "__main__":
    sys.exit(main())

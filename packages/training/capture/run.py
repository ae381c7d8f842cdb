"""`python -m training mode=capture`: rows for later runs, from prompts that the target answers or conversations that it reads.

    data.prompts -> answers (or the assistant's own turns) -> shards of token rows, or rows with hidden states

Killed at any instant it goes on where it was: what is on disk is not made again, and the rest comes out as it would have.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console

from runtime.backends import load_target
from runtime.backends.transformers.packed import load_packed
from runtime.config import DrafterConfig, SessionsConfig, require
from runtime.devices import choose_device
from runtime.drafters.loading import load_drafter
from runtime.drafters.none import NoDrafter
from runtime.engine.local import LocalEngine
from runtime.errors import ConfigError, ModelError
from runtime.files import sha256_of
from runtime.garbage import set_apart_what_is_loaded
from runtime.models import ResolvedModel, Tokenizer, absolute, resolve
from runtime.models.fingerprint import read_json
from runtime.types import Switch
from training.capture.answers import Answers
from training.capture.config import Output
from training.capture.features import FeatureSink
from training.config import TrainingConfig
from training.data.conversations import by_reason, files_of
from training.data.corpus import encode_files
from training.data.plane import open_plane, plane_root
from training.data.prompts import load_prompts
from training.data.shards import TokenShards
from training.data.tokens import TokenRow, heldout_fraction, is_heldout
from training.dialogues import Dialogues
from training.learning.target_weights import load_target_weights
from training.reporting.bar import Bar

logger = logging.getLogger(__name__)

PREFILL_TOKENS = 16  # of prompts in one forward, for each answer that is made at the same time


class Sink(Protocol):
    """Where rows go."""

    def is_known(self, name: str) -> bool:
        """Whether the row of this name was taken, by this process or one before it."""
        ...

    def add(self, rows: Sequence[TokenRow]) -> None: ...

    def flush(self) -> None:
        """Everything taken is on disk when this returns."""
        ...


@dataclass
class Made:
    """What became of the prompts, in this process."""

    rows: int = 0
    tokens: int = 0
    generated_tokens: int = 0
    found: int = 0  # dialogues or rows that were there already
    left_out: Counter[str] = field(default_factory=Counter)  # by reason
    truncated: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0

    def add(self, rows: Sequence[TokenRow]) -> None:
        self.rows += len(rows)
        self.tokens += sum(len(row.token_ids) for row in rows)
        self.generated_tokens += sum(row.num_generated for row in rows)

    def told(self) -> str:
        parts = [f"{self.rows} rows of {self.tokens} tokens, {self.generated_tokens} of them to learn from"]
        parts += [f"{self.found} were there already"] if self.found else []
        return ", ".join(parts + by_reason(self.left_out, self.truncated))


def capture(config: TrainingConfig, state_dir: Path, console: Console, stop: threading.Event) -> int:
    """Make the rows that the settings ask for; 0, also after a stop that was asked for."""
    job = _Job(config, state_dir, console, stop)
    with job.sink() as (sink, where):
        try:
            job.answer(sink) if config.answers.generate else job.read(sink)
        finally:
            sink.flush()
    ended = "stopped, the same command makes the rest" if stop.is_set() else "all rows made"
    logger.info("%s: %s; rows lie in %s", ended, job.made.told(), where)
    return 0


class _Job:
    def __init__(self, config: TrainingConfig, state_dir: Path, console: Console, stop: threading.Event) -> None:
        assert config.data.prompts is not None  # checked by TrainingConfig
        self._config = config
        self._state_dir = state_dir
        self._console = console
        self._stop = stop
        self._resolved: ResolvedModel = resolve(config.model.name)
        self._tokenizer = Tokenizer.load(self._resolved.path)
        self._files = files_of("data.prompts", config.data.prompts)
        self._heldout_fraction = 0.0  # known once the files were read
        self.made = Made()

    # --- where rows go ---

    @contextmanager
    def sink(self) -> Iterator[tuple[Sink, Path]]:
        with ExitStack() as stack:
            yield self._shards(stack) if self._config.answers.output is Output.TOKENS else self._plane(stack)

    def _shards(self, stack: ExitStack) -> tuple[Sink, Path]:
        answers, name = self._config.answers, self._config.trainer.name
        given = answers.directory
        directory = self._state_dir / "tokens" / name if given is None else absolute("answers.directory", given)
        shards = TokenShards(
            directory,
            self._origin(),
            self._vocab_size(),
            shard_tokens=answers.shard_tokens,
            flush_every_s=answers.flush_every_s,
            counts=lambda: {"left_out": dict(self.made.left_out), "truncated": dict(self.made.truncated)},
        )
        return stack.enter_context(shards), directory

    def _plane(self, stack: ExitStack) -> tuple[Sink, Path]:
        config = self._config.features
        store, ledger = open_plane(config, self._state_dir)
        stack.callback(store.close)
        stack.callback(ledger.close)
        device = choose_device(self._config.model.device)
        sink = FeatureSink(
            load_packed(self._resolved, device),
            store,
            ledger,
            load_target_weights(self._resolved, device),
            run_id=self._config.trainer.name,
            is_heldout=lambda source: is_heldout(source, self._heldout_fraction),
            max_batch_tokens=self._config.data.max_batch_tokens,
        )
        return sink, plane_root(config, self._state_dir)

    def _vocab_size(self) -> int:
        """Rows of the model's embedding, which may be more than its tokenizer knows."""
        path = self._resolved.path / "config.json"
        size = read_json(path).get("vocab_size")
        if type(size) is not int or size < 1:
            raise ModelError(f"{path} has vocab_size {size!r}, and not how many ids there are; fetch the model again.")
        return size

    def _origin(self) -> dict[str, Any]:
        """What all rows of one directory have in common."""
        answers = self._config.answers
        above = Path(os.path.commonpath([path.parent for path in self._files]))
        made = {"temperatures": answers.temperatures, "max_tokens": answers.max_tokens, "seed": self._config.trainer.seed}
        return {
            "model": self._resolved.name,
            "target_fingerprint": self._resolved.fingerprint,
            "tokenizer_hash": self._tokenizer.hash,
            "vocabulary_hash": self._tokenizer.vocabulary_hash,
            "template_hash": self._tokenizer.template_hash,
            "longest_row": self._config.data.max_tokens,
            "files": {str(path.relative_to(above)): sha256_of(path) for path in self._files if path.is_file()},
            "answers": made if answers.generate else None,
        }

    # --- where they come from ---

    def _hold_out(self, sources: Iterable[str]) -> None:
        """These are all that rows will come from."""
        data, gate = self._config.data, self._config.trainer.gate
        self._heldout_fraction = heldout_fraction(data.heldout_fraction, sources, gate.min_heldout_rows)

    def answer(self, sink: Sink) -> None:
        """The target answers the prompts."""
        config = self._config
        target = load_target(config.backend, config.model, self._resolved)
        longest = min(target.info.max_positions, config.data.max_tokens)
        room = longest - config.answers.max_tokens
        require(room >= 1, "answers.max_tokens", config.answers.max_tokens, f"below {longest}, the tokens that a row may have")
        with Bar(self._console, "lines of prompts") as bar:
            vocab_size = target.info.vocab_size
            prompts, self.made.left_out = load_prompts(self._files, self._tokenizer, vocab_size, room, report=bar.show)
        self._hold_out(prompt.id for prompt in prompts)
        sessions = SessionsConfig(
            max_sessions=2 * config.answers.concurrency,
            max_batch_sessions=config.answers.concurrency,
            kv_budget_mib=config.answers.kv_budget_mib,
            prefill_chunk_tokens=PREFILL_TOKENS * max(16, config.answers.concurrency),
            patient=True,
        )
        drafter = load_drafter(DrafterConfig(), target) if config.speculation.max_draft_tokens else NoDrafter()
        engine = LocalEngine(target, drafter, self._tokenizer, config.speculation, sessions)
        dialogues = Dialogues(
            engine,
            self._tokenizer,
            seed=config.trainer.seed,
            concurrency=config.answers.concurrency * 5 // 4,  # some wait, so that whatever ends is followed at once
            max_answer_tokens=config.answers.max_tokens,
            max_tokens=longest,
            capture=Switch.OFF,
            left_out=self.made.left_out,
        )
        answers = Answers(dialogues, prompts, config.answers.temperatures)
        answers.skip(sink.is_known)
        self.made.found = answers.num_done
        engine.start()
        set_apart_what_is_loaded()
        try:
            with Bar(self._console, "answers") as bar:
                self._take(answers, sink, bar)
        finally:
            engine.stop()

    def _take(self, answers: Answers, sink: Sink, bar: Bar) -> None:
        began = time.monotonic()
        for rows in answers.rows(self._stop.is_set):
            sink.add(rows)
            self.made.add(rows)
            rate = answers.num_generated / max(time.monotonic() - began, 1e-9)
            left_out = sum(self.made.left_out.values())
            bar.show(answers.num_done, answers.num_dialogues, f"{rate:.0f} tokens/s, {left_out} left out")

    def read(self, sink: Sink) -> None:
        """The assistant's turns are taken as they stand."""
        max_tokens, cache = self._config.data.max_tokens, self._state_dir / "cache" / "tokens"
        with Bar(self._console, "lines of conversations") as bar:
            found = encode_files("data.prompts", self._files, self._tokenizer, self._vocab_size(), max_tokens, cache, bar.show)
        self.made.left_out, self.made.truncated = found.left_out, found.truncated
        self._hold_out(source for source, _, _ in found.corpus.labels)
        if not len(found.corpus):
            raise ConfigError(
                f"data.prompts is {self._config.data.prompts!r}, and leaves nothing to learn from ({found.told()})."
            )
        with Bar(self._console, "rows") as bar:
            for done, row in enumerate(map(found.corpus.row, range(len(found.corpus)))):
                if self._stop.is_set():
                    return
                if sink.is_known(row.name):
                    self.made.found += 1
                    continue
                sink.add([row])
                self.made.add([row])
                bar.show(done, len(found.corpus))

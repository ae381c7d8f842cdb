"""mode=evaluate: real acceptance, by running drafters against the target on prompts, through the engine that serves.

    <evaluate.out>/{settings.json, answers.jsonl, acceptance.json, acceptance.md, acceptance.png, config.yaml, provenance.json}

Every shape of draft has an engine of its own, which all drafters and temperatures share in turn; its drafts always have that
shape. Answers are kept one by one, so the same command goes on where it was stopped or killed, and one with more drafters,
shapes or temperatures in the same directory makes only what is missing.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from runtime import machine
from runtime.backends import load_target
from runtime.backends.base import Target
from runtime.backends.transformers.loading import read_weights
from runtime.config import Numerics, SessionsConfig, require
from runtime.configuration import provenance
from runtime.devices import choose_device
from runtime.drafters.none import NoDrafter
from runtime.engine.local import LocalEngine
from runtime.errors import ConfigError
from runtime.files import dump_json, write_atomic
from runtime.models import ResolvedModel, Tokenizer, absolute, resolve
from runtime.registry import Registry
from training.config import TrainingConfig
from training.drafters import find_drafter
from training.judging import sheet
from training.judging.answers import AnswerLog, Asker, Pass
from training.judging.config import EvaluateConfig, speculation_of
from training.judging.drafters import Candidate, as_served, find
from training.judging.figures import Found, Resampling
from training.judging.lossless import Deviation, deviations, plain
from training.judging.oracle import LIMITS, Oracle
from training.judging.questions import Question, Suite, read_suites
from training.learning.start import AUTO
from training.learning.target_weights import load_target_weights
from training.reporting.bar import Bar

logger = logging.getLogger(__name__)

PREFILL_CHUNK_TOKENS = 1024  # nobody waits for a single answer
KV_BUDGET_MIB = 16384
NOT_LOSSLESS = 1  # exit status


def evaluate_drafter(config: TrainingConfig, state_dir: Path, console: Console, stop: threading.Event) -> int:
    """The command. 1 if a greedy answer differs from the target's own by more than a near tie."""
    settings = config.evaluate
    resolved = resolve(config.model.name)
    tokenizer = Tokenizer.load(resolved.path)
    target = load_target_weights(resolved, torch.device("cpu"))
    room = int(target.config["max_position_embeddings"]) - max(settings.lengths)
    suites = read_suites(settings.prompts, tokenizer, target.vocab_size, room, settings.per_category, settings.seed)
    root = config.registry.root
    registry = Registry(state_dir / "registry" if root is None else absolute("registry.root", root))
    on_disk = partial(
        find_drafter,
        setting="evaluate.drafter",
        registry=registry,
        runs=state_dir / "training",
        target=target,
        also="auto, ngram, none, ",
    )
    with ExitStack() as stack:
        given = [settings.drafter, *([settings.against] if settings.against is not None else [])]
        words = [as_served(registry, target.name) if word == AUTO else word for word in given]
        candidates = [stack.enter_context(find(word, on_disk)) for word in words]
        is_other = len({each.version for each in candidates}) == len(candidates)
        require(is_other, "evaluate.against", settings.against, f"another drafter than {settings.drafter!r}, or null")
        out = _directory(config, state_dir, resolved, suites, candidates)
        log = AnswerLog(out / "answers.jsonl")
        stack.callback(log.close)
        provenance(out, config)
        session = _Evaluation(config, resolved, tokenizer, suites, candidates, log, console, stop)
        session.run()
        if stop.is_set():
            logger.info("stopped with %d of %d answers; the same command goes on from there", *session.progress)
            return 0
        result = session.result()
    write_atomic(out / "acceptance.json", dump_json(result))
    write_atomic(out / "acceptance.md", sheet.markdown(result).encode())
    sheet.draw(result, out / "acceptance.png")
    sheet.show(result, Console())
    logger.info("written to %s: acceptance.json, acceptance.md, acceptance.png", out)
    return NOT_LOSSLESS if any(not each["is_near_tie"] for each in result["lossless"]["deviations"]) else 0


@dataclass(frozen=True)
class _Work:
    """Questions that are still to be answered under a pass. candidate None: without a drafter."""

    under: Pass
    candidate: Candidate | None
    questions: list[Question]


class _Evaluation:
    """One call of the command, behind its settings."""

    def __init__(
        self,
        config: TrainingConfig,
        resolved: ResolvedModel,
        tokenizer: Tokenizer,
        suites: Sequence[Suite],
        candidates: Sequence[Candidate],
        log: AnswerLog,
        console: Console,
        stop: threading.Event,
    ) -> None:
        self._config, self._settings = config, config.evaluate
        self._resolved, self._tokenizer = resolved, tokenizer
        self._suites, self._candidates = suites, candidates
        self._log, self._console, self._stop = log, console, stop
        self._questions = [question for suite in suites for question in suite.questions]
        self._sample = [question for suite in suites for question in _spread(suite.questions, self._settings.lossless_prompts)]
        self._model: dict[str, str] = {}
        self._deviations: list[Deviation] = []
        self._num_compared = 0
        self._num_made = 0
        self._num_tokens_made = 0
        self._seconds = 0.0

    @property
    def progress(self) -> tuple[int, int]:
        """(answers that there are, answers in all)"""
        works = [work for shape in self._settings.shapes for work in self._works(shape, only_missing=False)]
        keys = {(work.under, question.suite, question.id) for work in works for question in work.questions}
        return sum(key in self._log.answers for key in keys), len(keys)

    def run(self) -> None:
        """Make what is missing, shape by shape, and compare with the target's own answers."""
        done, total = self.progress
        began = time.monotonic()
        with Bar(self._console, "answers") as bar:
            bar.show(done, total)
            for shape in self._settings.shapes:
                if not self._stop.is_set():
                    self._run_shape(shape, lambda said: bar.show(done + self._num_made, total, said))
                    self._compare(shape)
        self._seconds = time.monotonic() - began

    def _run_shape(self, shape: str, show: Callable[[str], None]) -> None:
        target = load_target(self._config.backend, self._config.model, self._resolved)
        engine = self._engine(shape, target)
        engine.start()
        try:
            asker = Asker(engine, max(self._settings.lengths), self._settings.concurrency, self._settings.seed, self._stop)
            for work in self._works(shape, only_missing=True):
                if work.candidate is not None and engine.drafter_version != work.candidate.version:
                    engine.swap_drafter(work.candidate.load(target))
                self._ask(asker, work, show)
        finally:
            engine.stop()

    def _engine(self, shape: str, target: Target) -> LocalEngine:
        settings = self._settings
        sessions = SessionsConfig(
            max_sessions=settings.concurrency + 1,
            max_batch_sessions=settings.concurrency,
            prefill_chunk_tokens=PREFILL_CHUNK_TOKENS,
            kv_budget_mib=KV_BUDGET_MIB,
            prefix_reuse=False,  # an answer's first token comes of its prompt in every pass
        )
        info = target.info
        self._model = {"name": info.name, "fingerprint": info.fingerprint, "dtype": info.dtype, "device": info.device}
        return LocalEngine(target, NoDrafter(), self._tokenizer, speculation_of(shape), sessions)

    def _works(self, shape: str, *, only_missing: bool) -> list[_Work]:
        works = [
            _Work(Pass(candidate.version, shape, temperature), candidate, self._questions)
            for candidate in self._candidates
            for temperature in self._settings.temperatures
        ]
        if self._sample:  # compared greedily, whatever else is asked
            greedy = [Pass(candidate.version, shape, 0.0) for candidate in self._candidates]
            if 0.0 not in self._settings.temperatures:
                works += [_Work(each, who, self._sample) for each, who in zip(greedy, self._candidates, strict=True)]
            works.append(_Work(plain(greedy[0]), None, self._sample))
        if not only_missing:
            return works
        return [_Work(work.under, work.candidate, self._missing(work)) for work in works]

    def _missing(self, work: _Work) -> list[Question]:
        return [each for each in work.questions if (work.under, each.suite, each.id) not in self._log.answers]

    def _ask(self, asker: Asker, work: _Work, show: Callable[[str], None]) -> None:
        began = time.monotonic()
        num_tokens = num_steps = 0
        for answer in asker.ask(work.under, work.questions):
            self._log.add(answer)
            self._num_made += 1
            self._num_tokens_made += len(answer.token_ids)
            num_tokens += len(answer.token_ids)
            num_steps += len(answer.steps) + len(answer.prefilled)
            rate = f"{num_tokens / (time.monotonic() - began):.0f} tokens/s, {num_tokens / num_steps:.2f} a step"
            show(f"{work.under.words}: {rate}")

    @cached_property
    def _oracle(self) -> Oracle:
        return Oracle(read_weights(self._resolved, torch.float32, choose_device(self._config.model.device)).train(False))

    def _compare(self, shape: str) -> None:
        is_exact = self._config.backend.numerics is Numerics.INVARIANT
        for candidate in self._candidates:
            if not self._stop.is_set():
                under = Pass(candidate.version, shape, 0.0)
                limit = 0.0 if is_exact else LIMITS[self._model["dtype"]]
                compared, found = deviations(lambda: self._oracle, limit, under, self._sample, self._log.answers)
                self._num_compared += compared
                self._deviations += found

    def result(self) -> dict[str, Any]:
        """Everything, as JSON."""
        settings = self._settings
        vocabularies = {each.version: each.vocabulary for each in self._candidates if each.vocabulary is not None}
        resampling = Resampling(settings.confidence, settings.resamples, settings.seed)
        found = Found(self._suites, self._log.answers, vocabularies, resampling)
        passes = [
            Pass(candidate.version, shape, temperature)
            for candidate in self._candidates
            for shape in settings.shapes
            for temperature in settings.temperatures
        ]
        passes = list(dict.fromkeys(passes))
        lengths = sorted(set(settings.lengths))
        figures = [each for under in passes for length in lengths for each in found.figures(under, length)]
        pairs = []
        if settings.against is not None:
            ours, theirs = (candidate.version for candidate in self._candidates)
            pairs = [(each, Pass(theirs, each.shape, each.temperature)) for each in passes if each.drafter == ours != theirs]
        differences = [each for pair in pairs for length in lengths for each in found.differences(*pair, length)]
        return {
            "model": self._model,
            "prompts": [
                {"name": suite.name, "sha256": suite.sha256, "num_prompts": len(suite.questions), "left_out": suite.left_out}
                for suite in self._suites
            ],
            "drafters": {each.version: each.word for each in self._candidates},
            "lengths": lengths,
            "confidence": settings.confidence,
            "figures": [asdict(each) for each in figures],
            "depths": [asdict(each) for under in passes for each in found.depths(under)],
            "differences": [asdict(each) for each in differences],
            "lossless": {"num_compared": self._num_compared, "deviations": [asdict(each) for each in self._deviations]},
            "made_now": {
                "answers": self._num_made,
                "tokens": self._num_tokens_made,
                "seconds": round(self._seconds, 1),
                "concurrency": settings.concurrency,
            },
            "machine": machine.describe(),
        }


def _spread(questions: Sequence[Question], count: int) -> list[Question]:
    """So many of them, from all over the list."""
    count = min(count, len(questions))
    return [questions[index * len(questions) // count] for index in range(count)]


def _directory(
    config: TrainingConfig, state_dir: Path, resolved: ResolvedModel, suites: Sequence[Suite], candidates: Sequence[Candidate]
) -> Path:
    """Where this evaluation lies. ConfigError if answers to something else lie there."""
    settings: EvaluateConfig = config.evaluate
    decisive = {
        "model": resolved.fingerprint,
        "dtype": config.model.dtype.value,
        "device": config.model.device,
        "numerics": config.backend.numerics.value,
        "backend": config.backend.name,
        "prompts": {suite.name: suite.sha256 for suite in suites},
        "max_tokens": max(settings.lengths),
        "seed": settings.seed,
    }
    asked = {"drafters": [each.version for each in candidates], "shapes": settings.shapes, "per_category": settings.per_category}
    key = sha256(dump_json({**decisive, **asked, "temperatures": settings.temperatures})).hexdigest()[:12]
    out = state_dir / "evaluations" / key if settings.out is None else absolute("evaluate.out", settings.out)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"evaluate.out is {str(out)!r}, which cannot be made ({error}); give another directory.") from error
    path = out / "settings.json"
    if path.exists():
        before = _settings_of(path)
        changed = [name for name, value in decisive.items() if before.get(name) != value]
        if changed:
            name = changed[0]
            raise ConfigError(
                f"evaluate.out is {str(out)!r}, which holds answers with {name} {before.get(name)!r}, and now "
                f"it is {decisive[name]!r}; give another directory."
            )
    write_atomic(path, dump_json(decisive))
    return out


def _settings_of(path: Path) -> dict[str, Any]:
    try:
        before = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read as JSON ({error}); restore it, or give another evaluate.out.") from error
    if not isinstance(before, dict):
        raise ConfigError(f"{path} holds {type(before).__name__}, not an object; restore it, or give another evaluate.out.")
    return before

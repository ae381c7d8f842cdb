"""One running generation: its sampling state, its text, its counts, and the rule that ends it.

Tokens are taken one at a time, so that penalties, stops and the length limit see every accepted token in order: of a
verified batch, nothing behind the first token that ends the turn exists. Where nobody looks at each of them, they are taken
together.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Sequence

import torch

from runtime.backends.base import TargetInfo
from runtime.engine.base import OnEvent
from runtime.engine.stats import StepTally
from runtime.features.sampling import labelled
from runtime.features.tap import CapturedTurn
from runtime.models.tokenizer import Tokenizer
from runtime.sessions.session import Session, State
from runtime.speculation.accept import Verdict, Verdicts
from runtime.speculation.grammar import GrammarState
from runtime.speculation.sampling import Processor, Sampled, Uniforms, token_logprobs
from runtime.speculation.shape import GREEDY, SAMPLED, SEEDED, Ask
from runtime.speculation.stops import StopMatcher
from runtime.types import (
    Done,
    Event,
    Failed,
    FinishReason,
    SamplingParams,
    Started,
    TokenLogprob,
    Tokens,
    Usage,
)

log = logging.getLogger(__name__)


class Request:
    """Implements `runtime.engine.base.Generation`. All methods but `cancel` belong to the engine's thread."""

    def __init__(
        self,
        session: Session,
        params: SamplingParams,
        max_tokens: int,
        on_event: OnEvent,
        request_id: str | None,
        info: TargetInfo,
        tokenizer: Tokenizer,
        grammar: GrammarState | None,
        entropy: int | None = None,  # what to draw from without a seed; None: at random
    ) -> None:
        self.session = session
        self.params = params
        self.max_tokens = max_tokens
        self.num_prompt_tokens = len(session.history)
        self.num_cached_tokens = 0  # set when it starts to run
        self.num_emitted = 0
        self.steps = StepTally()
        self.drafter_versions: list[str] = []
        self.is_started = False
        self.finish_reason: FinishReason | None = None
        self.error: Exception | None = None
        self.matched_stop: str | int | None = None
        self.processor = Processor(params, session.history, info.vocab_size, torch.device(info.device), grammar)
        self._uniforms = None if params.is_greedy else Uniforms(entropy if params.seed is None else params.seed)
        self._request_id = request_id or uuid.uuid4().hex
        self._on_event = on_event
        self._is_cancelled = False
        self._is_finished = False
        self._text = tokenizer.stream()
        self._stops = StopMatcher(params.stop, params.include_stop)
        eos_token_ids = info.eos_token_ids if session.options.eos_token_ids is None else session.options.eos_token_ids
        self._eos_token_ids = frozenset() if params.ignore_eos else frozenset(eos_token_ids)
        self._stop_token_ids = frozenset(params.stop_token_ids) | frozenset(session.options.stop_token_ids)
        self._end_token_ids = self._eos_token_ids | self._stop_token_ids
        self.is_bare = self.processor.is_plain and not params.logprobs  # its tokens follow from logits alone, which nobody sees
        self._is_taken_together = self.is_bare and not params.stop
        self.draft_kind = GREEDY if params.is_greedy else SAMPLED if self.draft_temperature else SEEDED
        self.ask: Ask | None = None  # its last one
        self.waits_since = 0  # turn in which it came to read its prompt, or the one after that in which it read some of it

    @property
    def request_id(self) -> str:
        return self._request_id

    def cancel(self) -> None:
        self._is_cancelled = True

    @property
    def is_unwanted(self) -> bool:
        return self._is_cancelled or self.session.is_closed

    @property
    def is_ending(self) -> bool:
        """No more tokens are to come. (Asked many times in a step, so it calls nobody.)"""
        return self.finish_reason is not None or self._is_cancelled or self.session.state is State.CLOSED

    @property
    def is_over(self) -> bool:
        return self.error is not None or self._is_finished

    @property
    def num_remaining(self) -> int:
        return self.max_tokens - self.num_emitted

    @property
    def draft_temperature(self) -> float:
        """0: drafts are certain. With a seed they are, so that its tokens depend on nothing that was drafted."""
        return self.params.temperature if self.params.seed is None else 0.0

    @property
    def sampled(self) -> Sampled | None:
        """Where it stands; None: greedy."""
        return None if self._uniforms is None else Sampled(self.params, self._uniforms, self.num_emitted)

    def drafting(self, num_places: int) -> torch.Tensor | None:
        """The numbers to draft the next tokens with, float64 [num_places]; None: greedy."""
        return None if self._uniforms is None else self._uniforms.at(self.num_emitted, num_places)[:, 0]

    def judging(self, num_places: int) -> torch.Tensor | None:
        """The numbers to judge them with, float64 [num_places]; None: greedy."""
        return None if self._uniforms is None else self._uniforms.at(self.num_emitted, num_places)[:, 1]

    def start(self, drafter_version: str, target_fingerprint: str) -> None:
        self.is_started = True
        self.num_cached_tokens = self.session.cached
        length = len(self.session.history)
        self.emit(Started(self._request_id, self.session.id, drafter_version, target_fingerprint, length))

    def take(self, verdict: Verdict | Verdicts, logits: torch.Tensor, is_prefills: bool = False) -> int:
        """Take verified tokens until one ends the turn; returns how many became history. logits [n+1, V], as verified.
        is_prefills: it is the one token behind what was just read."""
        if self._is_taken_together:
            return self._take_together(verdict, is_prefills)
        taken: list[int] = []
        text, history, is_plain = "", self.session.history, self.processor.is_plain
        for token_id in verdict.token_ids:
            taken.append(token_id)
            history.append(token_id)
            if not is_plain:
                self.processor.advance(token_id)
            self.num_emitted += 1
            text += self._read(token_id)
            if self.finish_reason is not None:
                break
        if self.finish_reason is not None:
            text += self._finish_text()
        logprobs = self._logprobs(logits, verdict.path, taken) if isinstance(verdict, Verdict) else ()
        self.emit(Tokens(tuple(taken), text, logprobs, _drafted(verdict, len(taken)), is_prefills))
        return len(taken)

    def _take_together(self, verdict: Verdict | Verdicts, is_prefills: bool) -> int:
        """The same, where no token changes how the next one is picked and nothing in their text ends the turn."""
        taken = written = verdict.token_ids[: self.num_remaining]
        if not self._end_token_ids.isdisjoint(taken):
            end = next(place for place, token_id in enumerate(taken) if token_id in self._end_token_ids)
            written = taken = taken[: end + 1]
            self.finish_reason, self.matched_stop = "stop", taken[end]
            if taken[end] in self._eos_token_ids or not self.params.include_stop:
                written = taken[:end]
        elif len(taken) == self.num_remaining:
            self.finish_reason = "length"
        self.session.history += taken
        self.num_emitted += len(taken)
        text = self._text.push(*written) if self.params.detokenize else ""
        if self.finish_reason is not None:
            text += self._finish_text()
        self.emit(Tokens(tuple(taken), text, (), _drafted(verdict, len(taken)), is_prefills))
        return len(taken)

    def ends_within(self, token_ids: Sequence[int]) -> bool:
        """Whether the turn is sure to end with one of these, the next that there are. It may for other reasons too."""
        return self.num_remaining <= len(token_ids) or not self._end_token_ids.isdisjoint(token_ids)

    def ends_at(self, token_ids: Sequence[int]) -> bool:
        """Whether that is with the last of these."""
        return not self.ends_within(token_ids[:-1]) and self.ends_within(token_ids)

    def _read(self, token_id: int) -> str:
        """Text that became safe to show with this token; sets finish_reason if the token ends the turn."""
        if token_id in self._end_token_ids:
            self.finish_reason, self.matched_stop = "stop", token_id
            if token_id in self._eos_token_ids or not self.params.include_stop:
                return ""
        text, matched = self._stops.push(self._text.push(token_id)) if self.params.detokenize else ("", None)
        if matched is not None and self.finish_reason is None:
            self.finish_reason, self.matched_stop = "stop", matched
        if self.finish_reason is None and self.num_remaining == 0:
            self.finish_reason = "length"
        return text

    def _finish_text(self) -> str:
        """What was held back: an incomplete character, or what might have become a stop string and did not."""
        if isinstance(self.matched_stop, str):
            return ""
        text, matched = self._stops.push(self._text.flush())
        if matched is not None:
            self.finish_reason, self.matched_stop = "stop", matched
            return text
        return text + self._stops.flush()

    def _logprobs(self, logits: torch.Tensor, path: Sequence[int], taken: Sequence[int]) -> tuple[TokenLogprob, ...]:
        if not self.params.logprobs:
            return ()
        rows = [0, *(node + 1 for node in path)][: len(taken)]  # token k follows node k - 1 of the path
        return tuple(token_logprobs(logits[rows], taken, self.params.top_logprobs))

    def note_drafter(self, version: str) -> None:
        if version not in self.drafter_versions:
            self.drafter_versions.append(version)

    def finish(self) -> None:
        """The turn is over, by its own end or because nobody wants it any more."""
        self._is_finished = True
        if self.finish_reason is None:
            self.finish_reason = "cancelled"
            if held := self._finish_text():
                self.emit(Tokens((), held, (), ()))

    def captured(self) -> CapturedTurn:
        """What the tap gets of the turn, once it is over."""
        session, history = self.session, tuple(self.session.history)
        return CapturedTurn(
            session_id=session.id,
            token_ids=history,
            generated=tuple(index >= self.num_prompt_tokens for index in range(len(history))),
            hidden=tuple(session.features),
            labels=labelled(session.options.labels, self.params),
            drafter_version=self.drafter_versions[-1] if self.drafter_versions else "none",
            source="session",
            capture=session.options.capture,
            first_position=session.first_kept,
            num_unseen=session.options.cache_policy.num_unseen(session.cached),
        )

    def fail(self, error: Exception) -> None:
        self.error = error

    def report(self) -> None:
        """The last event. The session is idle again by now."""
        if self.error is not None:
            self.emit(Failed(self.error))
            return
        assert self.finish_reason is not None
        usage = Usage(self.num_prompt_tokens, self.num_emitted, self.num_cached_tokens)
        versions, length = tuple(self.drafter_versions), len(self.session.history)
        self.emit(Done(self.finish_reason, self.matched_stop, usage, self.steps.stats(), versions, length))

    def emit(self, event: Event) -> None:
        """A listener that raises loses its generation, not the engine."""
        try:
            self._on_event(event)
        except Exception:
            log.exception("The listener of generation %s raised; the generation is cancelled.", self._request_id)
            self.cancel()


def _drafted(verdict: Verdict | Verdicts, num_taken: int) -> tuple[bool, ...]:
    """Of each token, whether it was drafted: all but the last one of each verification."""
    if len(verdict.sizes) == 1:
        return (True,) * min(verdict.num_accepted, num_taken) + (False,) * (num_taken - verdict.num_accepted)
    return tuple(place < size - 1 for size in verdict.sizes for place in range(size))[:num_taken]

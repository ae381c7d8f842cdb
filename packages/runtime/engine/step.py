"""One step of the engine, as four verbs: schedule, draft, verify, commit. All of it runs on the engine's thread.

    schedule  which tokens of which sessions go into the forward: one pending token each, or a chunk of prompt
    draft     the drafter catches up on what became history and proposes a chain for every decoding session
    verify    one ragged target forward over pending tokens, drafts and prompt chunks together
    commit    accepted tokens become history, their K/V and hidden states are kept, the rest is forgotten

Invariant between steps: K/V and kept features of a session cover history[:cached], and cached < len(history).
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

import torch

from runtime.backends.base import Segment, SegmentOutput, Target
from runtime.config import SessionsConfig, SpeculationConfig
from runtime.drafters.base import Draft, Drafter, DraftRequest
from runtime.engine.base import EngineStats
from runtime.engine.holdings import Holdings
from runtime.engine.request import Request
from runtime.errors import EngineUnavailable, SlipstreamError
from runtime.features.tap import CapturedTurn, Tap
from runtime.hidden_states import HiddenStates
from runtime.sessions.session import DraftState, Session
from runtime.speculation.accept import verify
from runtime.types import HistoryTruncated, SpeculationStats, Switch

log = logging.getLogger(__name__)

MIN_PREFILL_TOKENS = 16  # a prefilling session's least share of a step


@dataclass
class Work:
    """One session's part in one step."""

    request: Request
    token_ids: list[int]  # history[cached : cached + len], the pending token or a chunk of prompt
    is_last_chunk: bool  # reaches the end of the history, so its last logits give the next token
    is_decode: bool  # one pending token behind a cached history: may be drafted for
    draft: Draft = field(default_factory=lambda: Draft([]))

    @property
    def segment(self) -> Segment:
        assert self.request.session.cache is not None
        token_ids = self.token_ids + self.draft.token_ids
        num_logits = 1 + len(self.draft.token_ids) if self.is_last_chunk else 0
        return Segment(self.request.session.cache, token_ids, num_logits=num_logits)


class Stepper:
    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        speculation: SpeculationConfig,
        sessions: SessionsConfig,
        tap: Tap | None,
    ) -> None:
        self.drafter = drafter  # the active one
        self.drafters = {drafter.version: drafter}  # those that sessions may be pinned to, the active one included
        self._target = target
        self._info = target.info
        self._max_draft_tokens = speculation.max_draft_tokens
        self._prefill_chunk_tokens = sessions.prefill_chunk_tokens
        self.holdings = Holdings(target, sessions)
        self._tap = tap
        self._stats = EngineStatsBuilder()

    @torch.inference_mode()
    def step(self, batch: Sequence[Request]) -> None:
        """Advance every request of the batch by at most one forward; those that ended have `is_over` set."""
        works = self._schedule(batch)
        if not works:
            return
        self._draft([work for work in works if work.is_decode])
        outputs = self._verify(works)
        for work, output in zip(works, outputs, strict=True):
            self._commit(work, output)
        self.holdings.count()

    # --- schedule ---

    def _schedule(self, batch: Sequence[Request]) -> list[Work]:
        live = [request for request in batch if not self._end_if_unwanted(request)]
        for request in live:
            self._enter(request)
        num_prefilling = sum(_num_pending(request) > 1 for request in live)
        share = max(MIN_PREFILL_TOKENS, self._prefill_chunk_tokens // max(num_prefilling, 1))
        return [self._plan(request, share) for request in live]

    def _end_if_unwanted(self, request: Request) -> bool:
        if request.is_unwanted:
            self._finish(request)
            return True
        return False

    def _enter(self, request: Request) -> None:
        """For the first time, or again after it had to wait: what of its history is cached is known from here on."""
        if request.is_started and request.session.cache is not None:
            return
        self.holdings.open(request.session)
        if not request.is_started:
            request.start(self.drafter.version, self._info.fingerprint)
            self._stats.prompt_tokens += request.num_prompt_tokens
            self._stats.cached_prompt_tokens += request.num_cached_tokens
        self._tell_dropped(request)

    def _tell_dropped(self, request: Request) -> None:
        session = request.session
        if session.dropped and not session.has_told_drop:
            session.has_told_drop = True
            request.emit(HistoryTruncated(session.dropped))

    def _plan(self, request: Request, share: int) -> Work:
        session = request.session
        token_ids = session.history[session.cached : session.cached + share]
        is_last_chunk = session.cached + len(token_ids) == len(session.history)
        return Work(request, token_ids, is_last_chunk, is_decode=is_last_chunk and len(token_ids) == 1 and session.cached > 0)

    # --- draft ---

    def _draft(self, works: Sequence[Work]) -> None:
        asked = [(work, self._draft_request(work.request, depth)) for work in works if (depth := self._depth(work.request))]
        if not asked:
            return
        try:
            proposals = self.drafter.propose([request for _, request in asked])
            drafts = [
                _clip(draft, request.depth, self._info.vocab_size) for (_, request), draft in zip(asked, proposals, strict=True)
            ]
        except Exception:  # a drafter may fail in any way; the output must not depend on it
            log.exception("Drafter %s failed; this step runs without drafts.", self.drafter.version)
            self._stats.num_drafter_failures += 1
            for work, _ in asked:
                self.holdings.drop_draft(work.request.session)
            return
        for (work, _), draft in zip(asked, drafts, strict=True):
            work.draft = draft
            work.request.note_drafter(self.drafter.version)

    def _depth(self, request: Request) -> int:
        """Drafts worth verifying: never past the last token that may be emitted."""
        if not (request.params.speculate and request.session.options.drafter_policy.kind != "off"):
            return 0
        asked = request.params.max_draft_tokens
        depth = self._max_draft_tokens if asked is None else min(asked, self._max_draft_tokens)
        return min(depth, request.num_remaining - 1)

    def _draft_request(self, request: Request, depth: int) -> DraftRequest:
        session = request.session
        if session.draft is not None and session.draft.drafter is not self.drafter:
            self.holdings.drop_draft(session)
        if session.draft is None:
            first = session.first_kept
            session.draft = DraftState(self.drafter, self.drafter.new_state(), position=first, first=first)
        position = min(session.draft.position, session.cached - 1)  # at least the last row, to draft from
        session.draft.position = session.cached
        return DraftRequest(
            state=session.draft.handle,
            position=position,
            aux=session.aux_from(position),
            history=session.history,
            depth=depth,
            temperature=request.params.temperature,
            uniforms=request.drafting(depth),
        )

    # --- verify ---

    def _verify(self, works: list[Work]) -> list[SegmentOutput]:
        """One forward for all. If it raises, every request in it fails, and no session has changed."""
        self._stats.num_target_forwards += 1
        try:
            return self._target.forward([work.segment for work in works])
        except Exception as error:
            log.exception("The target's forward failed; %d generations end with it.", len(works))
            for work in works:
                failure = EngineUnavailable(f"The target's forward failed: {error}. The session keeps what was committed.")
                failure.__cause__ = error
                work.request.fail(failure)
            works.clear()
            return []

    # --- commit ---

    def _commit(self, work: Work, output: SegmentOutput) -> None:
        request, session = work.request, work.request.session
        if self._end_if_unwanted(request):
            return
        num_taken = 0
        if work.is_last_chunk:
            try:
                verdict = verify(output.logits, work.draft, request.processor, request.judging(len(work.draft.token_ids) + 1))
            except (SlipstreamError, ValueError) as error:  # unusable logits, or a draft outside its own distribution
                request.fail(error)
                return
            num_taken = request.take(verdict, output.logits)
            self._stats.generation_tokens += num_taken
            if work.is_decode:
                self._count(request, len(work.draft.token_ids), min(verdict.num_accepted, num_taken))
        num_rows = len(work.token_ids) + max(num_taken - 1, 0)  # the last taken token is pending: not computed yet
        assert session.cache is not None
        self._target.commit(session.cache, range(num_rows))
        self.holdings.keep(session, HiddenStates(output.hidden.aux[:num_rows].clone(), output.hidden.last[:num_rows].clone()))
        self._tell_dropped(request)
        if request.finish_reason is not None:
            self._finish(request)

    def _count(self, request: Request, num_drafted: int, num_accepted: int) -> None:
        request.speculation.record(num_drafted, num_accepted)
        if self._max_draft_tokens and request.params.speculate and request.session.options.drafter_policy.kind != "off":
            self._stats.for_version(self.drafter.version).record(num_drafted, num_accepted)

    def _finish(self, request: Request) -> None:
        """The turn is over: close its text, offer it to the tap."""
        request.finish()
        session = request.session
        session.compact_features()
        if self._tap is None or session.options.capture is Switch.OFF or request.num_emitted == 0:
            return
        history = tuple(session.history)
        self._tap.offer(
            CapturedTurn(
                session_id=session.id,
                token_ids=history,
                generated=tuple(index >= request.num_prompt_tokens for index in range(len(history))),
                hidden=tuple(session.features),
                labels=session.options.labels,
                drafter_version=request.drafter_versions[-1] if request.drafter_versions else "none",
                source="session",
            )
        )

    # --- drafters ---

    def swap(self, drafter: Drafter, sessions: Iterable[Session], pinned: Collection[str]) -> None:
        """The pointer switch. Sessions prime the new drafter from their kept features when they next draft; those that are
        pinned to the old one keep it."""
        old = self.drafter
        for session in sessions:
            is_pinned = session.options.drafter_policy.kind == "pinned"
            if session.draft is not None and session.draft.drafter is old and not is_pinned:
                self.holdings.drop_draft(session)
        self.drafter = self.drafters[drafter.version] = drafter
        if old.version not in pinned:
            self.forget(old.version)
        self._stats.num_swaps += 1

    def add(self, drafter: Drafter) -> None:
        """Sessions may be pinned to it from now on, until the last of them has gone."""
        self.drafters.setdefault(drafter.version, drafter)

    def forget(self, version: str) -> None:
        """Nobody is pinned to it any more."""
        if version != self.drafter.version:
            self.drafters.pop(version, None)

    # --- room ---

    def make_room(self, running: Iterable[Request], sessions: Iterable[Session], *, is_next_step: bool = False) -> bool:
        """Whether the budget holds what these have yet to take: the rest of their history and the next tokens behind it, or
        the rows of one step only."""
        need = self._step_bytes if is_next_step else self._growth_bytes
        return self.holdings.make_room(sum(map(need, running)), sessions)

    def _growth_bytes(self, request: Request) -> int:
        ahead = min(request.num_remaining, self._prefill_chunk_tokens)
        return self.holdings.growth_bytes(request.session, len(request.session.history) + ahead)

    def _step_bytes(self, request: Request) -> int:
        num_rows = min(_num_pending(request), self._prefill_chunk_tokens) + self._max_draft_tokens
        return self.holdings.growth_bytes(request.session, request.session.cached + num_rows)

    def awaits_prefix(self, request: Request, running: Iterable[Request]) -> bool:
        return self.holdings.awaits_prefix(request.session, [other.session for other in running])

    def stats(self) -> EngineStats:
        return self._stats.build(self.holdings.kv_bytes, self.holdings.budget_bytes, self.drafter.version)


class EngineStatsBuilder:
    """Counters of the engine's thread; `build` may be called from any thread."""

    def __init__(self) -> None:
        self.prompt_tokens = 0
        self.cached_prompt_tokens = 0
        self.generation_tokens = 0
        self.num_target_forwards = 0
        self.num_drafter_failures = 0
        self.num_swaps = 0
        self._by_version: dict[str, SpeculationStats] = {}

    def for_version(self, version: str) -> SpeculationStats:
        return self._by_version.setdefault(version, SpeculationStats())

    def build(self, kv_bytes: int, kv_budget_bytes: int, drafter_version: str) -> EngineStats:
        return EngineStats(
            kv_bytes=kv_bytes,
            kv_budget_bytes=kv_budget_bytes,
            prompt_tokens=self.prompt_tokens,
            cached_prompt_tokens=self.cached_prompt_tokens,
            generation_tokens=self.generation_tokens,
            num_target_forwards=self.num_target_forwards,
            num_drafter_failures=self.num_drafter_failures,
            speculation={version: stats.copy() for version, stats in self._by_version.copy().items()},
            drafter_version=drafter_version,
            num_swaps=self.num_swaps,
        )


def _num_pending(request: Request) -> int:
    return len(request.session.history) - request.session.cached


def _clip(draft: Draft, depth: int, vocab_size: int) -> Draft:
    """What the target can verify of a proposal: at most `depth` tokens, none outside the vocabulary or without its `probs`."""
    token_ids = draft.token_ids[: depth if draft.probs is None else min(depth, len(draft.probs))]
    bad = next((k for k, token_id in enumerate(token_ids) if not 0 <= token_id < vocab_size), len(token_ids))
    return Draft(token_ids[:bad], None if draft.probs is None else draft.probs[:bad])

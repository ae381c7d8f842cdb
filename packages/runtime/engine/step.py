"""One step of the engine, as four verbs: schedule, draft, verify, commit. All of it runs on the engine's thread.

    schedule  which tokens of which sessions go into the forward: one pending token each, or a chunk of prompt
    draft     drafters catch up on what became history and propose a chain or a tree for every decoding session
    verify    one ragged target forward over pending tokens, drafts and prompt chunks together
    commit    accepted tokens become history, their K/V and hidden states are kept, the rest is forgotten

Invariant between steps: K/V and kept features of a session cover history[:cached]. A turn whose last token is not covered
yet takes part in one forward more, from which nothing is sampled; so between turns cached == len(history).
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterable, Sequence

import torch

from runtime.backends.base import SegmentOutput, Target
from runtime.backends.whole_steps import Fuses
from runtime.config import SessionsConfig, SpeculationConfig, SpeculationMode
from runtime.drafters.base import Drafter
from runtime.engine.base import EngineStats
from runtime.engine.calibration import measure_forward
from runtime.engine.drafting import Drafting
from runtime.engine.flights import Outcome
from runtime.engine.fused import FusedSteps
from runtime.engine.holdings import ROOM_TOKENS, Holdings, Readers
from runtime.engine.request import Request
from runtime.engine.stats import EngineStatsBuilder
from runtime.engine.work import Work
from runtime.errors import EngineUnavailable, ModelError, SlipstreamError
from runtime.features.tap import Tap
from runtime.hidden_states import HiddenStates
from runtime.sessions.session import Session
from runtime.speculation.accept import Contradiction, Verdict, verify
from runtime.speculation.depth import Pacer
from runtime.types import HistoryTruncated, Switch

log = logging.getLogger(__name__)

CHUNK_TOKENS = (256, 2048)  # of prompts in one forward; the latter where whole steps run on a device
LEAST_CHUNK_TOKENS = 64  # of one prompt: where many wait, they take turns rather than crumbs
_NO_LOGITS = torch.empty(0)


class Stepper:
    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        speculation: SpeculationConfig,
        sessions: SessionsConfig,
        tap: Tap | None,
    ) -> None:
        keeps_features = tap is not None or speculation.max_draft_tokens > 0 or not sessions.patient
        self.holdings = Holdings(target, sessions, keeps_features)
        self._pacer = Pacer(speculation)
        self.drafting = Drafting(drafter, self._pacer, self.holdings, target.info)
        self._target = target
        self._info = target.info
        self._speculation = speculation
        self._prefill_chunk_tokens = sessions.prefill_chunk_tokens or CHUNK_TOKENS[isinstance(target, Fuses)]
        self._num_turns = 0
        self._tap = tap
        self._stats = EngineStatsBuilder()
        self._fused: FusedSteps | None = None
        if isinstance(target, Fuses):
            self._fused = FusedSteps(target, self.drafting, speculation, sessions)
            self.holdings.budget_bytes = min(self.holdings.budget_bytes, target.capacity_bytes)

    @property
    def max_sessions(self) -> int:
        """Of a step: as many as the device takes whole steps of, since those beyond would hold all others up."""
        return sys.maxsize if self._fused is None else self._fused.max_sessions

    def prepare(self) -> None:
        """Before the first step: measure what there is to measure, if anything depends on it."""
        if self._speculation.mode is SpeculationMode.ADAPTIVE and self._speculation.max_draft_tokens:
            self._pacer.costs = measure_forward(self._target)
        if self._fused is not None:
            self._fused.prepare()

    @torch.inference_mode()
    def step(self, batch: Sequence[Request]) -> None:
        """Advance every request of the batch by at most one forward; those that ended have `is_over` set."""
        works = self._schedule(batch)
        if self._fused is not None:
            on_device, works = self._fused.split(works)
            if works and not any(work.gives_tokens for work in works):
                self._step(works)  # behind the step that is under way, without a wait: the one after it has them already
                on_device += [work for work in self._just_read(works) if self._fused.takes(work)]
                works = []
            self._advance(self._fused, on_device)
        if works:
            self._step(works)
        self.holdings.count()

    def _just_read(self, works: Sequence[Work]) -> list[Work]:
        """Those of these whose prompt is read to its last token, which is pending now."""
        ready = [work.request for work in works if not (work.request.is_ending or work.request.is_over)]
        return [self._plan(request, 1) for request in ready if _num_pending(request) == 1]

    def _step(self, works: list[Work]) -> None:
        began, decoding = time.perf_counter(), [work for work in works if work.is_decode]
        self.drafting.draft(decoding)
        started, context = time.perf_counter(), sum(work.request.session.cached for work in works) // len(works)
        outputs = self._verify(works)
        for work, output in zip(works, outputs, strict=True):
            try:
                self._commit(work, output)
            except Exception as error:
                self._give_up(work.request, error)
        if self._pacer.costs is not None and len(decoding) == len(works) == len(outputs):
            num_rows = sum(1 + len(work.draft.token_ids) for work in works)
            self._pacer.costs.record_forward(len(works), num_rows, context, time.perf_counter() - started)
        if self._fused is not None:
            self._fused.spent_elsewhere(time.perf_counter() - began)

    # --- schedule ---

    def _schedule(self, batch: Sequence[Request]) -> list[Work]:
        live = [request for request in batch if self._goes_on(request)]
        shares = self._read_in_turn([request for request in live if _num_pending(request) > 1])
        return [self._plan(request, share) for request in live if (share := shares.get(id(request), 1))]

    def _read_in_turn(self, prefilling: Sequence[Request]) -> dict[int, int]:
        """By request's id: tokens of its prompt to read in this step, which may be none. Who waited longest comes first, and of
        those that waited alike, who has least to read."""
        self._num_turns += 1
        left, shares = self._prefill_chunk_tokens, {}
        share = max(LEAST_CHUNK_TOKENS, left // max(len(prefilling), 1))
        for request in prefilling:
            request.waits_since = request.waits_since or self._num_turns
        for request in sorted(prefilling, key=lambda request: (request.waits_since, _num_pending(request))):
            wanted = min(_num_pending(request), share, self._prefill_chunk_tokens)
            shares[id(request)] = given = min(wanted, left)
            left -= given
            if given == wanted:  # who gets less, or nothing, keeps its place
                request.waits_since = self._num_turns + 1
        return shares

    def _goes_on(self, request: Request) -> bool:
        """Whether it takes part in this step. What goes wrong with one request is no other's business."""
        try:
            return not self._end(request) and self._enter(request)
        except Exception as error:
            self._give_up(request, error)
            return False

    def _end(self, request: Request) -> bool:
        """Whether the turn ends here: nothing more is wanted of it, and K/V covers the history or is not worth a forward."""
        if not request.is_ending:
            return False
        session = request.session
        if _num_pending(request) == 1 and request.is_started and session.cached > 0 and not session.is_closed:
            return False
        self._finish(request)
        return True

    def _enter(self, request: Request) -> bool:
        """For the first time, or again after it had to wait: what of its history is cached is known from here on.

        False: the target had no room for it, so it failed; the others go on.
        """
        if request.is_started and request.session.cache is not None:
            return True
        try:
            self.holdings.open(request.session)
        except Exception as error:  # a device's own, most likely
            log.exception("No K/V for session %s; its generation ends.", request.session.id)
            request.fail(EngineUnavailable(f"The target gave no room for the session's K/V: {error}. Try again later."))
            return False
        if not request.is_started:
            request.start(self.drafting.active.version, self._info.fingerprint)
            self._stats.prompt_tokens += request.num_prompt_tokens
            self._stats.cached_prompt_tokens += request.num_cached_tokens
        self._tell_dropped(request)
        return True

    def _tell_dropped(self, request: Request) -> None:
        session = request.session
        if session.dropped and not session.has_told_drop:
            session.has_told_drop = True
            request.emit(HistoryTruncated(session.dropped))

    def _plan(self, request: Request, share: int) -> Work:
        session = request.session
        num_pending = _num_pending(request)
        if num_pending > 1 and self._fused is not None and self._fused.picks_first(request):
            share = min(share, num_pending - 1)
        token_ids = session.history[session.cached : session.cached + share]
        is_last_chunk = session.cached + len(token_ids) == len(session.history)
        is_left = self._fused is not None and not request.is_ending and num_pending > 1
        return Work(request, token_ids, is_last_chunk, is_settling=request.is_ending, is_left=is_left)

    # --- verify ---

    def _verify(self, works: list[Work]) -> list[SegmentOutput]:
        """One forward for all. If it raises, every request in it fails, and no session has changed."""
        self._stats.num_target_forwards += 1
        try:
            return self._target.forward([work.segment for work in works])
        except Exception as error:
            self._fail(works, error)
            return []

    def _fail(self, works: list[Work], error: Exception) -> None:
        """The forward raised."""
        log.error("The target's forward failed; %d generations end with it.", len(works), exc_info=error)
        for work in works:
            if work.is_settling:  # all its tokens have left already
                self._finish(work.request)
                continue
            failure = EngineUnavailable(f"The target's forward failed: {error}. The session keeps what was committed.")
            failure.__cause__ = error.with_traceback(None)  # whose frames have the request
            work.request.fail(failure)
            if self._fused is not None:
                self._fused.leave(work.request.session)
        works.clear()

    # --- commit ---

    def _commit(self, work: Work, output: SegmentOutput) -> None:
        request, session = work.request, work.request.session
        if session.is_closed:
            self._finish(request)
            return
        path: Sequence[int] = ()
        if work.gives_tokens and not request.is_ending:
            try:
                verdict = self._judge(work, output)
            except SlipstreamError as error:  # unusable logits
                request.fail(error)
                return
            self.drafting.record(work, verdict.path)
            num_taken = request.take(verdict, output.logits, is_prefills=not work.is_decode)
            path = verdict.path[:num_taken]
            if work.is_decode:
                self._count(work, num_taken, len(path), len(work.draft.token_ids), work.draft.depth)
            else:
                self._stats.generation_tokens += num_taken
        rows = work.rows(path)
        assert session.cache is not None
        self._target.commit(session.cache, rows)
        is_kept = self.holdings.keeps_features and not session.num_behind and not work.is_left
        self.holdings.keep(session, len(rows), _kept(output.hidden, rows) if is_kept else None)
        self._tell_dropped(request)
        if request.is_ending:
            self._end(request)

    def _judge(self, work: Work, output: SegmentOutput) -> Verdict:
        """What the target keeps of the draft, and its own token. Of a draft that contradicts its own `probs` nothing is looked at
        from there on: what was decided before stays, or it would be decided twice."""
        request = work.request
        try:
            return verify(output.logits, work.draft, request.processor, request.judging(work.draft.depth + 1))
        except SlipstreamError:
            raise
        except Exception as error:
            if not work.draft.token_ids:
                raise
            version = "none" if work.drafter is None else work.drafter.version
            log.exception("A draft of drafter %s cannot be judged; this step runs without it.", version)
            self.drafting.num_failures += 1
            num_sound = error.node if isinstance(error, Contradiction) else 0
            work.draft = work.draft.only(range(num_sound))
            return verify(output.logits[: num_sound + 1], work.draft, request.processor, request.judging(num_sound + 1))

    def _give_up(self, request: Request, error: Exception) -> None:
        """What went wrong with one session's result ends this generation and no other. Nobody knows what its K/V holds then."""
        log.error("What a step gave session %s could not be kept; its generation ends.", request.session.id, exc_info=error)
        self.holdings.release(request.session)
        failure = EngineUnavailable(f"The step's result could not be kept: {error}. The session keeps its tokens; try again.")
        failure.__cause__ = error.with_traceback(None)
        request.fail(failure)

    # --- both, on the device ---

    def _advance(self, fused: FusedSteps, works: list[Work]) -> None:
        """A step of these that the device makes by itself."""
        steps_before, tokens_before = fused.num_steps, self._stats.generation_tokens
        try:
            outcomes = fused.run(works)
        except Exception as error:
            fused.abandon()
            for work in works:  # nobody knows what its K/V holds now
                self.holdings.release(work.request.session)
            self._fail(works, error)
            return
        finally:
            self._stats.num_target_forwards += fused.num_steps - steps_before
        for outcome in outcomes:
            try:
                self._keep(fused, outcome)
            except Exception as error:
                self._give_up(outcome.work.request, error)
        fused.note_taken(self._stats.generation_tokens - tokens_before)

    def _keep(self, fused: FusedSteps, outcome: Outcome) -> None:
        """As `_commit`, but the K/V is there already, and too much of it where the turn ends early."""
        work, verdict = outcome
        request, session, num_there = work.request, work.request.session, len(verdict.token_ids)
        if session.is_closed:
            self._finish(request)
            return
        assert session.cache is not None
        num_rows = 1
        if not request.is_ending:
            if min(verdict.token_ids) < 0:
                self._target.truncate(session.cache, session.cached)
                fused.leave(session)
                request.fail(ModelError("The target's logits are unusable: none is finite. Check its weights, or try float32."))
                return
            num_taken, depth = request.take(verdict, _NO_LOGITS), work.shape.depth
            num_rows = min(num_taken + 1, num_there)  # K/V of the last one taken is there too, unless it is pending
            if depth:
                self._count_row(work, num_taken, verdict.sizes, depth)
            else:
                self._count(work, num_taken, 0, 0, 0, num_taken)
        if num_rows < num_there:
            self._target.truncate(session.cache, session.cached + num_rows)
        self.holdings.keep(session, num_rows, None)
        self._tell_dropped(request)
        if request.is_ending:
            self._end(request)

    def _count_row(self, work: Work, num_taken: int, sizes: Sequence[int], depth: int) -> None:
        """Of the steps in a row those of which something was taken."""
        for size in sizes:
            if num_taken > 0:
                self._count(work, min(size, num_taken), min(size - 1, num_taken), depth, depth)
            num_taken -= size

    def _count(self, work: Work, num_taken: int, num_accepted: int, num_drafted: int, depth: int, num_steps: int = 1) -> None:
        self._stats.generation_tokens += num_taken
        work.request.steps.add(num_drafted, num_accepted, depth, num_steps)
        if work.drafter is not None:
            self._stats.of_version(work.drafter.version).add(num_drafted, num_accepted, depth, num_steps)

    def _finish(self, request: Request) -> None:
        """Nothing more is computed for the turn: close its text, offer it to the tap, whose trouble is no generation's."""
        request.finish()
        if self._fused is not None:
            self._fused.leave(request.session)
        try:
            self._offer(request)
        except Exception:
            log.exception("A turn of session %s could not be captured; its K/V is computed anew.", request.session.id)
            self.holdings.release(request.session)

    def _offer(self, request: Request) -> None:
        session = request.session
        has_states = _num_pending(request) <= 1  # not where it ends while it waits for room, or before all is read anew
        is_offered = session.options.capture is not Switch.OFF and request.num_emitted > 0 and has_states
        if self._tap is not None and is_offered:
            self.holdings.catch_up(session)
        session.compact_features()
        if self._tap is not None and is_offered:
            self._tap.offer(request.captured())

    # --- room ---

    def make_room(self, num_bytes: int, sessions: Iterable[Session]) -> bool:
        """Whether the budget holds so many more; sessions at rest give up their K/V for it."""
        return self.holdings.make_room(num_bytes, sessions)

    def growth_bytes(self, request: Request) -> int:
        """What it has yet to take: the rest of its history and the next tokens behind it."""
        ahead = min(request.num_remaining, self._prefill_chunk_tokens, ROOM_TOKENS)
        return self.holdings.growth_bytes(request.session, len(request.session.history) + ahead)

    def step_bytes(self, request: Request) -> int:
        """The same for the rows of one step only."""
        num_rows = min(_num_pending(request), self._prefill_chunk_tokens) + self._speculation.max_draft_nodes
        return self.holdings.growth_bytes(request.session, request.session.cached + num_rows)

    def surely_has_room(self, num_requests: int) -> bool:
        """Whether a step of so many fits into the budget, whoever they are."""
        return self.holdings.surely_has_room(num_requests, self._speculation.max_draft_nodes, self._prefill_chunk_tokens)

    def awaits_prefix(self, request: Request, reading: Readers) -> bool:
        return self.holdings.awaits_prefix(request.session, reading.like(request.session))

    def stats(self) -> EngineStats:
        held, drafts = self.holdings, self.drafting
        return self._stats.build(held.kv_bytes, held.budget_bytes, drafts.active.version, drafts.num_failures, drafts.num_swaps)


def _num_pending(request: Request) -> int:
    return len(request.session.history) - request.session.cached


def _kept(hidden: HiddenStates, rows: Sequence[int]) -> HiddenStates:
    """A copy of these rows: a view would keep all of the forward's."""
    if isinstance(rows, range):
        return HiddenStates(hidden.aux[: len(rows)].clone(), hidden.last[: len(rows)].clone())
    return hidden[torch.tensor(rows, device=hidden.aux.device)]

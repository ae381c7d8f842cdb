"""Steps that run on the device as a whole, for the sessions whose tokens need no look by the host: greedy and sampled decoding
that no penalty, bias or grammar bends and no log-probabilities are asked of.

A target that can (`backends.whole_steps`) gives a decoder that drafts, verifies and accepts without the host in between. All
that a step needs of the one before it is on the device, so it is launched before that one has been looked at, and the device
never waits for the host: who turns out to have ended meanwhile is left out when it is collected.

    device   | step 1        | step 2        | step 3        |
    host       launch 2        collect 1, take 1, launch 3     collect 2, take 2, launch 4

Everything else goes the general way of `step`, and a session may change from one way to the other at any step. Prompts are read
there up to their last token, behind the step that is under way, and the step after it begins with that token. Stops and length
limits cut what was emitted, as there; who ends with a token that has no K/V yet takes part in the next step for that alone. With
many sessions, several steps are launched in a row and looked at together: there it is the host that takes the time.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace

from runtime.backends.whole_steps import Fuses
from runtime.config import SessionsConfig, SpeculationConfig, SpeculationMode, TreeShape
from runtime.drafters.base import Drafter
from runtime.drafters.eagle3 import Eagle3Drafter
from runtime.drafters.none import NoDrafter
from runtime.engine.drafting import Drafting, ask_for
from runtime.engine.flights import Flight, Landed, Lessons, Outcome
from runtime.engine.request import Request
from runtime.engine.work import Work
from runtime.errors import EngineUnavailable
from runtime.garbage import set_apart_what_is_loaded
from runtime.sessions.session import Session
from runtime.speculation.accept import Verdicts
from runtime.speculation.costs import StepCosts
from runtime.speculation.depth import Pacer
from runtime.speculation.shape import PLAIN, Shape

MAX_DEPTH = 7  # of a chain on the device, whatever the settings allow elsewhere
SOME_SESSIONS = 12  # from so many on steps come in a row,
MANY_SESSIONS = 48  # and from so many on in longer ones,
ROW_SECONDS = 0.03  # but none much longer than this: new requests wait meanwhile,
PATIENT_SECONDS = 0.2  # or this where nobody minds
PLAIN_STEPS = 4  # of a row; any number where many sessions are and none could draft: the pacer looks between rows only
DRAFTED_STEPS = (2, 3)  # of some sessions and of many: who ends in between has taken the place of somebody else
STEPS_BESIDE_PROMPTS = 2  # at most where nothing is drafted: a prompt has a chunk of it read between two rows


class FusedSteps:
    def __init__(
        self,
        target: Fuses,
        drafting: Drafting,
        speculation: SpeculationConfig,
        sessions: SessionsConfig,
    ) -> None:
        self._info, self._drafting = target.info, drafting
        # Its own: costs here are other than elsewhere.
        self._pacer = Pacer(replace(speculation, shape=TreeShape.CHAIN), whole_steps=True)
        self._is_adaptive = speculation.mode is SpeculationMode.ADAPTIVE and speculation.max_draft_tokens > 0
        self._drafts = speculation.max_draft_tokens > 0
        self._only_trees = speculation.shape is TreeShape.TREE  # which are drafted the general way
        depth = 0 if self._only_trees else min(speculation.max_draft_tokens, MAX_DEPTH)
        self._decoder = target.new_decoder(depth, sessions.max_batch_sessions)
        self._is_patient = sessions.patient
        self._loaded: Drafter | None = None  # whose weights the decoder has
        self._can_draft = False  # whether it took them
        self._steps: deque[list[Flight]] = deque()  # under way: of each those that draft and those that do not
        self._landed_at = 0.0
        self._waited_s = 0.0  # for the last one that landed
        self._learned_s = 0.0  # that would have been a wait for the next one
        self._elsewhere_s = 0.0  # that the host spent on the general way since then
        self._seconds: dict[tuple[int, int], float] = {}  # of steps by number of sessions and depth, as first measured
        self._lessons = Lessons(self._pacer)
        self._is_alone = False  # nobody goes the general way in this step
        self.num_steps = 0  # so far

    @property
    def max_sessions(self) -> int:
        return self._decoder.max_sequences

    def prepare(self) -> None:
        """Before the first step: have everything compiled and measured."""
        self._load()
        self._seconds = self._decoder.warm_up(self._decoder.max_sequences)
        if self._is_adaptive:
            self._lessons.costs = {samples: StepCosts(self._seconds) for samples in (False, True)}
            self._pacer.costs = self._lessons.costs[False]
        set_apart_what_is_loaded()

    # --- who runs here ---

    def split(self, works: Sequence[Work]) -> tuple[list[Work], list[Work]]:
        """Of at most `max_sessions` those that run here, and those that go the general way."""
        here: list[Work] = []
        rest: list[Work] = []
        for work in works:
            if self.takes(work):
                here.append(work)
            else:
                rest.append(work)
                self.leave(work.request.session)
        self._is_alone = not rest
        return here, rest

    def leave(self, session: Session) -> None:
        if session.cache is not None:
            self._decoder.leave(session.cache)

    def abandon(self) -> None:
        """A step raised: nothing that is under way is looked at any more."""
        self._steps.clear()
        self._lessons.forget()
        self._decoder.abandon()

    def takes(self, work: Work) -> bool:
        if work.is_settling:
            return any(id(work.request) in flight.requests for flights in self._steps for flight in flights)
        return work.is_decode and self._has_room(work, 0) and self._picks(work.request)

    def picks_first(self, request: Request) -> bool:
        """Whether the prompt's last token comes here as the pending one, so that the first answer token is picked here too."""
        return request.num_remaining > 0 and self._picks(request)

    def _picks(self, request: Request) -> bool:
        """Whether the device alone can say what comes next, and draft for it."""
        if not request.is_bare:
            return False
        drafter = self._drafter_for(request)
        return drafter is None or (drafter is self._drafting.active and (drafter is not self._loaded or self._can_draft))

    def _has_room(self, work: Work, num_new: int) -> bool:
        """Whether another step stays within the model's positions, so many tokens from now."""
        return self._info.max_positions - len(work.request.session.history) - num_new > self._decoder.max_depth

    def _drafter_for(self, request: Request) -> Drafter | None:
        if not self._drafts:
            return None
        drafter = self._drafting.drafter_for(request)
        return None if isinstance(drafter, NoDrafter) else drafter

    def _load(self) -> None:
        active = self._drafting.active
        if self._loaded is not active:
            self._lessons.learn(self._loaded)
            if self._loaded is not None:
                self._pacer.forget(self._loaded.version)
            self._loaded = active
            self._can_draft = (
                not self._only_trees and isinstance(active, Eagle3Drafter) and self._decoder.load_drafter(active.model)
            )

    def note_taken(self, num_tokens: int) -> None:
        """How many tokens of what `run` said became history."""
        self._lessons.note_taken(num_tokens)

    def spent_elsewhere(self, seconds: float) -> None:
        """On the general way, between two steps here."""
        self._elsewhere_s += seconds

    # --- steps ---

    def run(self, works: Sequence[Work]) -> list[Outcome]:
        """What the step under way emits for those of these that are in it; what a step emits for these, if none is."""
        live = [work for work in works if not work.is_settling]
        if self._steps:
            self._take_off_ahead(live)
            if self._lessons.fit_into(self._waited_s) and not self._decoder.has_landed():
                self._learned_s = self._lessons.learn(self._loaded)
            elif self._lessons.is_overdue:
                self._lessons.learn(self._loaded)
        landed = [self._land(flight, works) for flight in (self._steps.popleft() if self._steps else ())]
        if not self._steps:
            self._load()  # nothing is under way: a swap takes effect here
            if not any(part.works for part in landed) and self._can_draft_all(live):
                parts = self._parts(live)
                landed = [self._land(self._launch(part, depth, {}, time.perf_counter()), part) for part, depth in parts]
            self._take_off(live, {id(work.request): new.token_ids for part in landed for work, _, new in part.works})
        self._lessons.note(landed)
        if not self._steps:
            self._lessons.learn(self._loaded)
        return [outcome for part in landed for outcome in part.outcomes()]

    def _take_off_ahead(self, works: Sequence[Work]) -> None:
        """Begin the step after the one that is under way, whatever that one brings; unless a swap waits for its end, or all may
        end with it."""
        if self._loaded is not self._drafting.active or not self._can_draft_all(works):
            return
        ahead = {id(work.request): flight for flight in self._steps[-1] for work in flight.works}
        most = [flight.most_tokens if (flight := ahead.get(id(work.request))) else 0 for work in works]
        if all(work.request.num_remaining <= num for work, num in zip(works, most, strict=True)):
            return
        if not all(self._has_room(work, num) for work, num in zip(works, most, strict=True)):
            return
        parts = self._parts([Work(work.request, work.token_ids, is_last_chunk=True) for work in works])
        if all(self._goes_on(work, depth, ahead) for part, depth in parts for work in part):
            num_ahead = {request: flight.most_tokens for request, flight in ahead.items()}
            self._begin(parts, num_ahead, time.perf_counter())

    def _goes_on(self, work: Work, depth: int, ahead: Mapping[int, object]) -> bool:
        """Whether the device needs nothing of what the host is to hear yet."""
        return id(work.request) not in ahead or self._decoder.can_continue(_cache(work), depth)

    def _begin(self, parts: Sequence[tuple[list[Work], int]], num_ahead: Mapping[int, int], began: float) -> None:
        """num_ahead: tokens that the host has not taken yet, by request's id."""
        flights: list[Flight] = []
        for part, depth in parts:
            try:
                flights.append(self._launch(part, depth, num_ahead, began))
            except EngineUnavailable:  # no room; the tokens of this step must not suffer, and the next step will ask again
                break
        if flights:
            self._steps.append(flights)

    def _can_draft_all(self, works: Sequence[Work]) -> bool:
        """False for one step after a swap to a drafter that cannot run here: its sessions go the general way from then on."""
        return self._can_draft or all(self._drafter_for(work.request) is None for work in works)

    def _take_off(self, works: Sequence[Work], new: Mapping[int, Sequence[int]]) -> None:
        """Begin the step after this one for all that it may have, unless the host is needed first. new: by request's id, the
        tokens that just came for it."""
        began = time.perf_counter()
        going: list[Work] = []
        num_ending = 0  # of them: only the K/V of the last token is missing
        for work in works:
            request, new_ids = work.request, new.get(id(work.request), ())
            if (is_ending := request.ends_within(new_ids)) and not (new_ids and request.ends_at(new_ids)):
                continue
            if self._has_room(work, len(new_ids)):
                num_ending += is_ending
                going.append(Work(request, work.token_ids, is_last_chunk=True))
        parts = self._parts(going) if self._can_draft_all(going) else []
        if going and num_ending == len(going):
            parts = [(going, 0)]
        if all(self._goes_on(work, depth, new) for part, depth in parts for work in part):
            self._begin(parts, {request: len(new_ids) for request, new_ids in new.items()}, began)

    def _parts(self, works: Sequence[Work]) -> list[tuple[list[Work], int]]:
        """Those that draft, and how deep, and those that do not. The pacer says it; here all drafts are chains, and those that
        draft share the greatest depth, but for those whose requests allow less, who share the least that one of them does."""
        if not self._decoder.max_depth or not works:
            return [(list(works), 0)] if works else []
        drafting: list[Work] = []
        for work in works:
            work.drafter = self._drafter_for(work.request)
            if work.drafter is not None:
                work.ask = ask_for(work, self._decoder.max_depth)  # near its end too: those few steps are not worth a choice
                drafting.append(work)
        asks = [work.ask for work in drafting if work.ask is not None]
        if costs := self._lessons.costs:
            self._pacer.costs = costs[any(not work.request.params.is_greedy for work in works)]
        shapes = self._pacer.held(asks, len(works)) if asks else []
        if shapes is None:
            shapes = self._pacer.choose(asks, len(works), _context(works))
        limit = self._decoder.depth_of(sum(shape.depth > 0 for shape in shapes))
        depth = min(max((shape.depth for shape in shapes), default=0), limit, max(work.request.num_remaining for work in works))
        less = min((work.ask.limit for work in drafting if work.ask is not None and 0 < work.ask.limit < depth), default=depth)
        for work, shape in zip(drafting, shapes, strict=True):
            assert work.ask is not None
            work.shape = Shape(depth if work.ask.limit >= depth else less) if shape.depth else PLAIN
        parts = [([work for work in works if work.shape.depth == part_depth], part_depth) for part_depth in {depth, less, 0}]
        return [(part, part_depth) for part, part_depth in sorted(parts, key=lambda part: -part[1]) if part]

    def _launch(self, works: list[Work], depth: int, num_ahead: Mapping[int, int], began: float) -> Flight:
        """began: from when on this one takes its time, if none before it does."""
        caches = [_cache(work) for work in works]
        histories = [work.request.session.history for work in works]
        sampled = [work.request.sampled for work in works]
        num_steps = self._num_in_a_row(works, depth, num_ahead)
        if not self._steps:
            self._elsewhere_s = 0.0  # it was spent before this one began
        is_typical = self._decoder.launch(caches, histories, sampled, depth, num_steps)
        self.num_steps += num_steps
        requests = {id(work.request) for work in works}
        has_sampled = any(one is not None for one in sampled)
        return Flight(works, requests, caches, depth, num_steps, began, has_sampled, is_typical, self._is_alone)

    def _num_in_a_row(self, works: list[Work], depth: int, num_ahead: Mapping[int, int]) -> int:
        """Steps before the host looks again: as many as are of use to somebody, and stay within the model's positions."""
        if len(works) < SOME_SESSIONS:
            return 1
        are_many = len(works) >= MANY_SESSIONS
        if depth:
            most = DRAFTED_STEPS[are_many]
        elif not (self._is_alone or self._is_patient):
            most = STEPS_BESIDE_PROMPTS
        else:
            most = self._decoder.max_steps if are_many and all(work.ask is None for work in works) else PLAIN_STEPS
        of_one = min(
            (seconds for (num, deep), seconds in self._seconds.items() if deep == depth and num >= len(works)), default=0.0
        )
        num = min(most, int((PATIENT_SECONDS if self._is_patient else ROW_SECONDS) / max(of_one, 1e-6)))
        num_new = [num_ahead.get(id(work.request), 0) for work in works]
        of_use = max(work.request.num_remaining - more for work, more in zip(works, num_new, strict=True))
        longest = max(len(work.request.session.history) + more for work, more in zip(works, num_new, strict=True))
        return max(min(num, of_use, (self._info.max_positions - longest) // (depth + 1)), 1)

    def _land(self, flight: Flight, works: Sequence[Work]) -> Landed:
        """The end of a step, for those of these that are in it, with the cache that they had when it began."""
        present = {id(work.request): work for work in works}
        mine: list[Work | None] = []
        for launched, cache in zip(flight.works, flight.caches, strict=True):
            work = present.get(id(launched.request))
            mine.append(None if work is None or work.request.session.cache != cache else work)
        emitted = self._decoder.collect([work is not None for work in mine])
        self._waited_s, self._learned_s = emitted.waited_s + self._learned_s, 0.0
        began, self._landed_at = max(flight.began, self._landed_at), time.perf_counter()
        seconds, self._elsewhere_s = max(self._landed_at - began - self._elsewhere_s, self._waited_s), 0.0
        landed: list[tuple[Work, Work, Verdicts]] = []
        for index, (work, launched, new) in enumerate(zip(mine, flight.works, emitted.tokens, strict=True)):
            if work is not None and new:
                sizes = (1,) * len(new) if not flight.depth else emitted.sizes[index] if emitted.sizes else (len(new),)
                landed.append((work, launched, Verdicts(new, sizes)))
        return Landed(landed, flight, seconds, self._waited_s, emitted.device_s)


def _cache(work: Work) -> int:
    cache = work.request.session.cache
    assert cache is not None
    return cache


def _context(works: Sequence[Work]) -> int:
    return sum(work.request.session.cached for work in works) // max(len(works), 1)

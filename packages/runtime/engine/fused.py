"""Steps that run on the device as a whole, for the sessions whose tokens need no look by the host: plain greedy decoding.

A target that can (`Fuses`) gives a decoder that drafts, verifies and accepts without the host in between; what a step emitted
comes back at once for all its sessions. Everything else, prompts among it, goes the general way of `step`, and a session may
change from one way to the other at any step. Stops and length limits cut what was emitted, as there.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

from runtime.backends.base import Target
from runtime.config import SpeculationConfig, SpeculationMode, TreeShape
from runtime.drafters.base import Draft, Drafter
from runtime.drafters.eagle3 import Eagle3Drafter
from runtime.eagle3.model import Eagle3Model
from runtime.engine.drafting import Drafting
from runtime.engine.work import Work
from runtime.hidden_states import HiddenStates
from runtime.sessions.session import Session
from runtime.speculation.accept import Verdict
from runtime.speculation.costs import Costs
from runtime.speculation.depth import Ask, Pacer, Shape
from runtime.types import SamplingParams

MAX_DEPTH = 7  # of a chain on the device, whatever the settings allow elsewhere


class Decoder(Protocol):
    """Whole steps on the device. See the CUDA backend's for what they do."""

    @property
    def max_sequences(self) -> int: ...

    @property
    def max_depth(self) -> int: ...

    def load_drafter(self, model: Eagle3Model) -> bool:
        """Draft with this network from the next step on. False, and no change, if it cannot."""
        ...

    def step(self, caches: Sequence[int], histories: Sequence[Sequence[int]], depth: int) -> tuple[list[list[int]], HiddenStates]:
        """New tokens of each, the last of them pending (-1: no finite logits), and states [n, depth + 1, ...] of the rows."""
        ...

    def leave(self, cache: int) -> None:
        """The cache goes on elsewhere, or nowhere. Also for one that was never here."""
        ...

    def warm_up(self, num_sequences: int) -> dict[int, float]:
        """Compile what steps of up to so many sequences need; seconds of a plain step by their number."""
        ...


@runtime_checkable
class Fuses(Target, Protocol):
    """A target that runs whole steps."""

    def new_decoder(self, max_depth: int) -> Decoder: ...


@dataclass(frozen=True)
class Outcome:
    """What a step emitted for one session, and the states of its rows. All rows but that of the last token are committed."""

    work: Work
    verdict: Verdict
    hidden: HiddenStates


class FusedSteps:
    def __init__(self, target: Fuses, drafting: Drafting, speculation: SpeculationConfig) -> None:
        self._info, self._drafting = target.info, drafting
        self._pacer = Pacer(replace(speculation, shape=TreeShape.CHAIN))  # its own: costs here are other than elsewhere
        self._is_adaptive = speculation.mode is SpeculationMode.ADAPTIVE and speculation.max_draft_tokens > 0
        self._decoder = target.new_decoder(min(speculation.max_draft_tokens, MAX_DEPTH))
        self._loaded: Drafter | None = None  # whose weights the decoder has
        self._can_draft = False  # whether it took them

    def prepare(self, num_sequences: int) -> None:
        """Before the first step: have everything compiled and measured."""
        self._load()
        seconds = self._decoder.warm_up(num_sequences)
        if self._is_adaptive:
            self._pacer.costs = Costs(seconds)

    def split(self, works: Sequence[Work]) -> tuple[list[Work], list[Work]]:
        """Those that run here, and those that go the general way."""
        self._load()
        here: list[Work] = []
        rest: list[Work] = []
        for work in works:
            if len(here) < self._decoder.max_sequences and self._takes(work):
                here.append(work)
            else:
                rest.append(work)
                self.leave(work.request.session)
        return here, rest

    def leave(self, session: Session) -> None:
        if session.cache is not None:
            self._decoder.leave(session.cache)

    def run(self, works: Sequence[Work]) -> list[Outcome]:
        """One step for these; those that draft and those that do not are a step each."""
        context = sum(work.request.session.cached for work in works) // max(len(works), 1)
        self._choose(works, context)
        outcomes: list[Outcome] = []
        for is_drafting in (True, False):
            part = [work for work in works if bool(work.shape.depth) == is_drafting]
            if part:
                outcomes += self._step(part, max(work.shape.depth for work in part), context)
        return outcomes

    def record(self, outcome: Outcome, path: Sequence[int]) -> None:
        """What became of a draft: the nodes that were accepted."""
        work = outcome.work
        if work.ask is not None and work.shape.depth:
            self._pacer.record(work.ask, work.shape, work.draft, path)

    def _load(self) -> None:
        active = self._drafting.active
        if self._loaded is not active:
            if self._loaded is not None:
                self._pacer.forget(self._loaded.version)
            self._loaded = active
            self._can_draft = isinstance(active, Eagle3Drafter) and self._decoder.load_drafter(active.model)

    def _takes(self, work: Work) -> bool:
        """Whether the device alone can say what comes next, and draft for it."""
        request = work.request
        if not work.is_decode or not request.processor.is_plain or not _is_simple(request.params):
            return False
        if len(request.session.history) + self._decoder.max_depth + 1 > self._info.max_positions:
            return False
        drafter = self._drafting.drafter_for(request)
        return drafter is None or (drafter is self._loaded and self._can_draft)

    def _choose(self, works: Sequence[Work], context: int) -> None:
        """A depth for each, as the pacer has it: here all drafts are chains, and those that draft share the greatest depth."""
        drafting: list[Work] = []
        for work in works:
            work.drafter = self._drafting.drafter_for(work.request)
            if work.drafter is not None:
                work.ask = Ask(work.drafter.version, _limit(work))
                drafting.append(work)
        asks = [work.ask for work in drafting if work.ask is not None]
        shapes = self._pacer.choose(asks, len(works), context) if asks else []
        depth = min(max((shape.depth for shape in shapes), default=0), self._decoder.max_depth)
        for work, shape in zip(drafting, shapes, strict=True):
            work.shape = Shape(depth if shape.depth else 0)

    def _step(self, works: list[Work], depth: int, context: int) -> list[Outcome]:
        started = time.perf_counter()
        sessions = [work.request.session for work in works]
        caches = [session.cache for session in sessions if session.cache is not None]
        tokens, hidden = self._decoder.step(caches, [session.history for session in sessions], depth)
        self._record(works, depth, context, time.perf_counter() - started)
        outcomes = []
        for index, (work, new) in enumerate(zip(works, tokens, strict=True)):
            path = list(range(len(new) - 1))
            if work.drafter is not None and depth:
                work.request.note_drafter(work.drafter.version)
                work.draft = Draft(new[:-1] + [0] * (depth - len(path)))  # as many nodes; which the others were is of no use
            rows = HiddenStates(hidden.aux[index, : len(new)], hidden.last[index, : len(new)])
            outcomes.append(Outcome(work, Verdict(new, path), rows))
        return outcomes

    def _record(self, works: Sequence[Work], depth: int, context: int, seconds: float) -> None:
        """What a step costs: a plain one is a forward; a drafting one is a forward and what came on top."""
        costs, drafter = self._pacer.costs, works[0].drafter
        if costs is None:
            return
        num = len(works)
        if not depth:
            costs.record_forward(num, num, context, seconds)
        elif drafter is not None:
            forward = costs.forward(num, num * (depth + 1), context)
            costs.record_proposal(drafter.version, 1, num, depth, max(seconds - forward, 0.0))


def _limit(work: Work) -> int:
    request = work.request
    asked = request.params.max_draft_tokens
    return request.num_remaining if asked is None else min(asked, request.num_remaining)


def _is_simple(params: SamplingParams) -> bool:
    return params.is_greedy and not params.logprobs

"""The draft verb of a step: every decoding session asks its own drafter, each drafter is asked once for all its sessions.

Knows which drafter a session follows and what it has seen of it; what is worth asking for is the pacer's to say. A drafter
may fail in any way: then its sessions go without drafts for a step, and the output is the same.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from runtime.backends.base import TargetInfo
from runtime.drafters.base import Draft, Drafter, DraftRequest, SparseProbs
from runtime.engine.holdings import Holdings
from runtime.engine.request import Request
from runtime.engine.work import Work
from runtime.sessions.session import DraftState, Session
from runtime.speculation.depth import Pacer
from runtime.speculation.shape import Ask

log = logging.getLogger(__name__)

MAX_NODES = 63  # of a draft, where its drafter was told no number: with the pending token, as many rows as a bit mask holds


class Drafting:
    def __init__(self, drafter: Drafter, pacer: Pacer, holdings: Holdings, target: TargetInfo) -> None:
        self.active = drafter
        self.loaded = {drafter.version: drafter}  # those that sessions may be pinned to, the active one included
        self.num_failures = 0  # steps that ran without drafts of a drafter because it raised
        self.num_swaps = 0
        self._pacer = pacer
        self._holdings = holdings
        self._vocab_size = target.vocab_size
        self._may_look = target.device == "cpu"  # at a draft while it grows, without waiting for it

    # --- which drafter ---

    def drafter_for(self, request: Request) -> Drafter | None:
        """The one that speculates for this request, if any does."""
        policy = request.session.options.drafter_policy
        if policy.kind == "off" or not request.params.speculate:
            return None
        return self.loaded.get(policy.version) if policy.kind == "pinned" else self.active

    def swap(self, drafter: Drafter, sessions: Iterable[Session], pinned: Collection[str]) -> None:
        """The pointer switch. Sessions prime the new drafter from their kept features when they next draft; those that are
        pinned to the old one keep it."""
        old = self.active
        for session in sessions:
            is_pinned = session.options.drafter_policy.kind == "pinned"
            if session.draft is not None and session.draft.drafter is old and not is_pinned:
                self._holdings.drop_draft(session)
        self.active = self.loaded[drafter.version] = drafter
        if old.version not in pinned:
            self.forget(old.version)
        self.num_swaps += 1

    def add(self, drafter: Drafter) -> None:
        """Sessions may be pinned to it from now on, until the last of them has gone."""
        self.loaded.setdefault(drafter.version, drafter)

    def forget(self, version: str) -> None:
        """Nobody is pinned to it any more."""
        if version != self.active.version and self.loaded.pop(version, None) is not None:
            self._pacer.forget(version)

    # --- what it proposes ---

    def draft(self, works: Sequence[Work]) -> None:
        """Give each of these decoding works its draft, and note who made it."""
        for work in works:
            work.drafter = self.drafter_for(work.request)
        drafting = [work for work in works if work.drafter is not None]
        if not drafting:
            return
        context = sum(work.request.session.cached for work in works) // len(works)
        asks = [ask_for(work, min(work.request.num_remaining, MAX_NODES)) for work in drafting]
        shapes = self._pacer.choose(asks, len(works), context)
        calls: dict[tuple[str, int], list[Work]] = {}
        for work, ask, shape in zip(drafting, asks, shapes, strict=True):
            work.ask, work.shape = ask, shape
            if shape.depth:
                work.is_enough = self._pacer.enough_for(ask, shape, len(works), context) if self._may_look else None
                calls.setdefault((ask.version, shape.width), []).append(work)
        seconds = sum(self._propose(version, width, of_one) for (version, width), of_one in calls.items())
        asked = [work for of_one in calls.values() for work in of_one]
        drafts = self._pacer.cut([(work.ask, work.draft) for work in asked if work.ask], len(works), context, seconds)
        for work, draft in zip(asked, drafts, strict=True):
            work.draft = draft

    def _propose(self, version: str, width: int, works: Sequence[Work]) -> float:
        """One call of the drafter that these share; the seconds that it took."""
        drafter = works[0].drafter
        assert drafter is not None
        try:
            requests = [self._request(work, drafter) for work in works]
            started = time.perf_counter()
            proposals = drafter.propose(requests)
            seconds = time.perf_counter() - started
            drafts = [
                clip(draft, request.depth, self._vocab_size, request.num_nodes or MAX_NODES)
                for request, draft in zip(requests, proposals, strict=True)
            ]
        except Exception:  # a drafter may fail in any way; the output must not depend on it
            log.exception("Drafter %s failed; this step runs without its drafts.", version)
            self.num_failures += 1
            for work in works:
                self._holdings.drop_draft(work.request.session)
            return 0.0
        for work, request, draft in zip(works, requests, drafts, strict=True):
            # Where certain nodes were asked for they are judged as such: a seed's tokens depend on no `probs`.
            work.draft = draft if request.temperature else replace(draft, probs=None)
            work.request.note_drafter(version)
        if self._pacer.costs is not None:
            depth = max(request.depth for request in requests)
            levels = max(draft.depth for draft in drafts)
            self._pacer.costs.record_proposal(version, width, len(works), depth, seconds, levels)
        return seconds

    def record(self, work: Work, path: Sequence[int]) -> None:
        """What became of a draft: the nodes that were accepted."""
        if work.ask is not None and work.shape.depth:
            self._pacer.record(work.ask, work.shape, work.draft, path)

    def _request(self, work: Work, drafter: Drafter) -> DraftRequest:
        request, session, shape = work.request, work.request.session, work.shape
        self._holdings.catch_up(session)
        if session.draft is not None and session.draft.drafter is not drafter:
            self._holdings.drop_draft(session)
        first = session.first_kept if session.dropped else 0  # which counts all parts that a turn's steps left behind
        if session.draft is None:
            session.draft = DraftState(drafter, drafter.new_state(), position=first, first=first)
        position = min(session.draft.position, session.cached - 1)  # at least the last row, to draft from
        position = max(position, first)
        session.draft.position = session.cached
        return DraftRequest(
            state=session.draft.handle,
            position=position,
            aux=session.aux_from(position),
            history=session.history,
            depth=shape.depth,
            width=shape.width,
            num_nodes=shape.num_nodes,
            temperature=request.draft_temperature,
            uniforms=request.drafting(shape.depth),
            is_enough=work.is_enough,
        )


def ask_for(work: Work, most: int) -> Ask:
    """How the pacer is asked for the shape of its draft, of which so many levels can be of use."""
    assert work.drafter is not None
    request, version = work.request, work.drafter.version
    asked = request.params.max_draft_tokens
    limit = most if asked is None else min(asked, most)
    ask = request.ask
    if ask is None or ask.limit != limit or ask.version != version:
        ask = request.ask = Ask(version, limit, request.draft_kind)
    return ask


def clip(draft: Draft, depth: int, vocab_size: int, max_nodes: int = MAX_NODES) -> Draft:
    """What the target can verify of a proposal: nodes down to `depth`, in the vocabulary and with their `probs`, whose parents
    are such nodes too; the first `max_nodes` of them. A sampled node goes if it could have been one outside the vocabulary,
    whatever it is: if what was drawn decided that, what is left would be drawn from another distribution.

    ValueError if its ids are no ints, its parents make no tree or its confidences are none.
    """
    if any(not isinstance(token_id, int) for token_id in draft.token_ids):
        raise ValueError(f"A draft has token ids {draft.token_ids}; each must be an int.")
    num_nodes = len(draft.token_ids) if draft.probs is None else min(len(draft.token_ids), len(draft.probs))
    if len(draft.lineage) < num_nodes or any(not -1 <= parent < node for node, parent in enumerate(draft.lineage)):
        raise ValueError(
            f"A draft of {len(draft.token_ids)} nodes has parents {draft.parents}; each must be an earlier node, or -1."
        )
    confidences = draft.confidences
    if confidences is not None and (
        len(confidences) != len(draft.token_ids) or not all(0.0 <= confidence < math.inf for confidence in confidences)
    ):
        raise ValueError(f"A draft of {len(draft.token_ids)} nodes has confidences {confidences}; each needs one, 0 or more.")
    ranges: dict[int, bool] = {}  # by the tensor of ids, which nodes mostly share

    def stays_within(q: SparseProbs) -> bool:
        ids = q.token_ids
        if id(ids) not in ranges:
            ranges[id(ids)] = not len(ids) or (int(ids.min()) >= 0 and int(ids.max()) < vocab_size)
        return ranges[id(ids)]

    kept = {-1}
    for node, level in zip(range(num_nodes), draft.depths(), strict=False):
        is_known = 0 <= draft.token_ids[node] < vocab_size and draft.lineage[node] in kept
        if level < depth and is_known and len(kept) <= max_nodes and (draft.probs is None or stays_within(draft.probs[node])):
            kept.add(node)
    return draft if len(kept) > len(draft.token_ids) else draft.only(sorted(kept - {-1}))

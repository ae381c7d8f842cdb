"""The draft verb of a step: every decoding session asks its own drafter, each drafter is asked once for all its sessions.

Knows which drafter a session follows and what it has seen of it; what is worth asking for is the pacer's to say. A drafter
may fail in any way: then its sessions go without drafts for a step, and the output is the same.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Sequence

from runtime.drafters.base import Draft, Drafter, DraftRequest
from runtime.engine.holdings import Holdings
from runtime.engine.request import Request
from runtime.engine.work import Work
from runtime.sessions.session import DraftState, Session
from runtime.speculation.depth import Ask, Pacer, Shape

log = logging.getLogger(__name__)


class Drafting:
    def __init__(self, drafter: Drafter, pacer: Pacer, holdings: Holdings, vocab_size: int) -> None:
        self.active = drafter
        self.loaded = {drafter.version: drafter}  # those that sessions may be pinned to, the active one included
        self.num_failures = 0  # steps that ran without drafts of a drafter because it raised
        self.num_swaps = 0
        self._pacer = pacer
        self._holdings = holdings
        self._vocab_size = vocab_size

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
        if version != self.active.version:
            self.loaded.pop(version, None)

    # --- what it proposes ---

    def draft(self, works: Sequence[Work]) -> None:
        """Give each of these decoding works its draft, and note who made it."""
        for work in works:
            work.drafter = self.drafter_for(work.request)
        drafting = [work for work in works if work.drafter is not None]
        shapes = self._pacer.choose([_ask(work) for work in drafting])
        asked: dict[str, list[tuple[Work, Shape]]] = {}
        for work, shape in zip(drafting, shapes, strict=True):
            if shape.depth:
                assert work.drafter is not None
                asked.setdefault(work.drafter.version, []).append((work, shape))
        for of_one in asked.values():
            self._ask(of_one)

    def _ask(self, works: Sequence[tuple[Work, Shape]]) -> None:
        """One call of the drafter that these share."""
        drafter = works[0][0].drafter
        assert drafter is not None
        requests = [self._request(work.request, drafter, shape) for work, shape in works]
        try:
            drafts = [
                clip(draft, request.depth, self._vocab_size)
                for request, draft in zip(requests, drafter.propose(requests), strict=True)
            ]
        except Exception:  # a drafter may fail in any way; the output must not depend on it
            log.exception("Drafter %s failed; this step runs without its drafts.", drafter.version)
            self.num_failures += 1
            for work, _ in works:
                self._holdings.drop_draft(work.request.session)
            return
        for (work, _), draft in zip(works, drafts, strict=True):
            work.draft = draft
            work.request.note_drafter(drafter.version)

    def _request(self, request: Request, drafter: Drafter, shape: Shape) -> DraftRequest:
        session = request.session
        if session.draft is not None and session.draft.drafter is not drafter:
            self._holdings.drop_draft(session)
        if session.draft is None:
            first = session.first_kept
            session.draft = DraftState(drafter, drafter.new_state(), position=first, first=first)
        position = min(session.draft.position, session.cached - 1)  # at least the last row, to draft from
        session.draft.position = session.cached
        return DraftRequest(
            state=session.draft.handle,
            position=position,
            aux=session.aux_from(position),
            history=session.history,
            depth=shape.depth,
            width=shape.width,
            temperature=request.params.temperature,
            uniforms=request.drafting(shape.depth),
        )


def _ask(work: Work) -> Ask:
    assert work.drafter is not None
    request = work.request
    asked = request.params.max_draft_tokens
    limit = request.num_remaining if asked is None else min(asked, request.num_remaining)
    return Ask(work.drafter.version, limit)


def clip(draft: Draft, depth: int, vocab_size: int) -> Draft:
    """What the target can verify of a proposal: nodes down to `depth`, in the vocabulary and with their `probs`, whose parents
    are such nodes too. ValueError if its parents make no tree."""
    num_nodes = len(draft.token_ids) if draft.probs is None else min(len(draft.token_ids), len(draft.probs))
    if len(draft.lineage) < num_nodes or any(not -1 <= parent < node for node, parent in enumerate(draft.lineage)):
        raise ValueError(
            f"A draft of {len(draft.token_ids)} nodes has parents {draft.parents}; each must be an earlier node, or -1."
        )
    kept: dict[int, int] = {-1: -1}  # node -> its new place
    for node, level in zip(range(num_nodes), draft.depths(), strict=False):
        if level < depth and 0 <= draft.token_ids[node] < vocab_size and draft.lineage[node] in kept:
            kept[node] = len(kept) - 1
    del kept[-1]
    if len(kept) == len(draft.token_ids):
        return draft
    return Draft(
        token_ids=[draft.token_ids[node] for node in kept],
        probs=draft.probs and [draft.probs[node] for node in kept],
        parents=None if draft.parents is None else [kept.get(draft.parents[node], -1) for node in kept],
        confidences=draft.confidences and [draft.confidences[node] for node in kept],
    )

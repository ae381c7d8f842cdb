"""What the engine holds for its sessions beside their ids: K/V in the target, kept hidden states, draft state.

All of it belongs to the engine's thread. Knows no requests and no sampling; what one step adds to a session it is told.

    history   [ sink ][ dropped .... ][ window ......... ][ pending
    K/V       [ sink ]                [ window ......... ]            covers history[:cached], less what its policy dropped
    features                       [ kept .............. ]            all of history[:cached], or the last rows if some dropped

A target that takes whole steps keeps the states of its rows beside their K/V. What prompts and such steps left behind is read
from there when somebody needs it (`catch_up`), which mostly nobody does.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache

import torch

from runtime.backends.base import FULL, Target
from runtime.backends.whole_steps import KeepsStates
from runtime.config import SessionsConfig
from runtime.hidden_states import HiddenStates
from runtime.sessions.prefixes import BLOCK_TOKENS, PrefixIndex, common_length
from runtime.sessions.saved import SavedSession
from runtime.sessions.session import Session
from runtime.types import CachePolicy

log = logging.getLogger(__name__)

MIN_SHARED_TOKENS = BLOCK_TOKENS
MOST_BLOCK_TOKENS = 128  # that a backend takes at once
ROOM_TOKENS = 256  # of an answer: there must be room for so many when it begins
MIN_DRAFT_ROWS = 1024  # before a drafter's state of a session that drops tokens begins again: beginning has its price


class Readers:
    """Sessions that read their prompt right now, by how it begins: one look-up each, however many there are."""

    def __init__(self, sessions: Iterable[Session]) -> None:
        self._by_start: dict[tuple[CachePolicy, tuple[int, ...]], list[Session]] = {}
        for session in sessions:
            self.add(session)

    def add(self, session: Session) -> None:
        if session.cached < len(session.history) - 1:
            self._by_start.setdefault(_start(session), []).append(session)

    def like(self, session: Session) -> Sequence[Session]:
        """Those that share at least the beginning that is worth sharing."""
        return self._by_start.get(_start(session), ())


def _start(session: Session) -> tuple[CachePolicy, tuple[int, ...]]:
    return session.options.cache_policy, tuple(session.history[:MIN_SHARED_TOKENS])


class Holdings:
    def __init__(self, target: Target, config: SessionsConfig, keeps_features: bool = True) -> None:
        self.budget_bytes = config.kv_budget_mib * 2**20
        self.kv_bytes = 0  # as of the last step; read by any thread
        self._target = target
        self.keeps_features = keeps_features  # False: nobody drafts, and nobody takes what was seen
        self._shares_prefixes = config.prefix_reuse
        self._prefixes = PrefixIndex()
        self._bytes_for = lru_cache(maxsize=4096)(target.cache_bytes)  # of so many tokens under a policy: asked in every step

    # --- a session's own ---

    def open(self, session: Session) -> None:
        """Before a turn's first forward: a cache with at least one token of the history still to compute, and no more than
        need be: what another session holds of the same beginning is taken over."""
        last = len(session.history) - 1
        if session.cached > last:
            self.rewind(session, last)
        if self._shares_prefixes and last - session.cached >= MIN_SHARED_TOKENS:
            found = self._prefixes.find(session, last)
            if found is not None and found[1] - session.cached >= MIN_SHARED_TOKENS:
                self.release(session)
                self._take_over(session, *found)
        if session.cache is None:
            self._give(session, self._target.new_cache(session.options.cache_policy))

    def keep(self, session: Session, num_rows: int, hidden: HiddenStates | None) -> None:
        """The session's K/V has grown by so many committed rows; their states are kept (and must be no views of more), or are
        read later, where the target has them."""
        assert session.cache is not None
        session.cached += num_rows
        if hidden is not None and not session.num_behind:
            session.features.append(hidden)
        elif self.keeps_features:
            session.num_behind += num_rows
        self._note(session)
        window = session.options.cache_policy.window
        if window is None:
            return
        session.dropped = self._target.dropped(session.cache)
        if session.dropped:
            if not session.num_behind:
                session.forget_features(session.cached - window)
            if session.draft is not None and session.draft.position - session.draft.first > max(2 * window, MIN_DRAFT_ROWS):
                self.drop_draft(session)  # it begins again with what is kept

    def catch_up(self, session: Session) -> None:
        """Read the states of what whole steps left behind, so that all are kept that may be: before anybody looks at them."""
        if not session.num_behind:
            return
        assert session.cache is not None
        assert isinstance(self._target, KeepsStates), "states of the general way are kept at once"
        window = session.options.cache_policy.window
        num_rows = session.num_behind
        if session.dropped and window is not None:
            num_rows = min(num_rows, window)  # those before are gone
        states = self._target.states_of(session.cache, session.cached - num_rows, session.cached)  # first: it may raise
        if num_rows < session.num_behind:
            session.num_settled, session.features = 0, []
        session.features.append(states)
        session.num_behind = 0
        if session.dropped and window is not None:
            session.forget_features(session.cached - window)

    def rewind(self, session: Session, length: int) -> None:
        """Keep K/V and features of the first `length` tokens; of none, if what the next token sees was dropped already, or if
        no feature row would be left to draft from."""
        assert session.cache is not None
        if session.dropped:
            self.catch_up(session)
        features, num_behind = session.features_upto(length), _num_behind(session, length)
        try:
            self._target.truncate(session.cache, length)
        except ValueError:
            length = 0
        if not length or (self.keeps_features and not features and not num_behind):
            self.release(session)
            return
        session.features, session.num_behind = features, num_behind
        session.num_settled = min(session.num_settled, len(session.features))
        session.cached = length
        session.dropped = self._target.dropped(session.cache)
        if session.draft is not None:
            session.draft.position = min(session.draft.position, length)
        self._note(session)

    def _note(self, session: Session) -> None:
        if self._shares_prefixes:
            self._prefixes.note(session)

    def release(self, session: Session) -> None:
        """Free K/V, kept features and draft state; the ids stay. The next call on the session prefills again."""
        self.drop_draft(session)
        if session.cache is not None:
            self._prefixes.remove(session)
            self._target.drop(session.cache)
            session.cache = None
        session.cached = session.dropped = session.num_settled = session.num_behind = 0
        session.features = []
        self.count()

    def drop_draft(self, session: Session) -> None:
        draft, session.draft = session.draft, None
        if draft is None:
            return
        try:
            draft.drafter.drop_state(draft.handle)
        except Exception:  # a drafter may fail in any way; whatever it still holds goes with it
            log.exception("Drafter %s did not give back the state of session %s.", draft.drafter.version, session.id)

    def _give(self, session: Session, cache: int) -> None:
        assert session.cache is None
        session.cache = cache
        if self._shares_prefixes:
            self._prefixes.add(session)
        self.count()

    # --- from one session to another, to a file and back ---

    def fork(self, parent: Session, child: Session, sessions: Iterable[Session]) -> None:
        """Give the child what the parent holds of its history, if the budget has room for it and its policy lets it go."""
        length = min(len(child.history), parent.cached)
        is_whole = length == parent.cached
        if child.is_closed or not length or (parent.dropped and not is_whole):
            return
        if self.make_room(self._bytes_for(length, child.options.cache_policy), sessions):
            self._take_over(child, parent, length)

    def _take_over(self, session: Session, holder: Session, length: int) -> None:
        """K/V is copied; kept features never change, so both may have them."""
        assert holder.cache is not None
        self._give(session, self._target.fork(holder.cache, length))
        session.features = holder.features_upto(length)
        session.num_settled = len(session.features)
        session.num_behind = _num_behind(holder, length)
        session.cached = length
        session.dropped = holder.dropped
        self._note(session)

    def save(self, session: Session) -> tuple[Mapping[str, torch.Tensor], HiddenStates | None]:
        """The session's K/V, on the CPU, and its kept features. Nothing, if nothing is cached, or no features are kept."""
        if session.cache is None or not session.cached or not self.keeps_features:
            return {}, None
        self.catch_up(session)
        return self._target.save(session.cache), HiddenStates.concat(session.features)

    def restore(self, session: Session, saved: SavedSession, sessions: Iterable[Session]) -> None:
        """Give the session what was saved for it, if this target can use it and the budget has room; else it prefills again."""
        policy, features = session.options.cache_policy, saved.features
        if session.is_closed or features is None or not self._fits(features, saved.cached, policy):
            return
        if not self.make_room(self._bytes_for(saved.cached, policy), sessions):
            return
        try:
            cache = self._target.restore(saved.kv, saved.cached, policy)
        except ValueError:  # of another dtype or backend: no harm, it is computed anew
            return
        self._give(session, cache)
        device = self._target.info.device
        session.features = [HiddenStates(features.aux.to(device), features.last.to(device))]
        session.num_settled = 1
        session.cached = saved.cached
        session.dropped = self._target.dropped(cache)
        self._note(session)

    def _fits(self, features: HiddenStates, cached: int, policy: CachePolicy) -> bool:
        """Whether they can be the kept states of so many cached tokens."""
        info, aux, last = self._target.info, features.aux, features.last
        has_width = aux.ndim == last.ndim == 2 and aux.shape[1] == 3 * info.hidden_size and last.shape[1] == info.hidden_size
        has_rows = (
            len(aux) == len(last) and (cached if policy.window is None else min(policy.window, cached)) <= len(aux) <= cached
        )
        return has_width and has_rows and str(aux.dtype) == str(last.dtype) == f"torch.{info.dtype}"

    # --- who waits for whom ---

    def awaits_prefix(self, session: Session, reading: Iterable[Session]) -> bool:
        """Whether a session that reads its prompt right now is about to hold a beginning of this one's, and nobody does yet.

        Only where nothing is dropped: a prompt longer than its window can be taken over at its very end only.
        """
        policy, limit = session.options.cache_policy, len(session.history) - 1
        if not self._shares_prefixes or policy.window is not None:
            return False
        coming = 0
        for other in reading:
            shared = common_length(session.history, other.history, limit)
            coming = max(coming, shared if other.cached < shared else 0)
        if coming - session.cached < MIN_SHARED_TOKENS:
            return False
        found = self._prefixes.find(session, limit)
        return found is None or coming - found[1] >= MIN_SHARED_TOKENS

    # --- the budget ---

    def count(self) -> None:
        self.kv_bytes = self._target.cache_bytes()

    def make_room(self, num_bytes: int, sessions: Iterable[Session]) -> bool:
        """Whether the budget holds so many bytes more; sessions at rest give up their K/V for it, the oldest of them first."""
        if self._target.cache_bytes() + num_bytes <= self.budget_bytes:
            return True
        for session in sessions:
            if session.is_at_rest and session.cache is not None:
                self.release(session)
                if self._target.cache_bytes() + num_bytes <= self.budget_bytes:
                    return True
        return False

    def surely_has_room(self, num_sessions: int, num_tokens: int, num_shared: int) -> bool:
        """Whether the budget holds so many tokens more of each of so many sessions, and num_shared of some of them, whatever they
        hold by now: said in no time, for backends that take a quarter more than they need, or a block, at most."""
        most = num_sessions * self._bytes_for(num_tokens + MOST_BLOCK_TOKENS, FULL) + self._bytes_for(num_shared, FULL)
        return self._target.cache_bytes() * 5 // 4 + most <= self.budget_bytes

    def growth_bytes(self, session: Session, num_tokens: int) -> int:
        """What the session has yet to take until it holds so many tokens."""
        policy = session.options.cache_policy
        needed = self._bytes_for(num_tokens, policy)
        return needed - self._bytes_for(session.cached, policy) if session.cached else needed


def _num_behind(session: Session, length: int) -> int:
    """Of the session's first `length` rows those whose states are to be read from the target."""
    return max(length - (session.cached - session.num_behind), 0)

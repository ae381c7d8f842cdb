"""Who holds K/V for the beginning of a history: chained hashes of whole blocks of tokens -> sessions.

    history   [ block 0 ][ block 1 ][ block 2 ][ rest
    chain        h0   ->    h1   ->    h2              h0 covers the cache policy as well, so other policies never meet

A chain is as long as a session's K/V, so a look-up costs the new history's own blocks, however many sessions there are.
Histories only ever grow, so what a chain says stays true; hashes may collide, so tokens are compared before one is believed.
Holdings are found by token ids alone, whoever sent them: see `sessions.prefix_reuse`. The engine's thread only.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from runtime.sessions.session import Session
from runtime.types import CachePolicy

BLOCK_TOKENS = 32
# Also the least that is worth a fork: a shorter beginning rides along in the chunk of prompt that has to be computed anyway.


class PrefixIndex:
    def __init__(self) -> None:
        self._chains: dict[Session, list[int]] = {}
        self._holders: dict[int, dict[Session, None]] = {}  # in order of arrival
        self._changed: dict[Session, None] = {}  # those whose K/V grew or shrank

    def __len__(self) -> int:
        """Entries: 0 when nobody holds anything."""
        return len(self._holders)

    def add(self, session: Session) -> None:
        """Follow this session's K/V from now on."""
        self._chains.setdefault(session, [])
        self.note(session)

    def note(self, session: Session) -> None:
        """Its K/V has grown or shrunk."""
        self._changed[session] = None

    def remove(self, session: Session) -> None:
        self._shorten(session, 0)
        self._chains.pop(session, None)
        self._changed.pop(session, None)

    def find(self, session: Session, limit: int) -> tuple[Session, int] | None:
        """Another session, and how many tokens of this one's history, at most `limit`, it can hand over: the most there are."""
        self._catch_up()
        history = session.history
        levels: list[dict[Session, None]] = []  # [i]: sessions that hold blocks 0..i
        for chained in _chain(history, limit // BLOCK_TOKENS, session.options.cache_policy):
            if chained not in self._holders:
                break
            levels.append(self._holders[chained])
        for level, holders in reversed(list(enumerate(levels, start=1))):
            found = _longest(session, holders, level * BLOCK_TOKENS, limit)
            if found is not None:
                return found
        return None

    def _catch_up(self) -> None:
        """Take in the blocks that sessions have come to hold, and forget those that they lost."""
        for session in self._changed:
            chain = self._chains[session]
            num_blocks = session.cached // BLOCK_TOKENS
            if num_blocks < len(chain):
                self._shorten(session, num_blocks)
            elif num_blocks > len(chain):
                policy = session.options.cache_policy
                for chained in _chain(session.history, num_blocks, policy, chain):
                    chain.append(chained)
                    self._holders.setdefault(chained, {})[session] = None
        self._changed.clear()

    def _shorten(self, session: Session, num_blocks: int) -> None:
        chain = self._chains.get(session, [])
        for chained in chain[num_blocks:]:
            holders = self._holders[chained]
            del holders[session]
            if not holders:
                del self._holders[chained]
        del chain[num_blocks:]


def _chain(history: Sequence[int], num_blocks: int, policy: CachePolicy, known: Sequence[int] = ()) -> Iterable[int]:
    """The chained hashes of blocks len(known) .. num_blocks - 1."""
    chained = known[-1] if known else hash(policy)
    for index in range(len(known), num_blocks):
        chained = hash((chained, *history[index * BLOCK_TOKENS : (index + 1) * BLOCK_TOKENS]))
        yield chained


def _longest(session: Session, holders: Iterable[Session], shared: int, limit: int) -> tuple[Session, int] | None:
    """Of those that seem to share the session's first `shared` tokens, the one that goes on like it the longest."""
    candidates: list[tuple[int, Session]] = []
    for holder in holders:
        length, end = shared, min(limit, holder.cached, shared + BLOCK_TOKENS)
        while length < end and holder.history[length] == session.history[length]:
            length += 1
        is_whole = length == holder.cached  # a part of what has dropped tokens is no beginning of anything
        if holder is not session and (is_whole or not holder.dropped):
            candidates.append((length, holder))
    for length, holder in sorted(candidates, key=lambda candidate: -candidate[0]):
        if holder.history[:shared] == session.history[:shared]:
            return holder, length
    return None


def common_length(a: Sequence[int], b: Sequence[int], limit: int) -> int:
    """How many tokens both begin with, at most `limit`."""
    low, high = 0, min(len(a), len(b), limit)
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low

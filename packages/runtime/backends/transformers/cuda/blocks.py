"""Who holds which block of the pool: tables, reference counts and cache policies, on the host alone.

A block holds 16 tokens of all layers. Forks share blocks; whoever writes into a shared one first gets a copy. Blocks that a
policy hides from everything that follows leave the middle of a table, where the dead block 0 then stands:

    position / 16    0     1     2     3     4
    table           [7]   [0]   [0]   [5]   [9]     sink of 16 tokens, a window that reaches back to block 3
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from runtime.errors import EngineUnavailable
from runtime.types import CachePolicy

BLOCK_TOKENS = 16
DEAD = 0  # stands for no block: padded rows write to it, nobody reads it


def num_blocks_for(num_tokens: int) -> int:
    return -(-num_tokens // BLOCK_TOKENS)


@dataclass(eq=False)
class Table:
    """The blocks of one sequence by position, and how much of them is committed."""

    policy: CachePolicy
    length: int = 0  # committed tokens, the dropped ones included
    blocks: list[int] = field(default_factory=list)
    parents: Sequence[int] = ()  # of the tentative rows of the last forward
    num_ahead: int = 0  # tokens that steps under way may still write behind the committed ones
    row: int | None = None  # of the device's copy
    seating: int = 0  # differs each time that it gets a row
    first_stale: int = 0  # entries before it are on the device already
    may_share: bool = False  # its last block, with a fork: reserve before writing

    @property
    def gone(self) -> range:
        """Indices of the blocks that the policy dropped."""
        first = last = num_blocks_for(self.policy.sink)
        while last < len(self.blocks) and self.blocks[last] == DEAD:
            last += 1
        return range(first, last)

    @property
    def dropped(self) -> int:
        return len(self.gone) * BLOCK_TOKENS

    def touch(self, index: int) -> None:
        """Entries from this one on have changed."""
        self.first_stale = min(self.first_stale, index)


class Blocks:
    """The free list and the counts. `copies` collects (from, to) of blocks that must be copied before the next write."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, DEAD, -1))
        self._holders = [0] * num_blocks
        self.copies: list[tuple[int, int]] = []

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_blocks - 1 - self.num_free

    def reserve(self, table: Table, num_tokens: int) -> None:
        """Blocks for so many tokens behind the committed ones, all of them writable. EngineUnavailable if the pool is full."""
        end = num_blocks_for(table.length + num_tokens)
        needed, shared = self.num_needed(table, num_tokens), self._shared(table)
        if needed > len(self._free):
            raise EngineUnavailable(
                f"The K/V pool is full: {needed} more blocks are needed, {len(self._free)} of {self.num_blocks - 1} are free. "
                "Lower sessions.kv_budget_mib, or raise backend.kv_pool_mib."
            )
        if shared is not None:
            mine = self._take()
            self.copies.append((table.blocks[shared], mine))
            self._give_back(table.blocks[shared])
            table.blocks[shared] = mine
            table.touch(shared)
        table.may_share = False
        if end > len(table.blocks):
            table.touch(len(table.blocks))
            table.blocks.extend(self._take() for _ in range(end - len(table.blocks)))

    def num_needed(self, table: Table, num_tokens: int) -> int:
        """Blocks that `reserve` would take; where several tables share one that each would copy, maybe one less."""
        num_new = num_blocks_for(table.length + num_tokens) - len(table.blocks)
        return max(num_new, 0) + (self._shared(table) is not None)

    def _shared(self, table: Table) -> int | None:
        """The place of the block that the next token goes to, if somebody else holds it too."""
        first = table.length // BLOCK_TOKENS
        return first if first < len(table.blocks) and self._holders[table.blocks[first]] > 1 else None

    def trim(self, table: Table, num_tokens: int = 0) -> None:
        """Free what holds no committed token, nor one of so many behind them."""
        keep = num_blocks_for(table.length + num_tokens)
        for block in table.blocks[keep:]:
            self._give_back(block)
        del table.blocks[keep:]
        table.touch(keep)

    def drop_unseen(self, table: Table) -> None:
        """Free the whole blocks that no later token sees, one block aside: a way back for whoever truncates a little."""
        if table.policy.window is None:
            return
        unseen = table.length - table.policy.window + 1
        for index in range(table.gone.stop, min(unseen // BLOCK_TOKENS - 1, len(table.blocks))):
            self._give_back(table.blocks[index])
            table.blocks[index] = DEAD
            table.touch(index)

    def truncate(self, table: Table, length: int) -> None:
        check_length(table, length)
        table.length = length
        table.parents = ()
        self.trim(table)

    def fork(self, table: Table, length: int) -> Table:
        """Another holder of the first `length` tokens' blocks."""
        check_length(table, length)
        copy = Table(table.policy, length, table.blocks[: num_blocks_for(length)])
        for block in copy.blocks:
            self._holders[block] += block != DEAD
        table.may_share = copy.may_share = True
        return copy

    def adopt(self, table: Table, gone: range) -> None:
        """Blocks for a table that comes from elsewhere, its length set, with these indices dropped already."""
        indices = range(num_blocks_for(table.length))
        if len(indices) - len(gone) > len(self._free):
            raise EngineUnavailable(f"The K/V pool is full: {len(indices)} blocks are needed, {len(self._free)} are free.")
        table.blocks = [DEAD if index in gone else self._take() for index in indices]

    def release(self, table: Table) -> None:
        for block in table.blocks:
            self._give_back(block)
        table.blocks = []

    def _take(self) -> int:
        block = self._free.pop()
        self._holders[block] = 1
        return block

    def _give_back(self, block: int) -> None:
        if block == DEAD:
            return
        self._holders[block] -= 1
        if not self._holders[block]:
            self._free.append(block)


def check_length(table: Table, length: int) -> None:
    """ValueError if the first `length` tokens are not all there that a token behind them sees."""
    if not 0 <= length <= table.length:
        raise ValueError(f"Cannot truncate to {length} tokens; the cache holds {table.length}.")
    gone, window = table.gone, table.policy.window
    if not gone or window is None or length <= table.policy.sink:
        return
    if length - window + 1 < gone.stop * BLOCK_TOKENS:
        raise ValueError(
            f"Cannot truncate to {length} tokens; the cache dropped {len(gone) * BLOCK_TOKENS} of them behind the first "
            f"{table.policy.sink}, and what follows would see some of those. Compute the history anew."
        )

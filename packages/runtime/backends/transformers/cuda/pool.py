"""The K/V of all sessions on the device: pages of 16 tokens, and one table that tells the kernels where they lie.

Beside keys and values a page has room for what the forward leaves behind for drafting and training (`states`) and for a
drafter's own keys and values, so one table serves all and a fork shares all. Every plane is [n, blocks, heads, 16, width].
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from itertools import count

import numpy as np
import torch

from runtime.backends.segments import check_root_path
from runtime.backends.transformers.cache import KVShape
from runtime.backends.transformers.cuda.blocks import BLOCK_TOKENS, DEAD, Blocks, Table, num_blocks_for
from runtime.backends.transformers.cuda.sending import Sender
from runtime.types import CachePolicy

# Sequences that one forward can have, and more: who was in it before finds its row still filled. Fewer where rows are long.
FEWEST_ROWS, MOST_ROWS, MOST_ENTRIES = 512, 4096, 2**24
AHEAD_TOKENS = 64  # pages are taken for so many tokens at once, so that tables seldom change


class PagedPool:
    """Caches by handle, their pages, and the device's block table."""

    def __init__(self, shape: KVShape, hidden_size: int, max_positions: int, num_blocks: int) -> None:
        assert shape.key_dim == shape.value_dim
        self.shape = shape
        self.blocks = Blocks(num_blocks)
        self._sender = Sender(shape.device)
        # Zeros, not garbage: whatever the kernels do with masked keys, a NaN is not among them.
        pages = (2 * shape.num_layers, num_blocks, shape.num_kv_heads, BLOCK_TOKENS, shape.key_dim)
        self._kv = torch.zeros(pages, dtype=shape.dtype, device=shape.device)
        self.keys, self.values = self._kv[: shape.num_layers].unbind(), self._kv[shape.num_layers :].unbind()
        self._states = torch.zeros(1, num_blocks, 1, BLOCK_TOKENS, 4 * hidden_size, dtype=shape.dtype, device=shape.device)
        self.states = self._states.view(-1, 4 * hidden_size)  # [slots, 4H]: three auxiliary layers and the normed last
        self._planes: list[torch.Tensor] = []
        self._block_bytes = 0  # of all planes
        self._add(self._kv)
        self._add(self._states)
        self._tables: dict[int, Table] = {}
        self._handles, self._seatings = count(), count(1)
        self._longest = max_positions
        row_blocks = num_blocks_for(max_positions) + 1
        num_rows = max(FEWEST_ROWS, min(MOST_ROWS, MOST_ENTRIES // row_blocks))
        # Row 0 is nobody's: all of it is dead.
        self.device_table = torch.zeros(num_rows, row_blocks, dtype=torch.int32, device=shape.device)
        self._row_owners: OrderedDict[int, Table | None] = OrderedDict((row, None) for row in range(1, num_rows))

    @staticmethod
    def page_bytes(shape: KVShape, hidden_size: int) -> int:
        return BLOCK_TOKENS * (shape.token_bytes + 4 * hidden_size * shape.dtype.itemsize)

    def add_plane(self, heads: int, width: int) -> torch.Tensor:
        """A further plane [blocks, heads, 16, width] that follows copies and commits, a drafter's keys for one."""
        shape = self.shape
        plane = torch.zeros(1, self.blocks.num_blocks, heads, BLOCK_TOKENS, width, dtype=shape.dtype, device=shape.device)
        self._add(plane)
        return plane[0]

    def _add(self, plane: torch.Tensor) -> None:
        self._planes.append(plane)
        self._block_bytes += plane[:, 0].numel() * plane.element_size()

    # --- caches ---

    def __getitem__(self, handle: int) -> Table:
        if handle not in self._tables:
            raise ValueError(
                f"Cache {handle!r} is not here: it was dropped, or is no handle of this target. Make one with new_cache()."
            )
        return self._tables[handle]

    def add(self, table: Table) -> int:
        handle = next(self._handles)
        self._tables[handle] = table
        return handle

    def drop(self, handle: int) -> None:
        table = self[handle]
        self.blocks.release(table)
        if table.row is not None:
            self._row_owners[table.row] = None
            self._row_owners.move_to_end(table.row, last=False)
        del self._tables[handle]

    def num_bytes(self, num_blocks: int | None = None) -> int:
        """Of so many blocks; None: of those in use."""
        return (self.blocks.num_used if num_blocks is None else num_blocks) * self._block_bytes

    def bytes_for(self, num_tokens: int, policy: CachePolicy) -> int:
        blocks = num_blocks_for(num_tokens)
        if policy.window is not None:  # both ends of the window cut a block, and one more waits to be dropped
            blocks = min(blocks, num_blocks_for(policy.sink) + num_blocks_for(policy.window) + 3)
        return blocks * self._block_bytes

    # --- before and after a forward ---

    def reserve(self, tables: Sequence[Table], num_tokens: Sequence[int], takes_ahead: bool = False) -> None:
        """Writable pages for the new tokens of each, and the device's table up to date. takes_ahead: while more than half of all
        pages is free, for `AHEAD_TOKENS` more of each, which give them back when others lack them."""
        if takes_ahead:
            more = [min(num + AHEAD_TOKENS, self._longest - table.length) for table, num in zip(tables, num_tokens, strict=True)]
            if self._num_needed(tables, more) < self.blocks.num_free - self.blocks.num_blocks // 2:
                num_tokens = more
        if self._num_needed(tables, num_tokens) > self.blocks.num_free:
            for table in self._tables.values():
                self.blocks.trim(table, max(table.num_ahead, len(table.parents)))
        try:
            for table, size in zip(tables, num_tokens, strict=True):
                self.blocks.reserve(table, size)
        finally:  # also of those that came before one for which there was no room
            self._copy()
        for table in tables:
            self._seat(table)
        self._upload([table for table in tables if table.first_stale < len(table.blocks)])

    def _num_needed(self, tables: Sequence[Table], num_tokens: Sequence[int]) -> int:
        return sum(map(self.blocks.num_needed, tables, num_tokens))

    def _copy(self) -> None:
        if self.blocks.copies:
            sources, targets = self._sender.send(np.array(self.blocks.copies, dtype=np.int64)).unbind(1)
            self.blocks.copies.clear()
            for plane in self._planes:
                plane[:, targets] = plane[:, sources]

    def hold_rows(self, tables: Iterable[Table]) -> None:
        """None of these loses its row to the next ones that need one."""
        for table in tables:
            if table.row is not None:
                self._row_owners.move_to_end(table.row)

    def _seat(self, table: Table) -> None:
        """Give a table a row of the device's copy: the longest unused, if it has none, but of nobody who has steps under way."""
        if table.row is None:
            longest_unused = next(iter(self._row_owners.items()))
            idle = (item for item in self._row_owners.items() if item[1] is None or not item[1].num_ahead)
            row, owner = next(idle, longest_unused)
            table.seating = next(self._seatings)
            if owner is not None:
                owner.row = None
            self._row_owners[row] = table
            table.row, table.first_stale = row, 0
        self._row_owners.move_to_end(table.row)

    def _upload(self, tables: Sequence[Table]) -> None:
        """Entries that the device does not have yet, of all of them at once."""
        if not tables:
            return
        width, places, entries = self.device_table.shape[1], list[int](), list[int]()
        for table in tables:
            assert table.row is not None
            places += range(table.row * width + table.first_stale, table.row * width + len(table.blocks))
            entries += table.blocks[table.first_stale :]
            table.first_stale = len(table.blocks)
        sent = self._sender.send(np.array([places, entries], dtype=np.int32))  # at once: each copy takes its time
        self.device_table.view(-1).scatter_(0, sent[0].long(), sent[1])

    def commit(self, table: Table, rows: Sequence[int]) -> None:
        """Keep the tentative rows of one root path and free the rest; with all of them kept, blocks taken ahead stay taken."""
        check_root_path(table.parents, rows)
        if rows and rows[-1] != len(rows) - 1:  # not simply the first rows: move them together
            sources = self._places(table, [table.length + row for row in rows])
            targets = self._places(table, range(table.length, table.length + len(rows)))
            for plane in self._planes:
                # With a slice between two index tensors their axis comes first: [rows, n, heads, width] on both sides.
                plane[:, targets[0], :, targets[1]] = plane[:, sources[0], :, sources[1]]
        self.advance(table, len(rows), keep_tail=len(rows) == len(table.parents))

    def advance(self, table: Table, num_tokens: int, keep_tail: bool = False) -> None:
        """The first tentative rows are committed where they lie. keep_tail: blocks taken ahead stay taken."""
        table.length += num_tokens
        table.parents = ()
        if not keep_tail:
            self.blocks.trim(table)
        self.blocks.drop_unseen(table)

    def _places(self, table: Table, positions: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Block and offset of each position."""
        blocks = [table.blocks[position // BLOCK_TOKENS] for position in positions]
        offsets = [position % BLOCK_TOKENS for position in positions]
        block, offset = self._sender.send(np.array([blocks, offsets], dtype=np.int64))
        return block, offset

    def states_of(self, table: Table, first: int, end: int) -> torch.Tensor:
        """[end - first, 4H] what the forwards of these committed positions left behind; they must not be dropped."""
        positions = np.arange(first, end)
        slots = np.array(table.blocks, dtype=np.int64)[positions // BLOCK_TOKENS] * BLOCK_TOKENS + positions % BLOCK_TOKENS
        return self.states[self._sender.send(slots)]

    # --- on disk ---

    def save(self, table: Table) -> dict[str, torch.Tensor]:
        """Pages and states of the blocks that are held, in table order, and how many tokens they are of."""
        index = self._held(table.blocks[: num_blocks_for(table.length)])
        pages = {name: plane[:, index].cpu().contiguous() for name, plane in self._saved_planes()}
        return {**pages, "length": torch.tensor([table.length])}

    def restore(self, tensors: Mapping[str, torch.Tensor], length: int, policy: CachePolicy) -> int:
        table = Table(policy, length)
        held = tensors["kv"].shape[1] if "kv" in tensors and tensors["kv"].dim() == 5 else -1
        expected = {name: ((plane.shape[0], held, *plane.shape[2:]), plane.dtype) for name, plane in self._saved_planes()}
        expected["length"] = ((1,), torch.int64)
        found = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
        if found != expected:
            raise ValueError(f"The saved tensors are {found}; this target's are {expected}.")
        first, total = num_blocks_for(policy.sink), num_blocks_for(length)
        gone = range(first, first + total - held)
        unseen = 0 if policy.window is None else max(length - policy.window + 1, 0) // BLOCK_TOKENS
        if int(tensors["length"]) != length or held > total or (gone and gone.stop > unseen):
            raise ValueError(f"{held} blocks of K/V of {int(tensors['length'])} tokens were saved; they are not {length} tokens.")
        self.blocks.adopt(table, gone)
        index = self._held(table.blocks)
        for name, plane in self._saved_planes():
            plane[:, index] = tensors[name].to(self.shape.device)
        return self.add(table)

    def _held(self, blocks: Sequence[int]) -> torch.Tensor:
        return torch.tensor([block for block in blocks if block != DEAD], dtype=torch.int64, device=self.shape.device)

    def _saved_planes(self) -> list[tuple[str, torch.Tensor]]:
        return [("kv", self._kv), ("states", self._states)]

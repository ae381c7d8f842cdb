"""`CudaTarget`: a Llama-like decoder over paged K/V, its short forwards under CUDA graphs.

A forward's rows lie sequence by sequence. The numbers of rows and of sequences are padded to the next that there is a graph of,
and the launches are replayed from it, since it is they that take the time; what is longer still is launched kernel by kernel.
It is the same kernels, so a row's result depends on no other row.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from transformers import PreTrainedModel

from runtime.backends.base import FULL, Segment, SegmentOutput, TargetInfo
from runtime.backends.segments import check_batch, depths
from runtime.backends.transformers.cache import KVShape
from runtime.backends.transformers.cuda import launch
from runtime.backends.transformers.cuda.blocks import BLOCK_TOKENS, Table
from runtime.backends.transformers.cuda.launch import NO_WINDOW, SEQUENCE_FIELDS, Buffers, Head, Rows
from runtime.backends.transformers.cuda.network import Network, read_network
from runtime.backends.transformers.cuda.pool import PagedPool
from runtime.backends.transformers.cuda.sending import Sender
from runtime.hidden_states import HiddenStates
from runtime.types import CachePolicy

if TYPE_CHECKING:
    from runtime.backends.transformers.cuda.decoder import FusedDecoder

# Few, so that graphs are few, and close, so that little is padded.
BUCKETS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
GRAPH_SEQUENCES = (1, 4, 16, 64)
MAX_NODES = 64  # of a tree: one bit each
MAX_GRAPH_ROWS = 2048  # as many as are read of prompts at once
# Numbers of sequences and of rows of all of them, however long each is; the smaller ones first.
GRAPH_SHAPES = [(num, rows) for num in GRAPH_SEQUENCES for rows in BUCKETS if num <= rows <= MAX_GRAPH_ROWS]
MAX_LONG_SEGMENTS, MAX_LONG_ROWS = 256, 32768  # of prompts at once; fewer segments than the block table has rows


class Graphs:
    """What was launched once with these shapes is replayed from then on. Buffers are static, so replays read new inputs.

    What it leaves in its buffers is read before the next replay. What it allocates for itself lies where the other graphs'
    does: nothing of it outlives the replay.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}
        if device.type == "cuda":  # what one capture gave back, another takes only on the same stream
            self._pool, self._stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def __len__(self) -> int:
        return len(self._graphs)

    def run(self, key: Hashable, launches: Callable[[], None]) -> bool:
        """Replay; the first time launch once for real, which compiles kernels, and capture for the next time. Whether it was
        there already."""
        if graph := self._graphs.get(key):
            graph.replay()
            return True
        launches()
        if self._device.type == "cuda":
            graph = torch.cuda.CUDAGraph()
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(self._stream):
                # Other threads may use the device meanwhile.
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                launches()
                graph.capture_end()
            self._graphs[key] = graph
        return self._device.type != "cuda"


class CudaTarget:
    """Implements `runtime.backends.base.Target`. One thread at a time."""

    def __init__(self, network: Network, info: TargetInfo, shape: KVShape, pool_bytes: int) -> None:
        self.network, self._info = network, info
        self.device = shape.device
        num_blocks = pool_bytes // PagedPool.page_bytes(shape, info.hidden_size)
        self.pool = PagedPool(shape, info.hidden_size, info.max_positions, num_blocks)
        self._graphs, self._sender = Graphs(self.device), Sender(self.device)
        self._buffers = Buffers(MAX_GRAPH_ROWS, network.geometry, shape.dtype, self.device)
        self._head = Head(network.head)
        no_states = HiddenStates(*(network.head.new_empty(0, width * info.hidden_size) for width in (3, 1)))
        self._nothing = SegmentOutput(network.head.new_empty(0, info.vocab_size, dtype=torch.float32), no_states)
        self._inputs = torch.zeros(5 * MAX_GRAPH_ROWS + 6 * max(GRAPH_SEQUENCES), dtype=torch.int32, device=self.device)

    @property
    def info(self) -> TargetInfo:
        return self._info

    @property
    def embedding(self) -> torch.Tensor:
        return self.network.embedding

    @property
    def lm_head(self) -> torch.Tensor:
        return self.network.head

    def new_cache(self, policy: CachePolicy = FULL) -> int:
        return self.pool.add(Table(policy))

    @torch.inference_mode()
    def forward(self, segments: Sequence[Segment]) -> list[SegmentOutput]:
        """See the protocol. ValueError, before anything changes, for a segment that makes no sense."""
        check_batch(segments, self.length, self._info)
        if any(segment.parents is not None and len(segment.token_ids) > MAX_NODES for segment in segments):
            raise ValueError(f"A tree of more than {MAX_NODES} nodes cannot be verified at once; draft fewer.")
        return [output for part in _parts(segments) for output in self._forward(part)]

    def _forward(self, segments: Sequence[Segment]) -> list[SegmentOutput]:
        tables = [self.pool[segment.cache] for segment in segments]
        sizes = [len(segment.token_ids) for segment in segments]
        is_prompt = not any(segment.num_logits for segment in segments)  # with steps behind it
        self.pool.reserve(tables, sizes, takes_ahead=is_prompt)
        is_tree = any(segment.parents is not None for segment in segments)
        ends = np.cumsum(sizes).tolist()
        starts = [end - size for end, size in zip(ends, sizes, strict=True)]
        if (shape := graph_shape(len(segments), ends[-1])) is not None:
            num, num_rows = shape
            packed = pack(segments, tables, sizes, starts, num_rows, num, is_tree)
            self._sender.write(self._inputs[: len(packed)], packed)
            self._replay(num, num_rows, is_tree)
            left = self._buffers.hidden[: ends[-1]]
        else:
            packed = pack(segments, tables, sizes, starts, ends[-1], len(segments), is_tree)
            rows = unpack(self._sender.send(packed), self.pool.device_table, ends[-1], len(segments), max(sizes), is_tree)
            buffers = Buffers(ends[-1], self.network.geometry, self.network.embedding.dtype, self.device)
            self.run_layers(rows, buffers)
            left = buffers.hidden
        for table, segment, size in zip(tables, segments, sizes, strict=True):
            table.parents = range(-1, size - 1) if segment.parents is None else tuple(segment.parents)
        if not any(segment.num_logits or segment.wants_states for segment in segments):
            return [self._nothing] * len(segments)
        hidden = self._states(left.clone() if shape is not None else left)
        wanted = [row for segment, end in zip(segments, ends, strict=True) for row in range(end - segment.num_logits, end)]
        logits = torch.empty(len(wanted), self._info.vocab_size, dtype=torch.float32, device=self.device)
        if wanted:
            last = hidden.last if len(wanted) == ends[-1] else hidden.last[self._sender.send(np.array(wanted))]
            self._head.logits(last, logits)
        by_segment = torch.split(logits, [segment.num_logits for segment in segments])
        return [SegmentOutput(part, hidden[start:end]) for part, start, end in zip(by_segment, starts, ends, strict=True)]

    def _replay(self, num: int, num_rows: int, is_tree: bool) -> None:
        """All layers, of what lies in the inputs: any of the sequences may have all of the rows."""

        def launches() -> None:
            rows = unpack(self._inputs, self.pool.device_table, num_rows, num, num_rows, is_tree)
            self.run_layers(rows, self._buffers)

        self._graphs.run((num, num_rows, is_tree), launches)

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Capture all forwards without trees that have a graph, of nobody's rows."""
        self._inputs.zero_()
        for num, num_rows in GRAPH_SHAPES:
            self._replay(num, num_rows, is_tree=False)

    def run_layers(self, rows: Rows, buffers: Buffers) -> None:
        """All layers; the states of the rows come to lie in `buffers.hidden` and in the pool."""
        network, n = self.network, rows.num_rows
        g = network.geometry
        launch.embed(rows.ids, network.embedding, network.layers[0].input_norm, buffers)
        x, q, mid = buffers.x[:n], buffers.q[:n], buffers.mid[:n]
        aux, ids = [part[:n] for part in buffers.aux], self._info.aux_layer_ids
        next_gains = [layer.input_norm for layer in network.layers[1:]] + [None]
        for i, (layer, next_gain) in enumerate(zip(network.layers, next_gains, strict=True)):
            keys, values = self.pool.keys[i], self.pool.values[i]
            launch.qkv(layer, g, rows, buffers, q, keys, values, (network.cos, network.sin))
            launch.attend(layer, g, rows, buffers, keys, values, q)
            launch.linear(buffers.o[:n], layer.out, mid, residual=x, gain=layer.mlp_norm, buffers=buffers)
            x = aux[ids.index(i)] if i in ids else buffers.x[:n]
            launch.mlp(layer, g, buffers, x, next_gain)
        launch.keep_states(aux, x, network.norm, g.eps, rows.slots, buffers.hidden, self.pool.states)

    def _states(self, hidden: torch.Tensor) -> HiddenStates:
        """Of rows [T, 4H]."""
        split = 3 * self._info.hidden_size
        return HiddenStates(hidden[:, :split], hidden[:, split:])

    @property
    def capacity_bytes(self) -> int:
        """Of K/V; a tenth of the pool is kept back for blocks that are taken ahead."""
        return self.pool.num_bytes(self.pool.blocks.num_blocks - 1) * 9 // 10

    def new_decoder(self, max_depth: int, max_sequences: int) -> FusedDecoder:
        """What runs whole steps of this target's sequences on the device, so many at most, with chains of up to max_depth."""
        from runtime.backends.transformers.cuda.decoder import FusedDecoder

        return FusedDecoder(self, max_depth, max_sequences)

    @torch.inference_mode()
    def states_of(self, cache: int, first: int, end: int) -> HiddenStates:
        """Of committed positions, out of the pool."""
        return self._states(self.pool.states_of(self.pool[cache], first, end))

    @torch.inference_mode()
    def commit(self, cache: int, rows: Sequence[int]) -> None:
        self.pool.commit(self.pool[cache], rows)

    def truncate(self, cache: int, length: int) -> None:
        self.pool.blocks.truncate(self.pool[cache], length)

    def fork(self, cache: int, length: int | None = None) -> int:
        table = self.pool[cache]
        return self.pool.add(self.pool.blocks.fork(table, table.length if length is None else length))

    def drop(self, cache: int) -> None:
        self.pool.drop(cache)

    def length(self, cache: int) -> int:
        return self.pool[cache].length

    def dropped(self, cache: int) -> int:
        return self.pool[cache].dropped

    def save(self, cache: int) -> dict[str, torch.Tensor]:
        return self.pool.save(self.pool[cache])

    @torch.inference_mode()
    def restore(self, tensors: Mapping[str, torch.Tensor], length: int, policy: CachePolicy) -> int:
        return self.pool.restore(tensors, length, policy)

    def cache_bytes(self, num_tokens: int = 0, policy: CachePolicy = FULL) -> int:
        return self.pool.bytes_for(num_tokens, policy) if num_tokens else self.pool.num_bytes()


def load_fused(model: PreTrainedModel, info: TargetInfo, shape: KVShape, pool_mib: int | None) -> CudaTarget | None:
    """A target of a model on its device, whose weights it takes over; None for a model of another kind."""
    network = read_network(model, info.max_positions)
    if network is None:
        return None
    pool_bytes = pool_mib * 2**20 if pool_mib else torch.cuda.mem_get_info(shape.device)[0] * 3 // 10
    return CudaTarget(network, info, shape, pool_bytes)


def bucket(n: int) -> int:
    """The next size that graphs are made for; n itself beyond them."""
    return next((size for size in BUCKETS if size >= n), n)


def graph_shape(num_sequences: int, num_rows: int) -> tuple[int, int] | None:
    """The smallest that holds these; None: they are too many."""
    return next((shape for shape in GRAPH_SHAPES if shape[0] >= num_sequences and shape[1] >= num_rows), None)


def _parts(segments: Sequence[Segment]) -> Iterator[Sequence[Segment]]:
    """What is computed one after the other: of hundreds of prompts no more at once than there is room for between the kernels."""
    first, num_rows = 0, 0
    for index, segment in enumerate(segments):
        size = len(segment.token_ids)
        if index > first and (index - first == MAX_LONG_SEGMENTS or num_rows + size > MAX_LONG_ROWS):
            yield segments[first:index]
            first, num_rows = index, 0
        num_rows += size
    if segments:
        yield segments[first:]


def pack(
    segments: Sequence[Segment],
    tables: Sequence[Table],
    sizes: Sequence[int],
    starts: Sequence[int],
    num_rows: int,
    num: int,
    is_tree: bool,
) -> np.ndarray:
    """All of `Rows` that changes, as one int32 array: ancestors (int64), ids, positions, slots, then the fields by sequence.
    is_tree: the ancestors are looked at."""
    packed = np.zeros(5 * num_rows + 6 * num, dtype=np.int32)
    ancestors = packed[: 2 * num_rows].view(np.int64)
    ids, positions, slots = packed[2 * num_rows : 5 * num_rows].reshape(3, num_rows)
    by_sequence = packed[5 * num_rows :].reshape(6, num)
    for s, (segment, table, size, start) in enumerate(zip(segments, tables, sizes, starts, strict=True)):
        end = start + size
        ids[start:end] = segment.token_ids
        places = np.arange(table.length, table.length + size)
        positions[start:end] = places if segment.parents is None else np.asarray(depths(segment.parents, size)) + table.length
        blocks = np.array(table.blocks[table.length // BLOCK_TOKENS :], dtype=np.int32)
        slots[start:end] = blocks[places // BLOCK_TOKENS - table.length // BLOCK_TOKENS] * BLOCK_TOKENS + places % BLOCK_TOKENS
        if is_tree and size <= MAX_NODES:
            ancestors[start:end] = masks(segment.parents, size)
        window = NO_WINDOW if table.policy.window is None else table.policy.window
        assert table.row is not None
        by_sequence[:, s] = (table.row, start, size, table.length, table.policy.sink, window)
    return packed


def unpack(packed: torch.Tensor, table: torch.Tensor, num_rows: int, num: int, max_size: int, is_tree: bool) -> Rows:
    """Views of what `pack` made."""
    ids, positions, slots = packed[2 * num_rows : 5 * num_rows].view(3, num_rows)
    fields = dict(zip(SEQUENCE_FIELDS, packed[5 * num_rows : 5 * num_rows + 6 * num].view(6, num), strict=True))
    ancestors = packed[: 2 * num_rows].view(torch.int64) if is_tree else None
    return Rows(ids, positions, slots, table, max_size=max_size, ancestors=ancestors, **fields)


def masks(parents: Sequence[int] | None, size: int) -> np.ndarray:
    """Bit masks of what each node sees, itself and its ancestors, int64 [size]. At most 64 nodes."""
    sees: list[int] = []
    for node, parent in enumerate(range(-1, size - 1) if parents is None else parents):
        sees.append(1 << node | (sees[parent] if parent >= 0 else 0))
    return np.array(sees, dtype=np.uint64).view(np.int64)

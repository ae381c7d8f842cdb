"""`Target`: the model half of an engine, as every backend implements it.

A target owns its K/V caches. The engine hands it ragged batches: for each sequence some new tokens, as a chain or as a
tree, and then says which of them became history. Tensors cross this line as torch tensors whatever the backend computes in.

    cache = target.new_cache()
    [out] = target.forward([Segment(cache, token_ids=[5, 6, 7])])   # K/V of 3 tokens written, tentative
    target.commit(cache, [0, 1, 2])                                 # all became history
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from runtime.hidden_states import HiddenStates
from runtime.types import CachePolicy

FULL = CachePolicy()  # keeps everything


@dataclass(frozen=True)
class TargetInfo:
    """What there is to know about a loaded target without touching its weights."""

    name: str
    fingerprint: str  # content hash of weights + config + tokenizer: two targets with equal fingerprints are one target
    vocab_size: int  # V
    hidden_size: int  # Ht
    num_layers: int  # n
    max_positions: int
    aux_layer_ids: tuple[int, int, int]
    eos_token_ids: tuple[int, ...]
    dtype: str  # "float32", "bfloat16"
    device: str


@dataclass(frozen=True)
class Segment:
    """The new tokens of one sequence in a ragged forward. Node i sees the cache, its ancestors and itself."""

    cache: int  # handle from new_cache()
    token_ids: Sequence[int]  # at least one
    parents: Sequence[int] | None = (
        None  # [len(token_ids)], index of each node's parent in this segment, -1: the cache; None: a chain
    )
    num_logits: int = 1  # logits for the last num_logits rows; 0: none
    wants_states: bool = True  # False: a target that keeps them (`whole_steps.KeepsStates`) may leave them out of the output


@dataclass(frozen=True)
class SegmentOutput:
    logits: torch.Tensor  # [num_logits, V] float32
    hidden: HiddenStates  # of all rows of the segment, in order; of none, where they were left out


class Target(Protocol):
    @property
    def info(self) -> TargetInfo: ...

    @property
    def embedding(self) -> torch.Tensor:
        """[V, Ht] input embedding, shared with the drafter; never modified."""
        ...

    @property
    def lm_head(self) -> torch.Tensor:
        """[V, Ht] output head; never modified."""
        ...

    def new_cache(self, policy: CachePolicy = FULL) -> int:
        """A handle to an empty K/V cache. Its tokens see what the policy lets them see, in every layer."""
        ...

    def forward(self, segments: Sequence[Segment]) -> list[SegmentOutput]:
        """One forward for all segments (each cache at most once). Writes tentative K/V behind each cache's committed length.

        Tentative K/V not committed is overwritten by the cache's next forward. On an exception no committed K/V has changed.
        """
        ...

    def commit(self, cache: int, rows: Sequence[int]) -> None:
        """Make these rows of the cache's last forward (a root path, ascending) part of its history; forget the others."""
        ...

    def truncate(self, cache: int, length: int) -> None:
        """Keep the first `length` committed tokens. ValueError if the cache holds fewer, or dropped some that the next needs."""
        ...

    def fork(self, cache: int, length: int | None = None) -> int:
        """A new cache of the same policy with the first `length` committed tokens (None: all). ValueError as for truncate."""
        ...

    def drop(self, cache: int) -> None:
        """Free the cache. The handle is dead afterwards."""
        ...

    def length(self, cache: int) -> int:
        """Committed tokens of the cache, those that its policy dropped included."""
        ...

    def dropped(self, cache: int) -> int:
        """Committed tokens whose K/V is gone, because under the policy nothing that follows sees them.

        Under one policy it depends on the greatest length alone, not on how the tokens came. A backend may drop in steps.
        """
        ...

    def save(self, cache: int) -> dict[str, torch.Tensor]:
        """All that `restore` needs, on the CPU and contiguous, under names of the backend's choosing. Tentative rows are not."""
        ...

    def restore(self, tensors: Mapping[str, torch.Tensor], length: int, policy: CachePolicy) -> int:
        """A new cache with the `length` committed tokens that were saved under this policy.

        ValueError for tensors of another name, shape or dtype.
        """
        ...

    def cache_bytes(self, num_tokens: int = 0, policy: CachePolicy = FULL) -> int:
        """Bytes held by all caches now; with num_tokens, the bytes of a cache that grew to so many under the policy.

        Both count whole blocks. A forward of many rows may need more than the latter for as long as it is tentative.
        """
        ...

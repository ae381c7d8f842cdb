"""What a target promises that runs whole steps on its device: draft, verify and accept without the host in between.

The engine's side of it is `engine.fused`; the one target that can is the CUDA backend's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from runtime.backends.base import Target
from runtime.eagle3.model import Eagle3Model
from runtime.hidden_states import HiddenStates
from runtime.speculation.sampling import Sampled


@runtime_checkable
class KeepsStates(Protocol):
    """A target that has the states of all rows whose K/V it has."""

    def states_of(self, cache: int, first: int, end: int) -> HiddenStates:
        """A copy of those of committed positions first .. end-1, which must not be dropped."""
        ...


class Emitted(NamedTuple):
    """What a step brought, or several in a row, sequence by sequence."""

    tokens: list[list[int]]  # the last of each is pending; -1: no finite logits
    sizes: list[list[int]] | None = None  # how many came with each step; None: one step, or one token with each
    waited_s: float = 0.0  # that the host had to wait for the device
    device_s: float | None = None  # that the device was at work for it alone, where it can tell


class Decoder(Protocol):
    """Whole steps on the device. See the CUDA backend's for what they do."""

    @property
    def max_sequences(self) -> int: ...

    @property
    def max_depth(self) -> int: ...

    @property
    def max_steps(self) -> int:
        """In a row."""
        ...

    def depth_of(self, num_sequences: int) -> int:
        """Of the longest chains that so many can have, at most `max_depth`."""
        ...

    def load_drafter(self, model: Eagle3Model) -> bool:
        """Draft with this network from the next step on. False, and no change, if it cannot."""
        ...

    def can_continue(self, cache: int, depth: int) -> bool:
        """Whether another step of this sequence needs nothing of the host, not even what the one under way will bring."""
        ...

    def launch(
        self,
        caches: Sequence[int],
        histories: Sequence[Sequence[int]],
        sampled: Sequence[Sampled | None],
        depth: int,
        num_steps: int = 1,
    ) -> bool:
        """Begin a step, or several in a row. Histories include the pending token, `sampled` says where sampled requests stand;
        those of caches that can continue are not looked at. Up to four may be under way, which are collected in their order.
        False: something was compiled in between, so this step says nothing of what others take."""
        ...

    def has_landed(self) -> bool:
        """Whether `collect` would not have to wait."""
        ...

    def collect(self, still_wanted: Sequence[bool]) -> Emitted:
        """End the first of those under way. What is no longer wanted changes nothing, and where it goes on in others under way,
        none come for it there. States of the rows are the target's to tell."""
        ...

    def leave(self, cache: int) -> None:
        """The cache goes on elsewhere, or nowhere. Also for one that was never here."""
        ...

    def abandon(self) -> None:
        """Forget all that is under way, and every sequence, since something raised: who goes on begins anew."""
        ...

    def warm_up(self, num_sequences: int) -> dict[tuple[int, int], float]:
        """Compile what steps of up to so many sequences need; seconds of each step by their number and its depth."""
        ...


@runtime_checkable
class Fuses(KeepsStates, Target, Protocol):
    """A target that runs whole steps."""

    @property
    def capacity_bytes(self) -> int:
        """Of K/V that it can hold; its memory does not grow."""
        ...

    def new_decoder(self, max_depth: int, max_sequences: int) -> Decoder: ...

"""Several processes that train one run together, as torchrun starts them: `World` is what one of them knows of the others.

    torchrun --nproc-per-node=4 -m training ...

Every rank runs the same loop in step with the others: what one of them decides alone (its rows have ended, a signal came) goes
through `any` or `share`, so that nobody waits in a collective which another rank never enters. Values travel as JSON in tensors
on the CPU, over gloo; gradients over gloo or NCCL. A rank that fails says why before it goes; one that is killed says nothing;
either way the others end with `RankLost`. A world of one process needs no process group, and costs nothing.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous
from torch.nn.parallel import DistributedDataParallel

from runtime.errors import ConfigError, RankLost
from training.config import Parallel

if TYPE_CHECKING:  # they take longer to import than all that is ours; who has shards has imported them
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

FAILURE = "slipstream/failure"  # where a rank that fails says why
LAST_WORDS_S = 2.0  # how long the others wait for it
POLL_S = 2e-4  # of a collective, growing to
LONGEST_POLL_S = 0.02
PEERS = ("gloo", "NCCL", "Connection closed by peer", "Connection reset by peer")  # in what a broken collective says


@dataclass
class World:
    """This process among the others. The defaults are a process that trains alone."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0  # on this machine
    local_size: int = 1
    parallel: Parallel = Parallel.DDP
    store: Store | None = None
    while_waiting: Callable[[], None] = field(default=lambda: None)  # called now and then while others are waited for

    @property
    def is_first(self) -> bool:
        """The one that writes, judges and tells."""
        return self.rank == 0

    # --- collectives: every rank makes the same calls in the same order ---

    def any(self, *flags: bool) -> list[bool]:
        """For each flag, whether it is up on any rank. What the first rank alone decides, the others hand in as False."""
        return [total > 0 for total in self.sum(flags)]

    def sum(self, values: Sequence[float]) -> list[float]:
        """Each value, summed over ranks in float64."""
        total = torch.tensor(values, dtype=torch.float64)
        self.add_up(total)
        return total.tolist()

    def add_up(self, tensor: torch.Tensor) -> None:
        """Sum a tensor of the CPU over ranks, in place."""
        if self.size > 1:
            with self.watching():
                self._wait(dist.all_reduce(tensor, async_op=True))

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks, by rank, on every rank: JSON, and choices by their value."""
        if self.size == 1:
            return [value]
        data = torch.frombuffer(bytearray(json.dumps(value, default=lambda choice: choice.value).encode()), dtype=torch.uint8)
        lengths = torch.zeros(self.size, dtype=torch.int64)
        lengths[self.rank] = len(data)
        self.add_up(lengths)
        table = torch.zeros(self.size, int(lengths.max()), dtype=torch.uint8)
        table[self.rank, : len(data)] = data
        self.add_up(table)
        return [json.loads(bytes(line[:length].tolist())) for line, length in zip(table, lengths.tolist(), strict=True)]

    def share(self, value: Any) -> Any:
        """The first rank's JSON value, on every rank."""
        return self.gather(value if self.is_first else None)[0]

    @contextmanager
    def first_in_turn(self) -> Iterator[None]:
        """The first rank does what stands inside before the others do."""
        if not self.is_first:
            self.any(False)
        yield
        if self.is_first:
            self.any(False)

    def check_same(self, values: Mapping[str, Any]) -> None:
        """ConfigError, on every rank, if these JSON values, by what they are, differ between ranks."""
        every = self.gather(dict(values))
        for rank, others in enumerate(every):
            for what, first in every[0].items():
                if others[what] != first:
                    raise ConfigError(
                        f"{what} is {first!r} on rank 0 and {others[what]!r} on rank {rank}; give all ranks of a run the same "
                        "settings, and a state_dir and a model that all of them see."
                    )

    # --- failures ---

    @contextmanager
    def watching(self) -> Iterator[None]:
        """RankLost in place of what torch says when another rank is gone."""
        try:
            yield
        except RuntimeError as error:
            is_of_peers = isinstance(error, dist.DistError) or any(word in str(error) for word in PEERS)
            if self.size == 1 or not is_of_peers or isinstance(error, RankLost):
                raise
            raise RankLost(self._last_words()) from error

    def say_why(self, error: BaseException) -> None:
        """Leave word for the others before this rank goes."""
        if self.store is not None and not isinstance(error, RankLost):
            self.store.set(FAILURE, f"rank {self.rank} failed with {type(error).__name__}: {error}")

    def _last_words(self) -> str:
        assert self.store is not None
        deadline = time.monotonic() + LAST_WORDS_S
        while time.monotonic() < deadline:
            try:
                if self.store.check([FAILURE]):
                    return str(self.store.get(FAILURE).decode())
            except RuntimeError:  # it went with the rank that kept it
                break
            time.sleep(LAST_WORDS_S / 20)
        return "another rank ended without a word, killed or cut off"

    def _wait(self, work: dist.Work) -> None:
        pause_s = POLL_S
        while not work.is_completed():
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_POLL_S)
            if pause_s == LONGEST_POLL_S:
                self.while_waiting()
        work.wait()


ALONE = World()


_LEFT: list[Any] = []
"""Groups that were left. Who drops the last reference to one joins its threads, which may ask for the interpreter lock to drop
what they last worked on: a DDP reducer would do that while it holds the lock, and both would wait for ever."""


@contextmanager
def joined(parallel: Parallel, device: str, timeout_s: float) -> Iterator[World]:
    """Join the processes that torchrun started, if it did. device: `model.device`. A rank that leaves with an error says so to
    the others; one that says nothing for timeout_s is given up. ConfigError if the others cannot be met."""
    size = _of_environment("WORLD_SIZE", 1)
    if size <= 1:
        yield World()
        return
    is_cuda = device.startswith("cuda") or (device == "auto" and torch.cuda.is_available())
    local_rank = _of_environment("LOCAL_RANK", 0)
    if is_cuda:
        if local_rank >= torch.cuda.device_count():
            raise ConfigError(
                f"LOCAL_RANK is {local_rank}, and {torch.cuda.device_count()} CUDA devices are here; start no more processes "
                "than there are devices (torchrun --nproc-per-node), or use model.device=cpu."
            )
        torch.cuda.set_device(local_rank)
    timeout = timedelta(seconds=timeout_s)
    try:
        store, rank, size = next(rendezvous("env://", timeout=timeout))
        backend = "cpu:gloo,cuda:nccl" if is_cuda else "gloo"
        dist.init_process_group(backend, store=PrefixStore("group", store), rank=rank, world_size=size, timeout=timeout)
    except (RuntimeError, ValueError) as error:
        raise ConfigError(
            f"The {size} processes of WORLD_SIZE could not meet ({error}); start them all, with torchrun, or unset WORLD_SIZE."
        ) from error
    mode = Parallel.DDP if parallel is Parallel.AUTO else parallel
    world = World(rank, size, local_rank, _of_environment("LOCAL_WORLD_SIZE", size), mode, store)
    try:
        yield world
    except BaseException as error:
        world.say_why(error)
        raise
    finally:
        _LEFT.append(dist.group.WORLD)
        dist.destroy_process_group()


def _of_environment(name: str, default: int) -> int:
    text = os.environ.get(name, str(default))
    if not text.isdecimal():
        raise ConfigError(f"{name} is {text!r} in the environment; it must be a number, as torchrun sets it, or unset.")
    return int(text)


# --- models ---


def spread(chain: nn.Module, world: World) -> nn.Module:
    """The module as the ranks train it: replicated (DDP) or its parameters, gradients and moments in shards (FSDP2). All
    begin with the first rank's weights. With one process, the module itself."""
    if world.size == 1:
        return chain
    with world.watching():
        for parameter in chain.parameters():
            dist.broadcast(parameter.data, src=0)
        if world.parallel is Parallel.DDP:
            return DistributedDataParallel(chain, init_sync=False)
        from torch.distributed.fsdp import fully_shard

        fully_shard(chain, reshard_after_forward=False)
        return chain


@contextmanager
def keeping_gradients(module: nn.Module, is_last: bool) -> Iterator[None]:
    """Forward and backward inside: gradients are summed over ranks with the last micro-batch of a step only. Parameters stay
    together till then, so a step has the same collectives on ranks with more micro-batches and with fewer."""
    if _is_sharded(module):
        module.set_requires_gradient_sync(is_last)
        module.set_reshard_after_backward(is_last)
        yield
    elif isinstance(module, DistributedDataParallel) and not is_last:
        with module.no_sync():
            yield
    else:
        yield


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself, put together from its shards if it has some; a collective then."""
    return tensor.full_tensor() if _is_shard(tensor) else tensor


def sharded_like(tensor: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """A copy of a whole tensor, on the parameter's device, cut as the parameter is."""
    if not _is_shard(parameter):
        return tensor.clone().to(parameter.device)
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(tensor.to(parameter.device), parameter.device_mesh, parameter.placements)


def _is_sharded(module: nn.Module) -> TypeGuard[FSDPModule]:
    return isinstance(module, getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", ()))


def _is_shard(tensor: torch.Tensor) -> TypeGuard[DTensor]:
    return isinstance(tensor, getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", ()))

"""What ranks tell each other, and how a module is spread over them: in real processes, and on two GPUs where there are two."""

from __future__ import annotations

import dataclasses
import textwrap

import pytest
import torch

from runtime.errors import ConfigError
from training.config import Parallel
from training.learning.distributed import ALONE, joined
from training.learning.learner import Learner
from training.learning.start import from_scratch

RANK = """
import datetime, os
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from runtime.errors import ConfigError, RankLost
from training.config import Parallel
from training.learning.distributed import joined, keeping_gradients, sharded_like, spread, whole

with joined(Parallel.{parallel}, "{device}", 60.0) as world:
    rank, size = world.rank, world.size
    device = torch.device("cuda", world.local_rank) if "{device}" == "cuda" else torch.device("cpu")
"""


def everywhere(code: str, parallel: Parallel = Parallel.AUTO, device: str = "cpu") -> str:
    return RANK.format(parallel=parallel.name, device=device) + textwrap.indent(textwrap.dedent(code), "    ")


def test_one_process_alone_needs_no_others() -> None:
    with joined(Parallel.FSDP, "cpu", 1.0) as world:
        assert (world.rank, world.size, world.is_first) == (0, 1, True)
        assert world.any(True, False) == [True, False]
        assert world.sum([2, 0.5]) == [2.0, 0.5]
        assert world.gather({"a": 1}) == [{"a": 1}]
        assert world.share("x") == "x"
        world.check_same({"a": 1})


@pytest.mark.parametrize("value", ["two", "-1", ""])
def test_an_environment_that_torchrun_did_not_set_is_refused(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", value)
    with (
        pytest.raises(ConfigError, match=r"WORLD_SIZE is '.*' in the environment; it must be a number"),
        joined(Parallel.AUTO, "cpu", 1.0),
    ):
        pass


def test_others_that_never_come_are_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("RANK", raising=False)
    with (
        pytest.raises(ConfigError, match=r"The 2 processes of WORLD_SIZE could not meet \(.*RANK.*\); start them all, with"),
        joined(Parallel.AUTO, "cpu", 1.0),
    ):
        pass


def test_ranks_agree(nursery) -> None:
    code = everywhere(
        """
        assert world.any(rank == 2, False, rank != 0) == [True, False, True]
        assert world.sum([rank, 0.5]) == [3.0, 1.5]
        assert world.gather(["ä" * rank, None]) == [["", None], ["ä", None], ["ää", None]]
        assert world.share(str(rank)) == "0"
        order = []
        with world.first_in_turn():
            order = world.store.add("turn", 1)
        assert (order == 1) == world.is_first
        world.check_same({"a": [1, None], "b": Parallel.DDP})
        waits = []
        world.while_waiting = lambda: waits.append(rank)
        if rank == 0:
            import time; time.sleep(0.5)
        world.any(False)
        assert bool(waits) == (rank != 0)
        try:
            world.check_same({"a": 1, "b": rank // 2})
        except ConfigError as error:
            assert "b is 0 on rank 0 and 1 on rank 2" in str(error)
        else:
            raise AssertionError
        """
    )
    nursery.start_ranks(code, code, code)
    assert nursery.results() == [0, 0, 0], nursery.said.read_text()


SPREAD = """
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(6, 10, bias=False), nn.Linear(10, 4, bias=False)).to(device)
    torch.manual_seed(0)
    alone = nn.Sequential(nn.Linear(6, 10, bias=False), nn.Linear(10, 4, bias=False)).to(device)
    chain = spread(model, world)
    parameters = dict(model.named_parameters())
    assert all(isinstance(each, DTensor) for each in parameters.values()) == (world.parallel is Parallel.FSDP)
    if world.parallel is Parallel.FSDP:
        assert parameters["0.weight"].to_local().shape[0] < 10
    for name, each in alone.named_parameters():
        assert torch.equal(whole(parameters[name].detach()), each)  # the first rank's
        assert torch.equal(whole(sharded_like(each.detach(), parameters[name])), each)
    inputs = torch.randn(3, 6, generator=torch.Generator().manual_seed(5)).to(device)  # rank 0 takes two, rank 1 one
    alone(inputs).square().sum().backward()
    mine = inputs[:2] if rank == 0 else inputs[2:]
    for number, row in enumerate(mine, 1):
        with keeping_gradients(chain, number == len(mine)):
            (chain(row[None]).square().sum() * size).backward()
    for name, each in alone.named_parameters():
        torch.testing.assert_close(whole(parameters[name].grad), each.grad, rtol=1e-4, atol=1e-5)
    norm = whole(nn.utils.clip_grad_norm_(parameters.values(), 1.0))
    torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(alone.parameters(), 1.0), rtol=1e-4, atol=1e-5)
"""

BOTH = pytest.mark.parametrize("parallel", [Parallel.DDP, Parallel.FSDP], ids=lambda kind: kind.value)


@BOTH
def test_gradients_of_ranks_and_micro_batches_are_summed(nursery, parallel: Parallel) -> None:
    code = everywhere(SPREAD, parallel)
    nursery.start_ranks(code, code)
    assert nursery.results() == [0, 0], nursery.said.read_text()


@pytest.mark.cuda
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@BOTH
def test_the_same_on_two_gpus(nursery, parallel: Parallel) -> None:
    code = everywhere(SPREAD, parallel, "cuda")
    nursery.start_ranks(code, code)
    assert nursery.results() == [0, 0], nursery.said.read_text()


@pytest.mark.parametrize("held", ["rows", "rows of one depth", "rows of which nothing carries loss", "nothing"])
def test_every_parameter_has_a_gradient_whatever_a_rank_holds(state, held: str) -> None:
    """Or else ranks would exchange gradients of different parameters, and wait for each other."""
    learner = from_scratch(state.target, state.config().trainer, state.rows(range(4)))
    assert isinstance(learner, Learner)
    taught = learner._pack(state.rows(range(2), num_generated=2 if held == "rows of one depth" else 14))
    if held == "rows of which nothing carries loss":
        taught = dataclasses.replace(taught, carries=torch.zeros_like(taught.carries))
    learner._backward(None if held == "nothing" else taught, torch.ones(5), is_last=True)
    assert [name for name, each in learner._model.named_parameters() if each.grad is None] == []
    moved = [name for name, each in learner._model.named_parameters() if each.grad is not None and each.grad.any()]
    assert bool(moved) == (held in ("rows", "rows of one depth"))


def test_a_rank_that_is_gone_is_told_with_its_reason(nursery) -> None:
    code = everywhere(
        """
        if rank == 1:
            raise ValueError("the second rank is tired")
        try:
            world.any(True)
        except RankLost as error:
            assert "and rank 1 failed with ValueError: the second rank is tired. What the latest" in str(error)
        else:
            raise AssertionError
        """
    )
    nursery.start_ranks(code, code)
    assert nursery.results() == [0, 1], nursery.said.read_text()


def test_other_errors_keep_their_words() -> None:
    with pytest.raises(RuntimeError, match="out of memory"), ALONE.watching():
        raise RuntimeError("out of memory")

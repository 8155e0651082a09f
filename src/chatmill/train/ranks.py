"""The processes of a run: which one this is, its device, and what they share; one alone needs no torchrun."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from chatmill.load.placement import named_device, rank_and_world


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """This process among all of them."""

    rank: int
    world: int
    device: torch.device
    group: Any | None
    """The process group of all ranks; None where there is one process."""

    @property
    def first(self) -> bool:
        """Whether this one writes logs and checkpoints."""
        return self.rank == 0

    def any(self, flag: bool) -> bool:
        """Whether any rank says yes; every rank asks at the same time."""
        if self.group is None:
            return flag
        votes = torch.tensor([int(flag)], device=self.device)
        dist.all_reduce(votes, op=dist.ReduceOp.MAX, group=self.group)
        return bool(votes.item())

    def wait(self) -> None:
        """Until all ranks are here."""
        if self.group is not None:
            dist.barrier(group=self.group)


@contextmanager
def joined_ranks(device: str = "auto") -> Iterator[Ranks]:
    """Join the processes that torchrun started (gloo on CPUs, nccl on GPUs), and leave them at the end."""
    rank, world = rank_and_world()
    chosen = _device(device)
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    started = world > 1 and not dist.is_initialized()
    if started:
        dist.init_process_group("nccl" if chosen.type == "cuda" else "gloo")
    try:
        yield Ranks(rank=rank, world=world, device=chosen, group=dist.group.WORLD if world > 1 else None)
    finally:
        if started:
            dist.destroy_process_group()


def _device(asked: str) -> torch.device:
    if asked != "auto":
        return named_device(asked)
    if torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    return torch.device("cpu")

"""Where a loader runs: which of how many processes this one is, and the device that its batches go to."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from chatmill.errors import ConfigError

if TYPE_CHECKING:
    import torch


def rank_and_world(rank: int | None = None, world_size: int | None = None) -> tuple[int, int]:
    """`(rank, world_size)`; what is not given comes from `RANK` and `WORLD_SIZE`, else it is 0 and 1."""
    chosen = _from_environment("RANK", 0) if rank is None else rank
    world = _from_environment("WORLD_SIZE", 1) if world_size is None else world_size
    if world < 1 or not 0 <= chosen < world:
        raise ConfigError(
            f"rank {chosen} of world_size {world}: ranks go from 0 to world_size - 1; give both arguments, "
            "or start the processes with torchrun"
        )
    return chosen, world


def _from_environment(name: str, default: int) -> int:
    text = os.environ.get(name)
    if text is None:
        return default
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"the environment variable {name} is {text!r}; a whole number is needed") from None


def named_device(name: Any, *, present: bool = True) -> torch.device:
    """The torch device of a name; one that does not exist, or (`present`) is not in this machine, is an error."""
    import torch

    try:
        device = torch.device(name)
    except (RuntimeError, TypeError, ValueError):
        raise ConfigError(f"device is {name!r}; give cpu, cuda, cuda:1, mps, ...") from None
    if not present:
        return device
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device is {name!r}, but torch sees no GPU here: give cpu, or install torch with CUDA")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"device is {name!r}, but there are {torch.cuda.device_count()} GPUs, counted from 0")
    return device

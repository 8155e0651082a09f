"""Which of how many processes this one is: the arguments, else what torchrun put into the environment."""

from __future__ import annotations

import os

from chatmill.errors import ConfigError


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

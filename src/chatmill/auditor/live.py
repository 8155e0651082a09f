"""Read the first batches of a DataLoader or a Trainer without side effects."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

import numpy as np


def is_trainer(source: Any) -> bool:
    """Return whether this is a Trainer of transformers, or one derived from it."""
    return hasattr(source, "get_train_dataloader")


@contextmanager
def kept_random_states() -> Iterator[None]:
    """Restore the states of the random numbers that a loader, its collator, or an import draws."""
    torch = sys.modules.get("torch")  # without torch there is no DataLoader
    python, numpy = random.getstate(), np.random.get_state()
    state = None if torch is None else torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        if torch is not None:
            torch.set_rng_state(state)


def first_batches(source: Any, count: int | None) -> Iterator[Any]:
    """Read the first batches of a loader or Trainer, all for None; training reads the same ones afterwards."""
    loader = source.get_train_dataloader() if is_trainer(source) else source
    # accelerate's own iterator waits for other processes, and must be read to its end; the loader in it need not
    loader = getattr(loader, "base_dataloader", loader)
    states = [(generator, generator.get_state()) for generator in _generators(loader)]
    yield from islice(loader, count)
    for generator, state in states:
        generator.set_state(state)


def _generators(sampler: Any) -> Iterator[Any]:
    """Find the random generators of a loader or sampler, and of the samplers in it."""
    if getattr(sampler, "generator", None) is not None:
        yield sampler.generator
    for name in ("batch_sampler", "sampler"):
        inner = getattr(sampler, name, None)
        if inner is not None:
            yield from _generators(inner)

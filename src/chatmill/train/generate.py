"""Decoding: one token after the other from a prompt of ids, until a stop id comes or there is no room."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch

from chatmill.errors import ConfigError
from chatmill.train.attention import whole_row_documents


class FinishReason(StrEnum):
    """Why decoding ended."""

    STOP = "stop"
    """The model gave a stop id."""
    LENGTH = "length"
    """As many new tokens as were asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How the next token is drawn."""

    temperature: float = 0.0
    """0 takes the likeliest token (greedy)."""
    top_p: float = 1.0
    """Draw from the likeliest tokens that together have this probability."""
    seed: int = 0
    max_new_tokens: int = 256

    def __post_init__(self) -> None:
        if not self.temperature >= 0:
            raise ConfigError(f"temperature is {self.temperature}; it must be 0 (greedy) or more")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p is {self.top_p}; it must be above 0, up to 1")
        if self.max_new_tokens < 1:
            raise ConfigError(f"max_new_tokens is {self.max_new_tokens}; it must be 1 or more")


@dataclass(frozen=True, slots=True, kw_only=True)
class Generated:
    """What a model said."""

    ids: tuple[int, ...]
    """New tokens, without the stop id."""
    finish: FinishReason
    stop_id: int | None
    """The stop id that ended it."""


@torch.no_grad()
def generate(
    model: Any, prompt: Sequence[int], *, stop_ids: Collection[int] = (), sampling: Sampling | None = None
) -> Generated:
    """Decode from a GPT (with a cache of keys and values) or a transformers model (run again for each token)."""
    if not len(prompt):
        raise ConfigError("the prompt has no tokens: there is nothing to continue")
    options = sampling or Sampling()
    generator = torch.Generator().manual_seed(options.seed)
    was_training = model.training
    model.eval()
    new: list[int] = []
    stop_id = None
    steps = _logits(model, [int(token) for token in prompt], new)
    for logits in steps:
        token = _draw(logits, options, generator)
        if token in stop_ids:
            stop_id = token
            break
        new.append(token)
        if len(new) == options.max_new_tokens:
            break
    model.train(was_training)
    return Generated(
        ids=tuple(new), finish=FinishReason.LENGTH if stop_id is None else FinishReason.STOP, stop_id=stop_id
    )


def _logits(model: Any, prompt: list[int], new: list[int]) -> Iterator[torch.Tensor]:
    """The logits (vocabulary,) behind the prompt, and then behind each token that the caller appends to `new`."""
    device = next(model.parameters()).device
    if not hasattr(model, "step"):
        while True:
            ids = torch.tensor([prompt + new], device=device)
            yield model.logits(ids, whole_row_documents(ids.shape, device))[0, -1]
    cache: list[list[torch.Tensor]] = [[] for _ in model.blocks]
    yield model.step(torch.tensor([prompt], device=device), 0, cache)[0]
    while True:
        yield model.step(torch.tensor([new[-1:]], device=device), len(prompt) + len(new) - 1, cache)[0]


def _draw(logits: torch.Tensor, options: Sampling, generator: torch.Generator) -> int:
    scores = logits.float().cpu()
    if options.temperature == 0:
        return int(scores.argmax())
    likely, ids = torch.softmax(scores / options.temperature, dim=-1).sort(descending=True)
    before = likely.cumsum(-1) - likely
    likely = likely.masked_fill(before >= options.top_p, 0)  # the first one has nothing before it and always stays
    return int(ids[torch.multinomial(likely, 1, generator=generator)])

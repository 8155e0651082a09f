"""Gemma 4: as many tokens as pooled patches, in the largest picture of the same shape that a budget allows."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

from chatmill.images.rule import Config, Grid, PictureRule, SizeError


@dataclass(frozen=True, kw_only=True)
class Gemma4Rule(PictureRule):
    """The grid is the number of tokens."""

    family: str = "gemma4"
    placeholder: str = "<|image|>"
    token: str = "<|image|>"
    before: str = "<|image>"
    after: str = "<image|>"
    marks: tuple[str, ...] = ("<|image>", "<image|>")
    patch: int
    pooled: int
    most: int

    types = "mm_token_type_ids"
    grid_key = "num_soft_tokens_per_image"
    unused_keys = ("num_soft_tokens_per_image",)

    @classmethod
    def of(cls, image: Config, processor: Config) -> Self:
        """Read it from the files of a model."""
        return cls(
            patch=image.get("patch_size", 16),
            pooled=image.get("pooling_kernel_size", 3),
            most=image.get("max_soft_tokens", 280),
        )

    def grid(self, height: int, width: int) -> Grid:
        """Whole pooled patches within the budget; a side that has none gets one."""
        step = self.pooled * self.patch
        budget = self.most * self.pooled**2 * self.patch**2
        scale = math.sqrt(budget / (height * width))
        rows, columns = math.floor(scale * height / step), math.floor(scale * width / step)
        if not rows and not columns:
            raise SizeError("the model's processor makes nothing of it")
        if not rows:
            rows, columns = 1, min(width // height, self.most)
        elif not columns:
            rows, columns = min(height // width, self.most), 1
        return (rows * columns,)

    def pieces(self, grid: Grid, size: tuple[int, int], others: int) -> Iterator[tuple[str, int]]:
        """Yield one token for each pooled patch."""
        yield self.token, grid[0]

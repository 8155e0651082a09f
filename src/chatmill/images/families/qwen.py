"""Qwen2-VL, 2.5-VL, 3-VL and 3.5: as many tokens as merged patches, in a picture that is resized to whole ones."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from chatmill.images.rule import Config, Grid, PictureRule, SizeError

MOST_ASPECT = 200


@dataclass(frozen=True, kw_only=True)
class QwenRule(PictureRule):
    """The grid is what the processor calls `image_grid_thw`."""

    family: str = "qwen"
    placeholder: str = "<|image_pad|>"
    token: str = "<|image_pad|>"
    marks: tuple[str, ...] = ("<|vision_start|>", "<|vision_end|>")
    patch: int
    merge: int
    least_pixels: int
    most_pixels: int

    @property
    def counted_frames(self) -> int:
        """How many frames a picture counts as, where its pixels are compared with the limits."""
        return 1

    @classmethod
    def of(cls, image: Config, processor: Config) -> Self:
        """Read it from the files of a model."""
        size = image.get("size") or {}
        return cls(
            patch=image.get("patch_size", 14),
            merge=image.get("merge_size", 2),
            least_pixels=image.get("min_pixels") or size.get("shortest_edge", 56 * 56),
            most_pixels=image.get("max_pixels") or size.get("longest_edge", 28 * 28 * 1280),
        )

    def grid(self, height: int, width: int) -> Grid:
        """Return one frame, and the patches of the resized picture."""
        if max(height, width) / min(height, width) > MOST_ASPECT:
            raise SizeError(f"one side is more than {MOST_ASPECT} times the other, which the model's processor refuses")
        step = self.patch * self.merge
        rows, columns = round(height / step) * step, round(width / step) * step
        frames = self.counted_frames
        if frames * rows * columns > self.most_pixels:
            scale = math.sqrt(frames * height * width / self.most_pixels)
            rows, columns = (max(step, math.floor(side / scale / step) * step) for side in (height, width))
        elif frames * rows * columns < self.least_pixels:
            scale = math.sqrt(self.least_pixels / (frames * height * width))
            rows, columns = (math.ceil(side * scale / step) * step for side in (height, width))
        return 1, rows // self.patch, columns // self.patch

    def pieces(self, grid: Grid, size: tuple[int, int], others: int) -> Iterator[tuple[str, int]]:
        """Yield one token for each merged patch."""
        yield self.token, math.prod(grid) // self.merge**2

    has_axes = True
    grid_key = "image_grid_thw"

    def axes(self, grid: Grid) -> tuple[NDArray[np.int64], int]:
        """Row by row; what follows goes on after the longer side."""
        frames, rows, columns = grid[0], grid[1] // self.merge, grid[2] // self.merge
        return np.indices((frames, rows, columns)).reshape(3, -1), max(rows, columns)

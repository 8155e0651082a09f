"""GLM-4V and 4.6V: merged patches as in Qwen-VL, with a limit that counts every picture as several frames."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Self

from chatmill.images.families.qwen import MOST_ASPECT, QwenRule
from chatmill.images.rule import Config, Grid, SizeError


@dataclass(frozen=True, kw_only=True)
class GlmRule(QwenRule):
    """The grid is what the processor calls `image_grid_thw`."""

    family: str = "glm"
    placeholder: str = "<|image|>"
    token: str = "<|image|>"
    marks: tuple[str, ...] = ("<|begin_of_image|>", "<|end_of_image|>")
    frames: int

    @classmethod
    def of(cls, image: Config, processor: Config) -> Self:
        """From the files of a model."""
        size = image.get("size") or {}
        return cls(
            patch=image.get("patch_size", 14),
            merge=image.get("merge_size", 2),
            frames=image.get("temporal_patch_size", 2),
            least_pixels=size.get("shortest_edge", 112 * 112),
            most_pixels=size.get("longest_edge", 28 * 28 * 15000),
        )

    def grid(self, height: int, width: int) -> Grid:
        """One frame, and the patches of the resized picture; a small one is made as large as a merged patch first."""
        step = self.patch * self.merge
        if height < step or width < step:
            larger = max(step / height, step / width)
            height, width = int(height * larger), int(width * larger)
        if max(height, width) / min(height, width) > MOST_ASPECT:
            raise SizeError(f"one side is more than {MOST_ASPECT} times the other, which the model's processor refuses")
        rows, columns = round(height / step) * step, round(width / step) * step
        pixels = self.frames * height * width
        if self.frames * rows * columns > self.most_pixels:
            scale = math.sqrt(pixels / self.most_pixels)
            rows, columns = (max(step, math.floor(side / scale / step) * step) for side in (height, width))
        elif self.frames * rows * columns < self.least_pixels:
            scale = math.sqrt(self.least_pixels / pixels)
            rows, columns = (math.ceil(side * scale / step) * step for side in (height, width))
        return 1, rows // self.patch, columns // self.patch

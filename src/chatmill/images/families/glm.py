"""GLM-4V and 4.6V: merged patches as in Qwen-VL, with a limit that counts every picture as several frames."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from chatmill.images.families.qwen import QwenRule
from chatmill.images.rule import Config, Grid


@dataclass(frozen=True, kw_only=True)
class GlmRule(QwenRule):
    """The grid is what the processor calls `image_grid_thw`."""

    family: str = "glm"
    placeholder: str = "<|image|>"
    token: str = "<|image|>"
    marks: tuple[str, ...] = ("<|begin_of_image|>", "<|end_of_image|>")
    frames: int

    @property
    def counted_frames(self) -> int:
        """As many as go into one patch in time."""
        return self.frames

    @classmethod
    def of(cls, image: Config, processor: Config) -> Self:
        """Read it from the files of a model."""
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
        return super().grid(height, width)

"""Pixtral and Mistral 3: rows of patches with a token after each row, in a picture that is made no larger."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Self

from chatmill.images.rule import Config, Grid, PictureRule


@dataclass(frozen=True, kw_only=True)
class PixtralRule(PictureRule):
    """The grid is the resized picture in pixels, which the processor calls `image_sizes`."""

    family: str = "pixtral"
    placeholder: str = "[IMG]"
    token: str = "[IMG]"
    row_end: str = "[IMG_BREAK]"
    end: str = "[IMG_END]"
    marks: tuple[str, ...] = ("[IMG_BREAK]", "[IMG_END]")
    patch: int
    longest: int

    grid_key = "image_sizes"

    @classmethod
    def of(cls, image: Config, processor: Config) -> Self:
        """Read it from the files of a model."""
        names = {
            "placeholder": processor.get("image_token", "[IMG]"),
            "token": processor.get("image_token", "[IMG]"),
            "row_end": processor.get("image_break_token", "[IMG_BREAK]"),
            "end": processor.get("image_end_token", "[IMG_END]"),
        }
        return cls(
            **names,
            marks=(names["row_end"], names["end"]),
            patch=processor.get("patch_size", 16) * processor.get("spatial_merge_size", 1),
            longest=(image.get("size") or {}).get("longest_edge", 1024),
        )

    def grid(self, height: int, width: int) -> Grid:
        """Whole patches of a picture that is no longer than allowed."""
        ratio = max(height / self.longest, width / self.longest)
        if ratio > 1:
            height, width = math.floor(height / ratio), math.floor(width / ratio)
        rows, columns = (height - 1) // self.patch + 1, (width - 1) // self.patch + 1
        return rows * self.patch, columns * self.patch

    def pieces(self, grid: Grid, size: tuple[int, int], others: int) -> Iterator[tuple[str, int]]:
        """Yield a token for each patch, one after each row, and another one after the last."""
        rows, columns = (side // self.patch for side in grid)
        for row in range(rows):
            yield self.token, columns
            yield (self.row_end if row + 1 < rows else self.end), 1

    @property
    def processor_options(self) -> dict[str, Any]:
        """Patches as the model merges them."""
        return {"patch_size": self.patch}

"""LLaVA-OneVision: a whole picture, and its tiles without what pads them, with a token after each row."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from chatmill.images.rule import Config, Grid, PictureRule


@dataclass(frozen=True, kw_only=True)
class LlavaOnevisionRule(PictureRule):
    """The grid is the canvas in pixels: the first of `canvases` that shows most of the picture and wastes least."""

    family: str = "llava_onevision"
    placeholder: str = "<image>"
    token: str = "<image>"
    canvases: tuple[tuple[int, int], ...]
    tile: int
    count: int
    most_tiles: int
    drops_first: bool

    @classmethod
    def of(cls, image: Config, processor: Config) -> Self:
        """Read it from the files of a model."""
        size = image.get("size") or {"height": 384, "width": 384}
        named = processor.get("image_token", "<image>")
        return cls(
            placeholder=named,
            token=named,
            canvases=tuple((height, width) for height, width in image["image_grid_pinpoints"]),
            tile=size.get("shortest_edge") or min(size["height"], size["width"]),
            count=processor["num_image_tokens"],
            most_tiles=int(processor.get("vision_aspect_ratio", "anyres_max_9").removeprefix("anyres_max_")),
            drops_first=processor.get("vision_feature_select_strategy") == "default",
        )

    def grid(self, height: int, width: int) -> Grid:
        """Choose the best canvas."""
        best, shown, wasted = self.canvases[0], 0, math.inf
        for canvas in self.canvases:
            scale = min(canvas[1] / width, canvas[0] / height)
            pixels = min(int(width * scale) * int(height * scale), width * height)
            rest = canvas[0] * canvas[1] - pixels
            if pixels > shown or (pixels == shown and rest < wasted):
                best, shown, wasted = canvas, pixels, rest
        return best

    def pieces(self, grid: Grid, size: tuple[int, int], others: int) -> Iterator[tuple[str, int]]:
        """Yield the whole picture alone, and a token, if there are others; else its tiles too."""
        count = self.count + 1 if others else self.count + self._of_tiles(grid, *size)
        yield self.token, count - self.drops_first

    def _of_tiles(self, grid: Grid, height: int, width: int) -> int:
        side = math.isqrt(self.count)
        rows, columns = side * (grid[0] // self.tile), side * (grid[1] // self.tile)
        if width / height > columns / rows:
            rows -= (rows - int(round(height * (columns / width), 7))) // 2 * 2
        else:
            columns -= (columns - int(round(width * (rows / height), 7))) // 2 * 2
        ratio = math.sqrt(rows * columns / (self.most_tiles * side**2))
        if ratio > 1.1:
            rows, columns = int(rows // ratio), int(columns // ratio)
        return rows * columns + rows

    def grids_made(self, output: Mapping[str, Any], count: int) -> list[Grid]:
        """Compute the grids from the sizes of the pictures, which is all that the processor returns."""
        return [self.grid(int(height), int(width)) for height, width in output["image_sizes"]]

    def arranged(self, documents: Sequence[Sequence[Any]]) -> Any:
        """Arrange the pictures by document: a picture that is not alone is not cut into tiles."""
        return [list(pictures) for pictures in documents if pictures]

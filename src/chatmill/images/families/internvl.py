"""InternVL 3: tiles of one size in the grid that is nearest to the picture's shape, and a small copy of the whole."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Self

from chatmill.images.rule import Config, Grid, PictureRule


@dataclass(frozen=True, kw_only=True)
class InternVLRule(PictureRule):
    """The grid is the number of tiles."""

    family: str = "internvl"
    placeholder: str = "<IMG_CONTEXT>"
    token: str = "<IMG_CONTEXT>"
    before: str = "<img>"
    after: str = "</img>"
    marks: tuple[str, ...] = ("<img>", "</img>")
    count: int
    least: int
    most: int
    tile: tuple[int, int]

    unused_keys = ("num_patches",)
    grid_key = "num_patches"

    @classmethod
    def of(cls, image: Config, processor: Config) -> Self:
        """Read it from the files of a model; the processor cuts pictures into tiles unless it is told otherwise."""
        size = image.get("size") or {}
        return cls(
            count=processor.get("image_seq_length", 256),
            least=image.get("min_patches", 1),
            most=image.get("max_patches", 12),
            tile=(size.get("height", 384), size.get("width", 384)),
        )

    @property
    def processor_options(self) -> dict[str, Any]:
        """Tiles, which the image processor alone would not make."""
        return {"crop_to_patches": True}

    def grid(self, height: int, width: int) -> Grid:
        """Tiles of the nearest shape; of those equally near the largest that the picture covers by more than half."""
        sides = range(1, self.most + 1)
        shapes = [(c, r) for c in sides for r in sides if self.least <= c * r <= self.most]
        best, nearest = (1, 1), float("inf")
        for columns, rows in sorted(shapes, key=lambda shape: shape[0] * shape[1]):
            off = abs(width / height - columns / rows)
            covers = width * height > 0.5 * self.tile[0] * self.tile[1] * columns * rows
            if off < nearest or (off == nearest and covers):
                best, nearest = (columns, rows), off
        tiles = best[0] * best[1]
        return (tiles + 1 if tiles > 1 else 1,)

    def pieces(self, grid: Grid, size: tuple[int, int], others: int) -> Iterator[tuple[str, int]]:
        """Yield the same number of tokens for each tile."""
        yield self.token, self.count * grid[0]

"""Llama 4: tiles on the canvas that fits the picture best, with marks between them, and a small copy of the whole."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

import numpy as np

from chatmill.errors import ConfigError
from chatmill.images.rule import Config, Grid, PictureRule

START, END, PATCH = "<|image_start|>", "<|image_end|>", "<|patch|>"
NEXT_COLUMN, NEXT_ROW = "<|tile_x_separator|>", "<|tile_y_separator|>"


@dataclass(frozen=True, kw_only=True)
class Llama4Rule(PictureRule):
    """The grid is rows and columns of tiles."""

    family: str = "llama4"
    placeholder: str = "<|image|>"
    token: str = "<|image|>"
    marks: tuple[str, ...] = (START, END, PATCH, NEXT_COLUMN, NEXT_ROW)
    count: int
    tile: int
    most_tiles: int
    fills: bool
    """Whether the largest canvas is taken, not the smallest that the picture fits on."""

    unused_keys = ("aspect_ratios",)
    grid_key = "aspect_ratios"

    @classmethod
    def of(cls, image: Config, processor: Config) -> Self:
        """Read it from the files of a model."""
        size = image.get("size") or {}
        height, width = size.get("height", 336), size.get("width", 336)
        if height != width:
            raise ConfigError(f"tiles of {height} x {width} pixels are not square, which Llama 4's processor refuses")
        patches = (height // processor.get("patch_size", 14)) ** 2
        return cls(
            count=patches // round(1 / processor.get("pixel_shuffle_ratio", 0.5) ** 2),
            tile=height,
            most_tiles=image.get("max_patches", 16),
            fills=bool(image.get("resize_to_max_canvas", False)),
        )

    def grid(self, height: int, width: int) -> Grid:
        """Return the canvas that shrinks the picture least, or else enlarges it least; of those the smallest.

        Scales are compared in float32, as the processor compares them.
        """
        sides = range(1, self.most_tiles + 1)
        shapes = np.array([(r, c) for r in sides for c in sides if r * c <= self.most_tiles])
        scales = np.minimum(
            (shapes[:, 0] * self.tile).astype(np.float32) / np.float32(height),
            (shapes[:, 1] * self.tile).astype(np.float32) / np.float32(width),
        )
        larger = scales[scales >= 1]
        if len(larger):
            chosen = larger.max() if self.fills else larger.min()
        else:
            chosen = scales.max()
        fitting = shapes[scales == chosen]
        rows, columns = fitting[fitting.prod(axis=1).argmin()].tolist()
        return rows, columns

    def pieces(self, grid: Grid, size: tuple[int, int], others: int) -> Iterator[tuple[str, int]]:
        """Tiles row by row if there is more than one, and the whole picture."""
        rows, columns = grid
        yield START, 1
        for _ in range(rows if rows * columns > 1 else 0):
            for column in range(columns):
                yield PATCH, self.count
                yield (NEXT_COLUMN if column + 1 < columns else NEXT_ROW), 1
        yield from ((self.token, 1), (PATCH, self.count), (END, 1))

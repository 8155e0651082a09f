"""Idefics3 and SmolVLM: rows of tiles with their places written before them, and a small copy of the whole."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from chatmill.images.rule import Config, Grid, PictureRule, SizeError

MOST_SIDE = 4096
"""No side of a picture is made longer by the processor."""
MOST_TILES = 6
"""Rows, and columns, that the vocabulary has names for."""
FAKE, WHOLE = "<fake_token_around_image>", "<global-img>"


@dataclass(frozen=True, kw_only=True)
class Idefics3Rule(PictureRule):
    """The grid is rows and columns of tiles; none where the picture is not cut."""

    family: str = "idefics3"
    placeholder: str = "<image>"
    token: str = "<image>"
    marks: tuple[str, ...] = (FAKE, WHOLE)
    count: int
    longest: int
    tile: int
    cuts: bool

    unused_keys = ("rows", "cols")

    @classmethod
    def of(cls, image: Config, processor: Config) -> Self:
        """Read it from the files of a model."""
        return cls(
            count=processor.get("image_seq_len", 169),
            longest=(image.get("size") or {}).get("longest_edge", 4 * 364),
            tile=(image.get("max_image_size") or {}).get("longest_edge", 364),
            cuts=image.get("do_image_splitting", True),
        )

    @property
    def written_names(self) -> frozenset[str]:
        """With the names of all tiles."""
        return self.names | {name for name, _ in self.pieces((MOST_TILES, MOST_TILES), (0, 0), 0)}

    def grid(self, height: int, width: int) -> Grid:
        """Tiles of the picture after its longer side was resized."""
        if not self.cuts:
            return 0, 0
        height, width = self._resized(height, width)
        rows, columns = math.ceil(height / self.tile), math.ceil(width / self.tile)
        if max(rows, columns) > MOST_TILES:
            raise SizeError(f"it becomes {rows} x {columns} tiles, and the vocabulary has names for {MOST_TILES}")
        return (rows, columns) if rows * columns > 1 else (0, 0)

    def _resized(self, height: int, width: int) -> tuple[int, int]:
        shape = width / height
        if width >= height:
            width, height = self.longest, int(self.longest / shape)
            height += height % 2
        else:
            height, width = self.longest, int(self.longest * shape)
            width += width % 2
        height, width = max(height, 1), max(width, 1)
        if max(height, width) > MOST_SIDE:
            shape = width / height
            height, width = (
                (int(MOST_SIDE / shape), MOST_SIDE) if width >= height else (MOST_SIDE, int(MOST_SIDE * shape))
            )
        return max(height, 1), max(width, 1)

    def pieces(self, grid: Grid, size: tuple[int, int], others: int) -> Iterator[tuple[str, int]]:
        """Tiles row by row, a line break after each row, an empty line, and the whole picture."""
        rows, columns = grid
        for row in range(rows):
            for column in range(columns):
                yield from ((FAKE, 1), (f"<row_{row + 1}_col_{column + 1}>", 1), (self.token, self.count))
            yield "\n" if row + 1 < rows else "\n\n", 1
        yield from ((FAKE, 1), (WHOLE, 1), (self.token, self.count), (FAKE, 1))

    def grids_made(self, output: Mapping[str, Any], count: int) -> list[Grid]:
        """Count as the processor does."""
        return [(int(rows), int(columns)) for rows, columns in zip(output["rows"][0], output["cols"][0], strict=True)]

    @property
    def processor_options(self) -> dict[str, Any]:
        """The numbers of tiles, which the image processor would keep to itself."""
        return {"return_row_col_info": True}

    def arranged(self, documents: Sequence[Sequence[Any]]) -> Any:
        """Arrange all pictures as those of one text, so that none is padded; the model takes them in order."""
        return [super().arranged(documents)]

"""Gemma 3: every picture takes the same number of tokens, with blank lines around it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Self

from chatmill.errors import ConfigError
from chatmill.images.rule import Config, Grid, PictureRule


@dataclass(frozen=True, kw_only=True)
class Gemma3Rule(PictureRule):
    """The grid is the number of crops, which is 0: pan and scan is off in every published model."""

    family: str = "gemma3"
    placeholder: str = "<start_of_image>"
    token: str = "<image_soft_token>"
    before: str = "\n\n<start_of_image>"
    after: str = "<end_of_image>\n\n"
    marks: tuple[str, ...] = ("<end_of_image>",)
    count: int

    @classmethod
    def of(cls, image: Config, processor: Config) -> Self:
        """Read it from the files of a model."""
        if image.get("do_pan_and_scan"):
            raise ConfigError("pan and scan (do_pan_and_scan) adds crops of pictures, which Chatmill does not write")
        return cls(count=processor.get("image_seq_length") or image.get("image_seq_length") or 256)

    def grid(self, height: int, width: int) -> Grid:
        """Return no crops."""
        return (0,)

    def pieces(self, grid: Grid, size: tuple[int, int], others: int) -> Iterator[tuple[str, int]]:
        """Always the same."""
        yield self.token, self.count

    types = "token_type_ids"
    unused_keys = ("num_crops",)

    def grids_made(self, output: Mapping[str, Any], count: int) -> list[Grid]:
        """Crops, where the processor counts them."""
        crops = output.get("num_crops")
        return [(0,)] * count if crops is None else [(int(crop),) for crop in crops]

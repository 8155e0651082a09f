"""What the processor of a family of models writes for a picture of a given size."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from chatmill.core.canonical import canonical_json
from chatmill.core.hashed_fields import hashed_fields

Grid = tuple[int, ...]
Config = Mapping[str, Any]


class SizeError(ValueError):
    """A picture of a size that the model's processor refuses."""


@dataclass(frozen=True, kw_only=True)
class PictureRule(ABC):
    """The numbers of one processor, and what follows from them. A size is (height, width), turned as EXIF says."""

    family: str
    placeholder: str
    """What the chat template writes for a picture."""
    token: str
    """The control token that becomes `pieces`."""
    before: str = ""
    after: str = ""
    """Text that the processor writes around the token in the place of the placeholder."""
    marks: tuple[str, ...] = ()
    """Other control tokens that belong to a picture."""

    @property
    def fingerprint(self) -> str:
        """sha256 of all its numbers and texts; `family` tells rules of different kinds apart."""
        return hashlib.sha256(canonical_json(hashed_fields(self, {}))).hexdigest()

    @property
    def written(self) -> str:
        """What stands in the place of a placeholder before its token is expanded."""
        return f"{self.before}{self.token}{self.after}"

    @property
    def names(self) -> frozenset[str]:
        """All control tokens of pictures."""
        return frozenset({self.placeholder, self.token, *self.marks})

    @property
    def written_names(self) -> frozenset[str]:
        """All control tokens that a picture may become, also those that not every vocabulary has."""
        return self.names

    @abstractmethod
    def grid(self, height: int, width: int) -> Grid:
        """What the processor makes of a size: the numbers by which loaders compare its output with what was compiled.

        A `SizeError` where the processor refuses it.
        """

    @abstractmethod
    def pieces(self, grid: Grid, size: tuple[int, int], others: int) -> Iterator[tuple[str, int]]:
        """Control tokens or texts, in order, and how often each comes; `others` are more pictures in the document."""

    grid_key = ""
    """What the processor gives grids as."""

    def grids_made(self, output: Mapping[str, Any], count: int) -> list[Grid]:
        """Read the grids of `count` pictures from the processor's output."""
        return [tuple(int(number) for number in np.ravel(grid)) for grid in output[self.grid_key]]

    has_axes = False
    """Whether the model reads positions in time, height and width."""
    types = ""
    """The key in which the model reads which tokens are pictures, if it does."""
    unused_keys: ClassVar[tuple[str, ...]] = ()
    """What the image processor gives and the model does not read."""

    @property
    def processor_options(self) -> dict[str, Any]:
        """What the processor hands to its image processor."""
        return {}

    def arranged(self, documents: Sequence[Sequence[Any]]) -> Any:
        """Arrange the pictures of documents as the image processor takes them: all in one list."""
        return [picture for pictures in documents for picture in pictures]

    def axes(self, grid: Grid) -> tuple[NDArray[np.int64], int]:
        """Positions of the tokens of a picture in time, height and width, and how far the text after it moves on."""
        raise NotImplementedError(self.family)

    def as_json(self) -> dict[str, Any]:
        """Return the rule and its numbers, for manifests."""
        return {key: value for key, value in asdict(self).items() if value not in ("", ())}

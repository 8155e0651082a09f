"""The pack plan of a split: which episodes share a row, as two small arrays beside the episodes, checked when read."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from chatmill.core.tokens import offsets_of
from chatmill.errors import FormatError
from chatmill.store.forms import COUNT, FILE, TEXT, check_form
from chatmill.store.mapped import file_size

Ints = NDArray[np.int64]

PACK = "pack"
"""The folder in a split that holds the plan."""
ORDER = "order.u64"
"""Numbers of episodes, row after row."""
ROWS = "rows.u64"
"""Where each row begins in the order, and where the last one ends."""
PLAN = "plan.json"
"""Written last: a folder without it holds no plan."""
FORMAT, VERSION = "chatmill-pack", 1

_FORM = {
    "format": TEXT,
    "version": COUNT,
    "length": COUNT,
    "strategy": TEXT,
    "lower_bound": COUNT,
    "episodes": COUNT,
    "rows": COUNT,
    "tokens": COUNT,
    "files": {ORDER: FILE, ROWS: FILE},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PackPlan:
    """Row `r` holds the episodes `order[row_offsets[r]:row_offsets[r + 1]]`, one behind the other, then padding."""

    length: int
    """Tokens of a row, padding included."""
    strategy: str
    order: Ints
    """Numbers of episodes; each exactly once."""
    row_offsets: Ints
    """One more than there are rows."""
    row_tokens: Ints
    """Tokens of each row, padding not counted."""
    lower_bound: int
    """No packing of whole episodes can use fewer rows."""
    fingerprint: str
    """sha256 of plan.json, which has the hashes of both arrays."""

    def __len__(self) -> int:
        return len(self.row_tokens)

    @property
    def tokens(self) -> int:
        """Tokens of all episodes."""
        return int(self.row_tokens.sum())

    @property
    def padding(self) -> int:
        """Places of all rows that hold no token."""
        return len(self) * self.length - self.tokens

    def row(self, number: int) -> Ints:
        """The episodes of a row, in the order in which they are laid."""
        return self.order[self.row_offsets[number] : self.row_offsets[number + 1]]


def read_pack_plan(split: Path, lengths: Ints) -> PackPlan | None:
    """The plan in the folder of a split; None where it has none.

    `lengths` are the tokens of every episode of the split: each must be in exactly one row, and fit there.
    """
    folder = split / PACK
    if not folder.is_dir():
        return None
    path = folder / PLAN
    content, fingerprint = _content(path)
    if content["episodes"] != len(lengths):
        raise FormatError(
            f"{path}: a plan over {content['episodes']:,} episodes, and the split has {len(lengths):,}: it belongs to "
            "another dataset"
        )
    order = _numbers(folder / ORDER, content["episodes"])
    row_offsets = _numbers(folder / ROWS, content["rows"] + 1)
    _check_order(folder / ORDER, order)
    _check_borders(folder / ROWS, row_offsets, len(order))
    row_tokens = np.diff(offsets_of(lengths[order])[row_offsets])
    too_long = np.flatnonzero(row_tokens > content["length"])
    if len(too_long):
        row = int(too_long[0])
        raise FormatError(
            f"{folder}: row {row:,} has {row_tokens[row]:,} tokens, and a row holds {content['length']:,}: the plan "
            "belongs to another dataset, or was edited"
        )
    return PackPlan(
        length=content["length"],
        strategy=content["strategy"],
        order=order,
        row_offsets=row_offsets,
        row_tokens=row_tokens,
        lower_bound=content["lower_bound"],
        fingerprint=fingerprint,
    )


def _content(path: Path) -> tuple[dict[str, Any], str]:
    try:
        raw = path.read_bytes()
        content = json.loads(raw)
    except FileNotFoundError:
        raise FormatError(
            f"{path.parent}: {PLAN}, which is written last, is missing: build or copy the dataset again, or remove "
            "this folder to read the episodes without their plan"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise FormatError(f"{path} cannot be read: {error}") from None
    check_form(content, _FORM, str(path))
    if (content["format"], content["version"]) != (FORMAT, VERSION):
        raise FormatError(
            f"{path}: format {content['format']!r} version {content['version']!r}; this package reads {FORMAT!r} "
            f"version {VERSION}"
        )
    return content, hashlib.sha256(raw).hexdigest()


def _numbers(path: Path, count: int) -> Ints:
    if (size := file_size(path)) != count * 8:
        raise FormatError(f"{path}: {size:,} bytes, and {PLAN} says {count:,} numbers of 8 bytes: the file was cut")
    numbers = np.fromfile(path, dtype="<u8")
    if len(numbers) and int(numbers.max()) > np.iinfo(np.int64).max:
        raise _wrong(path, numbers, int(numbers.argmax()), "no number of an episode is that large")
    return numbers.astype(np.int64)


def _check_order(path: Path, order: Ints) -> None:
    """Every episode exactly once."""
    outside = np.flatnonzero(order >= len(order))
    if len(outside):
        raise _wrong(path, order, int(outside[0]), f"the split has {len(order):,} episodes, counted from 0")
    first = np.full(len(order), -1, dtype=np.int64)
    first[order[::-1]] = np.arange(len(order) - 1, -1, -1)
    again = np.flatnonzero(first[order] != np.arange(len(order)))
    if len(again):
        place = int(again[0])
        raise _wrong(path, order, place, f"this episode is already in place {first[order[place]]:,}")


def _check_borders(path: Path, borders: Ints, episodes: int) -> None:
    """From 0 to the number of episodes, and no row is empty."""
    if borders[0] != 0:
        raise _wrong(path, borders, 0, "the first row begins at 0")
    empty = np.flatnonzero(np.diff(borders) <= 0)
    if len(empty):
        raise _wrong(path, borders, int(empty[0]) + 1, "a row has at least one episode, so borders grow")
    if borders[-1] != episodes:
        raise _wrong(path, borders, len(borders) - 1, f"the last row ends with the last of {episodes:,} episodes")


def _wrong(path: Path, values: NDArray[Any], place: int, why: str) -> FormatError:
    return FormatError(f"{path}: number {place:,} (byte {place * 8:,}) is {values[place]:,}: {why}")

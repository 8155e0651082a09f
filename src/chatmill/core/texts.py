"""Many texts in one buffer of UTF-8: what columns of strings are made of, without a Python object for each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from chatmill.core.native import text_ranges
from chatmill.core.native.gather import gathered
from chatmill.core.tokens import offsets_of

Ints = NDArray[np.int64]
_NO_BYTES = np.empty(0, dtype=np.uint8)
_ZERO, _MISSING = (np.int64(number).tobytes() for number in (0, -1))


def _repeated(number: bytes, count: int) -> Ints:
    """Return an array that repeats one number (as `np.broadcast_to` makes, in a tenth of the time)."""
    return np.ndarray((count,), dtype=np.int64, buffer=number, strides=(0,))


Text = TypeVar("Text", str, str | None)


@dataclass(frozen=True, slots=True, eq=False)
class _Column(Sequence[Text]):
    """T texts; text `i` is the UTF-8 in `data[starts[i] : starts[i] + lengths[i]]`.

    Texts may lie in any order, overlap, and share the buffer with other columns.
    """

    data: NDArray[np.uint8]
    starts: Ints
    lengths: Ints
    """Bytes of each text; -1 if there is none."""

    def __len__(self) -> int:
        return len(self.starts)

    @overload
    def __getitem__(self, index: int) -> Text: ...
    @overload
    def __getitem__(self, index: slice) -> list[Text]: ...
    def __getitem__(self, index: int | slice) -> Text | list[Text]:
        data, starts, lengths = self.data, self.starts[index], self.lengths[index]
        if not isinstance(index, slice):
            text: Any = None if lengths < 0 else data[starts : starts + lengths].tobytes().decode()
            return text  # type: ignore[no-any-return]
        pairs = zip(starts.tolist(), lengths.tolist(), strict=True)
        return [None if n < 0 else data[at : at + n].tobytes().decode() for at, n in pairs]  # type: ignore[misc]


@dataclass(frozen=True, slots=True, eq=False)
class Texts(_Column[str]):
    """Texts that are all there."""

    @classmethod
    def of(cls, texts: Sequence[str]) -> Texts:
        """Strings as columns; `UnicodeEncodeError` where one has no UTF-8 form."""
        encoded = [text.encode() for text in texts]
        lengths = np.fromiter(map(len, encoded), dtype=np.int64, count=len(encoded))
        return cls.packed_in(np.frombuffer(b"".join(encoded), dtype=np.uint8), lengths)

    @classmethod
    def packed_in(cls, data: NDArray[np.uint8], lengths: Ints) -> Texts:
        """Texts of these lengths that fill a buffer without gaps."""
        return cls(data, offsets_of(lengths)[:-1], lengths)

    def raw(self, chosen: Ints) -> list[bytes]:
        """Return the bytes of some texts."""
        ranges, data = zip(self.starts[chosen].tolist(), self.lengths[chosen].tolist(), strict=True), self.data
        return [data[start : start + length].tobytes() for start, length in ranges]

    def take(self, chosen: NDArray[Any]) -> Texts:
        """Return the chosen texts, in that order, in the same buffer."""
        return Texts(self.data, self.starts[chosen], self.lengths[chosen])

    @property
    def offsets(self) -> Ints:
        """T + 1 offsets of the packed form: text `i` of `packed()` begins at `offsets[i]`."""
        return offsets_of(self.lengths)

    def packed(self) -> Texts:
        """Return the same texts without gaps, in a buffer of their own."""
        offsets = self.offsets
        if len(self.data) == offsets[-1] and np.array_equal(self.starts, offsets[:-1]):
            return self
        nowhere = np.zeros(len(self), dtype=np.uint8)
        return Texts(gathered([self.data], nowhere, self.starts, self.lengths), offsets[:-1], self.lengths)

    def characters(self) -> Ints:
        """Characters (code points) of each text."""
        return text_ranges.characters(self.data, self.starts, self.lengths)

    def not_ascii(self) -> NDArray[np.bool_]:
        """Return which texts are not ASCII."""
        return text_ranges.not_ascii(self.data, self.starts, self.lengths)

    def has_other_characters(self, ranges: Ints) -> NDArray[np.bool_]:
        """Flag texts with a character that is not ASCII and in none of these ranges of code points."""
        return text_ranges.other_characters(self.data, self.starts, self.lengths, ranges)

    def trimmed(self, byte: int | None, *, begin: bool = True, end: bool = True) -> Texts:
        """Without an ASCII character at both ends, or (None) without white space, as `str.strip` sees it."""
        sides = begin * text_ranges.AT_BEGIN + end * text_ranges.AT_END
        return Texts(self.data, *text_ranges.trimmed(self.data, self.starts, self.lengths, byte, sides))

    def replaced(self, places: Ints, others: Texts) -> Texts:
        """With other texts at these places."""
        data, shift = self.data, 0
        if others.data is not data:
            data, shift = np.concatenate([data, others.data]), len(data)
        starts, lengths = self.starts.copy(), self.lengths.copy()
        starts[places], lengths[places] = others.starts + shift, others.lengths
        return Texts(data, starts, lengths)


@dataclass(frozen=True, slots=True, eq=False)
class OptionalTexts(_Column[str | None]):
    """Texts of which some are missing."""

    @classmethod
    def none(cls, count: int) -> OptionalTexts:
        """`count` missing texts, in memory that does not grow with them."""
        return cls(_NO_BYTES, _repeated(_ZERO, count), _repeated(_MISSING, count))

    @classmethod
    def of(cls, texts: Sequence[str | None]) -> OptionalTexts:
        """Strings as columns; `UnicodeEncodeError` where one has no UTF-8 form."""
        places = np.array([place for place, text in enumerate(texts) if text is not None], dtype=np.int64)
        return cls.sparse(len(texts), places, Texts.of([text for text in texts if text is not None]))

    @classmethod
    def sparse(cls, count: int, places: Ints, texts: Texts) -> OptionalTexts:
        """`count` texts, all missing but those at the given places."""
        if not len(places):
            return cls.none(count)
        starts, lengths = np.zeros(count, dtype=np.int64), np.full(count, -1, dtype=np.int64)
        starts[places], lengths[places] = texts.starts, texts.lengths
        return cls(texts.data, starts, lengths)

    def raw(self, index: int) -> bytes | None:
        """Return the bytes of a text."""
        start, length = int(self.starts[index]), int(self.lengths[index])
        return None if length < 0 else self.data[start : start + length].tobytes()

    @property
    def present(self) -> NDArray[np.bool_]:
        """Which texts are there, be they empty."""
        return self.lengths >= 0

    @property
    def is_none(self) -> bool:
        """Whether the column was made of missing texts alone."""
        return not self.lengths.strides[0]

    def any_in(self, part: slice) -> bool:
        """Return whether a text is there in a part of the column."""
        return bool((self.lengths[part] >= 0).any())

    @property
    def texts(self) -> Texts:
        """The same texts, empty where one is missing."""
        return Texts(self.data, self.starts, np.maximum(self.lengths, 0))

    def take(self, chosen: NDArray[Any]) -> OptionalTexts:
        """Return the chosen texts, in that order, in the same buffer."""
        lengths = self.lengths[chosen]
        return self.none(len(lengths)) if self.is_none else OptionalTexts(self.data, self.starts[chosen], lengths)


AnyTexts = TypeVar("AnyTexts", Texts, OptionalTexts)


class TextJoiner:
    """Concatenates columns of texts, with all their buffers in one."""

    def __init__(self, columns: Iterable[Texts | OptionalTexts]) -> None:
        """`columns` are all that will be joined, so that a buffer which several of them share is copied once."""
        buffers = list({id(column.data): column.data for column in columns if len(column.data)}.values())
        self._data = buffers[0] if len(buffers) == 1 else np.concatenate([_NO_BYTES, *buffers])
        begins = offsets_of(np.array([len(buffer) for buffer in buffers], dtype=np.int64)).tolist()
        self._begins = {id(buffer): (begin, buffer) for buffer, begin in zip(buffers, begins, strict=False)}

    def join(self, columns: Sequence[AnyTexts]) -> AnyTexts:
        """Return all texts of the first column, then those of the second, ..."""
        starts = [c.starts + self._begins[id(c.data)][0] if len(c.data) else c.starts for c in columns]
        return type(columns[0])(self._data, np.concatenate(starts), np.concatenate([c.lengths for c in columns]))

"""Reads plain text records: JSONL with a text in one field of each object."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from os import PathLike, fspath
from pathlib import Path

import msgspec

from chatmill.errors import RecordError
from chatmill.read.lines import numbered_lines


def read_texts(paths: Iterable[str | PathLike[str]], *, field: str = "text") -> Iterator[str]:
    """The texts of JSONL files (also .gz and .zst), in order; a line without a text in `field` is an error."""
    decoder = msgspec.json.Decoder(dict)
    for path in map(Path, paths):
        for number, line in numbered_lines(path):
            try:
                text = decoder.decode(line).get(field)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise _bad(f"{error}", field, path, number) from None
            if not isinstance(text, str):
                raise _bad(f"the field {field!r} holds {type(text).__name__}", field, path, number)
            yield text


def _bad(fact: str, field: str, path: Path, number: int) -> RecordError:
    return RecordError(
        f"{fact}. Each line is a JSON object with a text in its field {field!r}",
        code="bad_text_line",
        where=f"{fspath(path)}:{number}",
    )

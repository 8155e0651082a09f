"""Reads text records: JSONL with a text in one field, and marker transcripts, also as plain text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from os import PathLike, fspath
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from chatmill.core.message_parser import checked_text
from chatmill.errors import FormatError, RecordError
from chatmill.json_values import decoded
from chatmill.read import lines
from chatmill.read.lines import limited_lines, line_too_long, numbered_lines, open_bytes

EOS_MARKER = "<|EOS|>"
USER_MARKER = "<|USER|>"


class Transcript(NamedTuple):
    """One record: the text as it is in the file, and where it begins."""

    text: str
    where: str
    """File and line, as `path:line`."""


def read_texts(paths: Iterable[str | PathLike[str]], *, field: str = "text") -> Iterator[str]:
    """Yield the texts of JSONL files (also .gz and .zst), in order; a line without a text in `field` is an error."""
    for path in map(Path, paths):
        for text, _ in _jsonl_texts(path, field, code="bad_text_line"):
            yield text


def read_transcripts(paths: str | PathLike[str] | Iterable[str | PathLike[str]]) -> Iterator[Transcript]:
    """Yield the transcripts of files (also .gz and .zst), in order, in memory that does not grow with them.

    A file named .jsonl, .ndjson or .json has one in the field `text` of each line. Plain text is split at `<|EOS|>`
    where it has one, else each line is a transcript. White space alone is no record in plain text, and an error in
    JSONL.
    """
    for path in map(Path, [paths] if isinstance(paths, str | PathLike) else paths):
        name = path.name.lower().removesuffix(".gz").removesuffix(".zst")
        if name.endswith((".jsonl", ".ndjson", ".json")):
            yield from _read_jsonl(path)
        elif any(EOS_MARKER in line for line in _text_lines(path)):
            yield from _read_split_at_eos(path)
        else:
            yield from _read_lines(path)


def _jsonl_texts(path: Path, field: str, *, code: str, hint: str = "") -> Iterator[Transcript]:
    for number, line in numbered_lines(path):
        where = f"{fspath(path)}:{number}"
        try:
            text = checked_text(msgspec.convert(msgspec.convert(decoded(line), dict[str, Any])[field], str), field)
        except (RecordError, msgspec.ValidationError, KeyError) as error:
            what = f"missing required field `{field}`" if isinstance(error, KeyError) else str(error)
            message = f"{what}. Each line is a JSON object with a string in its field {field!r}{hint}"
            raise RecordError(message, code=code, where=where) from None
        yield Transcript(text, where)


def _read_jsonl(path: Path) -> Iterator[Transcript]:
    hint = "; the command 'chatmill transcripts' makes such lines of conversations"
    for transcript in _jsonl_texts(path, "text", code="bad_transcript_line", hint=hint):
        if not transcript.text.strip():
            raise RecordError("the field 'text' holds no span", code="empty_transcript", where=transcript.where)
        yield transcript


def _read_split_at_eos(path: Path) -> Iterator[Transcript]:
    parts: list[str] = []  # of the record that has not ended yet
    size = begins = 0  # its characters, and its first line that is not blank
    for number, line in enumerate(_text_lines(path), 1):
        for place, piece in enumerate(line.split(EOS_MARKER)):
            if place:  # the marker before the piece ends the record
                if begins:
                    yield Transcript("".join(parts), f"{fspath(path)}:{begins}")
                parts, size, begins = [], 0, 0
            parts.append(piece)
            size += len(piece)
            begins = begins or (number if piece.strip() else 0)
            if size > lines.LINE_LIMIT:
                raise line_too_long(path, begins or number, noun="the transcript that begins here")
    if begins:
        yield Transcript("".join(parts), f"{fspath(path)}:{begins}")


def _read_lines(path: Path) -> Iterator[Transcript]:
    for number, line in enumerate(_text_lines(path), 1):
        if not line or line.isspace():
            continue
        where = f"{fspath(path)}:{number}"
        if USER_MARKER not in line:
            raise RecordError(
                f"the line has no {USER_MARKER}. Without {EOS_MARKER} in the file each line is one "
                f"transcript; if yours go over several lines, end each of them with {EOS_MARKER}",
                code="no_user_marker",
                where=where,
            )
        yield Transcript(line.removesuffix("\n"), where)


def _text_lines(path: Path) -> Iterator[str]:
    """The lines of a file of UTF-8 text with their ends; only a line feed ends a line, and a carriage return stays."""
    with open_bytes(path) as stream:
        for line in limited_lines(stream, path):
            try:
                yield line.decode()
            except UnicodeDecodeError as error:
                damaged = error.object[error.start : error.start + 4].hex(" ")
                raise FormatError(f"{path} is not UTF-8: {error.reason} (bytes {damaged})") from None

"""Reads marker transcripts: JSONL with a `text` field, text split at `<|EOS|>`, or one record a line."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from os import PathLike, fspath
from pathlib import Path
from typing import IO, NamedTuple

import msgspec

from chatmill.errors import FormatError, RecordError
from chatmill.read.compressed import open_bytes
from chatmill.read.lines import line_limit, line_too_long, numbered_lines

EOS_MARKER = "<|EOS|>"
USER_MARKER = "<|USER|>"

_CHUNK = 1 << 20


class Transcript(NamedTuple):
    """One record: the text as it is in the file, and where it begins."""

    text: str
    where: str
    """File and line, as `path:line`."""


class TranscriptFormat(StrEnum):
    """How a file holds transcripts."""

    JSONL = "jsonl"
    """One JSON object a line, the transcript in its field `text`."""
    TEXT = "text"
    """Plain text: split at `<|EOS|>` where the file has one, else one record a line."""

    @classmethod
    def of(cls, path: Path) -> TranscriptFormat:
        """By the file name without .gz or .zst: .jsonl, .ndjson and .json are JSONL, all others text."""
        name = path.name.lower().removesuffix(".gz").removesuffix(".zst")
        return cls.JSONL if name.endswith((".jsonl", ".ndjson", ".json")) else cls.TEXT


def read_transcripts(
    paths: str | PathLike[str] | Iterable[str | PathLike[str]], *, format: TranscriptFormat | None = None
) -> Iterator[Transcript]:
    """The transcripts of files (also .gz and .zst), in order, in memory that does not grow with them.

    `format` overrides what the file name says. White space alone is no record in plain text, and an error in
    JSONL.
    """
    files = [paths] if isinstance(paths, str | PathLike) else paths
    for path in map(Path, files):
        if (format or TranscriptFormat.of(path)) is TranscriptFormat.JSONL:
            yield from _read_jsonl(path)
        elif _has_eos(path):
            yield from _read_split_at_eos(path)
        else:
            yield from _read_lines(path)


class _Line(msgspec.Struct):
    text: str


def _read_jsonl(path: Path) -> Iterator[Transcript]:
    decoder = msgspec.json.Decoder(_Line)
    for number, line in numbered_lines(path):
        where = f"{fspath(path)}:{number}"
        try:
            text = decoder.decode(line).text
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise RecordError(
                f"{error}. Each line is a JSON object with a string in its field 'text'; the command "
                "'chatmill transcripts' makes such lines of conversations",
                code="bad_transcript_line",
                where=where,
            ) from None
        if not text.strip():
            raise RecordError("the field 'text' holds no span", code="empty_transcript", where=where)
        yield Transcript(text, where)


def _read_split_at_eos(path: Path) -> Iterator[Transcript]:
    line, limit, tail = 1, line_limit(), ""
    parts: list[str] = []  # of the record that has not ended yet; joined once, however long it is
    for chunk in _chunks(path):
        parts.append(chunk)
        tail += chunk
        found, tail = EOS_MARKER in tail, tail[-len(EOS_MARKER) :]
        if not found and sum(map(len, parts)) <= limit + len(EOS_MARKER):  # it can end in a part of the marker
            continue
        *whole, rest = "".join(parts).split(EOS_MARKER)
        parts, tail = [rest], rest[-len(EOS_MARKER) :]
        for piece in whole if found else [rest]:
            _check_length(path, line, piece, limit)
            if not piece.isspace() and piece:
                yield Transcript(piece, _where(path, line, piece))
            line += piece.count("\n")
    rest = "".join(parts)
    _check_length(path, line, rest, limit)
    if rest and not rest.isspace():
        yield Transcript(rest, _where(path, line, rest))


def _check_length(path: Path, line: int, piece: str, limit: int) -> None:
    if len(piece) > limit:
        raise line_too_long(path, line, limit, what="the transcript that begins here")


def _read_lines(path: Path) -> Iterator[Transcript]:
    with _decoded(path):
        for number, data in numbered_lines(path):
            line = data.decode()
            if line.isspace():
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


def _where(path: Path, line: int, piece: str) -> str:
    """The place of the first character that is not white space; `line` is where the piece begins."""
    blank = len(piece) - len(piece.lstrip())
    return f"{fspath(path)}:{line + piece.count(chr(10), 0, blank)}"


def _has_eos(path: Path) -> bool:
    tail = ""
    for chunk in _chunks(path):
        tail += chunk
        if EOS_MARKER in tail:
            return True
        tail = tail[-len(EOS_MARKER) :]
    return False


def _chunks(path: Path) -> Iterator[str]:
    """The text of a file in pieces, line ends as they are."""
    with open_bytes(path) as file, _decoded(path), _text(file) as text:
        while chunk := text.read(_CHUNK):
            yield chunk


def _text(file: IO[bytes]) -> io.TextIOWrapper:
    """Bytes as UTF-8 text; only a line feed ends a line, and a carriage return stays."""
    return io.TextIOWrapper(file, encoding="utf-8-sig", newline="\n")


@contextmanager
def _decoded(path: Path) -> Iterator[None]:
    try:
        yield
    except UnicodeDecodeError as error:
        found = error.object[error.start : error.start + 4].hex(" ")
        raise FormatError(f"{path} is not UTF-8: {error.reason} (bytes {found})") from None

"""The inputs of a build, read again one record at a time, in the order and with the caps and weights of its recipe."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from chatmill.compiler.paths import resolve_paths
from chatmill.compiler.recipe import Recipe, Source
from chatmill.core.conversation import Conversation
from chatmill.core.conversations import record_key
from chatmill.errors import ChatmillError, DataError, RecordError
from chatmill.prove.reference import uses_of
from chatmill.prove.report import VerifyReport
from chatmill.read.files import read_records
from chatmill.read.places import STDIN, place, sha256_of, size_of
from chatmill.read.record_shape import conversation_or_error
from chatmill.read.shapes import find_shape


class ReadRecord(NamedTuple):
    """One record of the inputs: a conversation, or the reason why it is none."""

    source: str
    """Its own source name, or the one of its file."""
    copies: int
    """How often the record is used, by the weight of its source."""
    conversation: Conversation | None
    error: RecordError | None


def check_inputs(inputs: Sequence[Mapping[str, Any]], book: VerifyReport) -> str:
    """Compare sizes and hashes with the manifest; a changed file is a finding. Gives why records cannot be read."""
    total, done = sum(file["bytes"] for file in inputs), 0
    missing = [file["path"] for file in inputs if not _is_there(file["path"])]
    if missing:
        relative = "" if os.path.isabs(missing[0]) else f" (relative names start from {Path.cwd()})"
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        return f"the records were not derived again: the input {missing[0]} is not here{more}{relative}"
    changed = 0
    for file in inputs:
        book.progress("inputs", done, total)
        path = place(file["path"])
        size, done = size_of(path), done + file["bytes"]
        if size != file["bytes"]:
            book.wrong(file["path"], f"the input has changed: {size:,} bytes, the manifest says {file['bytes']:,}")
            changed += 1
        elif (found := sha256_of(path)) != file["sha256"]:
            book.wrong(file["path"], f"the input has changed: sha256 {found}, the manifest says {file['sha256']}")
            changed += 1
    if changed:
        return f"the records were not derived again: {changed} of {len(inputs)} inputs have changed since the build"
    book.compared.append(f"{len(inputs)} inputs with the hashes of the manifest")
    return ""


def _is_there(path: str) -> bool:
    """Whether an input can be read again; standard input cannot, nor can a store that is out of reach."""
    try:
        return path != STDIN and place(path).is_file()
    except ChatmillError:
        return False


def sources_of(recipe: Recipe, inputs: Sequence[Mapping[str, Any]]) -> list[Source]:
    """The source of the recipe that each input belongs to; files that a glob matches only now are left alone."""
    if len(recipe.sources) == 1:
        return [recipe.sources[0]] * len(inputs)
    recorded = [file["path"] for file in inputs]
    found = [
        (str(path), source)
        for source in recipe.sources
        for path in resolve_paths(source.patterns)
        if str(path) in set(recorded)
    ]
    if [path for path, _ in found] != recorded:
        raise DataError(
            f"the sources of the recipe now give {len(found)} of the {len(recorded)} inputs of the manifest, or give "
            "them in another order: restore the files to where they were"
        )
    return [source for _, source in found]


def read_inputs(recipe: Recipe, inputs: Sequence[Mapping[str, Any]]) -> Iterator[ReadRecord]:
    """Every record that the build has read, in its order."""
    for file, source, lines, limit in _limits(recipe, inputs):
        if limit:
            yield from _read_file(file, source, min(lines, limit))


def capped(recipe: Recipe, inputs: Sequence[Mapping[str, Any]]) -> Counter[str]:
    """Lines or rows of each source that `max_records` leaves out."""
    out: Counter[str] = Counter()
    for file, _, lines, limit in _limits(recipe, inputs):
        out[file["source"]] += max(0, lines - limit)
    return +out


def _limits(
    recipe: Recipe, inputs: Sequence[Mapping[str, Any]]
) -> Iterator[tuple[Mapping[str, Any], Source, int, int]]:
    """Every input with its source, its lines or rows, and how many of them its source may still read."""
    left = {id(source): source.max_records for source in recipe.sources}
    for file, source in zip(inputs, sources_of(recipe, inputs), strict=True):
        lines, limit = int(file["lines"] if file["lines"] is not None else file["records"]), left[id(source)]
        if limit is not None:
            left[id(source)] = max(0, limit - lines)
        yield file, source, lines, lines if limit is None else limit


def _read_file(file: Mapping[str, Any], source: Source, limit: int) -> Iterator[ReadRecord]:
    """The records of the first `limit` lines or rows of one file."""
    shape, name = find_shape(file["shape"]), file["source"]
    for raw in read_records(file["path"]):
        number = int(raw.where.rpartition(":")[2].removeprefix("row "))
        if number > limit:
            return
        found = conversation_or_error(raw, shape, name)
        if isinstance(found, RecordError):
            yield ReadRecord(name, 1, None, found)
        else:
            yield ReadRecord(found.source, uses_of(record_key(found), source.weight), found, None)

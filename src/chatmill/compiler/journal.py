"""The journal of a join: a line for each part, which says how far the joined files have come with it.

With it a part can be removed as soon as it is joined: a build that is resumed goes on from the last line that the files
bear out. A line is handed to the system after the bytes it speaks of, so a killed process loses nothing that is in the
journal; should the machine itself go down, the last lines may speak of bytes that are not on the disk, and an earlier
one holds.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from chatmill.store.episode_manifest import FileRecord, ShardRecord, shard_from_json
from chatmill.store.episode_writer import WriterProgress

NOT_A_LINE = (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)
"""What reading bytes that are no line may raise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalLine:
    """Where the join was after a part."""

    receipt: dict[str, Any]
    """That of the part."""
    rejected: FileRecord | None
    """The joined file of rejected records, as far as it went then; None: there was none yet."""
    splits: Mapping[str, WriterProgress]
    """All splits that there were then. In the file, a line has of the published shards only the new ones."""


class _Published(NamedTuple):
    """A shard, and the number of the first line that knows it as published."""

    line: int
    split: str
    shard: ShardRecord


class Journal:
    """The file, open for more lines; line n is that of part n. In memory are their places and the shards alone."""

    def __init__(self, path: Path) -> None:
        """Open the file, or create it; what follows its last whole line is cut off."""
        self._path = path
        self._ends = [0]
        self._published: list[_Published] = []
        with path.open("ab+") as file:
            file.seek(0)
            for text in file:
                try:
                    line = _line_from_json(text)
                except NOT_A_LINE:
                    break
                self._keep(len(text), line)
        os.truncate(path, self._ends[-1])
        self._descriptor = os.open(path, os.O_RDWR)

    def __len__(self) -> int:
        """Lines: the number of parts that are joined."""
        return len(self._ends) - 1

    def _keep(self, size: int, line: JournalLine) -> None:
        for split, progress in line.splits.items():
            self._published += [_Published(len(self), split, shard) for shard in progress.published]
        self._ends.append(self._ends[-1] + size)

    def append(self, line: JournalLine) -> None:
        """Add a line."""
        known: dict[str, int] = {}
        for published in self._published:
            known[published.split] = known.get(published.split, 0) + 1
        new = {
            split: replace(progress, published=progress.published[known.get(split, 0) :])
            for split, progress in line.splits.items()
        }
        short = replace(line, splits=new)
        text = _line_to_json(short)
        done = 0
        while done < len(text):
            done += os.pwrite(self._descriptor, text[done:], self._ends[-1] + done)
        self._keep(len(text), short)

    def last(self) -> JournalLine:
        """The last line, with all shards that were published then."""
        line = _line_from_json(self._text(len(self) - 1))
        shards = {
            split: tuple(published.shard for published in self._published if published.split == split)
            for split in line.splits
        }
        splits = {split: replace(progress, published=shards[split]) for split, progress in line.splits.items()}
        return replace(line, splits=splits)

    def drop_last(self) -> None:
        """Take the last line away."""
        self._ends.pop()
        while self._published and self._published[-1].line >= len(self):
            self._published.pop()
        os.truncate(self._path, self._ends[-1])

    def receipts(self) -> Iterator[dict[str, Any]]:
        """Those of all parts that are joined, in order."""
        for number in range(len(self)):
            yield _line_from_json(self._text(number)).receipt

    def _text(self, number: int) -> bytes:
        first, end = self._ends[number : number + 2]
        return os.pread(self._descriptor, end - first, first)

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)


def _line_to_json(line: JournalLine) -> bytes:
    value = {
        "receipt": line.receipt,
        "rejected": line.rejected and {"bytes": line.rejected.bytes, "sha256": line.rejected.sha256},
        "splits": {
            split: {
                "names": progress.names,
                "sources": progress.sources,
                "published": [shard.to_json() for shard in progress.published],
                "growing": progress.growing.to_json(),
            }
            for split, progress in line.splits.items()
        },
    }
    return json.dumps(value, separators=(",", ":")).encode() + b"\n"


def _line_from_json(text: bytes) -> JournalLine:
    """Read a whole line; one of the errors `NOT_A_LINE` for anything else."""
    if not text.endswith(b"\n"):
        raise ValueError("a line without an end")
    value = json.loads(text)
    rejected = value["rejected"]
    return JournalLine(
        receipt=dict(value["receipt"]),
        rejected=rejected and FileRecord(bytes=int(rejected["bytes"]), sha256=str(rejected["sha256"])),
        splits={
            split: WriterProgress(
                names=tuple(map(str, progress["names"])),
                sources=tuple(map(str, progress["sources"])),
                published=tuple(shard_from_json(shard, "journal") for shard in progress["published"]),
                growing=shard_from_json(progress["growing"], "journal"),
            )
            for split, progress in value["splits"].items()
        },
    )

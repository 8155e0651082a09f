"""Input files: the order to scan one, what is found out about it, and the errors about files that cannot be read."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from chatmill.compiler.cuts import ChunkCut
from chatmill.compiler.recipe import SHARD_BYTES
from chatmill.core.checksums import INPUT_HASH
from chatmill.errors import DataError, FormatError, RecordError
from chatmill.files.inputs import StoredInput
from chatmill.files.stores import StoreAccess
from chatmill.read.agents.branches import AgentOptions
from chatmill.read.ranges import Chunk


@dataclass(frozen=True, slots=True, kw_only=True)
class InputFile:
    """What was read: enough to know later whether it is still the same."""

    path: str
    """As it was named."""
    source: str
    shape: str
    bytes: int
    digest: str
    """The `tree-xxh128` of the file as it lies on disk; for a packed file, of the packed bytes."""
    lines: int | None
    """Of JSONL, blank ones and a last one without line end included; None for the other formats."""
    records: int | None
    """Rows of Parquet, entries of a JSON list; None for JSONL, whose blank lines are not records."""
    mtime_ns: int
    """0 where it is in a store."""

    def as_json(self) -> dict[str, Any]:
        """Return what a manifest says about the file; the time of its last change is no part of it."""
        said = {name: getattr(self, name) for name in ("path", "source", "shape", "bytes", "lines", "records")}
        return {**said, INPUT_HASH: self.digest}


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownFile:
    """What an earlier build found out about a file that has not changed since."""

    digest: str
    cuts: tuple[ChunkCut, ...]
    """Of JSONL, if all of them are known and were cut for the same size; else empty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InputScan:
    """The order to scan one file."""

    path: str
    """As it was named; records and messages say it like this."""
    spool: str
    """Folder for files that cannot be read from the middle; made when it is needed."""
    base: str = field(default_factory=os.getcwd)
    """The folder that relative paths start from: the current one, for a worker that runs in another."""
    source: str | None = None
    """None: the file's name without its endings."""
    shape: str | None = None
    """None: found from the first records."""
    preferences: str | None = None
    """As in a recipe: which answers of pairs are read."""
    chunk_bytes: int = SHARD_BYTES
    """Wanted bytes of a chunk, unpacked."""
    copy: str = ""
    """The file to read in place of what was named: a copy on the machine of the job."""
    far: StoredInput | None = None
    """The file in its store; None for one of this machine."""
    access: StoreAccess | None = None
    """How stores are reached; None where none is needed."""
    share: str = ""
    """The URL that spools are uploaded below, for workers that share no folder; empty where all share one."""
    known: KnownFile | None = None
    agent: AgentOptions = field(default_factory=AgentOptions)
    """What the source says of files that agents left."""

    @property
    def data(self) -> str:
        """The file as an absolute path."""
        return os.path.join(self.base, self.copy or self.path)

    def here(self) -> InputScan:
        """Return the same order for a file of this machine: one in a store is copied."""
        return self if self.far is None else replace(self, copy=str(self.far.copy()))


@dataclass(frozen=True, slots=True, kw_only=True)
class ScannedInput:
    """A file and its chunks, which are numbered from 0 within the file."""

    file: InputFile
    chunks: tuple[Chunk, ...]


@contextmanager
def called_as_named(scan: InputScan) -> Iterator[None]:
    """Errors call the file by the name that it was given, not by its absolute path or that of a copy."""
    try:
        yield
    except (DataError, FormatError) as error:
        if isinstance(error, RecordError) or scan.data not in str(error):
            raise
        raise type(error)(str(error).replace(scan.data, scan.path)) from None


def size_and_time(scan: InputScan) -> tuple[int, int]:
    """Return the bytes of a file, and its time of change in nanoseconds, which is 0 for one in a store."""
    if scan.far is not None:
        return scan.far.bytes, 0
    status = file_status(scan)
    return status.st_size, status.st_mtime_ns


def file_status(scan: InputScan) -> os.stat_result:
    """Return what the system says of a file; one that is not there, or that cannot be read twice, is an error."""
    path = scan.path
    try:
        status = os.stat(scan.data)
    except FileNotFoundError:
        raise DataError(f"no such file: {path}") from None
    except (OSError, ValueError) as error:
        raise DataError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from None
    if stat.S_ISDIR(status.st_mode):
        raise DataError(f"{path} is a folder; name its files, such as {os.path.join(path, '*.jsonl')}")
    if not stat.S_ISREG(status.st_mode):
        raise DataError(f"{path} is no regular file and cannot be read twice; copy what it gives into one first")
    return status


@contextmanager
def reading(scan: InputScan) -> Iterator[None]:
    """Turn what the system says against reading a file into a `DataError` that names it."""
    try:
        yield
    except OSError as error:
        raise DataError(f"cannot read {scan.path}: {error.strerror or error}") from None

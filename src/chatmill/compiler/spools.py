"""Spools: inputs that cannot be cut in place, written as one plain file, which is cut while it is written.

Packed lines and JSON lists become lines, tables Arrow streams, one for each chunk. A spool is there whole or not at
all, and its name says which bytes it holds.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from chatmill.compiler.cuts import ROW_LIMIT, ChunkCut, LineCutter, stream_cuts
from chatmill.compiler.inputs import InputScan
from chatmill.core.publish import storing, whole_file
from chatmill.read import lines
from chatmill.read.agents.registry import options_key
from chatmill.read.file_format import FileFormat
from chatmill.read.files import agent_raws, list_entries
from chatmill.read.lines import line_too_long, open_bytes
from chatmill.read.places import place

BLOCK = 4 << 20
"""Bytes that are read at a time."""


def spooled_lines(scan: InputScan, form: FileFormat, digest: str) -> tuple[Path, list[ChunkCut]]:
    """Return a packed file of lines, or a JSON list, as plain lines, and their chunks; `digest` is that of the file.

    A line over the limit ends it while it is unpacked, so that no packed file can fill the disk with one line.
    """
    blocks = _unpacked
    name = f"{digest}-{form}.jsonl"
    if form is FileFormat.JSON:
        blocks = _listed
    elif form is FileFormat.AGENT:
        blocks = _agent_lines
        name = f"{digest}-{options_key(scan.agent, place(scan.path).name)}-{scan.shape or ''}.jsonl"
    cutter = LineCutter(scan.chunk_bytes, lines.LINE_LIMIT if form is FileFormat.JSONL else sys.maxsize)

    def cut(block: bytes) -> None:
        cutter.feed(block)
        if cutter.long_line is not None:
            raise line_too_long(scan.path, cutter.long_line)

    def write(spool: Path) -> None:
        with spool.open("wb") as out:
            for block in blocks(scan):
                cut(block)
                out.write(block)

    plain, is_new = _spooled(scan, name, write)
    if not is_new:
        for block in _file_blocks(plain):
            cut(block)
    return plain, cutter.finish()


def spooled_rows(scan: InputScan, batches: Iterable[Any], digest: str) -> tuple[Path, list[ChunkCut]]:
    """Return the rows of a table as Arrow streams, each of which is a chunk."""
    path = Path(scan.data)
    size = scan.chunk_bytes
    name = f"{digest}-{size}{''.join(path.suffixes[-2:])}.arrow"  # how a table is read depends on its ending
    plain, _ = _spooled(scan, name, lambda spool: _write_streams(batches, size, spool))
    return plain, stream_cuts(plain)


def _unpacked(scan: InputScan) -> Iterator[bytes]:
    return _file_blocks(Path(scan.data))


def _file_blocks(path: Path) -> Iterator[bytes]:
    """The unpacked bytes of a file; a generator, so that an error in writing them does not pass for one in reading."""
    step = min(BLOCK, lines.LINE_LIMIT)
    with open_bytes(path) as stream:
        while block := stream.read(step):
            yield block


def _listed(scan: InputScan) -> Iterator[bytes]:
    """The entries of a JSON list, each as a line: a line end between the parts of an entry is as good as a blank."""
    data = b"".join(_unpacked(scan))
    block = bytearray()
    for entry in list_entries(data, place(scan.path)):
        block += entry.replace(b"\n", b" ") + b"\n"
        if len(block) >= BLOCK:
            yield bytes(block)
            block.clear()
    yield bytes(block)


def _agent_lines(scan: InputScan) -> Iterator[bytes]:
    """The records of a file that an agent left, each as a line."""
    block = bytearray()
    for raw in agent_raws(Path(scan.data), scan.agent, scan.shape):
        # A lone surrogate stays the escape that it was, so that the check of the texts can name it.
        line = json.dumps(raw.value, ensure_ascii=False)
        try:
            block += line.encode() + b"\n"
        except UnicodeEncodeError:
            block += json.dumps(raw.value).encode() + b"\n"
        if len(block) >= BLOCK:
            yield bytes(block)
            block.clear()
    yield bytes(block)


def _write_streams(batches: Iterable[Any], chunk_bytes: int, spool: Path) -> None:
    """Write rows as Arrow streams of about `chunk_bytes`."""
    import pyarrow.ipc

    with spool.open("wb") as file:
        stream, rows, size = None, 0, 0
        for batch in batches:
            step = max(1, chunk_bytes * batch.num_rows // max(batch.nbytes, 1))
            for start in range(0, batch.num_rows, step):
                part = batch.slice(start, step)
                if stream is None:
                    stream = pyarrow.ipc.new_stream(file, part.schema)
                stream.write_batch(part)
                rows, size = rows + part.num_rows, size + part.nbytes
                if size >= chunk_bytes or rows >= ROW_LIMIT:
                    stream.close()
                    stream, rows, size = None, 0, 0
        if stream is not None:
            stream.close()


def _spooled(scan: InputScan, name: str, write: Callable[[Path], None]) -> tuple[Path, bool]:
    """Return the spool of this name, and whether it had to be written.

    Several builds, or processes, may write the same one: all have the same bytes, and the same time of change.
    """
    spool = Path(scan.base, scan.spool, name)
    if spool.exists():
        return spool, False
    with storing(spool):
        spool.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(spool) as temporary:
            write(temporary)
            os.utime(temporary, ns=(0, 0))
    return spool, True

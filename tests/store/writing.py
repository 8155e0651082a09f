"""Episodes to write, writers to stop and to go on with, and folders to do it in."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

import numpy as np
from hypothesis import strategies as st

from chatmill.store.episode_layout import MASK
from chatmill.store.episode_manifest import EpisodeManifest, FileRecord
from chatmill.store.episode_writer import EpisodeWriter, WriterProgress

MEMORY = "/dev/shm"
EIO = OSError(errno.EIO, os.strerror(errno.EIO))


@contextlib.contextmanager
def folder() -> Iterator[Path]:
    """An empty folder, in memory where there is one: what is written here is synced often."""
    usable = os.access(MEMORY, os.W_OK)
    with tempfile.TemporaryDirectory(prefix="chatmill-test-", dir=MEMORY if usable else None) as name:
        yield Path(name)


def files(place: Path) -> dict[str, bytes]:
    """Relative name -> bytes of every file below a folder."""
    return {str(p.relative_to(place)): p.read_bytes() for p in sorted(place.rglob("*")) if p.is_file()}


def open_files() -> int:
    """Descriptors that this process has open."""
    return len(os.listdir("/dev/fd"))


def record_of(data: bytes) -> FileRecord:
    return FileRecord(bytes=len(data), sha256=hashlib.sha256(data).hexdigest())


class Made(NamedTuple):
    """An episode; a fractional one needs a float32 mask."""

    ids: list[int]
    fractional: bool
    source: str
    record_id: str

    @property
    def weights(self) -> list[float]:
        return [0.5 if self.fractional else token % 3 for token in self.ids]


class Ending(StrEnum):
    """What happens to the first writer after its progress."""

    KILLED = "killed"
    ABORTED = "aborted"
    CLOSED = "closed"


def append(writer: EpisodeWriter, batch: Sequence[Made], *, bare: bool = False) -> None:
    """Append a batch with all columns but the kinds; `bare`: with none at all."""
    ids = np.array([token for made in batch for token in made.ids], dtype=np.uint32)
    offsets = np.cumsum([0] + [len(made.ids) for made in batch])
    if bare:
        writer.append_batch(ids, offsets)
        return
    writer.append_batch(
        ids,
        offsets,
        [weight for made in batch for weight in made.weights],
        source=[made.source for made in batch],
        turns=[len(made.ids) for made in batch],
        record_ids=[made.record_id for made in batch],
    )


def undisturbed(
    place: Path, batches: Sequence[Sequence[Made]], shard_tokens: int, *, bare: bool = False
) -> EpisodeManifest:
    writer = EpisodeWriter(place, "train", shard_tokens)
    for batch in batches:
        append(writer, batch, bare=bare)
    return writer.close()


def is_wide(progress: WriterProgress) -> bool:
    """Whether the shard that grew had a float32 mask by then."""
    growing = progress.growing
    return MASK in growing.files and growing.files[MASK].bytes == 4 * growing.tokens


def widens(progress: WriterProgress, later: Sequence[Sequence[Made]], shard_tokens: int) -> bool:
    """Whether batches that come after a progress make the mask of its growing shard wider."""
    room = shard_tokens - progress.growing.tokens
    for made in (made for batch in later for made in batch):
        room -= len(made.ids)
        if room < 0:
            break
        if made.fractional:
            return MASK in progress.growing.files and not is_wide(progress)
    return False


def make(tokens: int, *, fractional: bool = False, source: str = "a", number: int = 1) -> Made:
    return Made([number] * tokens, fractional, source, f"r{number}é")


BATCHES = [
    [make(3, number=1), make(4, number=2, source="b")],
    [make(3, number=4), make(2, number=5, source="c")],
    [make(4, number=7, fractional=True), make(1, number=8)],
    [make(2, number=10, source="d"), make(6, number=11), make(1, number=13)],
    [make(3, number=14, source="b")],
]
"""With shards of 9 tokens: the second batch ends in shard 1, where the third widens the mask."""


def begin(place: Path, batches: Sequence[Sequence[Made]], shard_tokens: int = 9) -> EpisodeWriter:
    writer = EpisodeWriter(place, "train", shard_tokens)
    for batch in batches:
        append(writer, batch)
    return writer


def go_on(
    place: Path, progress: WriterProgress, rest: Sequence[Sequence[Made]], shard_tokens: int = 9
) -> EpisodeManifest:
    """Go on behind a progress and close."""
    writer = EpisodeWriter(place, "train", shard_tokens, begun=progress)
    for batch in rest:
        append(writer, batch)
    return writer.close()


def stop(writer: EpisodeWriter, ending: Ending) -> Path:
    """The folder in which the next writer goes on; a kill leaves what the system has, which is what a copy finds."""
    left = writer.directory
    if ending is Ending.KILLED:
        left = left.with_name("killed")
        shutil.copytree(writer.directory, left)
    if ending is Ending.CLOSED:
        writer.close()
    else:
        writer.abort()
    return left


episode = st.builds(
    Made,
    st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=6),
    st.sampled_from([False, False, False, False, True]),
    st.sampled_from(["a", "b", "ç", "d"]),
    st.text(max_size=3),
)
batches_of = st.lists(st.lists(episode, min_size=1, max_size=4), min_size=2, max_size=8)

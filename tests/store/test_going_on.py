"""Writers that were stopped and go on, files that do not bear their progress out, and files synced while they grow."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from chatmill.errors import ConfigError, FormatError
from chatmill.store import durable, shard_writer
from chatmill.store.durable import Durability, GrowingFile
from chatmill.store.episode_check import check_episodes
from chatmill.store.episode_columns import SourceCodes, checked_columns
from chatmill.store.episode_layout import MASK
from chatmill.store.episode_manifest import COLUMNS, EpisodeManifest, FileRecord
from chatmill.store.episode_writer import EpisodeWriter, WriterProgress
from chatmill.store.shard_writer import ShardWriter

MEMORY = "/dev/shm"
EIO = OSError(errno.EIO, os.strerror(errno.EIO))


@contextlib.contextmanager
def folder() -> Iterator[Path]:
    """An empty folder, in memory where there is one: what is written here is synced often."""
    usable = os.access(MEMORY, os.W_OK)
    with tempfile.TemporaryDirectory(prefix="chatmill-test-", dir=MEMORY if usable else None) as name:
        yield Path(name)


@pytest.fixture
def home() -> Iterator[Path]:
    with folder() as path:
        yield path


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


def test_who_goes_on_writes_the_same_bytes() -> None:
    """Batches and a progress, then batches that are lost, then an end; another writer goes on.

    Also where the lost batches made the mask of the growing shard wider: it is made narrow again.
    """
    seen: Counter[str] = Counter()

    @settings(max_examples=120, deadline=None)
    @given(
        batches_of, st.sampled_from([1, 4, 9, 20]), st.integers(0, 7), st.integers(0, 3), st.sampled_from(Ending),
        st.booleans(), st.sampled_from([False, False, False, True]),
    )  # fmt: skip
    @example(BATCHES, 20, 1, 1, Ending.KILLED, False, False)
    @example(BATCHES, 9, 1, 0, Ending.KILLED, False, False)
    @example(BATCHES, 9, 1, 9, Ending.CLOSED, False, False)
    @example(BATCHES, 20, 2, 2, Ending.CLOSED, False, False)
    @example(BATCHES, 4, 0, 3, Ending.ABORTED, True, False)
    @example(BATCHES, 4, 0, 3, Ending.CLOSED, False, True)
    def holds(
        batches: list[list[Made]], shard_tokens: int, last: int, after: int, ending: Ending, other: bool, bare: bool
    ) -> None:
        kept = last % len(batches) + 1
        rest = batches[kept:]
        lost = (rest[::-1] if other else rest)[:after]
        with folder() as home:
            expected = undisturbed(home / "whole", batches, shard_tokens, bare=bare)
            writer = EpisodeWriter(home / "begun", "train", shard_tokens)
            for batch in batches[:kept]:
                append(writer, batch, bare=bare)
            progress, counts = writer.progress(), (writer.episodes, writer.tokens)
            for batch in lost:
                append(writer, batch, bare=bare)
            left = stop(writer, ending)
            since = (left / "train" / progress.growing.name).exists()
            writer = EpisodeWriter(left, "train", shard_tokens, begun=progress)
            assert (writer.episodes, writer.tokens) == counts
            for batch in rest:
                append(writer, batch, bare=bare)
            assert writer.close() == expected
            assert files(left) == files(home / "whole")
            assert check_episodes(left).problems == ()
        seen.update([ending, "bare" if bare else "full"])
        seen["wide"] += is_wide(progress)
        seen["widened since"] += widens(progress, lost, shard_tokens)
        seen["widened only now"] += not widens(progress, lost, shard_tokens) and widens(progress, rest, shard_tokens)
        seen["published since"] += since

    holds()
    assert set(seen) == {*Ending, "bare", "full", "wide", "widened since", "widened only now", "published since"}
    assert all(seen.values()), seen


class Stage(StrEnum):
    """Where a writer is killed while it makes a mask wider."""

    RENAMED = "renamed"
    """There is only the narrow one, under its other name."""
    HALF = "half"
    WHOLE = "whole"
    """The wide one is there, and the narrow one not yet removed."""


@pytest.mark.parametrize("stage", Stage)
def test_a_kill_while_a_mask_is_made_wider(home: Path, monkeypatch: pytest.MonkeyPatch, stage: Stage) -> None:
    monkeypatch.setattr(shard_writer, "COPY", 4)
    expected = undisturbed(home / "whole", BATCHES, 9)
    writer = begin(home / "begun", BATCHES[:2])
    progress = writer.progress()
    narrow = home / f"begun/train/.{progress.growing.name}.partial/{MASK}.uint8"
    sizes: list[int] = []
    wide: list[GrowingFile] = []
    unlink = Path.unlink

    def kill() -> None:
        if not sizes and narrow.exists():
            sizes.append(wide[-1].progress().bytes if wide else -1)
            shutil.copytree(home / "begun", home / "killed")

    class Killed(GrowingFile):
        def __init__(self, path: Path, durability: Durability) -> None:
            if stage is Stage.RENAMED:
                kill()
            super().__init__(path, durability)
            wide.append(self)

        def write(self, values: Any) -> None:
            super().write(values)
            if stage is Stage.HALF:
                kill()

    def removed(path: Path, missing_ok: bool = False) -> None:
        if stage is Stage.WHOLE:
            kill()
        unlink(path, missing_ok=missing_ok)

    monkeypatch.setattr(shard_writer, "GrowingFile", Killed)
    monkeypatch.setattr(Path, "unlink", removed)
    append(writer, BATCHES[2])
    writer.abort()
    monkeypatch.undo()
    assert progress.growing.files[MASK].bytes == 5
    assert sizes == {Stage.RENAMED: [-1], Stage.HALF: [16], Stage.WHOLE: [20]}[stage]
    assert go_on(home / "killed", progress, BATCHES[2:]) == expected
    assert files(home / "killed") == files(home / "whole")


# Files that are not as a progress says


def shorten(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def change(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(bytes([data[0] ^ 1]) + data[1:])


def lengthen(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"more")


def remove(path: Path) -> None:
    path.unlink()


def refused_then_repaired(stopped: Path, progress: WriterProgress, name: str, damage: Callable[[Path], None]) -> None:
    """A damaged file is named, nothing stays open or locked, and with the file as it was the writer goes on."""
    broken = stopped.with_name("broken")
    shutil.copytree(stopped, broken)
    damage(broken / name)
    before, now = files(broken), open_files()
    for _ in range(2):
        with pytest.raises(FormatError) as caught:
            EpisodeWriter(broken, "train", 9, begun=progress)
        assert str(caught.value).startswith(f"{broken / name}: ")
    assert open_files() == now
    assert files(broken) == before
    shutil.copy(stopped / name, broken / name)
    go_on(broken, progress, BATCHES[2:])
    assert files(broken) == files(stopped.with_name("whole"))
    shutil.rmtree(broken)


def stopped_with_progress(home: Path) -> tuple[Path, WriterProgress]:
    """An undisturbed split `whole`, and one that ends where its progress does, with a shard published."""
    undisturbed(home / "whole", BATCHES, 9)
    writer = begin(home / "begun", BATCHES[:2])
    progress = writer.progress()
    writer.abort()
    assert len(progress.published) == 1
    assert all(record.bytes for record in progress.growing.files.values())
    return home / "begun", progress


@pytest.mark.parametrize("damage", [shorten, change, remove])
def test_a_growing_file_that_is_not_what_was_written(home: Path, damage: Callable[[Path], None]) -> None:
    stopped, progress = stopped_with_progress(home)
    for name in progress.growing.files:
        refused_then_repaired(stopped, progress, f"train/.{progress.growing.name}.partial/{name}", damage)


@pytest.mark.parametrize("damage", [shorten, lengthen, remove])
def test_a_published_file_of_another_size(home: Path, damage: Callable[[Path], None]) -> None:
    stopped, progress = stopped_with_progress(home)
    shard = progress.published[0]
    for name in shard.files:
        refused_then_repaired(stopped, progress, f"train/{shard.name}/{name}", damage)


def test_shards_that_are_gone(home: Path) -> None:
    stopped, progress = stopped_with_progress(home)
    shutil.rmtree(stopped / f"train/.{progress.growing.name}.partial")
    with pytest.raises(FormatError, match=rf"\.{progress.growing.name}\.partial: there is no such folder"):
        EpisodeWriter(stopped, "train", 9, begun=progress)
    shutil.rmtree(stopped / "train" / progress.published[0].name)
    with pytest.raises(FormatError, match=rf"{progress.published[0].name}/\S+: there is no such file"):
        EpisodeWriter(stopped, "train", 9, begun=progress)


def test_what_lies_behind_a_progress_goes(home: Path) -> None:
    stopped, progress = stopped_with_progress(home)
    growing = stopped / f"train/.{progress.growing.name}.partial"
    for name in progress.growing.files:
        lengthen(growing / name)
    (growing / f"{MASK}.again").write_bytes(b"half")
    (stopped / "train/.shard_00007.partial").mkdir()
    for name in ("shard_00002", "shard_00003"):
        shutil.copytree(stopped / "train/shard_00000", stopped / "train" / name)
    (stopped / "train/episodes.json").write_text("{}")
    (stopped / "train/.episodes.json.partial").write_text("{")
    go_on(stopped, progress, BATCHES[2:])
    assert files(stopped) == files(home / "whole")


@pytest.mark.parametrize("lost", [b"\0", b"\xff"])
def test_a_progress_that_does_not_hold_leaves_one_before_it(home: Path, lost: bytes) -> None:
    """The mask has its size, but not all of its bytes (a machine went down): nobody made it wider."""
    batches = [[make(count)] for count in (5, 5, 90)]
    undisturbed(home / "whole", batches, 1000)
    writer = begin(home / "begun", batches[:1], 1000)
    first = writer.progress()
    append(writer, batches[1])
    second = writer.progress()
    append(writer, batches[2])
    writer.abort()
    mask = home / "begun/train/.shard_00000.partial" / MASK
    mask.write_bytes(mask.read_bytes()[:7] + lost * 93)
    with pytest.raises(FormatError, match=f"{MASK}: does not begin with the 10 bytes"):
        EpisodeWriter(home / "begun", "train", 1000, begun=second)
    go_on(home / "begun", first, batches[1:], 1000)
    assert files(home / "begun") == files(home / "whole")


# Ends of a writer, and the next ones


def test_abort_before_a_progress_leaves_nothing_that_is_half(home: Path) -> None:
    writer = begin(home / "one", BATCHES[:1])
    writer.abort()
    assert not list((home / "one").iterdir())
    writer = begin(home / "more", BATCHES[:2])
    writer.abort()
    assert sorted(p.name for p in (home / "more").iterdir()) == [".train.writing", "train"]
    assert [p.name for p in (home / "more/train").iterdir()] == ["shard_00000"]


def test_abort_after_a_progress_leaves_what_it_speaks_of(home: Path) -> None:
    expected = undisturbed(home / "whole", BATCHES, 9)

    def failing(place: Path) -> WriterProgress:
        with EpisodeWriter(place, "train", 9) as writer:
            append(writer, BATCHES[0])
            told.append(writer.progress())
            append(writer, BATCHES[1])
            raise RuntimeError("stop")

    told: list[WriterProgress] = []
    with pytest.raises(RuntimeError, match="stop"):
        failing(home / "begun")
    assert len(told) == 1
    again = EpisodeWriter(home / "begun", "train", 9, begun=told[0])
    again.abort()  # it told nothing of its own, but what it went on from stays
    again.abort()
    assert go_on(home / "begun", told[0], BATCHES[1:]) == expected
    assert files(home / "begun") == files(home / "whole")


def test_abort_of_one_growing_shard_keeps_the_mark(home: Path) -> None:
    writer = begin(home, BATCHES[:1])
    progress = writer.progress()
    assert not progress.published
    writer.abort()
    assert sorted(p.name for p in home.iterdir()) == [".train.writing", "train"]
    go_on(home, progress, BATCHES[1:])
    assert not list(home.rglob(".*"))


def test_a_full_disk_after_a_progress(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = undisturbed(home / "whole", BATCHES, 9)
    writer = begin(home / "begun", BATCHES[:2])
    progress = writer.progress()
    write, room = GrowingFile.write, [5]

    def full(self: GrowingFile, values: Any) -> None:
        room[0] -= 1
        if room[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(self, values)

    monkeypatch.setattr(GrowingFile, "write", full)
    with pytest.raises(ConfigError, match="No space left"):
        append(writer, BATCHES[3])
    monkeypatch.undo()
    assert go_on(home / "begun", progress, BATCHES[2:]) == expected
    assert files(home / "begun") == files(home / "whole")


def test_going_on_again_and_again(home: Path) -> None:
    """Each writer adds a batch and a progress, writes something that is lost, and is killed; also from one before."""
    expected = undisturbed(home / "whole", BATCHES, 12)
    place, told = home / "0", []
    writer = begin(place, BATCHES[:1], 12)
    for number, batch in enumerate(BATCHES[1:], 1):
        told.append(writer.progress())
        append(writer, [make(1, source="lost", number=number), make(12, source="also lost", number=number)])
        shutil.copytree(place, home / str(number))
        writer.abort()
        place = home / str(number)
        EpisodeWriter(place, "train", 12, begun=told[-1]).abort()
        writer = EpisodeWriter(place, "train", 12, begun=told[-1])
        assert writer.progress() == told[-1]
        append(writer, batch)
    assert writer.close() == expected
    assert files(place) == files(home / "whole")
    assert len({progress.growing.name for progress in told}) > 1
    for number in (3, 0):  # back to an earlier one, behind which other shards were published since
        assert go_on(place, told[number], BATCHES[number + 1 :], 12) == expected
        assert files(place) == files(home / "whole")


def test_one_writer_at_a_time(home: Path) -> None:
    expected = undisturbed(home / "whole", BATCHES, 9)
    writer = begin(home / "begun", BATCHES[:1])
    progress = writer.progress()
    append(writer, BATCHES[1])
    writer.progress()
    before, now = files(home / "begun"), open_files()
    with pytest.raises(ConfigError, match="another process is writing"):
        EpisodeWriter(home / "begun", "train", 9, begun=progress)
    assert files(home / "begun") == before
    assert open_files() == now
    writer.abort()
    second = EpisodeWriter(home / "begun", "train", 9, begun=progress)
    with pytest.raises(ConfigError, match="another process is writing"):
        EpisodeWriter(home / "begun", "train", 9, begun=progress)
    for batch in BATCHES[1:]:
        append(second, batch)
    assert second.close() == expected
    assert files(home / "begun") == files(home / "whole")


def test_a_shard_is_left_or_discarded(home: Path) -> None:
    columns = checked_columns(
        [1, 2, 3], [0, 1, 3], [1, 0.5, 0], None, source=None, turns=None, trained=None, record_ids=["a", "é"],
        first=0, sources=SourceCodes(),
    )  # fmt: skip
    specs = tuple(column for column in COLUMNS if column.name in columns.names)

    def opened(begun: Any = None) -> ShardWriter:
        return ShardWriter(home / "shard", specs, masks=True, durability=Durability.SYNCED, begun=begun)

    now = open_files()
    shard = opened()
    shard.append(columns)
    progress = shard.progress("shard_00000")
    assert {name: record_of(data) for name, data in files(home / "shard").items()} == progress.files
    shard.append(columns)
    shard.leave()
    shard = opened(progress)
    assert (shard.episodes, shard.tokens) == (2, 3)
    shard.append(columns)
    record = shard.finish("shard_00000")
    assert (record.episodes, record.tokens) == (4, 6)
    assert {name: record_of(data) for name, data in files(home / "shard").items()} == record.files
    assert np.fromfile(home / "shard" / MASK, dtype="<f4").tolist() == [1, 0.5, 0] * 2
    assert np.fromfile(home / "shard/episodes.idx", dtype="<u8").tolist() == [0, 1, 1, 2, 3, 1, 4, 2]
    assert np.fromfile(home / "shard/record_id.offsets", dtype="<u8").tolist() == [0, 1, 3, 4, 6]
    shard = opened(progress)
    shard.discard()
    assert not (home / "shard").exists()
    assert open_files() == now


# Growing files


@settings(max_examples=100, deadline=None)
@given(st.lists(st.binary(max_size=40), max_size=12), st.integers(0, 12), st.binary(max_size=50), st.booleans())
def test_files_grow_piece_by_piece(parts: list[bytes], cut: int, lost: bytes, arrays: bool) -> None:
    """The hash and the bytes of what was written, in one go or in two, for pieces and stretches of any size."""
    whole, first = b"".join(parts), b"".join(parts[:cut])

    def write(file: GrowingFile, parts: Sequence[bytes]) -> None:
        for part in parts:
            file.write(np.frombuffer(part, dtype=np.uint8) if arrays else part)

    with folder() as home, pytest.MonkeyPatch.context() as patch:
        for name, value in {"PIECE": 7, "BUFFER": 4, "STRETCH": 16}.items():
            patch.setattr(durable, name, value)
        path = home / "file"
        for durability in Durability:
            file = GrowingFile(path, durability)
            write(file, parts)
            assert file.finish() == record_of(whole)
            assert path.read_bytes() == whole
        file = GrowingFile(path)
        write(file, parts[:cut])
        begun = file.progress()
        assert begun == record_of(first)
        assert path.read_bytes() == first
        file.write(lost)
        file.discard()
        file = GrowingFile(path, begun=begun)
        assert path.read_bytes() == first
        assert file.progress() == begun
        write(file, parts[cut:])
        assert file.finish() == record_of(whole)
        assert path.read_bytes() == whole


def test_arrays_that_do_not_lie_in_a_row(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(durable, "PIECE", 13)
    values = np.arange(60, dtype="<u8").reshape(6, 10)
    file = GrowingFile(home / "file")
    for array in (values[:, ::3], values.T, values[:0], values.astype("<f4")):
        file.write(array)
    expected = values[:, ::3].tobytes() + values.T.tobytes() + values.astype("<f4").tobytes()
    assert file.finish() == record_of(expected)
    assert (home / "file").read_bytes() == expected


@pytest.mark.parametrize(
    ("there", "says"),
    [
        (b"0123", "4 bytes, but 10 were written"),
        (b"", "0 bytes, but 10 were written"),
        (None, "there is no such file"),
        (b"x123456789", "does not begin with the 10 bytes"),
        (b"012345678x and more", "does not begin with the 10 bytes"),
    ],
)
def test_a_file_that_does_not_begin_as_it_should(
    home: Path, monkeypatch: pytest.MonkeyPatch, there: bytes | None, says: str
) -> None:
    monkeypatch.setattr(durable, "PIECE", 4)
    path = home / "file"
    if there is not None:
        path.write_bytes(there)
    now = open_files()
    with pytest.raises(FormatError, match=says) as caught:
        GrowingFile(path, begun=record_of(b"0123456789"))
    assert str(path) in str(caught.value)
    assert open_files() == now
    assert (path.read_bytes() if path.exists() else None) == there


def watch(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """What is synced (the size of the file) and what the system may forget (up to where), as it happens."""
    seen: list[tuple[str, int]] = []

    def sync(descriptor: int) -> None:
        seen.append(("sync", os.fstat(descriptor).st_size))

    def advise(descriptor: int, offset: int, length: int, advice: int) -> None:
        assert (offset, advice) == (0, os.POSIX_FADV_DONTNEED)
        upto = length or os.fstat(descriptor).st_size  # for the system, 0 bytes means all of them
        seen.append(("forget", upto))

    monkeypatch.setattr(durable.os, "fsync", sync)
    monkeypatch.setattr(durable.os, "posix_fadvise", advise)
    monkeypatch.setattr(durable, "STRETCH", 100)
    return seen


def test_what_is_a_stretch_behind_leaves_the_cache(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = watch(monkeypatch)
    begun = b"*" * 30
    (home / "file").write_bytes(begun)
    file = GrowingFile(home / "file", begun=record_of(begun))
    assert seen == [("sync", 30), ("forget", 30)]  # so that what is read is what the disk has
    seen.clear()
    for _ in range(10):
        file.write(b"x" * 40)
    file.finish()
    assert [size for what, size in seen if what == "sync"] == [150, 270, 390, 430]
    assert [size for what, size in seen if what == "forget"] == [30, 150, 270]
    for place, (what, size) in enumerate(seen):
        if what == "forget":
            assert seen[place - 1][0] == "sync"
            assert seen[place - 1][1] >= size + 100


def test_the_first_stretch_stays_in_the_cache(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = watch(monkeypatch)
    file = GrowingFile(home / "file")
    for _ in range(6):
        file.write(b"x" * 50)
    file.finish()
    assert [size for what, size in seen if what == "sync"] == [100, 200, 300, 300]
    assert [size for what, size in seen if what == "forget"] == [100, 200]


def test_nothing_is_brought_to_the_disk_for_files_of_no_worth(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = watch(monkeypatch)
    monkeypatch.setattr(durable, "STRETCH", 1)
    file = GrowingFile(home / "file", Durability.SCRATCH)
    for _ in range(10):
        file.write(b"x" * 40)
    assert file.finish() == record_of(b"x" * 400)
    with EpisodeWriter(home / "split", "train", 9, durability=Durability.SCRATCH) as writer:
        for batch in BATCHES:
            append(writer, batch)
    assert seen == []


def test_a_writer_goes_on_while_the_disk_is_at_work_but_not_far(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One stretch is on its way at a time; who has filled the next one waits."""
    watch(monkeypatch)
    at_work, done = threading.Event(), threading.Event()

    def slow(descriptor: int) -> None:
        at_work.set()
        assert done.wait(30)

    monkeypatch.setattr(durable.os, "fsync", slow)
    file = GrowingFile(home / "file")
    file.write(b"x" * 100)
    assert at_work.wait(30)
    assert file.progress() == record_of(b"x" * 100)
    file.write(b"x" * 99)
    waiting = threading.Thread(target=file.write, args=(b"x",))
    waiting.start()
    waiting.join(0.2)
    assert waiting.is_alive()
    done.set()
    waiting.join(30)
    assert not waiting.is_alive()
    assert file.finish() == record_of(b"x" * 200)


def fail_once(monkeypatch: pytest.MonkeyPatch) -> list[OSError]:
    """Let the next sync behind a writer fail: the system tells an error of the disk only once. Empty when it did."""
    fsync, errors = os.fsync, [EIO]

    def sync(descriptor: int) -> None:
        if errors and threading.current_thread() is not threading.main_thread():
            raise errors.pop()
        fsync(descriptor)

    monkeypatch.setattr(durable.os, "fsync", sync)
    monkeypatch.setattr(durable, "STRETCH", 100)
    return errors


def test_an_error_of_the_disk_is_told_by_the_next_stretch(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    errors = fail_once(monkeypatch)
    now = open_files()
    file = GrowingFile(home / "file")
    file.write(b"x" * 100)
    file.write(b"x" * 99)
    with pytest.raises(OSError, match="Input/output error"):
        file.write(b"x")
    assert not errors
    file.discard()
    assert open_files() == now


def test_an_error_of_the_disk_is_told_by_a_progress(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By one that is taken when the other thread is done; none waits for it."""
    errors = fail_once(monkeypatch)
    file = GrowingFile(home / "file")
    file.write(b"x" * 100)

    def told() -> None:
        end = time.monotonic() + 30
        while time.monotonic() < end:
            file.progress()

    with pytest.raises(OSError, match="Input/output error"):
        told()
    assert not errors
    file.discard()


def test_an_error_of_the_disk_is_told_at_the_end(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    errors = fail_once(monkeypatch)
    file = GrowingFile(home / "file")
    file.write(b"x" * 100)
    with pytest.raises(OSError, match="Input/output error"):
        file.finish()
    assert not errors
    file.discard()


def test_discard_says_nothing_of_an_error_of_the_disk(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    errors = fail_once(monkeypatch)
    now = open_files()
    file = GrowingFile(home / "file")
    file.write(b"x" * 100)
    file.discard()
    file.discard()
    assert not errors
    assert open_files() == now


@pytest.mark.parametrize("says", ["writing failed", "publishing failed"])
def test_a_split_whose_disk_failed_is_not_published(home: Path, monkeypatch: pytest.MonkeyPatch, says: str) -> None:
    batches = [[make(30, number=number)] for number in range(6)]
    expected = undisturbed(home / "whole", batches, 10_000)
    writer = begin(home / "begun", batches[:1], 10_000)
    progress = writer.progress()
    errors = fail_once(monkeypatch)
    append(writer, batches[1])
    with pytest.raises(ConfigError, match=f"{says}: Input/output error"):
        append(writer, batches[2]) if says == "writing failed" else writer.close()
    assert not errors
    assert not list((home / "begun/train").glob("shard_*"))
    assert go_on(home / "begun", progress, batches[1:], 10_000) == expected
    assert files(home / "begun") == files(home / "whole")


FORKED = """
import os, signal, sys
from pathlib import Path
from chatmill.store import durable

def write(path):
    file = durable.GrowingFile(Path(path))
    for _ in range(5):
        file.write(b"x" * 100)
    file.finish()

durable.STRETCH = 100
write(sys.argv[1])
child = os.fork()
if not child:
    signal.alarm(5)
    write(sys.argv[2])
    os._exit(0)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_forked_process_has_no_thread_of_its_parent_but_writes(home: Path) -> None:
    command = [sys.executable, "-c", FORKED, str(home / "parent"), str(home / "child")]
    assert subprocess.run(command, check=False, timeout=60).returncode == 0, "the child hung and was stopped"
    assert files(home)["child"] == b"x" * 500

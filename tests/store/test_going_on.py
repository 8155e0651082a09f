"""Writers that were stopped and go on, and files that do not bear their progress out."""

from __future__ import annotations

import errno
import os
import shutil
from collections import Counter
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from chatmill.errors import ConfigError, FormatError
from chatmill.store import shard_writer
from chatmill.store.durable import Durability, GrowingFile
from chatmill.store.episode_check import check_episodes
from chatmill.store.episode_columns import SourceCodes, checked_columns
from chatmill.store.episode_layout import MASK
from chatmill.store.episode_manifest import COLUMNS
from chatmill.store.episode_writer import EpisodeWriter, WriterProgress
from chatmill.store.shard_writer import ShardWriter
from tests.store.writing import (
    BATCHES,
    Ending,
    Made,
    append,
    batches_of,
    begin,
    files,
    folder,
    go_on,
    is_wide,
    make,
    open_files,
    record_of,
    stop,
    undisturbed,
    widens,
)


def test_who_goes_on_writes_the_same_bytes() -> None:
    """Batches and a progress, then batches that are lost, then an end; another writer goes on.

    Also where the lost batches made the mask of the growing shard wider: it is made narrow again.
    """
    seen: Counter[str] = Counter()

    @settings(max_examples=120)
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

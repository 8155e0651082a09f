"""The cache of files from stores, used by many threads and processes at once."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from chatmill.core.checksums import FileRecord
from chatmill.core.publish import StorageError
from chatmill.files import cache


def record_of(number: int, size: int = 30) -> FileRecord:
    return FileRecord(bytes=size, digest=f"{number * 0x123456789:032x}")


def write_x(path: Path) -> None:
    path.write_bytes(b"x" * 30)


def files_in(root: Path) -> list[Path]:
    return sorted(path for path in (root / cache.FILES).rglob("*") if path.is_file())


def test_files_that_others_name_or_remove_meanwhile_disturb_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody has noted yet how much the cache holds, so it is counted while others write, name and remove files."""
    folder = tmp_path / cache.FILES / "00"
    folder.mkdir(parents=True)
    listed = cache._entries

    def entries_of_old(root: Path) -> Iterator[os.DirEntry[str]]:
        being_written = folder / f".tmp-1-{'a' * 16}"
        being_written.write_bytes(b"half")
        removed = folder / f"{'0' * 32}-4"
        removed.write_bytes(b"done")
        found = list(listed(root))
        being_written.rename(folder / f"{'0' * 31}1-8")
        removed.unlink()
        yield from found

    monkeypatch.setattr(cache, "_entries", entries_of_old)
    cache.keep(cache.file_of(record_of(1), tmp_path), 30, write_x)
    assert cache.file_of(record_of(1), tmp_path).exists()


def test_what_the_cache_holds_is_noted_of_many_threads(tmp_path: Path) -> None:
    for attempt in range(5):
        root = tmp_path / str(attempt)
        errors: list[BaseException] = []
        start = threading.Barrier(32)

        def keep_file(number: int, root: Path, start: threading.Barrier, errors: list[BaseException]) -> None:
            start.wait()
            try:
                cache.keep(cache.file_of(record_of(number), root), 30, write_x)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=keep_file, args=(number, root, start, errors)) for number in range(32)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors
        assert len(files_in(root)) == 32
        assert cache._noted_usage(root) == 32 * 30


@pytest.mark.parametrize("noted", ["", "12 apples"])
def test_a_note_that_says_nothing_is_made_anew(tmp_path: Path, noted: str) -> None:
    cache.keep(cache.file_of(record_of(1), tmp_path), 30, write_x)
    (tmp_path / "usage").write_text(noted)
    cache.keep(cache.file_of(record_of(2), tmp_path), 30, write_x)
    assert (tmp_path / "usage").read_text() == "60"


def test_many_small_files_are_kept_at_once(tmp_path: Path) -> None:
    files = {cache.name_of(record_of(number, 4)): b"%04d" % number for number in range(100)}
    cache.keep_small(tmp_path, files)
    assert {path.relative_to(tmp_path).as_posix(): path.read_bytes() for path in files_in(tmp_path)} == files
    assert cache._noted_usage(tmp_path) == 400
    cache.keep_small(tmp_path, {})
    assert cache._noted_usage(tmp_path) == 400


@pytest.mark.parametrize("small", [False, True])
def test_on_a_full_disk_what_is_not_needed_now_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small: bool
) -> None:
    old, new = (cache.file_of(record_of(number), tmp_path) for number in (1, 2))
    cache.keep(old, 30, write_x)

    def write_where_there_is_room(path: Path) -> None:
        path.write_bytes(b"x")
        if old.exists():
            raise OSError(errno.ENOSPC, "No space left on device")
        write_x(path)

    if small:
        monkeypatch.setattr(cache, "_write_bytes", lambda data, path: write_where_there_is_room(path))
        cache.keep_small(tmp_path, {cache.name_of(record_of(2)): b"x" * 30})
    else:
        cache.keep(new, 30, write_where_there_is_room)
    assert files_in(tmp_path) == [new]
    assert cache._noted_usage(tmp_path) == 30


def test_a_disk_that_stays_full_is_one_error_and_leaves_nothing(tmp_path: Path) -> None:
    def fail(path: Path) -> None:
        path.write_bytes(b"x")
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(StorageError, match="No space left"):
        cache.keep(cache.file_of(record_of(1), tmp_path), 30, fail)
    assert files_in(tmp_path) == []

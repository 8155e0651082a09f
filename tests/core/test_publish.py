"""Crash-safe files: killed at every step, disks that fill up, folders that cannot be written, and the one JSON."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chatmill.core import publish
from chatmill.core.canonical import canonical_json
from chatmill.core.checksums import Hash
from chatmill.core.publish import StorageError, write_whole
from chatmill.errors import ChatmillError, ConfigError, DataError
from tests.faults import faults, faults_hit
from tests.hashes import file_entry

OLD, NEW = b"old" * 1000, b"new" * 50_000


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def fill(folder: Path, text: str) -> Path:
    (folder / "sub").mkdir()
    (folder / "x").write_text(text)
    (folder / "sub" / "y").write_text(text)
    return folder


def failing(number: int) -> Callable[..., Any]:
    def fail(*_: Any) -> Any:
        raise OSError(number, os.strerror(number))

    return fail


def test_a_file_appears_whole_with_its_hash(tmp_path: Path) -> None:
    array = np.arange(100_000, dtype="<i4").reshape(100, 1000)
    path = tmp_path / ("a" * 250 + ".bin")  # the longest name there is
    with publish.whole_file(path) as temporary:
        file = publish.GrowingFile(temporary)
        for data in (b"head", b"", np.empty((0, 3)), array):
            file.write(data)
        record = file.finish()
        assert not path.exists()
        assert [bool(publish.TEMPORARY.fullmatch(name)) for name in names(tmp_path)] == [True]
    data = b"head" + array.tobytes()
    assert path.read_bytes() == data
    assert names(tmp_path) == [path.name]
    assert file.size == len(data)
    assert record.to_json() == file_entry(data)
    assert publish.file_digest(path, Hash.SHA256) == hashlib.sha256(data).hexdigest()
    mask = os.umask(0)
    os.umask(mask)
    assert path.stat().st_mode & 0o777 == 0o666 & ~mask, "others may read it as any other file"


@pytest.mark.parametrize("whole", [publish.whole_file, publish.whole_folder])
def test_nothing_appears_when_the_block_fails(tmp_path: Path, whole: Callable[[Path], Any]) -> None:
    def write(text: str, number: int) -> None:
        with whole(tmp_path / "a") as temporary:
            (temporary / "x" if temporary.is_dir() else temporary).write_text(text)
            print(1 // number)

    with pytest.raises(ZeroDivisionError):
        write("half", 0)
    assert names(tmp_path) == []
    write("whole", 1)
    assert names(tmp_path) == ["a"]
    if whole is publish.whole_file:
        with pytest.raises(ZeroDivisionError):
            write("half", 0)
        assert names(tmp_path) == ["a"]
        assert (tmp_path / "a").read_text() == "whole"


@pytest.mark.parametrize("call", ["write_bytes", "fsync", "replace"])
def test_a_full_disk_is_one_clear_error_and_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    write_whole(tmp_path / "a", OLD)
    with monkeypatch.context() as patch:
        patch.setattr(Path if call == "write_bytes" else os, call, failing(errno.ENOSPC))
        with pytest.raises(StorageError) as caught:
            write_whole(tmp_path / "a", NEW)
    error = caught.value
    assert isinstance(error, ChatmillError)
    assert isinstance(error, OSError)
    assert (error.errno, error.filename) == (errno.ENOSPC, str(tmp_path / "a"))
    assert str(error).startswith(f"{tmp_path / 'a'}: cannot write: No space left on device (ENOSPC); free some space")
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), again.errno) == (StorageError, str(error), errno.ENOSPC)
    assert names(tmp_path) == ["a"]
    assert (tmp_path / "a").read_bytes() == OLD


def test_places_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="check that the path is right"):
        write_whole(tmp_path / "no" / "a", b"x")
    (tmp_path / "f").touch()
    with pytest.raises(StorageError, match="a part of this path is a file"):
        write_whole(tmp_path / "f" / "a", b"x")
    with pytest.raises(StorageError, match="cannot read: No such file"):
        publish.file_digest(tmp_path / "missing", Hash.SHA256)
    with (
        pytest.raises(StorageError, match=r"cannot fly: .* \(no error number\); check the disk"),
        publish.storing("x", "fly"),
    ):
        raise OSError("odd")
    os.mkfifo(tmp_path / "pipe")
    for place in (tmp_path / "pipe", tmp_path):
        with pytest.raises(ConfigError, match="no plain file"):
            write_whole(place, b"x")
    assert (tmp_path / "pipe").is_fifo()


WRITE = """
import sys
from pathlib import Path
from chatmill.core.publish import publish_folder, temporary_folder, write_whole
final = Path(sys.argv[1]) / "part"
write_whole(final.parent / "a", b"new" * 50_000)
folder = temporary_folder(final)
(folder / "x").write_text("whole")
publish_folder(folder, final)
"""


@pytest.mark.parametrize(
    ("point", "there", "data"),
    [
        ("sync:tmp", ["a"], OLD),
        ("before:/a$", ["a"], OLD),
        ("after:/a$", ["a"], NEW),
        ("before:part", ["a"], NEW),
        ("after:part", ["a", "part"], NEW),
    ],
)
def test_files_and_folders_survive_a_kill(tmp_path: Path, point: str, there: list[str], data: bytes) -> None:
    folder, log = tmp_path / "d", tmp_path / "log"
    folder.mkdir()
    write_whole(folder / "a", OLD)
    command = [sys.executable, "-c", WRITE, str(folder)]
    ran = subprocess.run(command, env=os.environ | faults(f"{point}:1:kill", log=log), check=False)
    assert (ran.returncode, faults_hit(log)) == (-signal.SIGKILL, [point])
    orphans = [name for name in names(folder) if name not in there]
    assert len(orphans) == (not point.startswith("after"))
    assert publish.sweep_orphans(folder) == [folder / name for name in orphans]
    assert names(folder) == there
    assert (folder / "a").read_bytes() == data
    assert "part" not in there or (folder / "part" / "x").read_text() == "whole"


def test_a_folder_is_published_in_one_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    final = tmp_path / "out" / "part"
    publish.publish_folder(fill(publish.temporary_folder(final), "one"), final)
    assert names(tmp_path / "out") == ["part"]
    assert (final / "sub" / "y").read_text() == "one"
    second = fill(publish.temporary_folder(final), "two")
    with pytest.raises(ConfigError, match="is there already"):
        publish.publish_folder(second, final)
    assert (final / "x").read_text() == "one"
    publish.publish_folder(second, final, replace=True)
    assert (final / "x").read_text() == "two"
    assert names(tmp_path / "out") == ["part"]
    with pytest.raises(StorageError, match="cannot publish the folder"):
        publish.publish_folder(tmp_path / "nothing", tmp_path / "elsewhere")

    spool, rename = tmp_path / "spool", os.rename
    own, other = fill(publish.temporary_folder(spool), "own"), fill(publish.temporary_folder(spool), "other")

    def other_one_first(source: Path, target: Path) -> None:
        rename(other, spool)
        rename(source, target)

    monkeypatch.setattr(os, "rename", other_one_first)
    with pytest.raises(StorageError):
        publish.publish_folder(own, spool)
    assert (spool / "x").read_text() == "other", "what another process publishes meanwhile stays"
    assert own.is_dir()


def test_sweeping_takes_only_our_names(tmp_path: Path) -> None:
    keep = [".tmp-x", ".tmp-12-zz", "a.tmp-12-0123456789abcdef", ".tmp-12-0123456789abcdef.bin", ".tmp", "tmp-1-0"]
    outside, folder = tmp_path / "outside", tmp_path / "swept"
    outside.mkdir()
    (folder / "deep").mkdir(parents=True)
    for name in keep:
        (folder / name).touch()
    (outside / publish.temporary_beside(outside / "x").name).touch()
    (folder / "link").symlink_to(outside)
    fill(publish.temporary_folder(folder / "part"), "rest")
    publish.temporary_beside(folder / "deep" / "f").touch()
    publish.temporary_beside(folder / "f").symlink_to(outside)
    assert len(publish.sweep_orphans(folder)) == 3
    assert names(folder) == sorted([*keep, "deep", "link"])
    assert names(folder / "deep") == []
    assert len(names(outside)) == 1
    assert publish.sweep_orphans(folder) == publish.sweep_orphans(tmp_path / "missing") == []


def test_folders_are_synced_after_the_rename(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[tuple[str, str]] = []
    real_sync, real_replace = os.fsync, os.replace

    def sync(descriptor: int) -> None:
        target = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        steps.append(("sync", "folder" if target.is_dir() else "file"))
        real_sync(descriptor)

    def replace(source: Path, target: Path) -> None:
        steps.append(("rename", Path(target).name))
        real_replace(source, target)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(os, "replace", replace)
    write_whole(tmp_path / "a", b"x")
    assert steps == [("sync", "file"), ("rename", "a"), ("sync", "folder")]
    steps.clear()
    publish.publish_folder(fill(publish.temporary_folder(tmp_path / "part"), "t"), tmp_path / "part")
    assert steps.count(("sync", "file")) == 2
    assert steps.count(("sync", "folder")) == 3
    assert steps[-1] == ("sync", "folder")
    monkeypatch.setattr(os, "fsync", failing(errno.EINVAL))
    publish.sync_folder(tmp_path)  # not every file system can do it
    monkeypatch.setattr(os, "fsync", failing(errno.EIO))
    with pytest.raises(OSError, match="Input/output"):
        publish.sync_folder(tmp_path)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@given(JSON)
def test_canonical_json_is_one_spelling(value: Any) -> None:
    data = canonical_json(value)
    assert json.loads(data) == value
    assert canonical_json(json.loads(data)) == data
    if isinstance(value, dict):
        assert canonical_json(dict(reversed(value.items()))) == data


def test_canonical_json_in_bytes() -> None:
    assert canonical_json({"b": [1, 2.5, None], "a": "é\n"}) == b'{"a":"\\u00e9\\n","b":[1,2.5,null]}'
    assert canonical_json((1, (2,))) == b"[1,[2]]"
    with pytest.raises(DataError, match="no canonical JSON"):
        canonical_json({"a": float("nan")})
    with pytest.raises(TypeError):
        canonical_json({"a": {1, 2}})

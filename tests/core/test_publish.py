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
from chatmill.core.publish import (
    TEMPORARY,
    GrowingFile,
    StorageError,
    file_digest,
    publish_folder,
    storing,
    sweep_orphans,
    temporary_beside,
    temporary_folder,
    whole_file,
    whole_folder,
    write_whole,
)
from chatmill.errors import ChatmillError, ConfigError, DataError
from tests.faults import faults, faults_hit
from tests.hashes import file_entry

OLD, NEW = b"old" * 1000, b"new" * 50_000


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def run_python(script: str, *arguments: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", script, *map(str, arguments)]
    return subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, check=False)


def test_a_file_appears_whole_with_its_hash(tmp_path: Path) -> None:
    array = np.arange(100_000, dtype="<i4").reshape(100, 1000)
    with whole_file(tmp_path / "a.bin") as temporary:
        file = GrowingFile(temporary)
        for data in (b"head", b"", np.empty((0, 3)), array):
            file.write(data)
        record = file.finish()
        assert not (tmp_path / "a.bin").exists()
        assert [bool(TEMPORARY.fullmatch(name)) for name in names(tmp_path)] == [True]
    assert (tmp_path / "a.bin").read_bytes() == b"head" + array.tobytes()
    assert names(tmp_path) == ["a.bin"]
    assert file.size == 4 + array.nbytes
    data = b"head" + array.tobytes()
    assert record.to_json() == file_entry(data)
    assert file_digest(tmp_path / "a.bin", Hash.SHA256) == hashlib.sha256(data).hexdigest()
    mask = os.umask(0)
    os.umask(mask)
    assert (tmp_path / "a.bin").stat().st_mode & 0o777 == 0o666 & ~mask, "others may read it as any other file"


def test_nothing_appears_when_the_block_fails(tmp_path: Path) -> None:
    write_whole(tmp_path / "a", OLD)

    def fail_inside() -> None:
        with whole_file(tmp_path / "a") as temporary:
            temporary.write_bytes(NEW)
            print(1 // 0)

    with pytest.raises(ZeroDivisionError):
        fail_inside()
    assert names(tmp_path) == ["a"]
    assert (tmp_path / "a").read_bytes() == OLD
    write_whole(tmp_path / "a", NEW)
    assert (tmp_path / "a").read_bytes() == NEW


def test_a_file_may_have_the_longest_name_there_is(tmp_path: Path) -> None:
    path = tmp_path / ("a" * 250 + ".json")
    with whole_file(path) as partial:
        partial.write_text("whole")
    assert path.read_text() == "whole"


def no_space(*_: Any) -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("call", ["write_bytes", "fsync", "replace"])
def test_a_full_disk_is_one_clear_error_and_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    write_whole(tmp_path / "a", OLD)
    with monkeypatch.context() as patch:
        patch.setattr(Path if call == "write_bytes" else os, call, no_space)
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


def test_a_folder_that_is_not_there_or_is_a_file(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="check that the path is right"):
        write_whole(tmp_path / "no" / "a", b"x")
    (tmp_path / "f").touch()
    with pytest.raises(StorageError, match="a part of this path is a file"):
        write_whole(tmp_path / "f" / "a", b"x")
    with pytest.raises(StorageError, match="cannot read: No such file"):
        file_digest(tmp_path / "missing", Hash.SHA256)
    with pytest.raises(StorageError, match=r"cannot fly: .* \(no error number\); check the disk"), storing("x", "fly"):
        raise OSError("odd")


WRITE = """
import sys
from chatmill.core.publish import write_whole
write_whole(sys.argv[1] + "/a", b"new" * 50_000)
"""


@pytest.mark.parametrize(("point", "expected"), [("sync:tmp", OLD), ("before:/a$", OLD), ("after:/a$", NEW)])
def test_a_file_survives_a_kill_at_any_step(tmp_path: Path, point: str, expected: bytes) -> None:
    folder, log = tmp_path / "d", tmp_path / "log"
    folder.mkdir()
    write_whole(folder / "a", OLD)
    ran = run_python(WRITE, folder, **faults(f"{point}:1:kill", log=log))
    assert ran.returncode == -signal.SIGKILL
    assert faults_hit(log) == [point]
    assert (folder / "a").read_bytes() == expected
    orphans = [name for name in names(folder) if name != "a"]
    assert len(orphans) == (expected == OLD)
    assert sweep_orphans(folder) == [folder / name for name in orphans]
    assert names(folder) == ["a"]
    assert (folder / "a").read_bytes() == expected


def fill(folder: Path, text: str) -> Path:
    (folder / "sub").mkdir()
    (folder / "x").write_text(text)
    (folder / "sub" / "y").write_text(text)
    return folder


def test_a_folder_is_published_in_one_step(tmp_path: Path) -> None:
    final = tmp_path / "out" / "part"
    publish_folder(fill(temporary_folder(final), "one"), final)
    assert names(tmp_path / "out") == ["part"]
    assert (final / "sub" / "y").read_text() == "one"
    second = fill(temporary_folder(final), "two")
    with pytest.raises(ConfigError, match="is there already"):
        publish_folder(second, final)
    assert (final / "x").read_text() == "one"
    publish_folder(second, final, replace=True)
    assert (final / "x").read_text() == "two"
    assert names(tmp_path / "out") == ["part"]
    with pytest.raises(StorageError, match="cannot publish the folder"):
        publish_folder(tmp_path / "nothing", tmp_path / "elsewhere")


def test_a_folder_of_a_block_that_fails_is_removed(tmp_path: Path) -> None:
    def fail_inside() -> None:
        with whole_folder(tmp_path / "part") as temporary:
            fill(temporary, "half")
            print(1 // 0)

    with pytest.raises(ZeroDivisionError):
        fail_inside()
    assert names(tmp_path) == []
    with whole_folder(tmp_path / "part") as temporary:
        fill(temporary, "whole")
    assert names(tmp_path) == ["part"]


def test_a_folder_that_another_process_publishes_meanwhile_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    final = tmp_path / "spool"
    own, other = fill(temporary_folder(final), "own"), fill(temporary_folder(final), "other")

    rename = os.rename

    def other_one_first(source: Path, target: Path) -> None:
        rename(other, final)
        rename(source, target)

    monkeypatch.setattr(os, "rename", other_one_first)
    with pytest.raises(StorageError):
        publish_folder(own, final)
    assert (final / "x").read_text() == "other"
    assert own.is_dir()


PUBLISH = """
import sys
from pathlib import Path
from chatmill.core.publish import publish_folder, temporary_folder
final = Path(sys.argv[1])
folder = temporary_folder(final)
(folder / "x").write_text("whole")
publish_folder(folder, final)
"""


@pytest.mark.parametrize(("point", "there"), [("before:part", False), ("after:part", True)])
def test_a_folder_survives_a_kill_at_any_step(tmp_path: Path, point: str, there: bool) -> None:
    final, log = tmp_path / "d" / "part", tmp_path / "log"
    ran = run_python(PUBLISH, final, **faults(f"{point}:1:kill", log=log))
    assert (ran.returncode, faults_hit(log)) == (-signal.SIGKILL, [point])
    assert final.exists() == there
    assert len(sweep_orphans(tmp_path)) == (not there)
    assert names(tmp_path / "d") == (["part"] if there else [])
    assert not there or (final / "x").read_text() == "whole"


def test_sweeping_takes_only_our_names(tmp_path: Path) -> None:
    keep = [".tmp-x", ".tmp-12-zz", "a.tmp-12-0123456789abcdef", ".tmp-12-0123456789abcdef.bin", ".tmp", "tmp-1-0"]
    outside = tmp_path / "outside"
    outside.mkdir()
    folder = tmp_path / "swept"
    (folder / "deep").mkdir(parents=True)
    for name in keep:
        (folder / name).touch()
    (outside / temporary_beside(outside / "x").name).touch()
    (folder / "link").symlink_to(outside)
    fill(temporary_folder(folder / "part"), "rest")
    temporary_beside(folder / "deep" / "f").touch()
    temporary_beside(folder / "f").symlink_to(outside)
    assert len(sweep_orphans(folder)) == 3
    assert names(folder) == sorted([*keep, "deep", "link"])
    assert names(folder / "deep") == []
    assert len(names(outside)) == 1
    assert sweep_orphans(folder) == sweep_orphans(tmp_path / "missing") == []


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
    publish_folder(fill(temporary_folder(tmp_path / "part"), "t"), tmp_path / "part")
    assert steps.count(("sync", "file")) == 2
    assert steps.count(("sync", "folder")) == 3
    assert steps[-1] == ("sync", "folder")


def test_folders_that_cannot_be_synced_are_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(number: int) -> Callable[[int], None]:
        def sync(descriptor: int) -> None:
            raise OSError(number, os.strerror(number))

        return sync

    monkeypatch.setattr(os, "fsync", refuse(errno.EINVAL))
    publish.sync_folder(tmp_path)
    monkeypatch.setattr(os, "fsync", refuse(errno.EIO))
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


def test_what_is_no_plain_file_is_not_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for place in (pipe, tmp_path):
        with pytest.raises(ConfigError, match="no plain file"):
            write_whole(place, b"x")
    assert pipe.is_fifo()

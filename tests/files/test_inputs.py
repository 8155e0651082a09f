"""Input files in stores are copied into the cache, of one state for a whole build; their keys are not written."""

from __future__ import annotations

import functools
import gzip
import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest

from chatmill.compiler.run import run_build
from chatmill.errors import ConfigError, DataError
from chatmill.files import stores
from chatmill.files.inputs import find_input
from chatmill.read.conversations import ConversationFile
from tests.compiler.builds import CHATML, chats, digest, write_jsonl


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CHATMILL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("CHATMILL_STORE_RETRIES", "0")
    return tmp_path / "cache"


@pytest.fixture
def bucket(tmp_path: Path) -> Iterator[str]:
    memory = fsspec.filesystem("memory")
    yield f"memory://{tmp_path.name}"
    if memory.exists(f"/{tmp_path.name}"):
        memory.rm(f"/{tmp_path.name}", recursive=True)


def put(url: str, data: bytes) -> None:
    fsspec.filesystem("memory").pipe_file(url.removeprefix("memory:/"), data)


def recipe_of(*urls: str) -> dict[str, Any]:
    return {"sources": [{"path": list(urls)}], **CHATML, "shard_bytes": 4000}


def test_a_file_is_copied_once_and_again_when_it_was_written_again(bucket: str, own_cache: Path) -> None:
    put(f"{bucket}/a.jsonl", b"one")
    first = find_input(f"{bucket}/a.jsonl").copy()
    assert first.read_bytes() == b"one"
    assert first.name.endswith("-a.jsonl")
    assert find_input(f"{bucket}/a.jsonl").copy() == first
    put(f"{bucket}/a.jsonl", b"two")
    second = find_input(f"{bucket}/a.jsonl").copy()
    assert (second.read_bytes(), first.read_bytes()) == (b"two", b"one")


def test_a_file_that_changes_during_a_build_is_refused(bucket: str) -> None:
    put(f"{bucket}/a.jsonl", b"one")
    seen = find_input(f"{bucket}/a.jsonl")
    put(f"{bucket}/a.jsonl", b"two")
    with pytest.raises(DataError, match=r"a\.jsonl has changed since the build began"):
        seen.copy()


def test_a_store_that_gives_other_bytes_each_time_is_not_believed(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    put(f"{bucket}/a.jsonl", b"one")
    seen = find_input(f"{bucket}/a.jsonl")
    object.__setattr__(seen.found, "md5", "0" * 32)
    assert seen.copy().read_bytes() == b"one", "the digest may be of encrypted bytes, and the same bytes came twice"
    seen.copy().unlink()
    came = iter([b"abc", b"def"])
    monkeypatch.setattr(stores, "read_range", lambda url, start, stop: next(came))
    with pytest.raises(stores.RemoteError, match=r"a\.jsonl: cannot read: its bytes are other ones each time"):
        seen.copy()


class Elsewhere:
    """Runs each job with a cache of its own, as a cluster whose nodes share no folder."""

    def __init__(self, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.home, self.monkeypatch, self.jobs = home, monkeypatch, 0

    def map(self, job: Any, specs: Any) -> Iterator[tuple[int, Any]]:
        for index, spec in enumerate(specs):
            self.jobs += 1
            with self.monkeypatch.context() as patch:
                patch.setenv("CHATMILL_CACHE", str(self.home / f"machine{self.jobs}"))
                yield index, job(spec)

    def __enter__(self) -> Elsewhere:
        return self

    def __exit__(self, *error: object) -> None:
        return None


def spools(url: str) -> list[str]:
    return [name for name in stores.list_objects(url) if "spool" in name]


def test_spools_are_in_the_store_while_machines_without_a_common_folder_work(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Packed lines, a list and a table are written as spools by one machine, and read by others."""
    records = chats(40)
    lines = "".join(json.dumps(record) + "\n" for record in records).encode()
    put(f"{bucket}/in/a.jsonl", lines)
    put(f"{bucket}/in/b.jsonl.gz", gzip.compress(lines, mtime=0))
    put(f"{bucket}/in/c.json", json.dumps(records).encode())
    put(f"{bucket}/in/d.csv", b"question,answer\n2 + 2?,4\n")
    recipe = recipe_of(f"{bucket}/in/*")
    run_build(recipe, tmp_path / "local", workers=0)
    seen: list[list[str]] = []
    executor = Elsewhere(tmp_path, monkeypatch)
    list_objects = stores.list_objects

    def noted(url: str) -> dict[str, Any]:
        found = list_objects(url)
        seen.append([name for name in found if name.endswith((".arrow", "jsonl.jsonl", "json.jsonl"))])
        return found

    monkeypatch.setattr(stores, "list_objects", noted)
    result = run_build(recipe, f"{bucket}/built", executor=executor)
    assert executor.jobs > 5
    assert max(map(len, seen)) == 3, "spools of three files"
    assert spools(f"{bucket}/built") == []
    local = json.loads((tmp_path / "local" / "manifest.json").read_bytes())
    assert result.manifest["files"] == local["files"]
    with pytest.raises(DataError, match="no such file"):
        run_build(recipe_of(f"{bucket}/in/c.json", f"{bucket}/none.jsonl"), f"{bucket}/other", executor=executor)
    monkeypatch.setattr(stores, "list_objects", list_objects)
    put(f"{bucket}/in/e.jsonl", b"no json\n")
    with pytest.raises(DataError):
        run_build(recipe, f"{bucket}/other", executor=executor)
    assert spools(f"{bucket}/other") == [], "a build that fails takes its spools away"


def test_a_key_in_the_address_of_an_input_is_neither_written_nor_printed(bucket: str, tmp_path: Path) -> None:
    for url in ("https://host/a.jsonl?X-Amz-Signature=abcdef", "https://me:hush-hush@host/a.jsonl"):
        with pytest.raises(ConfigError, match="the address of this input holds a key") as caught:
            run_build(recipe_of(url), tmp_path / "built", workers=0)
        assert "abcdef" not in str(caught.value)
        assert "hush-hush" not in str(caught.value)


class Plain(http.server.SimpleHTTPRequestHandler):
    """A web server that says neither a version nor gives ranges."""

    asked: list[str] = []  # noqa: RUF012 - of all requests

    def log_message(self, *given: object) -> None:
        self.asked.append(self.command)


@pytest.fixture
def web(tmp_path: Path) -> Iterator[str]:
    folder = tmp_path / "web"
    folder.mkdir()
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Plain, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    Plain.asked.clear()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


def test_a_web_server_without_versions_and_ranges_is_read_once_for_a_build(
    web: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_jsonl(tmp_path / "web" / "a.jsonl", chats(30))
    monkeypatch.setattr(stores, "BLOCK", 1000)
    file = ConversationFile(f"{web}/a.jsonl")
    assert len(list(file)) == 30
    Plain.asked.clear()
    run_build(recipe_of(f"{web}/a.jsonl"), tmp_path / "built", workers=0)
    assert Plain.asked.count("GET") == 1
    write_jsonl(tmp_path / "web" / "a.jsonl", chats(30, 2))
    run_build(recipe_of(f"{web}/a.jsonl"), tmp_path / "again", workers=0)
    assert digest(tmp_path / "again") != digest(tmp_path / "built"), "an old copy is not taken for the file"


def test_a_web_server_that_is_busy_is_not_taken_for_one_without_the_file(
    web: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Plain, "do_HEAD", lambda self: self.send_error(503))
    monkeypatch.setattr(Plain, "do_GET", lambda self: self.send_error(503))
    with pytest.raises(stores.RemoteError, match=r"a\.jsonl: cannot read: .*\(tried once\)") as caught:
        find_input(f"{web}/a.jsonl")
    assert not isinstance(caught.value, stores.NoSuchObject)
    monkeypatch.undo()
    monkeypatch.setenv("CHATMILL_STORE_RETRIES", "0")
    with pytest.raises(DataError, match=r"no such file: .*none\.jsonl"):
        find_input(f"{web}/none.jsonl")

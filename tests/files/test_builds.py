"""A build into a store has the bytes of one into a folder, for tasks, kills, resumes elsewhere and several builders."""

from __future__ import annotations

import json
import os
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest

from chatmill.compiler.run import BuildResult, Outcome, run_build
from chatmill.core import publish
from chatmill.errors import ConfigError
from chatmill.files import builds, remote, stores
from chatmill.files.stores import RemoteError
from chatmill.prove.verify import verify
from tests.cli.run import here
from tests.compiler.builds import CHATML, chats, write_jsonl
from tests.files.stores_for_tests import s3_server

RECIPE = {
    "sources": [{"path": "in.jsonl"}],
    **CHATML,
    "shard_bytes": 4000,
    "pack": {"length": 2048},
    "split": {"val_fraction": 0.2},
    "on_error": "quarantine",
}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("home")
    write_jsonl(folder / "in.jsonl", [*chats(30), {"messages": "none"}])
    run_build(RECIPE, folder / "built", workers=0, base=folder)
    return folder


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CHATMILL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("CHATMILL_STORE_RETRIES", "0")
    return tmp_path / "cache"


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    name = f"memory://{tmp_path.name}/built"
    yield name
    memory = fsspec.filesystem("memory")
    if memory.exists(f"/{tmp_path.name}"):
        memory.rm(f"/{tmp_path.name}", recursive=True)


@pytest.fixture
def build(home: Path) -> Callable[..., BuildResult]:
    def built(url: str, **options: Any) -> BuildResult:
        recipe = RECIPE | options.pop("recipe", {})
        return run_build(recipe, url, base=home, **{"workers": 0, **options})

    return built


def objects(url: str) -> dict[str, bytes]:
    store, root = fsspec.core.url_to_fs(url)
    store.invalidate_cache()
    return {name.removeprefix(root).lstrip("/"): store.cat_file(name) for name in store.find(root)}


def assert_same(url: str, folder: Path) -> None:
    """The objects at a URL are the files of a folder; their manifests differ in times and places alone."""
    far = objects(url)
    near = {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    far.pop(remote.JOINED, None)
    manifests = [json.loads(files.pop("manifest.json")) for files in (far, near)]
    assert far == near
    for manifest in manifests:
        for key in ("created_unix_s", "contents_sha256", "recipe_sha256", "recipe", "git_sha"):
            del manifest[key]
        for seen in manifest["scanned"]:
            seen["from"] = ""
    assert manifests[0] == manifests[1]


def test_a_build_into_a_store_has_the_bytes_of_one_into_a_folder(
    home: Path, url: str, build: Callable[..., BuildResult], own_cache: Path
) -> None:
    result = build(url)
    assert (result.outcome, result.directory) == (Outcome.BUILT, url)
    assert_same(url, home / "built")
    assert list((own_cache / "builds").iterdir()) == [], "the local folder is empty in the end"
    assert build(url).outcome is Outcome.ALREADY_BUILT
    with pytest.raises(ConfigError, match=f"{url} holds another dataset"):
        build(url, recipe={"shard_bytes": 5000})


@pytest.mark.slow
def test_workers_upload_to_a_server_of_s3(home: Path, build: Callable[..., BuildResult]) -> None:
    with s3_server() as bucket:
        build(f"{bucket}/built", workers=2, recipe={"shard_bytes": 12000})
        run_build(RECIPE | {"shard_bytes": 12000}, home / "larger", workers=0, base=home)
        assert_same(f"{bucket}/built", home / "larger")
        done = here("verify", f"{bucket}/built", "--deep", cwd=home)
        assert done.returncode == 0, done.stdout + done.stderr


def test_tasks_need_nothing_but_the_url(
    home: Path, url: str, build: Callable[..., BuildResult], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for task in range(3):
        monkeypatch.setenv("CHATMILL_CACHE", str(tmp_path / f"machine{task}"))
        assert build(url, shard=(task, 3)).outcome is Outcome.SHARD_DONE
    monkeypatch.setenv("CHATMILL_CACHE", str(tmp_path / "another"))
    made = []
    monkeypatch.setattr(builds.RemoteBuild, "put_chunk", lambda *arguments: made.append(arguments))
    assert build(url, resume=True).outcome is Outcome.BUILT
    assert not made
    assert_same(url, home / "built")


class Stopped(BaseException):
    """As a kill: nothing that the build does after it counts."""


def stop_after(count: int, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Stop a build at a write to the store, and keep it from taking anything back; give how many are left."""
    left = [count]

    def counted(name: str) -> None:
        original = getattr(stores, name)

        def called(*arguments: Any, **options: Any) -> Any:
            left[0] -= 1
            if left[0] < 0:
                raise Stopped
            return original(*arguments, **options)

        monkeypatch.setattr(stores, name, called)

    for name in ("upload", "write_object", "create_object", "remove_objects"):
        counted(name)
    return left


@pytest.mark.filterwarnings("ignore:.*without a receipt")
@pytest.mark.parametrize("share", [0.03, 0.3, 0.7, 0.97, 0.985, 0.999])
def test_a_build_that_died_is_resumed_elsewhere(
    home: Path,
    url: str,
    build: Callable[..., BuildResult],
    share: float,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as patched:
        left = stop_after(1_000_000, patched)
        build(f"{url}-dry")
    with monkeypatch.context() as patched:
        stop_after(int(share * (1_000_000 - left[0])), patched)
        with pytest.raises(Stopped):
            build(url)
    monkeypatch.setenv("CHATMILL_CACHE", str(tmp_path / "elsewhere"))
    if "manifest.json" in objects(url):
        assert build(url, take_over=True).outcome is Outcome.ALREADY_BUILT
    else:
        with pytest.raises(ConfigError, match="--take-over"):
            build(url, resume=True)
        build(url, take_over=True)
    far = objects(url)
    assert not [name for name in far if name.startswith(".build/") and "lock" not in name]
    assert not verify(url).differences


def test_objects_without_a_receipt_are_removed_and_named(
    home: Path, url: str, build: Callable[..., BuildResult], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        stop_after(20, patched)
        with pytest.raises(Stopped):
            build(url)
    before = set(objects(url))
    assert any("/shard_" in name for name in before)
    with pytest.warns(UserWarning, match=f"{url}: removes .* objects without a receipt"):
        build(url, take_over=True)
    assert_same(url, home / "built")


def test_of_two_builds_at_once_one_is_told(url: str, build: Callable[..., BuildResult]) -> None:
    told = []

    def second() -> None:
        with pytest.raises(ConfigError) as caught:
            build(url)
        told.append(str(caught.value))

    assert build(url, on_start=second).outcome is Outcome.BUILT
    assert f"{url}: another build is at work there" in told[0]
    assert re.search(rf"process {os.getpid()}, last heard of \d+ seconds ago", told[0])
    assert f"chatmill build ... --out {url} --take-over" in told[0]


def test_builds_that_begin_at_once_do_not_sweep_each_others_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second driver begins when the first one has its folder, and not yet the lock of it."""
    root = tmp_path / "builds"
    others: list[threading.Thread] = []

    def lock_later(descriptor: int, message: str) -> None:
        if not others:
            others.append(threading.Thread(target=builds._driver_folder, args=(root,)))
            others[0].start()
            others[0].join(0.5)
        publish.lock(descriptor, message)

    monkeypatch.setattr(builds, "lock", lock_later)
    folder, descriptor = builds._driver_folder(root)
    others[0].join()
    assert folder.is_dir()
    assert len(list(root.glob("driver-*.lock"))) == 2
    os.close(descriptor)


def test_a_build_whose_lock_was_taken_over_publishes_nothing(url: str, build: Callable[..., BuildResult]) -> None:
    def another() -> None:
        assert build(url, take_over=True).outcome is Outcome.BUILT

    with pytest.raises(ConfigError, match="taken over the lock of this one"):
        build(url, on_start=another)
    assert not verify(url).differences


def test_a_store_that_cannot_create_exclusively_is_refused_unless_there_is_one_writer(
    home: Path, url: str, build: Callable[..., BuildResult], monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = type(fsspec.filesystem("memory"))
    pipe = memory.pipe_file

    def careless(self: Any, path: str, value: bytes, mode: str = "overwrite", **options: Any) -> None:
        pipe(self, path, value, **options)

    monkeypatch.setattr(memory, "pipe_file", careless)
    with pytest.raises(ConfigError, match=r"cannot create an object exclusively.* set single_writer: true"):
        build(url)
    build(url, recipe={"store": {"single_writer": True}})
    assert_same(url, home / "built")


def test_what_a_store_made_of_the_bytes_is_compared(
    url: str, build: Callable[..., BuildResult], monkeypatch: pytest.MonkeyPatch
) -> None:
    upload = stores.upload

    def damaged(path: Path, target: str) -> None:
        upload(path, target)
        if target.endswith("train/shard_00000/tokens.bin"):
            store, name = fsspec.core.url_to_fs(target)
            data = bytearray(store.cat_file(name))
            data[0] ^= 1
            store.pipe_file(name, bytes(data))

    monkeypatch.setattr(stores, "upload", damaged)
    with pytest.raises(RemoteError, match=r"tokens.bin: cannot write: what the store has afterwards are other bytes"):
        build(url)
    assert not [name for name in objects(url) if name.startswith(".build/receipts")]


@pytest.mark.slow
def test_an_object_in_parts_is_compared_without_reading_it_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S3 gives an MD5 of MD5s for it; one that was not finished is nothing, and is written again."""
    monkeypatch.setattr(stores, "PART", 5 << 20)
    path = tmp_path / "tokens.bin"
    path.write_bytes(bytes(range(256)) * (11 << 12))
    with s3_server() as bucket:
        build = builds.RemoteBuild(url=f"{bucket}/built")
        store = fsspec.filesystem("s3")
        begun = store.call_s3("create_multipart_upload", Bucket="team", Key="built/train/tokens.bin")
        store.call_s3(
            "upload_part",
            Bucket="team",
            Key="built/train/tokens.bin",
            PartNumber=1,
            UploadId=begun["UploadId"],
            Body=b"x" * (5 << 20),
        )
        assert stores.list_objects(build.url) == {}, "what a killed worker has uploaded of an object is not there"
        with monkeypatch.context() as patch:
            patch.setattr(stores, "read_range", None)
            build.put_files([(path, "train/tokens.bin")])
        found = stores.object_info(build.at("train/tokens.bin"))
        assert found.version.endswith("-3")
        path.write_bytes(bytes(11 << 20))
        assert not stores.has_digest_of(found, path)


@pytest.mark.parametrize("address", ["hf://datasets/team/chats", "https://host/built"])
def test_stores_that_are_read_alone_are_refused_by_name(build: Callable[..., BuildResult], address: str) -> None:
    with pytest.raises(ConfigError, match="not written there; build into a bucket"):
        build(address)


def test_a_place_with_other_objects_is_refused(url: str, build: Callable[..., BuildResult]) -> None:
    fsspec.filesystem("memory").pipe_file(f"{url.removeprefix('memory:/')}/notes.txt", b"mine")
    with pytest.raises(ConfigError, match=r"is not empty \(notes.txt\) and holds no build"):
        build(url)
    assert objects(url) == {"notes.txt": b"mine"}


def test_a_later_build_reuses_chunks_of_a_url(home: Path, url: str, build: Callable[..., BuildResult]) -> None:
    build(url)
    result = build(f"{url}-2", reuse=url)
    assert result.reused == result.chunks > 1
    assert_same(f"{url}-2", home / "built")
    assert run_build(RECIPE, home / "again", workers=0, base=home, reuse=url).reused == result.chunks
    assert_same(url, home / "again")

"""A dataset at a URL is read as one in a folder: by commands, in Python and by loaders, through a cache of files."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch

from chatmill.compiler.run import run_build
from chatmill.core.checksums import FileRecord
from chatmill.core.publish import StorageError
from chatmill.dataset.stored import Dataset
from chatmill.errors import ConfigError, FormatError
from chatmill.files import cache, remote, stores
from chatmill.files.stores import RemoteError
from chatmill.load.episodes import GPTEpisodeDataLoader
from chatmill.load.row_source import RowSource
from chatmill.prove.compare.diff import diff_datasets
from chatmill.prove.verify import verify
from chatmill.store.episodes import EpisodeDataset
from tests.cli.run import here
from tests.compiler.builds import CHATML, chats, write_jsonl
from tests.conftest import DATA
from tests.files.stores_for_tests import KEY, SECRET, put_folder, s3_server

CONFIG = {"batch_size": 3, "block_size": 64, "pad_token_id": 0, "use_loss_mask": True}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("home")
    write_jsonl(home / "in.jsonl", chats(40))
    recipe = {"sources": [{"path": "in.jsonl"}], **CHATML, "shard_bytes": 4000, "pack": {"length": 2048}}
    run_build({**recipe, "split": {"val_fraction": 0.2}}, home / "built", workers=0, base=home)
    return home / "built"


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CHATMILL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("CHATMILL_STORE_RETRIES", "0")
    return tmp_path / "cache"


@pytest.fixture
def url(built: Path, tmp_path: Path) -> Iterator[str]:
    """The dataset in a store in memory."""
    name = f"memory://{tmp_path.name}/built"
    put_folder(built, name)
    yield name
    fsspec.filesystem("memory").rm(f"/{tmp_path.name}", recursive=True)


def files_in(cache_folder: Path) -> set[str]:
    return {path.name for path in (cache_folder / cache.FILES).rglob("*") if path.is_file()}


MODEL = DATA / "tokenizers" / "qwen3"


def assert_commands_print_the_same(built: Path, address: str, tmp_path: Path) -> None:
    """Every command that takes a dataset, of a folder and of a URL."""
    commands = (
        ["verify", "--json"],
        ["stats", "--json"],
        ["stats"],
        ["inspect", "-n", "2"],
        ["inspect", "--json", "--row", "1"],
        ["view", "--save", "OUT.html"],
        ["export", "--to", "parquet", "--json", "--out", "OUT"],
        ["teacher", "request", "--out", "OUT"],
    )
    for arguments in commands:
        command, *options = arguments
        before = [options.pop(0)] if command == "teacher" else []
        said = []
        for name, place in (("out0", str(built)), ("out1", address)):
            out = str(tmp_path / f"{name}-{command}")
            done = here(command, *before, place, *(option.replace("OUT", out) for option in options))
            assert done.returncode == 0, done.stderr
            said.append(done.stdout.replace(f"{name}-", "out-").replace(place, "ADDRESS"))
        if command == "verify":
            said = [json.dumps({**json.loads(text), "seconds": 0}) for text in said]
        if command == "view":
            pages = ((tmp_path / f"out{n}-view.html", place) for n, place in enumerate((str(built), address)))
            said = [page.read_text().replace(place, "ADDRESS") for page, place in pages]
        assert said[0] == said[1], command
    same = here("diff", str(built), address)
    assert same.returncode == 0, same.stderr
    assert f"B {address}" in same.stdout
    places = (str(tmp_path / "out0-export"), f"{address}-export")
    audits = [here("audit", place, "-m", str(MODEL), "--json") for place in places]
    said = [json.dumps({**json.loads(audit.stdout), "name": ""}) for audit in audits]
    assert said[0] == said[1]


def test_commands_print_the_same_of_a_url_and_of_a_folder(built: Path, url: str, tmp_path: Path) -> None:
    assert here("export", url, "--to", "parquet", "--out", f"{url}-export").returncode == 0
    assert_commands_print_the_same(built, url, tmp_path)


@pytest.mark.slow
def test_commands_print_the_same_of_a_server_of_s3_and_write_no_key(built: Path, tmp_path: Path) -> None:
    with s3_server() as bucket:
        put_folder(built, f"{bucket}/built")
        done = here("export", str(built), "--to", "parquet", "--out", f"{bucket}/built-export")
        assert done.returncode == 0, done.stderr
        assert done.stdout.endswith(f"{bucket}/built-export\n")
        assert_commands_print_the_same(built, f"{bucket}/built", tmp_path)
        for secret in (KEY, SECRET):
            assert secret not in "".join(path.read_text() for path in tmp_path.rglob("*.json"))


def test_what_an_export_says_of_its_source_is_the_same(built: Path, url: str, tmp_path: Path) -> None:
    for name, address in (("a", str(built)), ("b", url)):
        assert here("export", address, "--to", "hf", "--out", str(tmp_path / name)).returncode == 0
    assert (tmp_path / "a/export.json").read_bytes() == (tmp_path / "b/export.json").read_bytes()


def test_an_export_is_written_to_a_url_and_read_from_there(built: Path, url: str, tmp_path: Path) -> None:
    assert here("export", str(built), "--to", "torchtitan", "--out", str(tmp_path / "rows")).returncode == 0
    done = here("export", url, "--to", "torchtitan", "--out", f"{url}-rows")
    assert done.returncode == 0, done.stderr
    assert f"{url}-rows" in done.stdout
    assert here("verify", f"{url}-rows").returncode == 0
    local, far = RowSource(tmp_path / "rows" / "train"), RowSource(f"{url}-rows/train")
    assert len(far) == len(local) > 0
    assert all(torch.equal(far[0][0][name], local[0][0][name]) for name in ("input", "positions"))
    again = here("export", url, "--to", "torchtitan", "--out", f"{url}-rows")
    assert again.returncode == 2
    assert f"{url}-rows: is there already" in again.stderr
    with pytest.raises(RemoteError, match=r"other: cannot open the dataset"):
        RowSource(f"{url}-rows/other")


def test_a_dataset_is_saved_from_one_place_to_the_other(built: Path, url: str, tmp_path: Path) -> None:
    assert Dataset(built).save(f"{url}-saved") == f"{url}-saved"
    Dataset(f"{url}-saved").save(tmp_path / "back")
    names = [path.relative_to(built) for path in built.rglob("*") if path.is_file()]
    assert all((tmp_path / "back" / name).read_bytes() == (built / name).read_bytes() for name in names)
    assert Dataset(built).save(f"{url}-saved") == f"{url}-saved", "the same one is left alone"
    fsspec.filesystem("memory").pipe_file(f"{url.removeprefix('memory:/')}-other/x", b"")
    with pytest.raises(ConfigError, match="is there already"):
        Dataset(built).save(f"{url}-other")


def test_what_is_written_to_files_alone_takes_no_url(built: Path, url: str, tmp_path: Path) -> None:
    commands = (
        ["view", str(built), "--save", "s3://team/page.html"],
        ["synth-kd", "none", "--out", "s3://team/kd"],
        ["teacher", "request", str(built), "--out", "s3://team/requests"],
        ["train", "none.yaml", "--out", "s3://team/run"],
    )
    for command in commands:
        done = here(*command)
        assert done.returncode == 2
        assert "this is written to files of this machine alone" in done.stderr
    done = here("teacher", "add", url, str(tmp_path))
    assert done.returncode == 2
    assert f"{url}: answers are added to a dataset in a folder" in done.stderr


def test_python_reads_a_url(built: Path, url: str) -> None:
    local, far = Dataset(built), Dataset(url)
    assert [item.ids.tolist() for item in far.episodes] == [item.ids.tolist() for item in local.episodes]
    assert [item.record_id for item in far.episodes] == [item.record_id for item in local.episodes]
    assert not verify(url).differences
    assert EpisodeDataset(url, "val").fingerprint == EpisodeDataset(built, "val").fingerprint  # type: ignore[arg-type]


@pytest.mark.parametrize("pack", [False, True])
def test_a_loader_gives_the_same_batches_and_resumes_from_the_other_place(built: Path, url: str, pack: bool) -> None:
    local, far = (GPTEpisodeDataLoader(CONFIG, dataset_dir=place, pack=pack) for place in (built, url))
    for _ in range(4):
        for one, other in zip(local.get_batch(), far.get_batch(), strict=True):
            assert torch.equal(one, other)
    state = json.loads(json.dumps(local.state_dict()))
    again = GPTEpisodeDataLoader(CONFIG, dataset_dir=url, pack=pack)
    again.load_state_dict(state)
    assert all(torch.equal(a, b) for a, b in zip(local.get_batch(), again.get_batch(), strict=True))


def test_a_dataset_is_opened_without_its_tokens_and_reads_what_is_asked_for(url: str, own_cache: Path) -> None:
    dataset = EpisodeDataset(url)  # type: ignore[arg-type]
    assert len(dataset.shards) > 3
    assert int(dataset.lengths.sum()) == dataset.tokens

    def fetched() -> list[int]:
        return [n for n, shard in enumerate(dataset.shards) if (shard.folder / "tokens.bin").exists()]

    assert fetched() == []
    _ = dataset[0].ids
    assert fetched() == [0]


def test_versions_share_files_of_the_same_digest(built: Path, url: str, own_cache: Path) -> None:
    verify(url)
    before = files_in(own_cache)
    put_folder(built, f"{url}-copy")
    verify(f"{url}-copy")
    assert files_in(own_cache) == before


def test_files_used_longest_ago_leave_a_cache_that_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHATMILL_CACHE_LIMIT", "100")
    records = [FileRecord(bytes=30, digest=f"{number:032x}") for number in range(4)]
    paths = [cache.file_of(record, tmp_path) for record in records]
    for number, path in enumerate(paths[:3]):
        cache.keep(path, 30, lambda file: file.write_bytes(b"x" * 30) and None)
        os.utime(path, (number, number))
    cache.touch(paths[0])
    cache.keep(paths[3], 30, lambda file: file.write_bytes(b"x" * 30) and None)
    assert [path.exists() for path in paths] == [True, False, True, True]
    with pytest.raises(ConfigError, match="raise CHATMILL_CACHE_LIMIT"):
        cache.keep(cache.file_of(FileRecord(bytes=101, digest="f" * 32), tmp_path), 101, lambda file: None)


def test_a_file_that_left_the_cache_is_fetched_again(built: Path, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    far, local = EpisodeDataset(url), EpisodeDataset(built)  # type: ignore[arg-type]
    size = max(path.stat().st_size for path in built.rglob("*.bin"))
    monkeypatch.setenv("CHATMILL_CACHE_LIMIT", str(3 * size))
    for _ in range(2):
        assert [item.ids.tolist() for item in far] == [item.ids.tolist() for item in local]
        far.release()


def test_a_file_is_in_the_cache_whole_or_not_at_all(tmp_path: Path) -> None:
    target = cache.file_of(FileRecord(bytes=4, digest="a" * 32), tmp_path)

    def broken(file: Path) -> None:
        file.write_bytes(b"ha")
        raise RuntimeError("stopped")

    with pytest.raises(RuntimeError):
        cache.keep(target, 4, broken)
    assert list(target.parent.iterdir()) == []


def test_a_diff_fetches_no_tokens_of_equal_shards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_cache: Path
) -> None:
    records = chats(60)
    write_jsonl(tmp_path / "in.jsonl", records)
    recipe: dict[str, Any] = {"sources": [{"path": "in.jsonl"}], **CHATML, "shard_bytes": 4000}
    recipe |= {"packing": {"max_length": 60, "overflow": "windows"}, "split": {"val_fraction": 0.2}}
    run_build(recipe, tmp_path / "a", workers=0, base=tmp_path)
    records[-1]["messages"][-1]["content"] = "something else"
    write_jsonl(tmp_path / "in.jsonl", records)
    run_build(recipe, tmp_path / "b", workers=0, base=tmp_path)
    url = f"memory://{tmp_path.name}"
    for name in "ab":
        put_folder(tmp_path / name, f"{url}/{name}")
    local = diff_datasets(tmp_path / "a", tmp_path / "b").as_json()
    read, asked = stores.read_range, []

    def counted(*arguments: Any) -> bytes:
        asked.append(arguments[0])
        return read(*arguments)

    monkeypatch.setattr(stores, "read_range", counted)
    far = diff_datasets(f"{url}/a", f"{url}/b").as_json()
    assert {**far, "a": "", "b": ""} == {**local, "a": "", "b": ""}
    assert far["differing"] == 1
    tokens = [name for name in asked if name.endswith("tokens.bin")]
    assert 1 <= len(tokens) <= 4, "of the shards that differ"
    assert len(list((tmp_path / "a").rglob("tokens.bin"))) > 12
    fsspec.filesystem("memory").rm(f"/{tmp_path.name}", recursive=True)


def test_many_threads_fetch_a_file_once(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = EpisodeDataset(url)  # type: ignore[arg-type]
    path = dataset.shards[0].folder / "tokens.bin"
    read, asked = stores.read_range, []

    def counted(*arguments: Any) -> bytes:
        asked.append(arguments)
        return read(*arguments)

    monkeypatch.setattr(stores, "read_range", counted)
    threads = [threading.Thread(target=remote.fill, args=(path,)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(asked) == 1


def test_each_failure_is_one_error_with_the_url(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = EpisodeDataset(url)  # type: ignore[arg-type]
    memory = fsspec.filesystem("memory")
    first, second = (
        f"{url.removeprefix('memory:/')}/train/{shard.folder.name}/tokens.bin" for shard in dataset.shards[:2]
    )
    memory.rm_file(first)
    with pytest.raises(RemoteError, match=r"memory://.*tokens.bin: .* it is gone .*restore it"):
        _ = dataset[0]
    data = bytearray(memory.cat_file(second))
    data[-1] ^= 1
    memory.pipe_file(second, bytes(data))
    with pytest.raises(RemoteError, match=r"its bytes have the xxh128 .* changed or damaged after it was written"):
        _ = dataset[int(dataset.episode_offsets[1])]
    with pytest.raises(RemoteError, match=r"nothing/there: .* no manifest.json, which a build writes last"):
        EpisodeDataset(f"{url}/nothing/there")  # type: ignore[arg-type]
    monkeypatch.setenv("CHATMILL_CACHE_LIMIT", "1kB")
    with pytest.raises(ConfigError, match="may hold 1,000: raise CHATMILL_CACHE_LIMIT"):
        verify(url)


def test_verify_looks_at_the_store_and_not_at_the_cache_alone(url: str) -> None:
    """A file in the cache proves nothing about the object that it came from."""
    assert not verify(url).differences
    memory, root = fsspec.filesystem("memory"), url.removeprefix("memory:/")
    names = [f"{root}/train/shard_0000{number}/tokens.bin" for number in range(3)]
    memory.rm_file(names[0])
    memory.pipe_file(names[1], bytes(len(memory.cat_file(names[1]))))
    memory.pipe_file(f"{root}/train/notes.txt", b"x")
    memory.pipe_file(f"{root}/notes.txt", b"x")
    said = {finding.file: finding.message for finding in verify(url).findings}
    assert said == {
        "train/shard_00000/tokens.bin": "is gone from the store",
        "train/shard_00001/tokens.bin": "was changed in the store after the build",
        "train/notes.txt": "is no part of the dataset: it was added in the store",
    }


def test_a_file_that_was_damaged_in_the_cache_is_fetched_again(url: str) -> None:
    dataset = EpisodeDataset(url)  # type: ignore[arg-type]
    verify(url)
    path = Path(os.path.realpath(dataset.shards[0].folder / "tokens.bin"))
    path.write_bytes(bytes(path.stat().st_size))
    assert not verify(url).differences
    assert any(path.read_bytes())


def test_a_rebuild_at_the_same_url_is_another_dataset(url: str, tmp_path: Path) -> None:
    """A reader that was open before sees the change; one that opens it later sees the new one."""
    first = EpisodeDataset(url)  # type: ignore[arg-type]
    _ = first[0].ids
    fsspec.filesystem("memory").rm(url.removeprefix("memory:/"), recursive=True)
    write_jsonl(tmp_path / "in.jsonl", chats(40, 9))
    run_build({"sources": [{"path": "in.jsonl"}], **CHATML, "shard_bytes": 4000}, url, workers=0, base=tmp_path)
    second = EpisodeDataset(url)  # type: ignore[arg-type]
    assert second.fingerprint != first.fingerprint
    assert not verify(url).differences
    with pytest.raises(RemoteError, match=r"(changed or damaged|it is gone|cannot read)"):
        [item.ids for item in first]


@pytest.mark.parametrize("name", ["manifest.json", ".origin", "../x", "/etc/x"])
def test_a_manifest_that_names_files_outside_of_its_folder_is_refused(url: str, name: str) -> None:
    memory, path = fsspec.filesystem("memory"), f"{url.removeprefix('memory:/')}/manifest.json"
    manifest = json.loads(memory.cat_file(path))
    manifest["files"][name] = {"bytes": 1, "xxh128": "0" * 32}
    memory.pipe_file(path, json.dumps(manifest).encode())
    with pytest.raises(FormatError, match="it was edited"):
        EpisodeDataset(url)  # type: ignore[arg-type]


def test_a_store_that_may_only_be_read_refuses_a_build_once(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError("Access Denied")

    monkeypatch.setattr(type(fsspec.filesystem("memory")), "pipe_file", refuse)
    assert len(EpisodeDataset(url)) > 0  # type: ignore[arg-type]
    with pytest.raises(RemoteError, match=r"build.json: cannot create: forbidden: Access Denied \(tried once\)"):
        run_build({"sources": [{"path": "in.jsonl"}], **CHATML}, f"{url}-2", workers=0)


def test_a_full_disk_under_the_cache_is_one_error(url: str, monkeypatch: pytest.MonkeyPatch, own_cache: Path) -> None:
    def full(self: Path, data: bytes) -> None:
        raise OSError(28, "No space left on device")

    dataset = EpisodeDataset(url)  # type: ignore[arg-type]
    monkeypatch.setattr(remote, "_download", lambda remote, path: full(path, b""))
    with pytest.raises(StorageError, match=rf"{own_cache}: cannot keep a file of a store in the cache: No space left"):
        _ = dataset[0].ids


def test_a_request_is_tried_again_as_often_as_asked(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "FIRST_WAIT", 0.001)
    monkeypatch.setenv("CHATMILL_STORE_RETRIES", "2")
    fails, cat = [3, 2], type(fsspec.filesystem("memory")).cat_file

    def broken(self: Any, path: str, **options: Any) -> bytes:
        if fails[0]:
            fails[0] -= 1
            raise ConnectionError("the line is down")
        return bytes(cat(self, path, **options))

    monkeypatch.setattr(type(fsspec.filesystem("memory")), "cat_file", broken)
    with pytest.raises(RemoteError, match=r"cannot read: the line is down \(tried 3 times\)"):
        stores.read_object(f"{url}/manifest.json")
    fails[0] = 2
    assert stores.read_object(f"{url}/manifest.json").startswith(b"{")


def test_keys_are_neither_taken_in_addresses_nor_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hush-hush-hush")
    assert stores.hidden("bad signature of hush-hush-hush at https://h/x?sig=abc%2F&X-Amz-Signature=12") == (
        "bad signature of ... at https://h/x?sig=...&X-Amz-Signature=..."
    )
    for address in ("s3://key:secret@team/built", "https://host/built?X-Amz-Signature=abc"):
        with pytest.raises(ConfigError, match="holds a key") as caught:
            EpisodeDataset(address)  # type: ignore[arg-type]
        assert "secret" not in str(caught.value).partition("holds")[0]
        assert "abc" not in str(caught.value)


def test_a_path_that_lost_a_slash_is_still_a_url() -> None:
    assert remote.address(Path("s3://team/built")) == "s3://team/built"
    assert remote.address("file:///data/built") is None
    assert remote.address(Path("foo://team/built")) == "foo://team/built", "an unknown store is named as one"
    with pytest.raises(ConfigError, match="name the bucket"):
        remote.address("s3://")
    assert remote.address("data/built") is remote.address(Path("C:/data")) is None

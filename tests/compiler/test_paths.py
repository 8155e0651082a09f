"""What a path of a recipe may name: files of every kind, globs, folders, standard input, and files behind URLs."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import fsspec
import pytest
from moto.server import ThreadedMotoServer

from chatmill.compiler.inputs import InputScan
from chatmill.compiler.paths import not_read_sentences, resolve_paths
from chatmill.compiler.run import run_build
from chatmill.compiler.scan_jobs import scan_input
from chatmill.errors import ChatmillError, ConfigError, DataError, MissingExtraError
from chatmill.files import stores
from chatmill.files.inputs import StoredInput
from chatmill.prove.verify import verify
from chatmill.read import places
from chatmill.read.conversations import ConversationFile
from chatmill.read.files import Raw, read_records
from chatmill.read.ranges import chunk_records
from tests.compiler.builds import CHATML, chats, digest, talk, write_jsonl
from tools.input_files import CASES, INPUTS
from tools.input_table import PAGE, with_table


def build(out: Path | str, *paths: object, workers: int = 0) -> dict[str, Any]:
    sources = [{"path": str(path)} for path in paths]
    return run_build({"sources": sources, **CHATML, "shard_bytes": 4000}, out, workers=workers).manifest


# Names and globs.


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("data/b.jsonl", "data/a.jsonl", "data/B.jsonl", "data/deep/er/c.jsonl.gz", "data/x[1].jsonl", "n.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    (tmp_path / "data" / ".hidden.jsonl").write_text("")
    (tmp_path / "data" / "folder.jsonl").mkdir()
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("patterns", "files"),
    [
        (["data/*.jsonl"], ["data/B.jsonl", "data/a.jsonl", "data/b.jsonl", "data/x[1].jsonl"]),
        (["data/**/[ac].*"], ["data/a.jsonl", "data/deep/er/c.jsonl.gz"]),
        (
            ["data/**"],
            ["data/B.jsonl", "data/a.jsonl", "data/b.jsonl", "data/deep/er/c.jsonl.gz", "data/x[1].jsonl"],
        ),
        (
            ["data/b.jsonl", "data/[ab].jsonl", "{home}/data/a.jsonl", "./data//b.jsonl", "n.md"],
            ["data/b.jsonl", "data/a.jsonl", "n.md"],
        ),
        (["data/x[1].jsonl"], ["data/x[1].jsonl"]),
        (["~/data/a.jsonl", "~/n*"], ["{home}/data/a.jsonl", "{home}/n.md"]),
    ],
)
def test_patterns_keep_their_order_and_globs_hold_files_alone_sorted(
    home: Path, monkeypatch: pytest.MonkeyPatch, patterns: list[str], files: list[str]
) -> None:
    monkeypatch.setenv("HOME", str(home))
    found = resolve_paths([pattern.format(home=home) for pattern in patterns])
    assert [str(path) for path in found] == [file.format(home=home) for file in files]


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("data/c.jsonl", "there is no file 'data/c.jsonl'. Did you mean 'data/"),
        ("dta/a.jsonl", "Did you mean 'data'?"),
        ("data/b.jsonl/c.jsonl", "Did you mean 'data/b.jsonl'?"),
        ("zzz/yyy/*.jsonl", "In '.' there is: data/, empty/, n.md"),
        ("data/*.parquet", "no file matches 'data/*.parquet'. In 'data' there is: B.jsonl, a.jsonl, b.jsonl, deep/, "),
        ("data/*.parquet", "deep/, folder.jsonl/ and 1 more"),
        ("data/fold*", "'data/fold*' matches folders alone, such as 'data/folder.jsonl'"),
        ("empty/*.jsonl", "In 'empty' there is: nothing"),
        ("", "an input file has an empty name"),
        (None, "no input files"),
    ],
)
def test_a_pattern_without_a_match_says_what_is_there(home: Path, pattern: str | None, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_paths([] if pattern is None else ["n.md", pattern])
    assert message in str(caught.value)


def test_what_a_folder_holds_and_is_not_read_is_named(home: Path) -> None:
    assert not_read_sentences(["data/*.jsonl", "data/a.jsonl", "s3://data"]) == []
    assert not_read_sentences(["data"]) == ["Not read in data: folders (deep/, folder.jsonl/)."]
    for number in range(7):
        (home / "data" / f"{number}.md").write_text("")
    assert not_read_sentences(["data"]) == [
        "Not read in data: files of unknown endings (0.md, 1.md, 2.md, 3.md, 4.md and 2 more) "
        "and folders (deep/, folder.jsonl/)."
    ]
    (home / "data" / "state.json").write_text("{}")  # a folder of `datasets` says itself what is in it
    assert not_read_sentences(["data"]) == []


# Files of every kind; the table of inputs in docs/records.md is what reading the files gives.


def test_files_of_every_kind_are_one_dataset(tmp_path: Path) -> None:
    kinds = ("pairs.csv", "pairs.tsv", "rows.feather", "stream.arrow", "saved", "list.json.gz", "pretty-objects.jsonl")
    manifest = build(tmp_path / "built", *(INPUTS / name for name in kinds))
    assert manifest["splits"]["train"]["episodes"] == 11
    assert verify(tmp_path / "built", deep=True).passed
    with pytest.raises(ConfigError, match="is a built dataset"):
        run_build({"sources": [{"path": str(tmp_path / "built")}], **CHATML}, tmp_path / "again")


def test_the_page_is_up_to_date() -> None:
    page = PAGE.read_text()
    assert with_table(page) == page, "run: python -m tools.input_table"
    assert len(CASES) >= 75
    written = {name for name in os.listdir(INPUTS) if name != "__pycache__"}
    assert written == {case.name for case in CASES}, "run: python -m tools.input_files"


def as_texts(raws: list[Raw]) -> list[tuple[str, str, str]]:
    return [(raw.where, str(raw.value), str(raw.error)) for raw in raws]


def test_a_build_cuts_every_file_into_the_records_that_reading_gives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(INPUTS)
    compared = 0
    for case in CASES:
        try:
            paths = [os.fspath(path) for path in resolve_paths([case.name])]
            wanted = [as_texts(list(read_records(path))) for path in paths]
        except ChatmillError as error:
            with pytest.raises(type(error)):
                [scan_input(InputScan(path=str(path), spool=str(tmp_path))) for path in resolve_paths([case.name])]
            continue
        for path, records in zip(paths, wanted, strict=True):
            scanned = scan_input(InputScan(path=path, spool=str(tmp_path), shape="openai", chunk_bytes=64))
            assert as_texts([raw for chunk in scanned.chunks for raw in chunk_records(chunk)]) == records, path
            compared += 1
    assert compared > 80


def test_what_standard_input_holds_is_told_from_its_first_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    for data, ending in ((b'\n {"messages": []}', ".jsonl"), (b"\xef\xbb\xbf\n[]", ".json")):
        places._copied_stdin.cache_clear()
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
        copy = places.stdin_copy()
        assert (copy.name, copy.read_bytes()) == (f"stdin{ending}", data)
    places._copied_stdin.cache_clear()
    assert list(tmp_path.iterdir()) == []


def test_a_build_of_standard_input_leaves_no_copy_of_it(tmp_path: Path) -> None:
    (tmp_path / "tmp").mkdir()
    command = [sys.executable, "-c", "from chatmill.cli import main; main()"]
    command += ["build", "-", "-t", "bytes", "--add-control-tokens", "-o", "built", "--workers", "0"]
    line = json.dumps({"messages": talk("q", "a")}).encode() + b"\n"
    environment = {**os.environ, "TMPDIR": str(tmp_path / "tmp")}
    subprocess.run(command, input=line, cwd=tmp_path, env=environment, check=True, capture_output=True)
    assert list((tmp_path / "tmp").iterdir()) == []
    manifest = json.loads((tmp_path / "built" / "manifest.json").read_bytes())
    assert [(file["path"], file["source"], file["lines"]) for file in manifest["inputs"]] == [("-", "stdin", 1)]


# Inputs from a store, against a server on loopback that speaks S3.


@pytest.fixture(scope="module")
def store() -> Iterator[Any]:
    """The store with the empty bucket `mill`; the variables that lead to it are set."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    variables = {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "mill",
        "AWS_SECRET_ACCESS_KEY": "mill",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }
    try:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in variables.items():
                patch.setenv(name, value)
            found = fsspec.filesystem("s3")
            found.mkdir("mill")
            yield found
    finally:
        server.stop()


def test_inputs_behind_urls_give_the_same_episodes(store: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHATMILL_CACHE", str(tmp_path / "cache"))
    records = chats(60, 1)
    store.put_file(str(write_jsonl(tmp_path / "chats.jsonl", records)), "s3://mill/in/a.jsonl")
    store.pipe_file("s3://mill/in/b.csv", b"question,answer\n2 + 2?,4\n")
    file = ConversationFile("s3://mill/in/a.jsonl")
    assert [c.id for c in file] == [record["id"] for record in records]
    assert next(iter(file)).where == "s3://mill/in/a.jsonl:1"
    signed = store.sign("s3://mill/in/a.jsonl")  # the S3 server is a web server as well
    assert signed.startswith(os.environ["AWS_ENDPOINT_URL"])
    assert [c.id for c in ConversationFile(signed)] == [record["id"] for record in records]
    manifest = build(tmp_path / "built", "s3://mill/in/*")
    inputs = [(file["path"], file["source"]) for file in manifest["inputs"]]
    assert inputs == [("s3://mill/in/a.jsonl", "a"), ("s3://mill/in/b.csv", "b")]
    assert manifest["splits"]["train"]["episodes"] == len(records) + 1
    assert verify(tmp_path / "built", deep=True).passed
    monkeypatch.setenv("CHATMILL_CACHE", str(tmp_path / "another"))
    with mock.patch.object(StoredInput, "_fetch", None):
        build(tmp_path / "by workers", "s3://mill/in/*", workers=2)
    assert digest(tmp_path / "by workers") == digest(tmp_path / "built"), "workers fetch"
    store.pipe_file("s3://mill/in/b.csv", b"question,answer\n2 + 2?,5\n")
    assert not verify(tmp_path / "built", deep=True).passed, "an input that has changed in the store"


def test_what_is_not_there_is_one_clear_error(store: Any, tmp_path: Path) -> None:
    store.pipe_file("s3://mill/a.xlsx", b"x")
    with pytest.raises(DataError, match=r"no such file: s3://mill/none\.jsonl"):
        next(iter(ConversationFile("s3://mill/none.jsonl")))
    with pytest.raises(ConfigError, match=r"no file matches 's3://mill/none/\*'"):
        build(tmp_path / "never", "s3://mill/none/*")
    with pytest.raises(ConfigError, match=r"nosuch://x: .*Known: s3://"):
        stores.filesystem("nosuch://x")
    with pytest.raises(DataError, match=r"a\.xlsx: cannot tell the format"):
        build(tmp_path / "never", "s3://mill/a.xlsx")
    with pytest.raises(DataError, match=r"no such file: s3://mill/a\.jsonl"):
        build("s3://mill/built", "s3://mill/a.jsonl")


MISSING = [
    ("s3://mill/a.jsonl", "s3fs", "s3"),
    ("gs://mill/a.jsonl", "gcsfs", "gs"),
    ("hf://datasets/a/b/a.jsonl", "huggingface_hub", "hf"),
    ("https://example.com/a.jsonl", "aiohttp", "http"),
    ("s3://mill/a.jsonl", "fsspec", "s3"),
]


def test_a_missing_package_is_named() -> None:
    """In a process of its own: fsspec remembers what it has imported."""
    code = f"""
import sys
from chatmill.errors import MissingExtraError
from chatmill.read.conversations import ConversationFile

for url, module, _ in {MISSING!r}:
    sys.modules[module] = None
    try:
        next(iter(ConversationFile(url)))
    except MissingExtraError as error:
        print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    for said, (_, module, extra) in zip(done.stdout.splitlines(), MISSING, strict=True):
        assert f"needs the package '{module}': pip install 'chatmill[{extra}]'" in said
    assert issubclass(MissingExtraError, ImportError)

"""Inputs from a store and datasets to one, against a server on loopback that speaks S3; kills included."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest

from chatmill.compiler.remote import MARK, STAGING_VARIABLE, staging_folder
from chatmill.compiler.run import Outcome, run_build
from chatmill.errors import ConfigError, DataError, MissingExtraError
from chatmill.prove.verify import verify
from chatmill.read import places
from chatmill.read.conversations import ConversationFile
from tests.compiler.builds import chats, digest, write_jsonl
from tests.compiler.s3_server import s3_server
from tests.forked import run_forked

CHATML = {"tokenizer": "bytes", "template": "chatml", "add_control_tokens": True, "shard_bytes": 4000}
RECORDS = chats(60, 1)
CODE = """
import json, sys
from chatmill.compiler.run import run_build
run_build(*json.loads(sys.argv[1]), workers=0, resume=True)
"""
KILLS = ("after_chunk:2", "after_upload_file:2", "before_remote_manifest:1", "after_remote_manifest:1")


@pytest.fixture(scope="module", autouse=True)
def server() -> Iterator[dict[str, str]]:
    with s3_server() as found:
        yield found


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The store; staging goes to a folder of the test."""
    monkeypatch.setenv(STAGING_VARIABLE, str(tmp_path / "staging"))
    found = fsspec.filesystem("s3")
    found.invalidate_cache()
    return found


@pytest.fixture
def chats_file(tmp_path: Path) -> Path:
    return write_jsonl(tmp_path / "chats.jsonl", RECORDS)


def test_inputs_behind_urls_give_the_same_episodes(store: Any, chats_file: Path, tmp_path: Path) -> None:
    store.put_file(str(chats_file), "s3://mill/in/a.jsonl")
    store.pipe_file("s3://mill/in/b.csv", b"question,answer\n2 + 2?,4\n")
    file = ConversationFile("s3://mill/in/a.jsonl")
    assert [c.id for c in file] == [record["id"] for record in RECORDS]
    assert next(iter(file)).where == "s3://mill/in/a.jsonl:1"
    recipe = {"sources": [{"path": "s3://mill/in/*"}], **CHATML}
    result = run_build(recipe, tmp_path / "built", workers=0)
    assert [file["path"] for file in result.manifest["inputs"]] == ["s3://mill/in/a.jsonl", "s3://mill/in/b.csv"]
    assert [file["source"] for file in result.manifest["inputs"]] == ["a", "b"]
    assert result.manifest["splits"]["train"]["episodes"] == len(RECORDS) + 1
    assert verify(tmp_path / "built", deep=True).passed
    store.pipe_file("s3://mill/in/b.csv", b"question,answer\n2 + 2?,5\n")
    report = verify(tmp_path / "built", deep=True)
    assert not report.passed, "an input that has changed in the store"


def test_a_dataset_in_a_store_is_that_of_a_folder(store: Any, chats_file: Path, tmp_path: Path) -> None:
    recipe = {"sources": [{"path": str(chats_file)}], **CHATML}
    run_build(recipe, tmp_path / "built", workers=0)
    result = run_build(recipe, "s3://mill/built", workers=0)
    assert (result.outcome, str(result.directory)) == (Outcome.BUILT, "s3://mill/built")
    store.get("s3://mill/built/", str(tmp_path / "copy") + "/", recursive=True)
    assert digest(tmp_path / "copy") == digest(tmp_path / "built")
    assert not staging_folder("s3://mill/built").exists()
    assert run_build(recipe, "s3://mill/built/", workers=0).outcome is Outcome.ALREADY_BUILT
    with pytest.raises(ConfigError, match="s3://mill/built holds another dataset"):
        run_build({**recipe, "keep_kinds": False}, "s3://mill/built", workers=0)
    assert not staging_folder("s3://mill/built").exists()


@pytest.mark.parametrize("point", KILLS)
def test_a_killed_build_into_a_store_is_resumed(store: Any, chats_file: Path, tmp_path: Path, point: str) -> None:
    recipe = {"sources": [{"path": str(chats_file)}], **CHATML}
    url = f"s3://mill/{point.partition(':')[0]}"
    (tmp_path / "build.py").write_text(CODE)
    killed = run_forked(tmp_path / "build.py", json.dumps([recipe, url]), env={**os.environ, "CHATMILL_FAULTS": point})
    assert killed.returncode == -9, killed.stderr
    store.invalidate_cache()
    there = [path.rpartition("/")[2] for path in store.find(url)]
    assert ("manifest.json" in there) == (point == "after_remote_manifest:1"), "a manifest means a whole dataset"
    run_build(recipe, url, workers=0, resume=True)
    run_build(recipe, tmp_path / "built", workers=0)
    store.get(url, str(tmp_path / "copy"), recursive=True)
    assert digest(tmp_path / "copy") == digest(tmp_path / "built")


def test_a_place_that_holds_something_else_is_left_alone(store: Any, chats_file: Path) -> None:
    recipe = {"sources": [{"path": str(chats_file)}], **CHATML}
    store.pipe_file("s3://mill/full/notes.txt", b"mine")
    with pytest.raises(ConfigError, match=r"s3://mill/full is not empty \(notes\.txt\)"):
        run_build(recipe, "s3://mill/full", workers=0)
    store.pipe_file(f"s3://mill/other/{MARK}", json.dumps({"fingerprint": "f" * 64}).encode())
    with pytest.raises(ConfigError, match="unfinished copy of another dataset"):
        run_build(recipe, "s3://mill/other", workers=0)
    with pytest.raises(ConfigError, match="--shard"):
        run_build(recipe, "s3://mill/shares", shard=(0, 2))
    with pytest.raises(ConfigError, match="files can be read from there, and not written"):
        run_build(recipe, "https://example.com/built", workers=0)


def test_what_is_not_there_is_one_clear_error(store: Any) -> None:
    with pytest.raises(DataError, match=r"no such file: s3://mill/none\.jsonl"):
        next(iter(ConversationFile("s3://mill/none.jsonl")))
    with pytest.raises(ConfigError, match=r"no file matches 's3://mill/none/\*'"):
        run_build({"sources": [{"path": "s3://mill/none/*"}], **CHATML}, "never", workers=0)
    with pytest.raises(ConfigError, match=r"nosuch://x: .*Known: s3://"):
        places.filesystem("nosuch://x")


@pytest.mark.parametrize(
    ("url", "module", "line"),
    [
        ("s3://mill/a.jsonl", "s3fs", "needs the package 's3fs': pip install 'chatmill[s3]'"),
        ("gs://mill/a.jsonl", "gcsfs", "needs the package 'gcsfs': pip install 'chatmill[gs]'"),
        ("hf://datasets/a/b/a.jsonl", "huggingface_hub", "package 'huggingface_hub': pip install 'chatmill[hf]'"),
        ("https://example.com/a.jsonl", "aiohttp", "needs the package 'aiohttp': pip install 'chatmill[http]'"),
        ("s3://mill/a.jsonl", "fsspec", "needs the package 'fsspec': pip install 'chatmill[s3]'"),
    ],
)
def test_a_missing_package_is_named(url: str, module: str, line: str) -> None:
    """In a process of its own: fsspec remembers what it has imported."""
    code = f"""
import sys
sys.modules[{module!r}] = None
from chatmill.errors import MissingExtraError
from chatmill.read.conversations import ConversationFile
try:
    next(iter(ConversationFile({url!r})))
except MissingExtraError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert line in done.stdout
    assert issubclass(MissingExtraError, ImportError)


def test_a_file_from_a_web_server(server: dict[str, str], store: Any) -> None:
    """The S3 server is a web server as well."""
    store.pipe_file("s3://mill/web/a.jsonl", (json.dumps(RECORDS[0]) + "\n").encode())
    url = store.sign("s3://mill/web/a.jsonl")
    assert url.startswith(server["AWS_ENDPOINT_URL"])
    assert [c.id for c in ConversationFile(url)] == ["r0"]

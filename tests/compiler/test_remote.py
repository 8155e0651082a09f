"""Inputs from a store, against a server on loopback that speaks S3."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from moto.server import ThreadedMotoServer

from chatmill.compiler.run import run_build
from chatmill.errors import ConfigError, DataError, MissingExtraError
from chatmill.prove.verify import verify
from chatmill.read import places
from chatmill.read.conversations import ConversationFile
from tests.compiler.builds import chats, write_jsonl

CHATML = {"tokenizer": "bytes", "template": "chatml", "add_control_tokens": True, "shard_bytes": 4000}
RECORDS = chats(60, 1)


@pytest.fixture(scope="module", autouse=True)
def server() -> Iterator[dict[str, str]]:
    """A server on loopback that speaks S3, with the empty bucket `mill`, and the variables that lead to it."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        found = {
            "AWS_ENDPOINT_URL": f"http://{host}:{port}",
            "AWS_ACCESS_KEY_ID": "mill",
            "AWS_SECRET_ACCESS_KEY": "mill",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }
        with pytest.MonkeyPatch.context() as patch:
            for name, value in found.items():
                patch.setenv(name, value)
            fsspec.filesystem("s3", skip_instance_cache=True).mkdir("mill")
            yield found
    finally:
        server.stop()


@pytest.fixture
def store() -> Any:
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


def test_what_is_not_there_is_one_clear_error(store: Any, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no such file: s3://mill/none\.jsonl"):
        next(iter(ConversationFile("s3://mill/none.jsonl")))
    with pytest.raises(ConfigError, match=r"no file matches 's3://mill/none/\*'"):
        run_build({"sources": [{"path": "s3://mill/none/*"}], **CHATML}, tmp_path / "never", workers=0)
    with pytest.raises(ConfigError, match=r"nosuch://x: .*Known: s3://"):
        places.filesystem("nosuch://x")
    store.pipe_file("s3://mill/a.xlsx", b"x")
    with pytest.raises(DataError, match=r"a\.xlsx: cannot tell the format"):
        run_build({"sources": [{"path": "s3://mill/a.xlsx"}], **CHATML}, tmp_path / "never", workers=0)
    with pytest.raises(ConfigError, match=r"s3://mill/built: .* folder of this machine; copy it there"):
        run_build({"sources": [{"path": "s3://mill/a.jsonl"}], **CHATML}, "s3://mill/built", workers=0)


MISSING = [
    ("s3://mill/a.jsonl", "s3fs", "needs the package 's3fs': pip install 'chatmill[s3]'"),
    ("gs://mill/a.jsonl", "gcsfs", "needs the package 'gcsfs': pip install 'chatmill[gs]'"),
    ("hf://datasets/a/b/a.jsonl", "huggingface_hub", "package 'huggingface_hub': pip install 'chatmill[hf]'"),
    ("https://example.com/a.jsonl", "aiohttp", "needs the package 'aiohttp': pip install 'chatmill[http]'"),
    ("s3://mill/a.jsonl", "fsspec", "needs the package 'fsspec': pip install 'chatmill[s3]'"),
]


def test_a_missing_package_is_named() -> None:
    """In a process of its own: fsspec remembers what it has imported."""
    code = f"""
import sys
from chatmill.errors import MissingExtraError
from chatmill.read.conversations import ConversationFile

for url, module in {[one[:2] for one in MISSING]!r}:
    sys.modules[module] = None
    try:
        next(iter(ConversationFile(url)))
    except MissingExtraError as error:
        print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    for said, (_, _, line) in zip(done.stdout.splitlines(), MISSING, strict=True):
        assert line in said
    assert issubclass(MissingExtraError, ImportError)


def test_a_file_from_a_web_server(server: dict[str, str], store: Any) -> None:
    """The S3 server is a web server as well."""
    store.pipe_file("s3://mill/web/a.jsonl", (json.dumps(RECORDS[0]) + "\n").encode())
    url = store.sign("s3://mill/web/a.jsonl")
    assert url.startswith(server["AWS_ENDPOINT_URL"])
    assert [c.id for c in ConversationFile(url)] == ["r0"]

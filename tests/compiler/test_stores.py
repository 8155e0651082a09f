"""gs:// and hf:// paths go through the file system that fsspec has for them, as s3:// does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.registry import _registry

from chatmill.compiler.run import run_build
from chatmill.errors import ConfigError, DataError
from chatmill.prove.verify import verify
from chatmill.read.conversations import ConversationFile
from tests.compiler.builds import chats, write_jsonl

RECORDS = chats(6, 1)
LINES = "".join(json.dumps(record) + "\n" for record in RECORDS).encode()
RECIPE: dict[str, Any] = {"tokenizer": "bytes", "template": "chatml", "add_control_tokens": True}


class FakeStore(MemoryFileSystem):
    """Files in memory, under the protocol of a real store."""

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        return super()._strip_protocol(str(path).partition("://")[2] or path)


@pytest.fixture(params=["gs://bucket", "hf://datasets/someone/chats"])
def home(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    kind = request.param.partition("://")[0]

    class Store(FakeStore):
        protocol = kind
        store: ClassVar[dict[str, Any]] = {}
        pseudo_dirs: ClassVar[list[str]] = [""]

        def unstrip_protocol(self, name: str) -> str:
            return f"{kind}://{name.lstrip('/')}"

    monkeypatch.setitem(_registry, kind, Store)
    return str(request.param)


def put(url: str, data: bytes) -> None:
    fsspec.filesystem(url.partition("://")[0]).pipe_file(url, data)


def test_inputs_are_read_and_built_like_files(home: str, tmp_path: Path) -> None:
    put(f"{home}/a.jsonl", LINES)
    put(f"{home}/b.csv", b"question,answer\n2 + 2?,4\n")
    found = list(ConversationFile(f"{home}/a.jsonl"))
    assert [one.id for one in found] == [record["id"] for record in RECORDS]
    assert found[0].where == f"{home}/a.jsonl:1"
    built = run_build({"sources": [{"path": f"{home}/*"}], **RECIPE}, tmp_path / "built", workers=0).manifest
    assert [file["path"] for file in built["inputs"]] == [f"{home}/a.jsonl", f"{home}/b.csv"]
    assert built["splits"]["train"]["episodes"] == len(RECORDS) + 1
    assert verify(tmp_path / "built", deep=True).passed
    with pytest.raises(DataError, match=f"no such file: {home}/none.jsonl"):
        next(iter(ConversationFile(f"{home}/none.jsonl")))


def test_a_dataset_is_not_written_there(home: str, tmp_path: Path) -> None:
    recipe = {"sources": [{"path": str(write_jsonl(tmp_path / "a.jsonl", RECORDS))}], **RECIPE}
    with pytest.raises(ConfigError, match=f"{home}/built: .* folder of this machine; copy it there"):
        run_build(recipe, f"{home}/built", workers=0)


def test_a_store_that_cannot_be_reached_is_one_clear_error(home: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*given: Any, **options: Any) -> Any:
        raise OSError("401 Client Error: Unauthorized")

    put(f"{home}/a.jsonl", LINES)
    monkeypatch.setattr(FakeStore, "_open", fail)
    with pytest.raises(DataError, match=f"cannot reach {home}/a.jsonl: 401 .* credentials"):
        list(ConversationFile(f"{home}/a.jsonl"))

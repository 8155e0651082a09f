"""A build of files of every kind is one dataset, and `verify` derives its records again."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from chatmill.compiler.run import run_build
from chatmill.errors import ConfigError
from chatmill.prove.verify import verify
from chatmill.read import places
from tools.input_files import INPUTS

KINDS = ("pairs.csv", "pairs.tsv", "rows.feather", "stream.arrow", "saved", "list.json.gz", "pretty-objects.jsonl")
CHATML = {"tokenizer": "bytes", "template": "chatml", "add_control_tokens": True}
BUILD_STDIN = [
    *(sys.executable, "-c", "from chatmill.cli import main; main()", "build", "-", "-t", "bytes"),
    *("--add-control-tokens", "-o", "built", "--workers", "0"),
]
TALK = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}


def test_files_of_every_kind_are_one_dataset(tmp_path: Path) -> None:
    recipe = {"sources": [{"path": str(INPUTS / name)} for name in KINDS], **CHATML}
    result = run_build(recipe, tmp_path / "built", workers=0)
    assert result.manifest["splits"]["train"]["episodes"] == 11
    assert verify(tmp_path / "built", deep=True).passed


def test_a_map_is_part_of_the_dataset(tmp_path: Path) -> None:
    fields = {"user": "customer_asks", "assistant": "agent_reply", "id": "ticket"}
    recipe = {"sources": [{"path": str(INPUTS / "own-fields.jsonl"), "map": fields}], **CHATML}
    run_build(recipe, tmp_path / "built", workers=0)
    assert verify(tmp_path / "built", deep=True).passed


@pytest.mark.parametrize(("data", "ending"), [(b'\n {"messages": []}', ".jsonl"), (b"\xef\xbb\xbf\n[]", ".json")])
def test_what_standard_input_holds_is_told_from_its_first_bytes(
    data: bytes, ending: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
    places._copied_stdin.cache_clear()
    try:
        copy = places.stdin_copy()
        assert (copy.name, copy.read_bytes()) == (f"stdin{ending}", data)
    finally:
        places._copied_stdin.cache_clear()
    assert list(tmp_path.iterdir()) == []


def test_a_build_of_standard_input_leaves_no_copy_of_it(tmp_path: Path) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    environment = {**os.environ, "TMPDIR": str(temporary)}
    line = (json.dumps(TALK) + "\n").encode()
    subprocess.run(BUILD_STDIN, input=line, cwd=tmp_path, env=environment, check=True, capture_output=True)
    assert list(temporary.iterdir()) == []
    manifest = json.loads((tmp_path / "built" / "manifest.json").read_bytes())
    assert [(file["path"], file["source"], file["lines"]) for file in manifest["inputs"]] == [("-", "stdin", 1)]


def test_a_built_dataset_is_no_folder_of_conversations(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text("{}")
    (tmp_path / "rejected.jsonl").write_text("{}")
    with pytest.raises(ConfigError, match="is a built dataset"):
        run_build({"sources": [{"path": str(tmp_path)}], **CHATML}, tmp_path / "built")

"""A build of files of every kind is one dataset, and `verify` derives its records again."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from chatmill.compiler.inputs import InputScan, scan_input
from chatmill.compiler.paths import resolve_paths
from chatmill.compiler.run import run_build
from chatmill.errors import ChatmillError, ConfigError
from chatmill.prove.verify import verify
from chatmill.read import places
from chatmill.read.files import Raw, read_records
from chatmill.read.ranges import chunk_records
from tests.compiler.builds import CHATML, talk
from tools.input_files import CASES, INPUTS
from tools.input_table import PAGE, with_table

KINDS = ("pairs.csv", "pairs.tsv", "rows.feather", "stream.arrow", "saved", "list.json.gz", "pretty-objects.jsonl")
BUILD_STDIN = [
    *(sys.executable, "-c", "from chatmill.cli import main; main()", "build", "-", "-t", "bytes"),
    *("--add-control-tokens", "-o", "built", "--workers", "0"),
]
TALK = {"messages": talk("q", "a")}


def test_files_of_every_kind_are_one_dataset(tmp_path: Path) -> None:
    recipe = {"sources": [{"path": str(INPUTS / name)} for name in KINDS], **CHATML}
    result = run_build(recipe, tmp_path / "built", workers=0)
    assert result.manifest["splits"]["train"]["episodes"] == 11
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


# The table of inputs in docs/records.md is what reading the files gives, and a build reads the same of them.


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

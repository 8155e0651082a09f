"""The table of inputs in docs/records.md is what reading the files gives, and a build reads the same of them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from chatmill.compiler.inputs import InputScan, scan_input
from chatmill.compiler.paths import resolve_paths
from chatmill.errors import ChatmillError
from chatmill.read.files import Raw, read_records
from chatmill.read.ranges import chunk_records
from tools.input_files import CASES, INPUTS
from tools.input_table import PAGE, with_table


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

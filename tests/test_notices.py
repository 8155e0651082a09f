"""Every file of others that the package or the repository carries is named in NOTICE, with its licence."""

from __future__ import annotations

import fnmatch
import json
import subprocess
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NOTICE = (ROOT / "NOTICE").read_text()
OURS = {".py", ".c", ".h", ".js", ".css", ".html", ".svg", ".md"}
"""Endings of files that are code and pages of this project."""
ROWS = [[cell.strip() for cell in line.strip("|").split("|")] for line in NOTICE.splitlines() if line.startswith("| ")]
LICENCES = {row[0]: row[2] for row in ROWS[1:]}
"""By the patterns of names."""


def assets() -> list[str]:
    """The files of the repository that are neither code nor pages of ours."""
    folders = ("src", "tests/data", "examples/data")
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", *folders]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout.split()
    if not names:  # not a checkout, as in an unpacked source distribution
        names = [str(p.relative_to(ROOT)) for f in folders for p in (ROOT / f).rglob("*") if p.is_file()]
    ignored = (".pyc", ".so", ".dylib", ".dll", ".typed")
    return [name for name in names if Path(name).suffix not in OURS and not name.endswith(ignored)]


def named(path: str) -> list[str]:
    return [pattern for pattern in LICENCES if fnmatch.fnmatchcase(path, pattern)]


def test_every_bundled_file_is_named_once() -> None:
    found = assets()
    assert len(found) > 40
    assert "src/chatmill/data/o200k_base.tiktoken.gz" in found
    assert len(LICENCES) == len(ROWS) - 1, "no pattern is named twice"
    for name in found:
        assert len(named(name)) == 1, f"{name} is named {len(named(name))} times in NOTICE: add its line"
    for pattern in LICENCES:
        assert fnmatch.filter(found, pattern), f"NOTICE names {pattern}, which is not there"
    lines = (ROOT / "examples" / "data" / "conversations.jsonl").read_text().splitlines()
    sources = {json.loads(line)["source"] for line in lines}
    assert len(sources) > 5
    assert all(named(f"tests/data/conversations/{source}.jsonl.gz") for source in sources)


def test_every_licence_is_one_that_may_be_bundled_and_has_its_text() -> None:
    licences = set(LICENCES.values()) - {"as below"}
    assert licences == {"MIT", "Apache-2.0", "BSD-3-Clause", "CC BY 4.0"}
    for text in (
        *(f"\n{licence}\n{'-' * len(licence)}\n" for licence in licences),
        "Permission is hereby granted, free of charge",
        "Redistributions in binary form must reproduce",
        "https://creativecommons.org/licenses/by/4.0/legalcode",
        "Copyright (c) 2022 OpenAI, Shantanu Jain",
    ):
        assert text in NOTICE
    assert "Apache License" in (ROOT / "LICENSE").read_text()


def test_every_template_of_the_tests_has_the_licence_of_its_model() -> None:
    """Also where NOTICE says that a file itself names none."""
    folder = ROOT / "tests" / "data" / "templates"
    rows = [line.split("\t") for line in (folder / "index.tsv").read_text().splitlines()[1:]]
    assert sorted(row[0] for row in rows) == sorted(str(p.relative_to(folder)) for p in folder.rglob("*.jinja"))
    assert {row[3] for row in rows} == {"MIT", "Apache-2.0"}
    assert {"Apertus", "Apriel", "Bielik", "LLaDA", "MiniMax"} <= {row[1] for row in rows}
    assert "The template files of Apertus, Apriel, Bielik, LLaDA and MiniMax have no header" in NOTICE


def test_wheel_and_sdist_carry_the_notices(tmp_path: Path) -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert settings["project"]["license"] == "Apache-2.0 AND MIT", "wheels hold the o200k vocabulary"
    assert settings["project"]["license-files"] == ["LICENSE", "NOTICE"]
    assert "sdist" not in settings["tool"]["hatch"]["build"]["targets"], "which could leave them out"
    pytest.importorskip("hatchling", reason="hatchling is there while packages are built")
    from hatchling.builders.sdist import SdistBuilder
    from hatchling.builders.wheel import WheelBuilder

    (wheel,) = WheelBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["standard"])
    (sdist,) = SdistBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["standard"])
    with zipfile.ZipFile(wheel) as packed, tarfile.open(sdist) as source:
        names, more = packed.namelist(), source.getnames()
    for file in ("NOTICE", "LICENSE"):
        assert [name for name in names if name.endswith(f"licenses/{file}")]
        assert [name for name in more if name.endswith(f"/{file}")]

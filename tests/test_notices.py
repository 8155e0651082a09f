"""Every file of others that the package or the repository carries is named in NOTICE, with its licence."""

from __future__ import annotations

import fnmatch
import json
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NOTICE = ROOT / "NOTICE"
OURS = {".py", ".c", ".h", ".js", ".css", ".html", ".svg", ".md"}
"""Endings of files that are code and pages of this project."""


def table() -> dict[str, tuple[str, str]]:
    """Pattern -> (origin, licence)."""
    rows = [line.strip("|").split("|") for line in NOTICE.read_text().splitlines() if line.startswith("| ")]
    found = {cells[0].strip(): (cells[1].strip(), cells[2].strip()) for cells in rows[1:]}
    assert len(found) == len(rows) - 1, "no file is named twice"
    return found


def assets() -> list[str]:
    """The files of the repository that are neither code nor pages of ours."""
    tracked = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "src", "tests/data", "examples/data"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    names = tracked.stdout.split() if tracked.returncode == 0 else []
    if not names:  # not a checkout, as in an unpacked source distribution
        folders = ("src", "tests/data", "examples/data")
        names = [str(p.relative_to(ROOT)) for f in folders for p in (ROOT / f).rglob("*") if p.is_file()]
    ignored = (".pyc", ".so", ".dylib", ".dll", ".typed")
    return [name for name in names if Path(name).suffix not in OURS and not name.endswith(ignored)]


def test_every_bundled_file_is_named_with_its_licence() -> None:
    found = assets()
    assert len(found) > 40
    assert "src/chatmill/data/o200k_base.tiktoken.gz" in found
    patterns = table()
    for name in found:
        matching = [pattern for pattern in patterns if fnmatch.fnmatchcase(name, pattern)]
        assert len(matching) == 1, f"{name} is named {len(matching)} times in NOTICE: add its line with the licence"
    for pattern in patterns:
        assert fnmatch.filter(found, pattern), f"NOTICE names {pattern}, which is not there"


def test_every_licence_is_one_that_may_be_bundled_and_has_its_text() -> None:
    text = NOTICE.read_text()
    licences = {licence for _, licence in table().values()} - {"as below"}
    assert licences == {"MIT", "Apache-2.0", "BSD-3-Clause", "CC BY 4.0"}
    for licence in licences:
        assert f"\n{licence}\n{'-' * len(licence)}\n" in text, f"the section of {licence}"
    assert "Permission is hereby granted, free of charge" in text
    assert "Redistributions in binary form must reproduce" in text
    assert "https://creativecommons.org/licenses/by/4.0/legalcode" in text
    assert "Copyright (c) 2022 OpenAI, Shantanu Jain" in text
    assert "Apache License" in (ROOT / "LICENSE").read_text()


def test_every_source_of_the_example_is_named() -> None:
    lines = (ROOT / "examples" / "data" / "conversations.jsonl").read_text().splitlines()
    sources = {json.loads(line)["source"] for line in lines}
    assert len(sources) > 5
    for source in sources:
        name = f"tests/data/conversations/{source}.jsonl.gz"
        assert [pattern for pattern in table() if fnmatch.fnmatchcase(name, pattern)], source


def test_every_template_of_the_tests_has_the_licence_of_its_model() -> None:
    """Also where NOTICE says that a file itself names none."""
    folder = ROOT / "tests" / "data" / "templates"
    rows = [line.split("\t") for line in (folder / "index.tsv").read_text().splitlines()[1:]]
    assert sorted(row[0] for row in rows) == sorted(str(p.relative_to(folder)) for p in folder.rglob("*.jinja"))
    assert {row[3] for row in rows} == {"MIT", "Apache-2.0"}
    silent = {row[1] for row in rows if row[1] in ("Apertus", "Apriel", "Bielik", "LLaDA", "MiniMax")}
    assert (
        f"The template files of {', '.join(sorted(silent)[:-1])} and {max(silent)} have no header" in NOTICE.read_text()
    )


def test_wheel_and_sdist_carry_the_notices() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["project"]["license-files"] == ["LICENSE", "NOTICE"], "both go into wheels and source distributions"
    assert project["project"]["license"] == "Apache-2.0 AND MIT", "wheels hold the o200k vocabulary"
    assert "exclude" not in project["tool"]["hatch"]["build"]["targets"].get("sdist", {})
    assert "only-include" not in project["tool"]["hatch"]["build"]["targets"].get("sdist", {})
    ignored = subprocess.run(["git", "check-ignore", "NOTICE"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert ignored.stdout == ""


def test_wheel_and_sdist_really_have_them(tmp_path: Path) -> None:
    pytest.importorskip("hatchling", reason="hatchling is there while packages are built")
    import tarfile
    import zipfile

    from hatchling.builders.sdist import SdistBuilder
    from hatchling.builders.wheel import WheelBuilder

    (wheel,) = WheelBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["standard"])
    (sdist,) = SdistBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["standard"])
    with zipfile.ZipFile(wheel) as packed, tarfile.open(sdist) as source:
        names, more = packed.namelist(), source.getnames()
    for file in ("NOTICE", "LICENSE"):
        assert [name for name in names if name.endswith(f"licenses/{file}")]
        assert [name for name in more if name.endswith(f"/{file}")]

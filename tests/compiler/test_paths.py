"""File names and globs: order, doubles, and what is said when nothing matches."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from chatmill.compiler.paths import not_read_sentences, resolve_paths
from chatmill.errors import ConfigError


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("data/b.jsonl", "data/a.jsonl", "data/B.jsonl", "data/deep/er/c.jsonl.gz", "data/x[1].jsonl", "n.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    (tmp_path / "data" / ".hidden.jsonl").write_text("")
    (tmp_path / "data" / "folder.jsonl").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def names(*patterns: str) -> list[str]:
    return [str(path) for path in resolve_paths(patterns)]


def test_globs_are_sorted_and_hold_files_alone(home: Path) -> None:
    assert names("data/*.jsonl") == ["data/B.jsonl", "data/a.jsonl", "data/b.jsonl", "data/x[1].jsonl"]
    assert names("data/**/*.gz") == ["data/deep/er/c.jsonl.gz"]
    assert names("data/**/[ac].*") == ["data/a.jsonl", "data/deep/er/c.jsonl.gz"]
    assert names("data/**") == [*names("data/*.jsonl")[:3], "data/deep/er/c.jsonl.gz", "data/x[1].jsonl"]


def test_patterns_keep_their_order_and_files_their_first_place(home: Path) -> None:
    assert names("data/b.jsonl", "data/[ab].jsonl", f"{home}/data/a.jsonl", "./data//b.jsonl", "n.md") == [
        "data/b.jsonl",
        "data/a.jsonl",
        "n.md",
    ]


def test_a_name_with_glob_signs_is_the_file_of_that_name(home: Path) -> None:
    assert names("data/x[1].jsonl") == ["data/x[1].jsonl"]


def test_the_home_folder_is_known(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(home))
    assert names("~/data/a.jsonl", "~/n*") == [f"{home}/data/a.jsonl", f"{home}/n.md"]


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("data/c.jsonl", "there is no file 'data/c.jsonl'. Did you mean 'data/"),
        ("dta/a.jsonl", "Did you mean 'data'?"),
        ("data/b.jsonl/c.jsonl", "Did you mean 'data/b.jsonl'?"),
        ("zzz/yyy/*.jsonl", "In '.' there is: data/, empty/, n.md"),
        ("data/*.parquet", "no file matches 'data/*.parquet'. In 'data' there is: B.jsonl, a.jsonl, b.jsonl, deep/, "),
        ("data/fold*", "'data/fold*' matches folders alone, such as 'data/folder.jsonl'"),
        ("empty/*.jsonl", "In 'empty' there is: nothing"),
        ("many/q*.parquet", "00.jsonl, 01.jsonl, 02.jsonl, 03.jsonl, 04.jsonl and 15 more"),
        ("", "an input file has an empty name"),
    ],
)
def test_a_pattern_without_a_match_says_what_is_there(home: Path, pattern: str, message: str) -> None:
    os.mkdir("empty")
    if pattern.startswith("many"):
        os.mkdir("many")
        for number in range(20):
            Path("many", f"{number:02d}.jsonl").write_text("")
    with pytest.raises(ConfigError) as caught:
        resolve_paths(["n.md", pattern])
    assert message in str(caught.value)
    with pytest.raises(ConfigError, match="no input files"):
        resolve_paths([])


def test_what_a_folder_holds_and_is_not_read_is_named(home: Path) -> None:
    assert not_read_sentences(["data/*.jsonl", "data/a.jsonl", "s3://data"]) == []
    assert not_read_sentences(["data"]) == ["Not read in data: folders (deep/, folder.jsonl/)."]
    for name in ("notes.txt", "a.jsonl.bak"):
        (home / "data" / name).write_text("")
    assert not_read_sentences(["data"]) == [
        "Not read in data: files of unknown endings (a.jsonl.bak, notes.txt) and folders (deep/, folder.jsonl/)."
    ]
    for number in range(9):
        (home / "data" / "deep" / f"{number}.md").write_text("")
    (home / "data" / "deep" / "er.jsonl").write_text("")
    [sentence] = not_read_sentences(["data/deep"])
    assert "files of unknown endings (0.md, 1.md, 2.md, 3.md, 4.md and 4 more)" in sentence
    (home / "data" / "deep" / "state.json").write_text("{}")  # a folder of `datasets` says itself what is in it
    assert not_read_sentences(["data/deep"]) == []

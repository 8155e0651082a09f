"""A file gets its name when it is whole; an error leaves the old one and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from chatmill.core.whole_file import whole_file


def test_a_file_is_replaced_when_the_block_ends_well(tmp_path: Path) -> None:
    for text in ("one", "two"):
        with whole_file(tmp_path / "a.txt") as partial:
            partial.write_text(text)
            assert partial.name.startswith(".a.txt.")
            assert text == "one" or (tmp_path / "a.txt").read_text() == "one"
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]
    assert (tmp_path / "a.txt").read_text() == "two"


def test_an_error_leaves_the_old_file_alone(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("old")

    def stopped() -> None:
        with whole_file(tmp_path / "a.txt") as partial:
            partial.write_text("half")
            raise ValueError("stop")

    with pytest.raises(ValueError, match="stop"):
        stopped()
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]
    assert (tmp_path / "a.txt").read_text() == "old"


def test_two_writers_of_one_file_in_one_process_do_not_meet(tmp_path: Path) -> None:
    with whole_file(tmp_path / "a.txt") as first:
        first.write_text("first")
        with whole_file(tmp_path / "a.txt") as second:
            second.write_text("second")
        assert first.read_text() == "first"
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]
    assert (tmp_path / "a.txt").read_text() == "first"


def test_a_file_may_have_the_longest_name_there_is(tmp_path: Path) -> None:
    path = tmp_path / ("a" * 250 + ".json")
    with whole_file(path) as partial:
        partial.write_text("whole")
    assert path.read_text() == "whole"

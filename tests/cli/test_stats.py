"""`chatmill stats`: tables and plots that read at 80 columns, without colour and without Unicode; and JSON."""

from __future__ import annotations

import json
from typing import Any

import pytest
import typer
from rich.cells import cell_len
from typer.testing import CliRunner

from chatmill.cli import stats as module
from chatmill.errors import UnknownNameError
from chatmill.look.dataset import open_for_looking
from chatmill.look.stats import dataset_stats
from tests.look.sets import folder

APP = typer.Typer()
APP.command(help=module.__doc__)(module.command)
LAYOUTS = ["episodes", "rows", "hf", "parquet", "kd"]


def run(*arguments: Any) -> Any:
    return CliRunner().invoke(APP, [str(a) for a in arguments])


@pytest.mark.parametrize("name", LAYOUTS)
def test_80_columns_without_colour(name: str) -> None:
    result = run(folder() / name)
    assert result.exit_code == 0, result.exception
    lines = result.output.splitlines()
    assert max(map(cell_len, lines)) <= 80
    assert "\x1b" not in result.output
    assert "\u2026" not in result.output, "a column was cut"
    assert "train: documents by length" in [line.rstrip() for line in lines]


def test_what_a_person_reads() -> None:
    stats = dataset_stats(open_for_looking(folder() / "rows"))
    train = stats.splits[0]
    lines = [line.rstrip() for line in run(folder() / "rows", "--split", "train").output.splitlines()]
    assert lines[0].startswith(f"train: {train.items:,} rows, {train.documents:,} documents, {train.tokens:,} tokens,")
    role = next(line for line in lines if line.startswith("assistant"))
    share = next(one for one in train.roles if one.name == "assistant")
    assert role.split()[1:4] == [f"{share.tokens:,}", f"{share.trained:,}", f"{share.share:.1%}"]
    for title in ("trained share per role", "trained share per turn", "documents per row"):
        assert f"train: {title}" in lines
    assert any(line.startswith("train: fill per row (mean ") for line in lines)
    assert "ledger of the build: where every token went" in lines
    assert "ledger: tokens by source" in lines
    assert "records left out: unknown role 1" in lines
    assert any(line.startswith("notes: episodes ") for line in lines)
    assert not any(line.startswith("val") for line in lines)


def test_bars_are_as_long_as_their_counts() -> None:
    output = run(folder() / "episodes", "--split", "train").output
    start = output.index("train: documents by length")
    rows = output[start : output.index("\n\n", start)].splitlines()[2:]
    bins = dataset_stats(open_for_looking(folder() / "episodes")).splits[0].length_bins
    assert len(rows) == len(bins) > 3
    drawn = [row.count("\u2588") for row in rows]
    most = max(one.count for one in bins)
    for one, length in zip(bins, drawn, strict=True):
        assert abs(length - max(drawn) * one.count / most) <= 1


def test_json_is_the_same_numbers() -> None:
    found = json.loads(run(folder() / "episodes", "--json").output)
    assert found == json.loads(json.dumps(dataset_stats(open_for_looking(folder() / "episodes")).as_json()))
    assert list(found["splits"]) == ["train", "val"]
    assert found["ledger"]["tokens"]["dropped"] == 0
    assert list(json.loads(run(folder() / "kd", "--split", "valid", "--json").output)["splits"]) == ["valid"]
    with pytest.raises(UnknownNameError, match="unknown split 'test'"):
        raise run(folder() / "episodes", "--split", "test").exception

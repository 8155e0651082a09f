"""The table of export targets, and functions in place of a name."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from chatmill.cli import app
from chatmill.errors import ConfigError
from chatmill.export.check import verify_export
from chatmill.export.export import export_dataset
from chatmill.export.registry import TARGETS
from chatmill.export.targets import Export
from chatmill.store.episode_writer import EpisodeWriter

ROOT = Path(__file__).parents[2]


def lines(export: Export) -> None:
    """Ids as lines of text: all that a target of one's own needs."""
    for split, rows in export.rows().items():
        with (export.folder / f"{split}.txt").open("w") as file:
            for batch in export.batches(split, rows):
                for start, end in pairwise(batch.token_offsets.tolist()):
                    file.write(" ".join(map(str, batch.documents.ids[start:end].tolist())) + "\n")
    export.say("masks are not kept")


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    with EpisodeWriter(tmp_path / "a", "train") as writer:
        writer.append([5, 6, 7], [0, 1, 1])
        writer.append([8, 9], [0, 1])
    return tmp_path / "a"


def test_a_function_is_a_target(dataset: Path, tmp_path: Path) -> None:
    result = export_dataset(dataset, lines)
    assert result.directory == tmp_path / "a-lines"
    assert (result.directory / "train.txt").read_text() == "5 6 7\n8 9\n"
    assert result.not_held == ("masks are not kept",)
    assert result.splits["train"] == {"rows": 2, "documents": 2, "tokens": 5, "trained": 3}
    assert json.loads((result.directory / "export.json").read_text())["to"] == "lines"
    assert verify_export(result.directory).passed
    packed = export_dataset(dataset, lines, tmp_path / "packed", max_length=5)
    assert (packed.directory / "train.txt").read_text() == "5 6 7 8 9\n"


def test_options_that_a_target_does_not_take_name_those_that_do(dataset: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="eod_id is for exports to megatron, olmo-core; parquet does not take it"):
        export_dataset(dataset, "parquet", tmp_path / "out", eod_id=3)


def test_help_and_docs_name_every_target() -> None:
    import typer

    group: Any = typer.main.get_command(app)
    context = group.make_context("chatmill", ["--help"], resilient_parsing=True)
    (to,) = [option for option in group.get_command(context, "export").params if option.name == "to"]
    assert to.help.startswith(", ".join(TARGETS))
    row = next(
        line for line in (ROOT / "docs/commands/export.md").read_text().splitlines() if line.startswith("| `--to`")
    )
    assert [name for name in TARGETS if f"`{name}`" not in row] == []
    page = (ROOT / "docs/trainers.md").read_text()
    assert [name for name in TARGETS if f"--to {name}" not in page] == []


@pytest.mark.parametrize(("to", "said"), [("trl", "SFTConfig("), ("hf", "TRL: SFTConfig(")])
def test_packed_rows_come_with_what_the_trainer_must_be_told(dataset: Path, tmp_path: Path, to: str, said: str) -> None:
    packed = export_dataset(dataset, to, tmp_path / "packed", max_length=8)
    assert packed.config.startswith(f"{said}padding_free=True, max_length=None)")
    alone = export_dataset(dataset, to, tmp_path / "alone")
    assert "padding_free" not in alone.config, "rows of one document need no such thing"

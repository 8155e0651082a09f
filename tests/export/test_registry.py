"""Export targets from a Python file and from an installed package, and the list of all."""

from __future__ import annotations

import json
import py_compile
from importlib.util import cache_from_source
from pathlib import Path
from py_compile import PycInvalidationMode
from typing import Any

import pytest
from typer.testing import CliRunner

from chatmill.cli import app
from chatmill.errors import ConfigError, UnknownNameError
from chatmill.export import registry
from chatmill.export.check import verify_export
from chatmill.export.export import export_dataset
from chatmill.export.registry import TARGETS, Target, find_target, packaged_targets
from chatmill.store.episode_writer import EpisodeWriter

ROOT = Path(__file__).parents[2]
TOY = '''
"""Ids as lines of text: all that a target of one's own needs."""

from chatmill.export.registry import Target
from chatmill.export.targets import Export


def write(export: Export) -> None:
    for split in export.source.splits:
        with (export.folder / f"{split}.txt").open("w") as file:
            for batch in export.batches(split, export.rows(split)):
                for start, end in zip(batch.token_offsets[:-1], batch.token_offsets[1:]):
                    file.write(" ".join(map(str, batch.documents.ids[start:end].tolist())) + "\\n")
    export.say("masks are not kept")


target = Target(name="lines", about="people: ids as lines of text", write=write)
'''


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    with EpisodeWriter(tmp_path / "a", "train") as writer:
        writer.append([5, 6, 7], [0, 1, 1])
        writer.append([8, 9], [0, 1])
    return tmp_path / "a"


def write_package(folder: Path, target: str = TOY, name: str = "lines") -> None:
    """What pip leaves of a package with an entry point."""
    (folder / "toy_exports.py").write_text(target)
    about = folder / "toy_exports-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-exports\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(f"[chatmill.exports]\n{name} = toy_exports:target\n")


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    import sys

    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.delitem(sys.modules, "toy_exports", raising=False)
    yield folder
    sys.modules.pop("toy_exports", None)


def test_a_target_from_a_file(dataset: Path, tmp_path: Path) -> None:
    (tmp_path / "my_target.py").write_text(TOY)
    (tmp_path / "other.py").write_text("raise SystemExit('a compiled file was run in place of the text')")
    compiled = cache_from_source(str(tmp_path / "my_target.py"))
    py_compile.compile(str(tmp_path / "other.py"), cfile=compiled, invalidation_mode=PycInvalidationMode.UNCHECKED_HASH)
    result = export_dataset(dataset, str(tmp_path / "my_target.py"))
    assert result.directory == tmp_path / "a-lines"
    assert (result.directory / "train.txt").read_text() == "5 6 7\n8 9\n"
    assert result.not_held == ("masks are not kept",)
    assert result.splits["train"] == {"rows": 2, "documents": 2, "tokens": 5, "trained": 3}
    manifest = json.loads((result.directory / "export.json").read_text())
    assert manifest["to"] == "lines"
    assert len(manifest["options"]["target_sha256"]) == 64
    assert verify_export(result.directory).passed
    packed = export_dataset(dataset, str(tmp_path / "my_target.py"), tmp_path / "packed", max_length=5)
    assert (packed.directory / "train.txt").read_text() == "5 6 7 8 9\n"


def test_a_target_from_a_package(dataset: Path, tmp_path: Path, packages: Path) -> None:
    with pytest.raises(UnknownNameError, match=r"Known: hf, .*\. A Python file .* --to \./my_target\.py"):
        find_target("lines")
    write_package(packages)
    result = export_dataset(dataset, "lines", tmp_path / "out")
    assert (result.directory / "train.txt").read_text() == "5 6 7\n8 9\n"
    (found,) = packaged_targets()
    assert found.origin == "the package toy-exports"
    done = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["export", "--list"])
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines[1:]] == [*TARGETS, "lines"]
    assert "people: ids as lines of text" in lines[-1]
    assert "toy-exports" in lines[-1]


def test_a_package_cannot_change_a_name_of_chatmill(packages: Path) -> None:
    write_package(packages, TOY.replace('"lines"', '"hf"'), "hf")
    assert find_target("hf").origin == "chatmill"
    with pytest.raises(ConfigError, match="toy-exports: its export target 'hf' has the name of one of Chatmill"):
        packaged_targets()


def test_a_package_that_cannot_be_loaded_is_named(packages: Path) -> None:
    write_package(packages, "import nothing_of_this_name\n")
    with pytest.raises(ConfigError, match=r"toy-exports: its export target 'lines' .*nothing_of_this_name"):
        find_target("lines")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1\n", "defines no 'target'"),
        ("target = 3\n", "is int, not a chatmill.export.registry.Target"),
        ("import nothing_of_this_name\n", r"cannot be imported: ModuleNotFoundError: .*line 1\)"),
        ("def broken(:\n", "cannot be imported: SyntaxError"),
        (TOY.replace('"lines"', '"My Lines"'), "is no name for an export target"),
        (TOY.replace("write=write", "write=write, takes=frozenset({'sharding'})"), "takes sharding; there is max_le"),
    ],
)
def test_a_file_that_is_no_target_is_one_clear_error(dataset: Path, tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "my_target.py").write_text(text)
    with pytest.raises(ConfigError, match=message):
        export_dataset(dataset, str(tmp_path / "my_target.py"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_missing_file(dataset: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.py: no such file; --to takes a name"):
        export_dataset(dataset, "nowhere.py")


def test_an_error_in_foreign_code_names_its_line(dataset: Path, tmp_path: Path) -> None:
    (tmp_path / "my_target.py").write_text(TOY.replace("export.batches", "export.bunches"))
    with pytest.raises(ConfigError, match=r"target 'lines' \(.*my_target.py\) failed: AttributeError: .*line 11\)"):
        export_dataset(dataset, str(tmp_path / "my_target.py"), tmp_path / "out")
    assert not list(tmp_path.glob(".tmp-*"))


def test_options_that_a_target_does_not_take_name_those_that_do(dataset: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="eod_id is for exports to megatron, olmo-core, which end documents"):
        export_dataset(dataset, "parquet", tmp_path / "out", eod_id=3)
    with pytest.raises(ConfigError, match="hub is for exports to hf, which have a layout"):
        export_dataset(dataset, "parquet", tmp_path / "out", hub=True)


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
    assert [name for name in TARGETS if name != "episodes" and f"--to {name}" not in page] == []


def test_every_target_of_chatmill_can_be_loaded() -> None:
    for target in TARGETS.values():
        assert isinstance(target, Target)
        assert target.about
        assert callable(registry._loaded(str(target.write)))
        assert ("max_length" in target.takes) != bool(target.no_rows)

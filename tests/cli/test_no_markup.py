"""No text from data or arguments is markup: hostile names come out of every command as they went in."""

from __future__ import annotations

import ast
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import chatmill as package
from chatmill.console import plain_column, plain_console
from tests.cli.run import Call
from tests.compiler.builds import OPEN_GATES, chats, plain_recipe, write_jsonl

HOSTILE = ["[/INST]", "[red]gone[/red]", "a[/]", ":smile:", "[link=file:///x]y[/link]", "\\[bold]"]
"""Closing tags that close nothing, tags that would vanish, emoji codes, and what an escape would look like."""
ROOT = Path(package.__file__).parent
Run = Callable[..., tuple[int, str]]


@pytest.fixture
def run(call: Call) -> Run:
    def run_wide(*arguments: str | Path) -> tuple[int, str]:
        done = call(*arguments, columns=200)
        return done.status, done.out + done.said

    return run_wide


def records(name: str) -> list[dict[str, Any]]:
    return [{**record, "source": name, "id": f"{name} {number}"} for number, record in enumerate(chats(6))]


def recipe(path: Path, out: Path) -> Path:
    out.write_text(json.dumps(plain_recipe(path, on_error="quarantine", gates=OPEN_GATES)))
    return out


@pytest.mark.parametrize("name", ["[/INST]:smile:", "[red]a[/red]\\[b]"])
def test_commands_print_hostile_names_as_they_are(name: str, run: Run, tmp_path: Path) -> None:
    """The name is that of the source, of the records, of the input file and of every folder that is written."""
    home = tmp_path / name.replace("/", "|")
    home.mkdir()
    folder = home.name
    broken = {"id": f"bad {name}", "messages": [{"role": name, "content": "x"}]}
    path = write_jsonl(home / f"{folder}.jsonl", [*records(name), broken])
    built = home / f"q{folder}"
    spec = recipe(path, home / "recipe.yaml")

    status, text = run("build", spec, "--out", built, "--workers", "0", "--quiet")
    assert status == 0, text
    assert name in text, "the row of the source"
    assert str(built) in text.replace("\n", "")
    for arguments in (
        ("build", spec, "--out", built, "--workers", "0", "--quiet"),
        ("stats", built),
        ("inspect", built, "-n", "1"),
        ("verify", built),
        ("export", built, "--to", "parquet", "--out", home / "out"),
        ("view", built, "--save", home / "page.html"),
        ("inspect", path, "-n", "1", "--tokenizer", "bytes", "--template", "chatml"),
        ("init", path, "--out", home / "made.yaml", "--tokenizer", "bytes"),
        ("transcripts", path, "--out", home / f"t{folder}", "--tokenizer", "bytes", "--context-length", "9999"),
    ):
        status, text = run(*arguments)
        assert "Traceback" not in text, (arguments, text)
        assert "MarkupError" not in text, (arguments, text)
        assert status != 70, (arguments, text)
        flat = text.replace("\n", "").replace(" ", "")
        assert name.replace(" ", "") in flat or folder in flat, (arguments, text)

    other = home / "changed.jsonl"
    changed = records(name)
    changed[0]["messages"][-1]["content"] += "!"
    write_jsonl(other, changed)
    assert run("build", recipe(other, home / "r2.yaml"), "--out", home / "b2", "--workers", "0", "--quiet")[0] == 0
    status, text = run("diff", built, home / "b2")
    assert status == 1, text
    assert name in text, "the id of the record that differs"

    status, text = run("verify", home / folder)
    assert status == 2
    assert folder in text.replace("\n", "")


def test_names_in_errors_and_findings_do_not_reach_the_terminal_as_codes(run: Run, tmp_path: Path) -> None:
    name = "a\x1b[2Jb\u202ec"
    status, text = run("verify", tmp_path / name)
    assert status == 2
    assert "a\u241b[2Jb\\u202ec" in text
    path = write_jsonl(tmp_path / "chats.jsonl", chats(3))
    assert run("build", recipe(path, tmp_path / "r.yaml"), "--out", tmp_path / "d", "-w", "0", "-q")[0] == 0
    (tmp_path / "d" / "train" / name).write_text("more")
    status, text = run("verify", tmp_path / "d")
    assert status == 1
    assert "\x1b" not in text
    assert "a\u241b[2Jb\\u202ec" in text


@pytest.mark.parametrize("name", HOSTILE)
def test_consoles_and_columns_take_strings_as_text(name: str) -> None:
    from rich.progress import Progress
    from rich.table import Table

    out = io.StringIO()
    console = plain_console(file=out, width=120)
    table = Table(title=name)
    table.add_column(name)
    table.add_row(name)
    console.print(name, table)
    assert out.getvalue().count(name) == 4
    bar = Progress(plain_column("{task.description}"), plain_column("{task.fields[text]}"), console=console)
    bar.add_task(name, text=name)
    console.print(bar.make_tasks_table(bar.tasks))
    assert out.getvalue().count(name) == 6


def test_nothing_else_makes_a_console_a_panel_or_a_text_column() -> None:
    """`Console` reads markup unless told otherwise, `TextColumn` and the titles of `Panel` always."""
    banned = {"Console", "TextColumn", "SpinnerColumn", "from_markup", "rprint"}
    checked = 0
    for path in sorted(ROOT.rglob("*.py")):
        text = path.read_text()
        checked += 1
        if path == ROOT / "console.py" or not any(word in text for word in (*banned, "rich.panel", "markup", "emoji")):
            continue
        nodes = list(ast.walk(ast.parse(text)))
        own = {node.name for node in nodes if isinstance(node, ast.ClassDef)}
        panels = any(isinstance(node, ast.ImportFrom) and node.module == "rich.panel" for node in nodes)
        assert not panels, f"{path}: the title of a panel is read as markup"
        for node in nodes:
            if isinstance(node, ast.Call):
                called = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
                assert called not in banned - own, f"{path}:{node.lineno}: use chatmill.console"
                if called == "print" and any(word.arg in ("markup", "emoji") for word in node.keywords):
                    raise AssertionError(f"{path}:{node.lineno}: markup is never turned on")
    assert checked > 300

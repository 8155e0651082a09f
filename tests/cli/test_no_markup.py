"""No text from data or arguments is markup: hostile names come out of every command as they went in."""

from __future__ import annotations

import ast
import io
import json
from pathlib import Path

import pytest

import chatmill as package
from chatmill.console import plain_column, plain_console
from tests.cli.run import Call
from tests.compiler.builds import OPEN_GATES, chats, plain_recipe, write_jsonl

HOSTILE = ["[/INST]", "[red]gone[/red]", "a[/]", ":smile:", "[link=file:///x]y[/link]", "\\[bold]"]
"""Closing tags that close nothing, tags that would vanish, emoji codes, and what an escape would look like."""
ROOT = Path(package.__file__).parent


def recipe(path: Path) -> Path:
    """A recipe next to its input."""
    made = path.with_suffix(".yaml")
    made.write_text(json.dumps(plain_recipe(path, on_error="quarantine", gates=OPEN_GATES)))
    return made


@pytest.mark.parametrize("name", ["[/INST]:smile:", "[red]a[/red]\\[b]"])
def test_commands_print_hostile_names_as_they_are(name: str, call: Call, tmp_path: Path) -> None:
    """The name is that of the source, of the records, of the input file and of every folder that is written."""
    home = tmp_path / name.replace("/", "|")
    home.mkdir()
    folder = home.name
    records = [{**record, "source": name, "id": f"{name} {number}"} for number, record in enumerate(chats(6))]
    broken = {"id": f"bad {name}", "messages": [{"role": name, "content": "x"}]}
    path = write_jsonl(home / f"{folder}.jsonl", [*records, broken])
    built, build = home / f"q{folder}", ("build", recipe(path), "--workers", "0", "--quiet", "--out")
    changed = [records[0] | {"messages": [{**one, "content": f"{one['content']}!"} for one in records[0]["messages"]]}]
    other = recipe(write_jsonl(home / "changed.jsonl", [*changed, *records[1:]]))
    assert call("build", other, "--out", home / "b2", "--workers", "0", "--quiet").status == 0
    for wanted, status, arguments in (
        (name, 0, (*build, built)),
        (str(built), 0, (*build, built)),
        (folder, 0, ("stats", built)),
        (folder, 0, ("inspect", built, "-n", "1")),
        (folder, 0, ("verify", built)),
        (folder, 0, ("export", built, "--to", "parquet", "--out", home / "out")),
        (folder, 0, ("view", built, "--save", home / "page.html")),
        (folder, 0, ("inspect", path, "-n", "1", "--tokenizer", "bytes", "--template", "chatml")),
        (folder, 0, ("init", path, "--out", home / "made.yaml", "--tokenizer", "bytes")),
        (path.name, 2, ("transcripts", path, "--out", home / "t", "--tokenizer", "bytes", "--context-length", "9999")),
        (f"{name} 0", 1, ("diff", built, home / "b2")),
        (folder, 2, ("verify", home / folder)),
    ):
        done = call(*arguments, columns=200)
        text = (done.out + done.said).replace("\n", "")
        assert done.status == status, (arguments, text)
        assert wanted in text or name in text, (arguments, text)
        assert "MarkupError" not in text


def test_names_in_errors_and_findings_do_not_reach_the_terminal_as_codes(call: Call, tmp_path: Path) -> None:
    name = "a\x1b[2Jb\u202ec"
    done = call("verify", tmp_path / name, columns=200)
    assert done.status == 2
    assert "a\u241b[2Jb\\u202ec" in done.said
    path = write_jsonl(tmp_path / "chats.jsonl", chats(3))
    assert call("build", recipe(path), "--out", tmp_path / "d", "-w", "0", "-q").status == 0
    (tmp_path / "d" / "train" / name).write_text("more")
    done = call("verify", tmp_path / "d", columns=200)
    assert done.status == 1
    assert "\x1b" not in done.out
    assert "a\u241b[2Jb\\u202ec" in done.out


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
    paths = sorted(ROOT.rglob("*.py"))
    assert len(paths) > 300
    for path in paths:
        text = path.read_text()
        if path == ROOT / "console.py" or not any(word in text for word in (*banned, "rich.panel", "markup", "emoji")):
            continue
        nodes = list(ast.walk(ast.parse(text)))
        own = {node.name for node in nodes if isinstance(node, ast.ClassDef)}
        assert not any(isinstance(node, ast.ImportFrom) and node.module == "rich.panel" for node in nodes), path
        for node in (one for one in nodes if isinstance(one, ast.Call)):
            called = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
            assert called not in banned - own, f"{path}:{node.lineno}: use chatmill.console"
            turns_on = called == "print" and any(word.arg in ("markup", "emoji") for word in node.keywords)
            assert not turns_on, f"{path}:{node.lineno}: markup is never turned on"

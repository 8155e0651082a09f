"""The documentation holds together: it builds strictly, links lead somewhere, commands and figures in it are real."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from chatmill.cli.app import COMMANDS, app
from tests.pages import DOCS, PAGES, ROOT, anchors, fences, links

OUTSIDE = re.compile(
    r"""(?:<script[^>]*\ssrc|<link[^>]*\shref|<img[^>]*\ssrc)=["']?(?:https?:)?//|url\(["']?(?:https?:)?//"""
)
"""What a browser would fetch by itself from somewhere else."""


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_anchors_and_files_that_a_page_names_are_there(page: Path) -> None:
    for target in links(page):
        path, _, anchor = target.partition("#")
        file = page if not path else page.parent / path
        assert file.exists(), f"{name_of(page)} links to {target}, which is not there"
        if anchor:
            assert anchor in anchors(file), f"{name_of(page)} links to {target}; anchors there: {sorted(anchors(file))}"
    text = page.read_text(encoding="utf-8")
    assert not re.search(r"(?<![\w.])/(home|root|Users|mnt)/", text), "it names this machine"
    if page.name not in ("CHANGELOG.md", "CONTRIBUTING.md"):  # which name what is gone, or may come
        for found in re.findall(r"`((?:tests|src|benchmarks|tools|examples)/[\w/]+\.py)`", text):
            assert (ROOT / found).is_file(), found


def test_every_picture_has_a_script_that_makes_it() -> None:
    scripts = [*ROOT.glob("examples/*.py"), *ROOT.glob("benchmarks/*.py"), *ROOT.glob("tools/*.py")]
    made = "".join(script.read_text(encoding="utf-8") for script in scripts)
    assert [path.name for path in sorted((DOCS / "images").iterdir()) if path.name not in made] == []


def test_files_on_the_page_of_the_architecture_are_there() -> None:
    """They are named as they are below `src/chatmill`."""
    drawn = re.findall(r"(?<![\w/])((?:[a-z_]+/)+[a-z_]+\.py)", (DOCS / "architecture.md").read_text())
    assert len(drawn) > 30
    for name in drawn:
        assert (ROOT / "src" / "chatmill" / name).is_file() or (ROOT / name).is_file(), name


def test_the_site_builds_strictly_and_needs_no_network(tmp_path: Path) -> None:
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    build(load_config(str(ROOT / "mkdocs.yml"), site_dir=str(tmp_path), strict=True))
    pages = sorted(tmp_path.rglob("*.html"))
    assert len(pages) > 25
    for path in [*pages, *tmp_path.glob("css/**/*.css")]:
        found = OUTSIDE.search(path.read_text(encoding="utf-8"))
        assert found is None, f"{path.name} fetches {found and found[0]}"
    assert "css/chatmill.css" in (tmp_path / "index.html").read_text(encoding="utf-8")


def test_every_page_is_in_the_navigation_once_and_every_command_in_the_index() -> None:
    listed = re.findall(r"[\w/-]+\.md", (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[2])
    assert sorted(listed) == sorted(str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md"))
    for name in COMMANDS:
        assert f"(commands/{name}.md)" in (DOCS / "index.md").read_text()


def commands_of(page: Path) -> list[str]:
    """Lines of fenced blocks that call chatmill, with continued lines joined and comments cut off."""
    texts = [f.body.replace("\\\n", " ") for f in fences(page) if f.language in ("", "bash", "sh", "console")]
    found = re.findall(r"^ *(?:\$ +)?(?:[A-Z_]+=\S+ +)*(chatmill [a-z][a-z-]* [^\n]*)", "\n".join(texts), re.M)
    return [re.split(r"  #| \|| &&| 2>| > |;", line)[0].strip() for line in found]


@pytest.mark.parametrize("page", [page for page in PAGES if commands_of(page)], ids=name_of)
def test_commands_on_the_page_exist_with_these_options(page: Path) -> None:
    group: Any = typer.main.get_command(app)
    context = group.make_context("chatmill", ["--help"], resilient_parsing=True)
    for line in commands_of(page):
        _, name, *arguments = shlex.split(line)
        command = group.get_command(context, name)
        assert command is not None, f"{name_of(page)}: {line}"
        if {"--help", "-h", "..."} & set(arguments):
            continue
        try:
            command.make_context(name, arguments, parent=context)
        except typer.Exit:  # --list answers at once, as --help does
            continue
        except Exception as error:
            pytest.fail(f"{name_of(page)}: {line}: {getattr(error, 'message', error)}")


def ratios(value: Any) -> Iterator[float]:
    """Numbers in a result file, and the ratios of rates that stand side by side."""
    if isinstance(value, dict):
        rates = [entry["rate"] for entry in value.values() if isinstance(entry, dict) and "rate" in entry]
        yield from (a / b for a in rates for b in rates if b)
        value = list(value.values())
    if isinstance(value, list):
        for entry in value:
            yield from ratios(entry)
    elif isinstance(value, int | float):
        yield float(value)


def test_figures_of_the_readme_are_those_of_the_result_files() -> None:
    results = [json.loads(path.read_text()) for path in (ROOT / "benchmarks" / "results").glob("*.json")]
    measured = list(ratios(results))
    figures = re.findall(r"(\d+(?:\.\d+)?)x\b", (ROOT / "README.md").read_text())
    assert len(figures) >= 4
    for figure in figures:
        digits = len(figure.partition(".")[2])
        assert any(f"{number:.{digits}f}" == figure for number in measured), f"{figure}x is in no result file"

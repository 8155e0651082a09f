"""Reads the pages of the documentation: fenced blocks, headings and links; and runs the blocks as a reader would."""

from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from tests.forked import for_shells

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [*(ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")), *sorted(DOCS.rglob("*.md"))]
QUIET = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
"""Tests share the cores: threads that wait for each other only cost time."""
_FENCE = re.compile(r"^(?P<indent> *)```(?P<language>\w*)[^\n]*\n(?P<body>.*?)^(?P=indent)```", re.M | re.S)
_LINK = re.compile(r"\]\(([^)\s]+)\)")


class Fence(NamedTuple):
    """A fenced block."""

    language: str
    body: str


def fences(page: Path) -> list[Fence]:
    """All fenced blocks of a page, in order."""
    return [Fence(match["language"], match["body"]) for match in _FENCE.finditer(page.read_text(encoding="utf-8"))]


def python_blocks(page: str) -> list[str]:
    """The Python of a page below `docs`."""
    return [fence.body for fence in fences(DOCS / page) if fence.language == "python"]


def run_python(page: str, *, blocks: int | None = None) -> dict[str, Any]:
    """Run the Python of a page from top to bottom, as one program: so many `blocks`, or any number but none."""
    names: dict[str, Any] = {"__name__": "docs"}
    found = python_blocks(page)
    assert found
    assert blocks in (None, len(found))
    for number, code in enumerate(found, 1):
        exec(compile(code, f"block {number} of {page}", "exec"), names)
    return names


def links(page: Path) -> list[str]:
    """Targets of links and images that lie in this repository; in fenced blocks and code spans, nothing is a link."""
    prose = re.sub(r"`[^`\n]*`", "", _FENCE.sub("", page.read_text(encoding="utf-8")))
    return [link for link in _LINK.findall(prose) if not link.startswith(("http://", "https://", "mailto:"))]


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as both mkdocs and code hosts make them."""
    from markdown.extensions.toc import slugify

    text = _FENCE.sub("", page.read_text(encoding="utf-8"))
    titles = re.findall(r"^#{1,6} +(.+?) *$", text, re.M)
    return {slugify(re.sub(r"[`*]|\]\([^)]*\)|\[", "", title), "-") for title in titles}


def run_bash(script: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a block as it stands, in one shell that stops at the first error, with this environment's commands first.

    `chatmill` is a fork of a process that has imported it.
    """
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        ["bash", "-eo", "pipefail", "-c", script],
        cwd=folder,
        env=for_shells({**os.environ, "PATH": path, "COLUMNS": "80", **QUIET}),
        capture_output=True,
        text=True,
        check=False,
    )


@dataclass(slots=True)
class Ran:
    """What became of a page: its blocks, lines that it shows and that were printed, all that was, and names it left."""

    blocks: int = 0
    shown: int = 0
    said: str = ""
    names: dict[str, Any] = field(default_factory=lambda: {"__name__": "docs"})


def run_page(page: str, folder: Path) -> Ran:
    """Run the shell and Python blocks of a page below `docs` in their order, as a reader would in a folder.

    A `text` block is what the block before it prints: all of it after Python; after a shell command some of its lines,
    each of which counts up to `...`.
    """
    ran, printed, language = Ran(), "", ""
    for fence in fences(DOCS / page):
        if fence.language == "text":
            assert language != "python" or fence.body == printed
            lines = [" ".join(line.split()) for line in printed.splitlines()]
            for line in filter(None, (" ".join(line.partition("...")[0].split()) for line in fence.body.splitlines())):
                assert any(line in one for one in lines), f"the page shows {line!r}; printed was:\n{printed}"
                ran.shown += 1
        if fence.language not in ("bash", "python"):
            continue
        language = fence.language
        if language == "bash":
            done = run_bash(fence.body, folder)
            printed = done.stdout + done.stderr
            assert done.returncode == 0, f"{fence.body}\n{printed}"
        else:
            with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.chdir(folder):
                exec(compile(fence.body, page, "exec"), ran.names)
            printed = out.getvalue()
        ran.blocks += 1
        ran.said += printed
    return ran

"""Reads the pages of the documentation: fenced blocks, headings and links; and runs the blocks as a reader would."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.forked import for_shells

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [*(ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")), *sorted(DOCS.rglob("*.md"))]
QUIET = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
"""Tests share the cores: threads that wait for each other only cost time."""
_FENCE = re.compile(r"^(?P<indent> *)```(?P<language>\w*)[^\n]*\n(?P<body>.*?)^(?P=indent)```", re.M | re.S)
_LINK = re.compile(r"\]\(([^)\s]+)\)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Fence:
    """A fenced block."""

    language: str
    body: str


def fences(page: Path) -> list[Fence]:
    """All fenced blocks of a page, in order."""
    found = _FENCE.finditer(page.read_text(encoding="utf-8"))
    return [Fence(language=match["language"], body=match["body"]) for match in found]


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


def prose(page: Path) -> str:
    """A page without its fenced blocks and code spans, in which nothing is a link."""
    return re.sub(r"`[^`\n]*`", "", _FENCE.sub("", page.read_text(encoding="utf-8")))


def links(page: Path) -> list[str]:
    """Targets of links and images that lie in this repository."""
    return [
        target for target in _LINK.findall(prose(page)) if not target.startswith(("http://", "https://", "mailto:"))
    ]


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


def run_page(page: Path, folder: Path) -> int:
    """Run the shell blocks of a page in a folder; every line of a `text` block is printed by the block before it.

    Gives the number of lines that were compared.
    """
    said, checked = "", 0
    for fence in fences(page):
        if fence.language == "bash":
            done = run_bash(fence.body, folder)
            assert done.returncode == 0, f"{fence.body}\n{done.stdout}\n{done.stderr}"
            said = "\n".join(line.rstrip() for line in done.stdout.splitlines())
        elif fence.language == "text":
            for line in fence.body.splitlines():
                assert line.rstrip() in said, f"the page shows {line!r}; printed was:\n{said}"
                checked += 1
    return checked

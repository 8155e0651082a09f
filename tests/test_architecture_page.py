"""The page on the architecture is true: its files are there, its floors hold, and what it adds works."""

from __future__ import annotations

import re
from pathlib import Path

import chatmill
from tests.pages import DOCS
from tests.test_architecture import MAY_IMPORT, ROOT

PAGE = DOCS / "architecture.md"
SOURCE = Path(chatmill.__file__).parent


def test_the_files_on_the_page_are_there() -> None:
    """In the drawing and in tables files are named as they are below `src/chatmill`."""
    named = re.findall(r"(?<![\w/])((?:[a-z_]+/)+[a-z_]+\.py)", PAGE.read_text())
    assert len(named) > 30
    for name in named:
        assert (SOURCE / name).is_file() or (DOCS.parent / name).is_file(), name


def test_the_names_on_the_page_are_in_their_files() -> None:
    named = re.findall(r"`([a-z_/]+\.py)` \(`(\w+)`\)", PAGE.read_text())
    assert len(named) >= 5
    for file, name in named:
        assert re.search(rf"\b(def|class) {name}\b", (SOURCE / file).read_text()), f"{name} in {file}"


def test_every_room_is_on_a_floor() -> None:
    table = PAGE.read_text().partition("## Floors")[2].partition("\n## ")[0]
    rows = [set(re.findall(r"`([a-z]+)`", line.split("|")[2])) for line in table.splitlines() if line.startswith("| ")]
    floors = [row for row in rows if row]
    rooms = {room for room in MAY_IMPORT if (ROOT / room).is_dir() or room in ("megatron", "torchtitan")}
    assert set().union(*floors) == rooms
    height = {room: -number for number, floor in enumerate(floors) for room in floor}
    for room in rooms:
        below = {other for other in MAY_IMPORT[room] if other in rooms}
        assert all(height[other] <= height[room] for other in below), room


def test_every_package_says_what_it_is_for() -> None:
    for file in SOURCE.rglob("__init__.py"):
        assert file.read_text().startswith('"""'), file.relative_to(SOURCE)

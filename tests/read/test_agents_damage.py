"""Whatever is wrong in a file of an agent, it is a reason with a code and never a traceback."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from chatmill.errors import ChatmillError
from chatmill.read.conversations import ConversationFile
from chatmill.read.places import RunFolder, place
from tests.read.agent_runs import DATA

JUNK: list[Any] = [None, True, 0, -1, 3.5, "", "x", "{", [], [None], [1], {}, {"a": 1}, {"type": "text"}]
FILES = [path for path in DATA.rglob("*") if path.suffix in (".jsonl", ".traj") or path.name.endswith(".traj.json")]
EXAMPLES = sorted(
    [*FILES, DATA / "openhands" / "events", DATA / "openhands" / "completions", DATA / "openhands_v0" / "events"]
)
"""A folder is read as one file of lines, which is damaged here."""


def example_text(path: Path) -> str:
    """Return the text of an example."""
    whole = place(path)
    return (whole.copy() if isinstance(whole, RunFolder) else path).read_text()


def places(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the paths of all values inside of one."""
    found = [at] if at else []
    if isinstance(value, dict):
        items: list[tuple[Any, Any]] = list(value.items())
    else:
        items = list(enumerate(value)) if isinstance(value, list) else []
    for key, inner in items:
        found += places(inner, (*at, key))
    return found


def replaced(value: Any, at: tuple[Any, ...], junk: Any) -> Any:
    """Return a value with another one in a place."""
    if not at:
        return junk
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[at[0]] = replaced(value[at[0]], at[1:], junk)
    return copy


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: "/".join(path.relative_to(DATA).parts))
def test_junk_anywhere_is_never_a_traceback(path: Path, tmp_path: Path) -> None:
    choose = random.Random(path.name)
    text = example_text(path)
    try:
        lines = [json.loads(text)]
    except ValueError:
        lines = [json.loads(line) for line in text.splitlines()]
    copy = tmp_path / place(path).name
    for _ in range(60):
        number = choose.randrange(len(lines))
        line = replaced(lines[number], choose.choice(places(lines[number])), choose.choice(JUNK))
        copy.write_text("\n".join(json.dumps(one) for one in [*lines[:number], line, *lines[number + 1 :]]))
        errors: list[ChatmillError] = []
        try:
            list(ConversationFile(copy, on_error=errors.append))
        except ChatmillError as error:
            errors.append(error)
        assert all(isinstance(error, ChatmillError) for error in errors)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: "/".join(path.relative_to(DATA).parts))
def test_a_file_that_is_cut_off_says_so(path: Path, tmp_path: Path) -> None:
    copy = tmp_path / place(path).name
    copy.write_text(example_text(path)[:-20])
    errors: list[ChatmillError] = []
    try:
        list(ConversationFile(copy, on_error=errors.append))
    except ChatmillError as error:
        errors.append(error)
    assert errors

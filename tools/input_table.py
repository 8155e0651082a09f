"""The table of inputs in docs/records.md: what becomes of each file in tests/data/inputs.

    python -m tools.input_table

A test compares the page with what this gives.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import chdir
from pathlib import Path

from chatmill.compiler.paths import resolve_paths
from chatmill.core.conversation import Message
from chatmill.errors import ChatmillError, RecordError
from chatmill.read.conversations import ConversationFile
from chatmill.read.field_maps import map_text, parse_map
from tools.input_files import CASES, INPUTS, Case

PAGE = Path(__file__).parents[1] / "docs" / "records.md"
BEGIN, END = "<!-- inputs: begin -->\n", "<!-- inputs: end -->\n"


def table() -> str:
    """The table as Markdown."""
    with chdir(INPUTS):
        rows = [f"| {_input(case)} | {result(case)} |" for case in CASES]
    return "\n".join(["| input | result |", "|---|---|", *rows]) + "\n"


def _input(case: Case) -> str:
    words = " ".join(f"--shape {word}" for word in case.map)
    name = f"{case.name}/" if os.path.isdir(case.name) else case.name
    return f"{case.what}: `{name}`" + (f" with `{words}`" if words else "")


def result(case: Case) -> str:
    """What reading a file gives: shape and messages, or the error."""
    shape = map_text(parse_map(case.map)) if case.map else None
    try:
        return "; ".join(_cell(found) for path in resolve_paths([case.name]) for found in _read(os.fspath(path), shape))
    except ChatmillError as error:
        return _cell(f"error: {error}")


def _read(path: str, shape: str | None) -> Iterator[str]:
    errors: list[RecordError] = []
    file = ConversationFile(path, shape=shape, on_error=errors.append)
    talks: Counter[str] = Counter()
    for conversation in file:
        options = [name for name in ("tools", "options") if getattr(conversation, name)]
        spoken = ", ".join(_message(message) for message in conversation.messages)
        talks[spoken + (f" (with {' and '.join(options)})" if options else "")] += 1
    for words, count in talks.items():
        yield f"{'map' if shape else file.shape.name}: {f'{count} times ' if count > 1 else ''}{words}"
    yield from (f"left out: {error}" for error in errors)
    if not talks and not errors:
        yield "no records"


def _message(message: Message) -> str:
    notes = ["reasoning"] if message.reasoning is not None else []
    notes += ["call"] if message.tool_calls else []
    notes += [f"weight {message.weight}"] if message.weight is not None else []
    return message.role.value + (f" ({', '.join(notes)})" if notes else "")


def _cell(text: str) -> str:
    """A sentence for a cell; the shapes that an error lists are those of this page."""
    return " ".join(text.partition(". Or name the shape")[0].replace("|", "\\|").replace("<", "&lt;").split())


def with_table(page: str) -> str:
    """The page with a fresh table."""
    head, _, rest = page.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return f"{head}{BEGIN}\n{table()}\n{END}{tail}"


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text()))

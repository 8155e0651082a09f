"""Calls every wrapper of the compiled part with numbers drawn by lot, with a library that is built for sanitizers.

`python -m tests.core.native.fuzz_wrappers LIBRARY ROUNDS SEED` prints the compiled functions that were called. An array
of a wrapper has its exact size, so that a sanitizer sees every access beside it. What a wrapper does not take is an
error of Python; a number that it does take must not lead out of any array.
"""

from __future__ import annotations

import contextlib
import random
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from chatmill.core.conversation import Conversation, Message, Role, ToolCall
from chatmill.core.conversations import Conversations
from chatmill.core.kinds import RoleCode
from chatmill.core.native import document_layout, gather, library, scan, text_ranges, trees
from chatmill.core.native.document_layout import ITEM, ItemTable, Origin
from chatmill.core.native.scan import MessageField, RecordField
from chatmill.core.native.trees import RowColumns
from chatmill.render.registry import bundled_names
from tests.core.native.mutations import mutated

REFUSED = (IndexError, ValueError, TypeError, OverflowError, RuntimeError, MemoryError)
HOSTILE = (-1, -2, 1 << 31, -(1 << 31), 1 << 32, 1 << 62, -(1 << 62), (1 << 63) - 1, -(1 << 63))


class Draw:
    """Arrays drawn by lot: mostly of numbers that fit, now and then with one that does not."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def ints(self, count: int, low: int, high: int, *, spoilt: float = 0.25) -> Any:
        """So many numbers, each from `low` up to `high`, one of which may be anything."""
        values = [self.random.randint(low, max(low, high)) for _ in range(max(count, 0))]
        return self.spoilt(np.array(values, dtype=np.int64), spoilt)

    def spoilt(self, values: Any, share: float = 0.25) -> Any:
        """The same with a number that fits nowhere, or with one number more or less."""
        if self.random.random() >= share:
            return values
        way = self.random.randrange(4)
        if way == 0 and len(values):
            values = values.copy()
            values[self.random.randrange(len(values))] = self.random.choice(HOSTILE)
        elif way == 1:
            values = values[:-1]
        elif way == 2:
            values = np.append(values, self.random.choice((0, 1, *HOSTILE)))
        elif len(values) > 1:
            values = values[::-1].copy()
        return np.ascontiguousarray(values)

    def offsets(self, parts: int, last: int, *, spoilt: float = 0.25) -> Any:
        """Where so many parts of a whole begin, and where the last one ends."""
        cuts = sorted(self.random.randint(0, last) for _ in range(max(parts - 1, 0)))
        whole = [0, *cuts, last] if parts else [0]
        return self.spoilt(np.array(whole, dtype=np.int64), spoilt)

    def data(self, most: int = 80) -> Any:
        """Bytes of text in several scripts."""
        letters = ("a", "b", " ", "\n", "ß", "漢", "😀", "\u3000", "\u00a0", "\0")
        text = "".join(self.random.choices(letters, k=self.random.randrange(most))).encode()
        return np.frombuffer(text, dtype=np.uint8).copy()


def copies(draw: Draw) -> None:
    dtype = draw.random.choice((np.uint8, np.int32, np.float64))
    buffers = [draw.data().astype(dtype) for _ in range(draw.random.randrange(1, 4))]
    count = draw.random.randrange(12)
    least = min(map(len, buffers))
    which = draw.ints(count, 0, len(buffers) - 1)
    if draw.random.randrange(2):
        which = which.astype(draw.random.choice((np.uint8, np.int8)))
    starts, lengths = draw.ints(count, 0, least), draw.ints(count, 0, least // 3)
    attempt(gather.gathered, buffers, which, starts, lengths)


def pieces(draw: Draw) -> None:
    buffers = [draw.data() for _ in range(draw.random.randrange(1, 4))]
    count = draw.random.randrange(14)
    least = min(map(len, buffers))
    which = draw.ints(count, 0, len(buffers) - 1, spoilt=0.1).astype(np.uint8)
    opens = draw.ints(count, 0, 1, spoilt=0.1).astype(np.bool_)
    attempt(gather.joined_pieces, buffers, which, draw.ints(count, 0, least), draw.ints(count, 0, least // 3), opens)


def points(draw: Draw) -> None:
    ids, texts = draw.random.randrange(30), draw.random.randrange(5)
    sizes = draw.ints(7, 0, 6, spoilt=0.1).astype(np.int32)
    pairs = draw.random.randrange(24)
    given = (draw.offsets(texts, ids), draw.ints(pairs, 0, texts - 1), draw.ints(pairs, 0, 40))
    attempt(gather.token_points, draw.ints(ids, 0, 6).astype(np.int32), sizes, *given)


def texts(draw: Draw) -> None:
    data = draw.data(200)
    count = draw.random.randrange(40)
    starts, lengths = draw.ints(count, 0, len(data)), draw.ints(count, 0, len(data) // 3)
    ranges = np.array([(0x80, 0x2FF), (0x2000, 0xD7A3)])
    attempt(text_ranges.other_characters, data, starts, lengths, ranges)
    for ask in (text_ranges.not_ascii, text_ranges.characters, text_ranges.distinct):
        attempt(ask, data, starts, lengths)
    attempt(
        text_ranges.trimmed, data, starts, lengths, draw.random.choice((None, 32, 97, 0, 255)), draw.random.randrange(5)
    )
    whole = data.tobytes()
    at = draw.random.randrange(len(whole) + 1)
    attempt(text_ranges.positions_of, whole[at : at + draw.random.randrange(6)], data)


def rows_of(draw: Draw, rows: int) -> RowColumns:
    """Rows of few different tokens, some of which go on from an earlier one."""
    offsets = draw.offsets(rows, draw.random.randrange(40), spoilt=0.1)
    tokens = max(int(offsets[-1]) if len(offsets) and 0 <= offsets[-1] < 1000 else 0, 0)
    parents, begins = np.full(rows, -1, dtype=np.int64), np.zeros(rows, dtype=np.int64)
    for row in range(1, min(rows, len(offsets) - 1)):
        if draw.random.randrange(3) == 0:
            parents[row] = draw.random.randrange(row)
            begins[row] = draw.random.randint(0, max(0, int(offsets[parents[row] + 1] - offsets[parents[row]])))
    return RowColumns(
        ids=draw.ints(tokens, 0, 2, spoilt=0.1).astype(np.int32),
        offsets=offsets,
        kinds=draw.ints(tokens, 0, 255, spoilt=0.05).astype(np.uint8),
        weights=draw.ints(tokens, 0, 2, spoilt=0.05).astype(np.float32),
        kept=draw.ints(tokens, 0, 1, spoilt=0.05).astype(np.uint8),
        later=draw.ints(tokens, 0, 1, spoilt=0.05).astype(np.uint8),
        parents=draw.spoilt(parents),
        begins=draw.spoilt(begins),
    )


def grown(draw: Draw) -> None:
    count = draw.random.randrange(8)
    rows, groups = rows_of(draw, count), draw.offsets(draw.random.randrange(4), count)
    capacity = draw.random.choice((40, 40, 12, 1, 0, -1, 1 << 62, (1 << 63) - 1))
    made = attempt(trees.grow_trees, rows, groups, capacity)
    if made is None:
        return
    runs = draw.random.randrange(1, 6)
    columns = [getattr(made, name) for name in made._fields]
    at = draw.random.randrange(2 * len(columns))
    if at < len(columns):
        columns[at] = draw.spoilt(columns[at], 1)
    messages = draw.ints(runs, -1, 3, spoilt=0.1).astype(np.int32)
    attempt(trees.tree_runs, trees.GrownTrees(*columns), rows, draw.offsets(runs, len(rows.ids)), messages)
    attempt(trees.tree_ends, made.lengths, made.branches, made.starts, made.depths)


def ends(draw: Draw) -> None:
    count = draw.random.randrange(5)
    branches = draw.ints(count, 0, 2)
    given = int(branches.sum()) if len(branches) and 0 <= branches.max() < 10 else draw.random.randrange(3)
    given = max(0, min(given, 20))
    attempt(trees.tree_ends, draw.ints(count, 0, 9), branches, draw.ints(given, 1, 8), draw.ints(given, 0, 4))
    if draw.random.randrange(4) == 0:  # counts whose sum wraps around to 0
        wrapping = np.full(4, 1 << 62)
        none = np.empty(0, dtype=np.int64)
        attempt(trees.tree_ends, np.ones(4, dtype=np.int64), wrapping, none, none)
        attempt(trees.tree_ends, wrapping, np.zeros(4, dtype=np.int64), none, none)


CALL = {"type": "function", "function": {"name": "find", "arguments": {"a": 1}}}
CALLS = (ToolCall("find", '{"a": 1}', "id0"), ToolCall("get", "{}"))
MESSAGE = Message(Role.ASSISTANT, "Grüße", reasoning="hm", tool_calls=CALLS, name="bot", channel="final")
BATCH = Conversations.of(
    [
        Conversation((Message(Role.USER, "hi"), MESSAGE)),
        Conversation((MESSAGE, Message(Role.TOOL, "漢", tool_call_id="t"), Message(Role.USER, ""))),
        Conversation(()),
    ]
)


def layouts(draw: Draw) -> None:
    plans, stretches = draw.random.randrange(1, 5), draw.random.randrange(8)
    firsts = draw.offsets(plans, draw.random.randrange(14), spoilt=0.1)
    items = np.zeros(int(firsts[-1]) if len(firsts) and 0 <= firsts[-1] < 1000 else 3, dtype=ITEM)
    for name, low, high in (("start", 0, 9), ("size", 0, 4), ("owner", -1, 3), ("message", 0, 1), ("call", 0, 1),
                            ("operations", 0, 1), ("expression", 0, 3), ("kind", 0, 255), ("form", 0, 2)):  # fmt: skip
        column = draw.ints(len(items), low, high, spoilt=0.1)
        items[name] = np.resize(column, len(items)).astype(items[name].dtype)
    items["origin"] = np.resize(draw.ints(len(items), 0, len(Origin) - 1, spoilt=0.05), len(items)) % 256 % len(Origin)
    for name in ("is_ids", "opens"):
        items[name] = np.resize(draw.ints(len(items), 0, 1, spoilt=0), len(items))
    table = ItemTable(firsts, items, np.arange(9, dtype=np.int32), np.frombuffer(b"fixed text", dtype=np.uint8))
    chosen, bases = draw.ints(stretches, 0, plans - 1, spoilt=0.1), draw.ints(stretches, 0, 1)
    rows = draw.random.randrange(4)
    attempt(document_layout.share, table, chosen, bases, draw.offsets(rows, stretches), draw.ints(rows, 0, 2))
    owners, skips = draw.ints(stretches, 0, len(BATCH) - 1), draw.ints(stretches, 0, 2)
    attempt(document_layout.lay_out, table, chosen, owners, bases, skips, BATCH)


RECORD = {
    "messages": RecordField.LIST,
    "id": RecordField.ID,
    "tools": RecordField.TOOLS,
    "source": RecordField.SOURCE,
    "chat_template_kwargs": RecordField.OPTIONS,
    "chosen": RecordField.ANSWER,
    "prompt": RecordField.QUESTION,
    "conversations": RecordField.REPEATED,
    "margin": RecordField.SCORE,
    "chosen_score": RecordField.SCORE + 1,
}
FIELDS = {
    "role": MessageField.ROLE,
    "content": MessageField.CONTENT,
    "reasoning_content": MessageField.REASONING,
    "tool_calls": MessageField.TOOL_CALLS,
    "weight": MessageField.WEIGHT,
    "name": MessageField.NAME,
    "token_ids": MessageField.TOKEN_IDS,
    "logprobs": MessageField.LOGPROBS,
    "from": MessageField.PASSED,
    "function_call": MessageField.ONLY_NULL,
    "images": MessageField.EMPTY,
}
ROLES = {role.name.lower(): role for role in (RoleCode.SYSTEM, RoleCode.USER, RoleCode.ASSISTANT, RoleCode.TOOL)}
NAMES = scan.ShapeNames(RECORD, FIELDS, ROLES)
TURNS = {"instruction": RecordField.TURN, "input": RecordField.TURN + 3, "output": RecordField.TURN + scan.MAX_JOINED}
TURN_NAMES = [
    scan.ShapeNames({**TURNS, "id": RecordField.ID} | more, FIELDS, ROLES)
    for more in ({}, {"system": RecordField.TURN + 20}, {"source": 255}, {"system": 95, "context": 96})
]
"""Two turns, more than there are roles, and fields of turns that are too many."""


def lines(draw: Draw) -> None:
    shape = draw.random.choice(("openai", "alpaca"))
    names = NAMES if shape == "openai" else draw.random.choice(TURN_NAMES)
    data = b"\n".join(mutated(draw.random.randrange(4), draw.random.randrange(1 << 30), shape))
    start, stop = draw.random.choice(
        ((0, len(data)), (draw.random.randint(-1, len(data) + 1), draw.random.randint(-1, len(data) + 1)))
    )
    attempt(scan.is_exact_json, data)
    count = attempt(scan.count_lines, data, start, stop)
    for counted in (None, count, draw.random.randrange(4), *draw.random.sample((-1, 50), 1)):
        attempt(scan.scan_lines, data, start, stop, names, counted)
    array = np.frombuffer(data, dtype=np.uint8).copy()
    attempt(scan.scan_texts, array, draw.offsets(draw.random.randrange(4), len(data)), names)


def attempt(run: Callable[..., Any], *arguments: Any) -> Any:
    """What a wrapper gives; None where it refuses its arguments."""
    with contextlib.suppress(*REFUSED):
        return run(*arguments)
    return None


def templates(seed: int, names: Sequence[str]) -> None:
    """The tries of templates take numbers of their own alone: by builds of real chats."""
    from chatmill.compiler.run import run_build
    from tests.compiler.builds import chats, plain_recipe, write_jsonl

    with tempfile.TemporaryDirectory() as folder:
        records = [record for record in chats(60, seed, words=3) if record["messages"]]
        call = {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": [CALL]}
        for record in records[::3]:
            record["messages"][-1:-1] = [call, {"role": "tool", "content": "flour"}]
        path = write_jsonl(Path(folder, "chats.jsonl"), records)
        for name in names:
            for expand in ("turns", "tree"):
                recipe = plain_recipe(path, template=name, expand=expand, on_error="quarantine", date="2026-01-01")
                run_build(recipe, Path(folder, f"{name}-{expand}"), workers=0)


STEPS: Sequence[Callable[[Draw], None]] = (copies, pieces, points, texts, grown, ends, layouts, lines)


def main() -> None:
    path, rounds, seed = sys.argv[1:]
    library.PATH = Path(path)
    called: set[str] = set()
    plain = library._function

    def noted(name: str, count: int) -> Any:
        called.add(name)
        return plain(name, count)

    library._function = noted  # type: ignore[assignment]
    for number in range(int(rounds)):
        draw = Draw(int(seed) + number)
        for step in STEPS:
            step(draw)
        if number % 1000 == 0:
            every = bundled_names()
            templates(number, every if int(rounds) > 1000 else ("qwen3", "gpt_oss"))
    print(*sorted(called))


if __name__ == "__main__":
    main()

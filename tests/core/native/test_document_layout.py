"""Documents are laid out after their plans, in compiled code as by NumPy."""

from __future__ import annotations

from itertools import accumulate, chain
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chatmill.core.conversation import Conversation, Message, Role, ToolCall
from chatmill.core.conversations import Conversations
from chatmill.core.kinds import REPEATED
from chatmill.core.native.document_layout import ITEM, NOBODY, ItemTable, Layout, Origin, lay_out, share
from tests.oracles import OF_CALLS, laid_out_by_numpy, shared_by_python

FIXED = b"<|user|><|end|>"
CALLS = (ToolCall("find", '{"a": 1}', "id0"), ToolCall("get", "{}", "id1"))
MESSAGE = Message(
    *(Role.ASSISTANT, "Grüße"), reasoning="hm", tool_calls=CALLS, name="bot", tool_call_id="t",
    channel="final", recipient="all", content_type="json",
)  # fmt: skip
BATCH = Conversations.of(
    [
        Conversation((Message(Role.USER, "hi"), MESSAGE), id="a"),
        Conversation(tuple(MESSAGE._replace(content=text) for text in ("Grüße", "zwei", "3")), id="b"),
        Conversation((MESSAGE,), id="c"),
    ]
)
Line = tuple[Any, ...]
WAYS = [lay_out, laid_out_by_numpy]


def table(plans: list[list[Line]]) -> ItemTable:
    """Lines are: is_ids, start, size, kind, owner, origin, message, call, operations, opens."""
    numbers: dict[Line, int] = {}
    items = []
    for is_ids, start, size, kind, owner, *source, opens in chain(*plans):
        origin, *rest = source
        line = (start, size, owner, *rest, 0, kind, origin, is_ids, opens)
        form = (*line[:7], kind & ~REPEATED, *line[8:])
        items.append((*line, numbers.setdefault(form, len(numbers))))
    return ItemTable(
        firsts=np.array([0, *accumulate(map(len, plans))], dtype=np.int64),
        items=np.array(items, dtype=ITEM),
        ids=np.arange(20, dtype=np.int32),
        text=np.frombuffer(FIXED, dtype=np.uint8),
    )


def laid_out(way: Any, plans: list[list[Line]], *numbers: list[int]) -> Layout:
    """Of stretches by number: their plans, their conversations, the messages they count from, and skipped items."""
    found: Layout = way(table(plans), *(np.array(column, dtype=np.int64) for column in numbers), BATCH)
    return found


def text_of(message: Message, line: Line) -> bytes:
    origin = Origin(line[5])
    if origin is Origin.FIXED:
        return FIXED[line[1] : line[1] + line[2]]
    owner = message.tool_calls[line[7]] if origin in OF_CALLS else message
    return str(getattr(owner, origin.name.lower().removeprefix("call_"))).encode()


@st.composite
def lines(draw: st.DrawFn) -> Line:
    common = (draw(st.integers(0, 40)), draw(st.sampled_from([NOBODY, -1, 0, 1, 2])))
    if draw(st.booleans()):
        return (True, draw(st.integers(0, 10)), draw(st.integers(0, 9)), *common, 0, 0, 0, 0, False)
    origin = draw(st.sampled_from(Origin))
    start, size = (draw(st.integers(0, 8)), draw(st.integers(0, 7))) if origin is Origin.FIXED else (0, 0)
    call = draw(st.integers(0, 1))
    return (False, start, size, *common, origin, 0, call, draw(st.integers(0, 2)), draw(st.booleans()))


@settings(max_examples=200)
@given(st.lists(st.lists(lines(), max_size=6), min_size=1, max_size=5), st.data())
def test_rows_are_their_plans(plans: list[list[Line]], data: st.DataObject) -> None:
    places = st.sampled_from([(1, 0), (1, 1), (1, 2), (2, 0)])  # a conversation and a message of it
    stretch = st.integers(0, len(plans) - 1).flatmap(
        lambda plan: st.tuples(st.just(plan), places, st.integers(0, len(plans[plan])))
    )
    chosen = [(plan, *place, skip) for plan, place, skip in data.draw(st.lists(stretch, max_size=8))]
    items = [(line, number, base) for plan, number, base, skip in chosen for line in plans[plan][skip:]]
    for way in WAYS:
        found = laid_out(way, plans, *([row[column] for row in chosen] for column in range(4)))
        assert found.kinds.tolist() == [line[3] for line, _, _ in items]
        assert found.owners.tolist() == [-1 if line[4] == NOBODY else line[4] + base for line, _, base in items]
        assert found.is_text.tolist() == [not line[0] for line, _, _ in items]
        ids = [place for place, (line, _, _) in enumerate(items) if line[0]]
        assert [(found.starts[k], found.sizes[k]) for k in ids] == [items[k][0][1:3] for k in ids]
        assert found.text_items.tolist() == [place for place, (line, _, _) in enumerate(items) if not line[0]]
        texts = [item for item in items if not item[0][0]]
        assert found.opens.tolist() == [line[9] for line, _, _ in texts]
        shown = {
            (int(BATCH.offsets[number]) + base, line[5] - 1)
            for line, number, base in texts
            if line[5] in (Origin.CONTENT, Origin.REASONING) and not line[8]
        }
        assert set(map(tuple, np.argwhere(found.whole).tolist())) == shown
        others = [k for k, (line, _, _) in enumerate(texts) if line[5] >= Origin.TOOL or line[8]]
        assert found.others.tolist() == others
        assert found.conversations.tolist() == [texts[k][1] for k in others]
        assert found.bases.tolist() == [texts[k][2] for k in others]
        assert table(plans).items["origin"][found.lines].tolist() == [texts[k][0][5] for k in others]
        for k, (line, number, base) in enumerate(texts):
            start, size = int(found.text_starts[k]), int(found.text_sizes[k])
            if line[5] < Origin.TOOL:
                text = found.buffers[found.which[k]][start : start + size].tobytes()
                assert text == text_of(BATCH[number].messages[base], line)


@settings(max_examples=300)
@given(st.data())
def test_rows_share_what_the_one_before_has_too(data: st.DataObject) -> None:
    kinds = st.sampled_from([8, 8 | REPEATED, 9])
    some = [(bool(k % 2), k // 2, 1, 8, 0, 0, 0, 0, 0, k > 3) for k in range(6)]
    line = st.builds(lambda one, kind: (*one[:3], kind, *one[4:]), st.sampled_from(some), kinds)
    plans = data.draw(st.lists(st.lists(line, max_size=3), min_size=1, max_size=4))
    stretch = st.tuples(st.integers(0, len(plans) - 1), st.integers(0, 1))
    rows: list[list[tuple[int, int]]] = []
    for _ in range(data.draw(st.integers(0, 5))):
        kept = rows[-1][: data.draw(st.integers(0, len(rows[-1])))] if rows else []
        rows.append([*kept, *data.draw(st.lists(stretch, max_size=4))])
    entries = np.array([entry for row in rows for entry in row], dtype=np.int64).reshape(-1, 2)
    firsts = np.array([0, *accumulate(map(len, rows))], dtype=np.int64)
    owners = np.array(sorted(data.draw(st.integers(0, 1)) for _ in rows), dtype=np.int64)
    given_rows = (table(plans), entries[:, 0], entries[:, 1], firsts, owners)
    for fast, slow in zip(share(*given_rows), shared_by_python(*given_rows), strict=True):
        assert np.array_equal(fast, slow)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("source", "stretch", "conversation", "base"),
    [
        ((Origin.CONTENT, 0, 0), -1, 0, 0),
        ((Origin.CONTENT, 0, 0), 1, 0, 0),
        ((Origin.CONTENT, 0, 0), 0, 3, 0),
        ((Origin.CONTENT, 0, 0), 0, -1, 0),
        ((Origin.CONTENT, 1, 0), 0, 2, 0),
        ((Origin.CONTENT, -1, 0), 0, 1, 0),
        ((Origin.CONTENT, 0, 0), 0, 2, 1),
        ((Origin.CONTENT, 0, 0), 0, 1, -1),
        ((Origin.CONTENT, 1, 0), 0, 1, 2),
        ((Origin.CONTENT, -2, 0), 0, 1, 1),
        ((Origin.CALL_NAME, 0, 0), 0, 0, 0),
        ((Origin.CALL_NAME, 2, 0), 0, 0, 0),
        ((Origin.CALL_NAME, 0, -1), 0, 1, 0),
        ((Origin.CALL_NAME, 0, 2), 0, 1, 0),
    ],
)
def test_what_lies_outside_is_refused(way: Any, source: Line, stretch: int, conversation: int, base: int) -> None:
    """The source is a column, a message and a call."""
    with pytest.raises(IndexError):
        laid_out(way, [[(False, 0, 0, 8, 0, *source, 0, True)]], [stretch], [conversation], [base], [0])

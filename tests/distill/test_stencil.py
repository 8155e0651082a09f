"""Rows cut by a stencil say what the decoder and the official renderer say, whatever stands in its holes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from chatmill.core.native.library import SWITCH, library
from chatmill.core.tokens import offsets_of
from chatmill.distill.bulk import PAUSE, BulkRows
from chatmill.distill.columns import RowTexts
from chatmill.distill.stencil import Filled, Stencil
from chatmill.errors import RecordError
from tests.distill.inputs import chat, real_rows, text
from tests.distill.test_render import SYSTEM, documents, encoded

compiled = pytest.mark.skipif(library() is None, reason="rows are cut only where the compiled scanner is there")
STENCIL = Stencil(
    [b'{"messages": [{"text": "', b'", "role": "user"}, {"text": "', b'"}, {"text":\n"', b'", "role": "assistant"}]}']
)
"""Of rows that `said` reads; the newline shows that literals may hold what bodies may not."""
SMUGGLED = [
    b'","role":"x',
    b'","name":"',
    b'x","reasoning_content":null,"name":"',
    b'"},{"role":"user","content":"',
    b'"}],"other":[{"a":"b',
    b'"}],"id":"',
    b'"}],"tools":[{"a":"',
    b'x\\\\","name":"',
    b'x\\\\"}],"other":[{"a":"b',
    b'x\\\\"},{"role":"user","content":\\"',
    b'x\\\\",',
    b'x\\\\"}],',
    b'x\\\\"}]}',
    b'"}, {"text": "',
    b'\\"}, {\\"text\\": \\"',
    b'\\"}, {"text": "',
    b'"}]}\n{"messages":[{"role":"user","content":"',
    b"\n",
    b"\\",
    b"x\\\\\\",
    b"\\\\",
    b'\\"',
    b'"',
    b"\\u00e9",
    b"\\ud83d\\ude00",
    b"\\ud800",
    b"\\u12",
    b"\\x41",
    b"\\'",
    b"\\/\\b\\f\\n\\r\\t",
    b"\t",
    b"\x00",
    b"\x1f",
    b"\x7f",
    b"\xff",
    b"\xed\xa0\x80",
    b"\xc0\x80",
    b"\xf4\x90\x80\x80",
    b"\xe2\x82",
    "é → 🙂".encode(),
    b"",
]


def said(row: bytes) -> list[str] | None:
    """The texts of a row that is as the stencil was made for; None for any other."""
    try:
        messages = json.loads(row.decode())["messages"]
        fields = [{key: value for key, value in message.items() if key != "text"} for message in messages]
        texts = [message["text"] for message in messages]
        "".join(texts).encode()  # a lone surrogate has no bytes
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    expected = [{"role": "user"}, {}, {"role": "assistant"}]
    return texts if fields == expected else None


def texts_by_row(filled: Filled | None) -> dict[int, list[str]]:
    if filled is None:
        return {}
    assert len(filled.texts) == 3 * len(filled.places)
    return {place: filled.texts[3 * n : 3 * n + 3] for n, place in enumerate(filled.places.tolist())}


PIECES = st.sampled_from(
    [*SMUGGLED, *(bytes([byte]) for byte in b'"\\,:{}[] nu0x'), b"role", b"text", b"name", b"null"]
)
BODIES = st.lists(PIECES, max_size=5).map(b"".join)
GOOD_BODIES = st.text(max_size=20).map(lambda text: json.dumps(text)[1:-1].encode())
WELL_FORMED = st.text(st.characters(blacklist_categories=("Cs",), blacklist_characters="\0"), max_size=12)
"""All but NUL, which the scanner leaves to others."""
ROWS = st.tuples(*[BODIES | GOOD_BODIES] * 3).map(STENCIL.filled)


@compiled
@settings(max_examples=400)
@given(st.lists(ROWS, min_size=1, max_size=6))
def test_what_fits_is_what_the_row_says(rows: list[bytes]) -> None:
    for place, texts in texts_by_row(STENCIL.fit(RowTexts.of(rows))).items():
        assert said(rows[place]) == texts


@compiled
def test_what_is_smuggled_into_a_hole_never_fits_as_something_else() -> None:
    good = STENCIL.filled([b"a", b"b", b"c"])
    rows = [STENCIL.filled([b"a"] * hole + [body] + [b"c"] * (2 - hole)) for body in SMUGGLED for hole in range(3)]
    rows += [STENCIL.filled([body, other, b"c"]) for body in SMUGGLED for other in SMUGGLED]
    fitting = 0
    for row in rows:
        found = texts_by_row(STENCIL.fit(RowTexts.of([good, row, good])))
        assert not found or found[0] == found[2] == ["a", "b", "c"]
        if 1 in found:
            assert found[1] == said(row)
            fitting += 1
    assert fitting > 50
    # All in one batch: a row must not be let through because another one makes up for its quotes.
    single = [row for row in rows if b"\n" not in row[len(STENCIL.literals[0]) :].replace(STENCIL.literals[2], b"")]
    found = texts_by_row(STENCIL.fit(RowTexts.of(single)))
    assert len(found) > 50
    assert all(said(single[place]) == texts for place, texts in found.items())


@compiled
@settings(max_examples=200)
@given(st.lists(st.tuples(*[WELL_FORMED] * 3), min_size=1, max_size=5), st.booleans())
def test_every_well_formed_row_fits(drawn: list[tuple[str, ...]], ascii_only: bool) -> None:
    def spelled(value: str) -> bytes:
        return json.dumps(value, ensure_ascii=ascii_only)[1:-1].encode()

    rows = [STENCIL.filled([spelled(value) for value in texts]) for texts in drawn]
    assert texts_by_row(STENCIL.fit(RowTexts.of(rows))) == {n: list(texts) for n, texts in enumerate(drawn)}


@compiled
def test_rows_that_do_not_have_the_literals_do_not_fit() -> None:
    good = STENCIL.filled([b"a", b"b", b"c"])
    others = [None, b"", good[1:], good[:-1], good + b" ", good.replace(b"user", b"tool"), STENCIL.literals[0]]
    others += [STENCIL.literals[0] + STENCIL.literals[-1], STENCIL.literals[0][:-1] + STENCIL.literals[-1]]
    assert STENCIL.fit(RowTexts.of(others)) is None
    found = texts_by_row(STENCIL.fit(RowTexts.of([good, *others, good])))
    assert found == {0: ["a", "b", "c"], len(others) + 1: ["a", "b", "c"]}
    assert STENCIL.fit(RowTexts.of([])) is None
    hidden = RowTexts.of([good, good]).without(frozenset([1]))
    assert list(texts_by_row(STENCIL.fit(hidden))) == [0]


def test_without_the_compiled_scanner_nothing_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SWITCH, "0")
    assert STENCIL.fit(RowTexts.of([STENCIL.filled([b"a", b"b", b"c"])])) is None


@pytest.fixture
def fitted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many rows of each batch were cut by a stencil."""
    counts: list[int] = []
    fit = Stencil.fit

    def noted(self: Stencil, rows: RowTexts) -> Filled | None:
        filled = fit(self, rows)
        counts.append(0 if filled is None else len(filled.places))
        return filled

    monkeypatch.setattr(Stencil, "fit", noted)
    return counts


def learn(bulk: BulkRows, messages: Any, **options: Any) -> None:
    """Let the renderer see rows of a kind, so that it has their stencil."""
    bulk._forget()
    bulk.render([encoded(messages, **options)] * 2)


def check(bulk: BulkRows, rows: Sequence[bytes]) -> None:
    """Ids, spans and failures of a batch are those of the official renderer."""
    batch = bulk.render(rows)
    failed = dict(batch.failed)
    assert sorted([*batch.rows.tolist(), *failed]) == list(range(len(rows)))
    for place, (ids, spans) in zip(batch.rows.tolist(), documents(batch), strict=True):
        expected = bulk.official.render(rows[place])
        assert ids.tolist() == expected.ids.tolist()
        assert spans.tolist() == expected.spans.tolist()
    for place, error in failed.items():
        with pytest.raises(RecordError) as caught:
            bulk.official.render(rows[place])
        assert caught.value.code == error.code


@compiled
def test_the_real_rows_are_cut(bulk: BulkRows, fitted: list[int]) -> None:
    rows = [row["messages_json"].encode() for row in real_rows()]
    bulk._forget()
    first, second = bulk.render(rows), bulk.render(rows)
    assert fitted == [500], "not in the first batch, which is where the stencil comes from"
    for name in ("ids", "spans", "lengths", "rows"):
        assert np.array_equal(getattr(first, name), getattr(second, name))


@compiled
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(st.lists(st.tuples(*[BODIES | GOOD_BODIES] * 3), min_size=1, max_size=4))
def test_any_bodies_equal_the_official_renderer(bulk: BulkRows, drawn: list[tuple[bytes, ...]]) -> None:
    learn(bulk, [SYSTEM, *chat("@0", "@1", "@2")])
    rows = []
    for bodies in drawn:
        row = encoded([SYSTEM, *chat("@0", "@1", "@2")])
        for number, body in enumerate(bodies):
            row = row.replace(b"@%d" % number, body)
        rows.append(row)
    check(bulk, [encoded([SYSTEM, *chat()]), *rows, encoded([SYSTEM, *chat()])])


@compiled
def test_cut_decoded_rendered_and_failing_rows_in_one_batch(bulk: BulkRows, fitted: list[int]) -> None:
    kinds = [
        encoded([SYSTEM, *chat("one")]),
        encoded([SYSTEM, *chat("two é", '\\ " \n', "🙂")]),
        encoded([SYSTEM, *chat("three é", "→", "🙂")], ensure_ascii=False),
        encoded([SYSTEM, *chat("other spelling")], separators=(",", ":")),
        encoded(chat("no system message")),
        encoded([SYSTEM, *chat(), SYSTEM]),
        encoded([SYSTEM, text("user", "no answer")]),
        encoded([SYSTEM, *chat("lone \ud800")]),
    ]
    learn(bulk, [SYSTEM, *chat()])
    fitted.clear()
    rows = [kinds[(n * n // 7) % len(kinds)] for n in range(120)]
    check(bulk, rows)
    assert fitted == [sum(row in kinds[:3] for row in rows)]
    assert 20 < fitted[0] < 100
    ids = bulk.render(rows).ids
    bulk._known_stencil = None
    assert np.array_equal(bulk.render(rows).ids, ids), "by the decoder alone"


@pytest.mark.parametrize(
    "texts", [("user", "text", "type"), ("text 0 of 3", "text 1 of 3", "text 2 of 3"), ("", "", ""), ("a", "a", "a")]
)
def test_texts_that_are_spelled_elsewhere_in_the_row(bulk: BulkRows, texts: tuple[str, str, str]) -> None:
    """The texts of the row that a stencil is made of may be found where they do not stand."""
    learn(bulk, chat(*texts))
    other_role = encoded(chat(*texts)).replace(b'"role": "user"', b'"role": "tool"')
    check(bulk, [encoded(chat("q", "r", "s")), encoded(chat(*texts)), other_role, encoded(chat("", "x", ""))])
    twice = encoded(chat("1", "2", "3")).replace(b'"text": "2"', b'"text": "2", "text": "22"')
    bulk._forget()
    bulk.render([twice, twice])
    check(bulk, [twice, twice.replace(b'"22"', b'"other"'), twice.replace(b'"2"', b'"other"')])


@compiled
def test_a_stencil_that_few_rows_fit_rests(bulk: BulkRows, fitted: list[int]) -> None:
    learn(bulk, chat())
    fitted.clear()
    check(bulk, [encoded(chat()), *[encoded([*chat(), SYSTEM])] * 3])
    assert fitted == [1]
    for _ in range(PAUSE):
        bulk.render([encoded(chat())])
    assert len(fitted) == 1, "it is not tried"
    bulk.render([encoded(chat())])
    assert len(fitted) == 2


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.string_view(), pa.binary()])
def test_rows_of_an_arrow_column(kind: pa.DataType) -> None:
    values = [b"a", None, b"", "é→".encode(), b"", None, b"last"]
    column = pa.array(values, pa.binary()).cast(kind)
    for part in (column, column[1:6], column[3:], column[7:], column[1:2]):
        rows = RowTexts.from_arrow(part)
        expected = part.cast(pa.large_binary()).to_pylist()
        assert list(rows) == expected
        assert rows[:] == expected
        assert rows.offsets[0] == 0
        assert list(RowTexts.of(expected)) == expected
        assert RowTexts.of(rows) is rows
    rows = RowTexts.from_arrow(column)
    assert rows.offsets.tolist() == offsets_of(np.array([len(value or b"") for value in values])).tolist()
    assert list(rows.without(frozenset([0, 3]))) == [None, None, b"", None, b"", None, b"last"]
    with pytest.raises(IndexError, match="no row 7"):
        rows[7]

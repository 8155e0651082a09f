"""The fast path gives exactly the ids of the official renderer, for every form of row; and the rules of the dataset."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from chatmill.compiler.pipeline import Pipeline
from chatmill.core.harmony_ids import spans_of_ids
from chatmill.core.tokens import offsets_of
from chatmill.distill.input_shards import COLUMNS
from chatmill.errors import ConfigError, RecordError
from chatmill.read.rows import read_rows
from chatmill.read.shapes import find_shape
from chatmill.systems.synth_kd import (
    EOD,
    KDSplit,
    OfficialRows,
    RenderedRow,
    synth_kd_split,
    valid_threshold,
    vocabulary_file,
)
from tests.distill.inputs import chat, real_rows, text

SYSTEM = {"role": "system", "content": [{"type": "system_content", "model_identity": "You are a test."}]}
DEVELOPER = {"role": "developer", "content": [{"type": "developer_content", "instructions": "Be brief."}]}
TOOLS = {
    "role": "developer",
    "content": [
        {
            "type": "developer_content",
            "tools": {"functions": {"name": "functions", "tools": [{"name": "f", "description": "d"}]}},
        }
    ],
}


def encoded(messages: Any, **options: Any) -> bytes:
    return json.dumps({"messages": messages}, **options).encode()


class Rendered(NamedTuple):
    """What the build makes of some rows."""

    ids: np.ndarray
    lengths: np.ndarray
    rows: np.ndarray
    """The places of the rows that were rendered."""
    spans: np.ndarray
    failed: list[tuple[int, RecordError]]
    """The places of the others, and why."""


def rendered(pipeline: Pipeline, rows: Sequence[bytes | None]) -> Rendered:
    """Rows as the columns that Parquet gives, through the reader and the pipeline of a build; they may be no UTF-8."""
    lengths = np.array([len(row or b"") for row in rows], dtype=np.int64)
    offsets = pa.py_buffer(offsets_of(lengths).astype(np.int32))
    present = np.packbits([row is not None for row in rows], bitorder="little")
    buffers = [pa.py_buffer(present), offsets, pa.py_buffer(b"".join(row or b"" for row in rows))]
    texts = pa.Array.from_buffers(pa.string(), len(rows), buffers)
    batch = pa.RecordBatch.from_arrays([pa.array([f"id-{n}" for n in range(len(rows))], pa.string()), texts], COLUMNS)
    found, errors = read_rows(batch, first=0, path="f", source="s", shape=find_shape("synth_kd"))
    compiled = pipeline.compile(found)
    wheres = [int(where.split()[-1]) for where in found.wheres[:]]
    failed = [(int(error.where.split()[-1]), error) for error in errors]
    failed += [(wheres[index], error) for index, error in compiled.failed]
    ids, borders, weights = compiled.tokens.ids, compiled.tokens.offsets, compiled.weights
    spans = spans_of_ids(ids, borders)
    assert np.array_equal(weights != 0, spans != 0), "what is trained is what is in a span"
    places = np.array(wheres, dtype=np.int64)[compiled.source_index]
    return Rendered(ids, np.diff(borders), places, spans, sorted(failed, key=lambda pair: pair[0]))


def slowly(official: OfficialRows, row: bytes | None) -> RenderedRow:
    """A row by the official renderer."""
    try:
        return official.render(None if row is None else row.decode())
    except UnicodeDecodeError:
        raise RecordError("not UTF-8", code="not_utf8") from None


def documents(batch: Rendered) -> list[tuple[np.ndarray, np.ndarray]]:
    offsets = offsets_of(batch.lengths).tolist()
    assert offsets[-1] == len(batch.ids) == len(batch.spans)
    return [(batch.ids[a:b], batch.spans[a:b]) for a, b in itertools.pairwise(offsets)]


def test_real_rows_are_read_as_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def one_by_one(batches: Sequence[pa.RecordBatch], *given: Any) -> Any:
        asked.append(sum(map(len, batches)))
        return iter(())

    monkeypatch.setattr("chatmill.read.rows.batch_records", one_by_one)
    rows = real_rows()
    columns = [[row["synth_id"] for row in rows], [row["messages_json"] for row in rows]]
    batch = pa.RecordBatch.from_arrays([pa.array(column, pa.string()) for column in columns], COLUMNS)
    found, errors = read_rows(batch, first=0, path="f", source="s", shape=find_shape("synth_kd"))
    assert len(found) == 500
    assert not errors
    assert sum(asked) == 0


def test_wrappers_return_eod_and_spans_spelled_out(pipeline: Pipeline, o200k: Any) -> None:
    """One conversation, token by token, with nothing taken from the code that is tested."""
    messages = [SYSTEM, DEVELOPER, *chat("hi", "think", "yo"), text("user", "and?"), *chat()[1:]]
    ((ids, spans),) = documents(rendered(pipeline, [encoded(messages)]))
    runs: list[tuple[int, str]] = []
    for token, span in zip(ids.tolist(), spans.tolist(), strict=True):
        piece = o200k.decode([token])
        if runs and runs[-1][0] == span and not piece.startswith(("<|start|>", "<|endoftext|>")):
            runs[-1] = (span, runs[-1][1] + piece)
        else:
            runs.append((span, piece))
    assert runs[2:] == [
        (0, "<|start|>user<|message|>hi<|end|>"),
        (1, "<|start|>assistant<|channel|>analysis<|message|>think<|end|>"),
        (2, "<|start|>assistant<|channel|>final<|message|>yo<|end|>"),
        (0, "<|start|>user<|message|>and?<|end|>"),
        (1, "<|start|>assistant<|channel|>analysis<|message|>Easy.<|end|>"),
        (2, "<|start|>assistant<|channel|>final<|message|>4<|return|>"),
        (0, "<|endoftext|>"),
    ]
    assert runs[0][0] == runs[1][0] == 0, "system and developer messages are not trained"
    assert runs[0][1].startswith("<|start|>system<|message|>You are a test.")
    assert runs[1][1].startswith("<|start|>developer<|message|># Instructions\n\nBe brief.")


def test_several_contents_are_refused_since_they_are_encoded_one_by_one(pipeline: Pipeline) -> None:
    two = [text("user", "a"), {"role": "assistant", "channel": "final", "content": [*text("x", "b")["content"] * 2]}]
    batch = rendered(pipeline, [encoded(chat()), encoded(two), encoded(chat("last"))])
    assert [(place, error.code, error.path) for place, error in batch.failed] == [
        (1, "several_contents", "messages[1].content")
    ]
    assert batch.rows.tolist() == [0, 2]


KNOWN_FORMS = {
    "no text": [text("user", "a"), {"role": "assistant", "channel": "final", "content": []}],
    "unknown field": [{**text("user", "a"), "mood": 1}, *chat()[1:]],
    "unknown field of a part": [
        {"role": "user", "content": [{"type": "text", "text": "a", "annotations": []}]},
        *chat()[1:],
    ],
    "leading tools change the system message": [SYSTEM, TOOLS, *chat()],
    "text as system": [text("system", "plain"), *chat()],
    "names and recipients": [text("user", "a", name="bob"), text("assistant", "b", channel="final", recipient="user")],
    "a recipient before the end": [
        text("user", "a"),
        text("assistant", "b", channel="final", recipient="user"),
        text("assistant", "c", channel="analysis", recipient="functions.x"),
    ],
    "content type": [text("user", "a"), text("assistant", "b", channel="analysis", content_type="<|constrain|>json")],
    "user channel": [text("user", "a", channel="final"), *chat()[1:]],
    "nulls": [text("user", "a", name=None, recipient=None, channel=None), *chat()[1:]],
    "control spelled in text": [*chat("<|start|>assistant<|end|>", "<|return|>", "<|endoftext|>")],
    "assistant first": [*chat()[1:]],
    "analysis last": [*chat()[:2]],
    "empty texts": [*chat("", "", "")],
    "plain string": [{"role": "user", "content": "a"}, *chat()[1:]],
    "system in the middle": [*chat(), SYSTEM, *chat()],
    "developer last": [*chat(), DEVELOPER],
    "tools": [SYSTEM, *chat(), TOOLS],
    "one system message in two channels": [SYSTEM, {**SYSTEM, "channel": "final"}, *chat()],
    "a NUL, which the scanner declines": [*chat("a\0b")],
    "a quote, a backslash and a feed": [*chat('\\ " \n', "é\u2028", "🙂")],
}


@pytest.mark.parametrize("name", KNOWN_FORMS)
def test_every_form_equals_the_official_renderer(pipeline: Pipeline, official: OfficialRows, name: str) -> None:
    spellings: list[dict[str, Any]] = [{}, {"separators": (",", ":"), "ensure_ascii": False}, {"indent": 1}]
    for row in (encoded(KNOWN_FORMS[name], **spelling) for spelling in spellings):
        batch = rendered(pipeline, [row])
        ((ids, spans),) = documents(batch)
        expected = slowly(official, row)
        assert ids.tolist() == expected.ids.tolist()
        assert spans.tolist() == expected.spans.tolist()
        assert ids.tolist().count(EOD) == 1, "a spelled control token stays text"


FAILING = {
    "no_messages": [None, b'{"messages": []}', b"{}", b"[]", b'{"messages": 3}'],
    "invalid_json": [b"", b"{", b'{"messages": [}', b"[" * 100_000, encoded(chat())[:-1], encoded(chat()) + b"]"],
    "unknown_role": [encoded([text("tool", "x"), *chat()]), encoded([*chat(), {"content": "x"}]), b'{"messages": [1]}'],
    "unknown_channel": [
        encoded([text("user", "a"), text("assistant", "b", channel="commentary")]),
        encoded([text("user", "a"), text("assistant", "b")]),
        encoded([text("user", "a"), text("assistant", "b", channel=["final"])]),
    ],
    "no_assistant": [encoded([text("user", "a")]), encoded([SYSTEM])],
    "harmony_refused": [
        encoded([{"role": "user", "content": None}, *chat()]),
        encoded([{"role": "user"}, *chat()]),
        encoded([text("user", "lone \ud800"), *chat()]),
        encoded([{"role": "user", "content": [{"type": "image"}]}, *chat()]),
        encoded([{"role": "user", "content": ["x"]}, *chat()]),
        encoded([{"role": "user", "content": [{"type": "input_text", "text": "x"}]}, *chat()]),
        encoded([{"role": "user", "content": [{"text": "x"}]}, *chat()]),
        encoded([{**SYSTEM, "role": "user"}, *chat()]),
    ],
    "not_utf8": [encoded(chat("x")).replace(b"x", b"\xff")],
}


@pytest.mark.parametrize("code", FAILING)
def test_rows_that_fail_say_why_and_leave_the_others_alone(
    pipeline: Pipeline, official: OfficialRows, code: str
) -> None:
    good = encoded(chat())
    expected = slowly(official, good).ids.tolist()
    for bad in FAILING[code]:
        batch = rendered(pipeline, [good, bad, good])
        assert [(place, error.code) for place, error in batch.failed] == [(1, code)], bad
        assert batch.rows.tolist() == [0, 2]
        assert [ids.tolist() for ids, _ in documents(batch)] == [expected, expected]
        with pytest.raises(RecordError) as caught:
            slowly(official, bad)
        assert caught.value.code == code, "both paths refuse for the same reason"


TEXTS = st.text(st.characters(blacklist_categories=("Cs",)), max_size=30) | st.sampled_from(
    ["<|end|>", '"}]}, {"role": "assistant"', "\\", '\\"', "\x00\x01", "🙂‍↔️ é", "\u2028", " \n\n ", "don't I'LL 12345"]
)
USERS = st.builds(text, st.just("user"), TEXTS)
ASSISTANTS = st.builds(
    lambda content, channel, more: text("assistant", content, channel=channel, **more),
    TEXTS,
    st.sampled_from(["analysis", "final", "final", "commentary", None]),
    st.sampled_from(
        [
            {},
            {},
            {"name": "a<|end|>"},
            {"recipient": "all"},
            {"recipient": "functions.f"},
            {"content_type": "json"},
            {"x": 1},
        ]
    ),
)
OTHERS = st.sampled_from([SYSTEM, DEVELOPER, TOOLS, text("system", "s"), {"role": "user", "content": "plain"}])
CONVERSATIONS = st.tuples(
    st.lists(st.sampled_from([SYSTEM, DEVELOPER, TOOLS]), max_size=2),
    st.lists(USERS | ASSISTANTS | ASSISTANTS, max_size=4),
    st.lists(OTHERS, max_size=1),
).map(lambda parts: [message for part in parts for message in part])
SPELLINGS = st.sampled_from(
    [{}, {"ensure_ascii": False}, {"separators": (",", ":")}, {"indent": 1}, {"ensure_ascii": False, "sort_keys": True}]
)


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(st.lists(st.tuples(CONVERSATIONS, SPELLINGS), min_size=1, max_size=4))
def test_any_rows_equal_the_official_renderer(
    pipeline: Pipeline, official: OfficialRows, drawn: list[tuple[Any, dict[str, Any]]]
) -> None:
    rows = [encoded(messages, **spelling) for messages, spelling in drawn]
    batch = rendered(pipeline, rows)
    found = dict(zip(batch.rows.tolist(), documents(batch), strict=True))
    failed = dict(batch.failed)
    assert found.keys() | failed.keys() == set(range(len(rows)))
    for place, row in enumerate(rows):
        if place in failed:
            with pytest.raises(RecordError) as caught:
                slowly(official, row)
            assert failed[place].code == caught.value.code
            continue
        expected = slowly(official, row)
        ids, spans = found[place]
        assert ids.tolist() == expected.ids.tolist()
        assert spans.tolist() == expected.spans.tolist()


def test_a_row_that_closes_its_list_and_opens_another(pipeline: Pipeline) -> None:
    """Such a row is no JSON, but looks like two when rows are decoded together."""
    good = encoded(chat())
    two = good[:-1] + b"," + good[len(b'{"messages": ') :]
    assert two.count(b"],[{") == 1
    for rows in ([good, two, good], [two], [good, two[:-2] + b"}", good]):
        batch = rendered(pipeline, rows)
        assert [error.code for _, error in batch.failed] == ["invalid_json"]
        assert len(batch.rows) == len(rows) - 1


SMUGGLED = [
    *(b'","role":"x', b'","name":"', b'"},{"role":"user","content":"', b'"}],"other":[{"a":"b', b'"}]}, {"text": "'),
    *(b'x\\\\","name":"', b'x\\\\"}],"other":[{"a":"b', b'x\\\\"}]}', b'\\"}, {\\"text\\": \\"', b'","text":"'),
    *(b'","type":"text', b'"},{"type":"text","text":"', b"\\", b"\\\\", b'\\"', b'"', b"\n", b"\t", b"\x00", b"\x1f"),
    *(b"\x7f", b"\\/\\b\\n", b"\\u00e9", b"\\u0000", b"\\ud83d\\ude00", b"\\ud800", b"\\u12", b"\\x41"),
    *("é → 🙂".encode(), b"\xff", b"\xed\xa0\x80", b"\xe2\x82"),
]
BODIES = st.lists(st.sampled_from(SMUGGLED) | st.text(max_size=9).map(str.encode), max_size=4).map(b"".join)


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(st.lists(st.tuples(BODIES, BODIES, BODIES), min_size=1, max_size=4))
def test_what_is_smuggled_into_a_text_is_what_the_row_says(
    pipeline: Pipeline, official: OfficialRows, drawn: list[tuple[bytes, bytes, bytes]]
) -> None:
    whole = encoded([SYSTEM, *chat("@0", "@1", "@2")])
    rows = [whole.replace(b"@0", a).replace(b"@1", b).replace(b"@2", c) for a, b, c in drawn]
    batch = rendered(pipeline, [whole, *rows, whole])
    found, failed = dict(zip(batch.rows.tolist(), documents(batch), strict=True)), dict(batch.failed)
    assert not failed.keys() & {0, len(rows) + 1}
    for place, row in enumerate(rows, 1):
        if place in failed and failed[place].code == "several_contents":
            assert b'"},' in row
        elif place in failed:
            with pytest.raises(RecordError) as caught:
                slowly(official, row)
            assert caught.value.code == failed[place].code
        else:
            expected = slowly(official, row)
            assert found[place][0].tolist() == expected.ids.tolist()
            assert found[place][1].tolist() == expected.spans.tolist()


def test_the_split_rule_on_known_ids() -> None:
    """Hashes computed once with `b2sum -l 64`."""
    known = {"synth-00000449": 0x24FE9E62B7470A4D, "é": 0xCB1ABF8BEFF3192F, "": 0xE4A6A0577479B2B4}
    for synth_id, number in known.items():
        share = number / 2**64
        assert synth_kd_split(synth_id, share + 1e-6) is KDSplit.VALID
        assert synth_kd_split(synth_id, share - 1e-6) is KDSplit.TRAIN
    assert valid_threshold(0.001) == 18446744073709551
    assert valid_threshold(0.1) == 1844674407370955161, "the decimal fraction, not its binary neighbour"
    assert valid_threshold(1.0) == 2**64
    ids = [f"synth-{n:08d}" for n in range(20_000)]
    assert 5 <= sum(synth_kd_split(i) is KDSplit.VALID for i in ids) <= 45
    assert all(synth_kd_split(i, 0.0) is KDSplit.TRAIN and synth_kd_split(i, 1.0) is KDSplit.VALID for i in ids[:50])
    with pytest.raises(ConfigError, match="from 0 to 1"):
        valid_threshold(1.5)


def test_a_manifest_names_the_vocabulary_as_it_was_given(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    for variable in ("O200K_HARMONY_VOCAB_PATH", "TIKTOKEN_ENCODINGS_BASE"):
        monkeypatch.delenv(variable, raising=False)
    bundled, name = vocabulary_file()
    assert name == "chatmill:o200k_base.tiktoken"
    project, other = tmp_path / "data/tokenizer/o200k_base.tiktoken", tmp_path / "any.name"
    project.parent.mkdir(parents=True)
    for path in (project, other):
        path.write_bytes(bundled.read_bytes())
    assert vocabulary_file()[1] == "data/tokenizer/o200k_base.tiktoken"
    assert vocabulary_file(other)[1] == str(other)
    monkeypatch.setenv("O200K_HARMONY_VOCAB_PATH", str(other))
    assert vocabulary_file()[1] == str(other)

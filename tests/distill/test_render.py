"""The fast path gives exactly the ids of the official renderer, for every form of row; and the rules of the dataset."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from chatmill.compiler.chunk_job import pipeline_of, recipe_json
from chatmill.compiler.pipeline import Pipeline
from chatmill.core.harmony_ids import EOD, spans_of_ids
from chatmill.core.tokens import offsets_of
from chatmill.distill.input_shards import COLUMNS, read_input
from chatmill.distill.manifest import KDConfig
from chatmill.distill.run import kd_recipe
from chatmill.errors import RecordError
from chatmill.read.rows import read_rows
from chatmill.read.shapes import find_shape
from chatmill.systems.synth_kd import KDSplit, OfficialRows, synth_kd_split, valid_threshold, vocabulary_file
from tests.distill.inputs import REAL, chat, real_rows, text

SYSTEM = {"role": "system", "content": [{"type": "system_content", "model_identity": "You are a test."}]}
DEVELOPER = {"role": "developer", "content": [{"type": "developer_content", "instructions": "Be brief."}]}
FUNCTIONS = {"functions": {"name": "functions", "tools": [{"name": "f", "description": "d"}]}}
TOOLS = {"role": "developer", "content": [{"type": "developer_content", "tools": FUNCTIONS}]}
SPELLINGS: list[dict[str, Any]] = [
    *[{}, {"ensure_ascii": False}, {"separators": (",", ":")}, {"indent": 1}],
    *[{"separators": (",", ":"), "ensure_ascii": False}, {"ensure_ascii": False, "sort_keys": True}],
]

Made = tuple[list[int], list[int]] | str
"""What a row becomes: its ids with the span of each, or the code of what is wrong with it."""


@pytest.fixture(scope="module")
def pipeline() -> Pipeline:
    """What builds render rows with."""
    return pipeline_of(recipe_json(kd_recipe(KDConfig(), read_input(REAL))))


@pytest.fixture(scope="module")
def official() -> OfficialRows:
    """The reference: rows rendered by openai-harmony."""
    return OfficialRows(vocabulary_file()[0])


def encoded(messages: Any, **options: Any) -> bytes:
    return json.dumps({"messages": messages}, **options).encode()


def columns(rows: Sequence[bytes | None]) -> pa.RecordBatch:
    """Rows as the columns that Parquet gives; they may be no UTF-8."""
    lengths = np.array([len(row or b"") for row in rows], dtype=np.int64)
    offsets = pa.py_buffer(offsets_of(lengths).astype(np.int32))
    present = pa.py_buffer(np.packbits([row is not None for row in rows], bitorder="little"))
    buffers = [present, offsets, pa.py_buffer(b"".join(row or b"" for row in rows))]
    texts = pa.Array.from_buffers(pa.string(), len(rows), buffers)
    return pa.RecordBatch.from_arrays([pa.array([f"id-{n}" for n in range(len(rows))], pa.string()), texts], COLUMNS)


def read(rows: Sequence[bytes | None]) -> Any:
    return read_rows(columns(rows), first=0, path="f", source="s", shape=find_shape("synth_kd"))


def rendered(pipeline: Pipeline, rows: Sequence[bytes | None]) -> list[Made]:
    """What the build makes of some rows that it reads together."""
    found, errors = read(rows)
    compiled = pipeline.compile(found)
    ids, borders = compiled.tokens.ids, compiled.tokens.offsets
    spans = spans_of_ids(ids, borders)
    assert np.array_equal(compiled.weights != 0, spans != 0), "what is trained is what is in a span"
    documents = [(ids[a:b].tolist(), spans[a:b].tolist()) for a, b in itertools.pairwise(borders.tolist())]
    wheres = [int(where.split()[-1]) for where in found.wheres[:]]
    made: list[tuple[int, Made]] = [(int(error.where.split()[-1]), error.code) for error in errors]
    made += [(wheres[index], error.code) for index, error in compiled.failed]
    made += [(wheres[index], one) for index, one in zip(compiled.source_index.tolist(), documents, strict=True)]
    assert sorted(place for place, _ in made) == list(range(len(rows)))
    return [one for _, one in sorted(made, key=lambda pair: pair[0])]


def officially(official: OfficialRows, row: bytes | None) -> Made:
    try:
        ids, spans = official.render(None if row is None else row.decode())
    except UnicodeDecodeError:
        return "not_utf8"
    except RecordError as error:
        return error.code
    return ids.tolist(), spans.tolist()


def test_real_rows_are_read_as_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def one_by_one(batches: Sequence[pa.RecordBatch], *given: Any) -> Any:
        asked.append(sum(map(len, batches)))
        return iter(())

    monkeypatch.setattr("chatmill.read.rows.batch_records", one_by_one)
    found, errors = read([row["messages_json"].encode() for row in real_rows()])
    assert (len(found), [*errors], sum(asked)) == (500, [], 0)


def test_wrappers_return_eod_and_spans_spelled_out(pipeline: Pipeline, o200k: Any) -> None:
    """One conversation, token by token, with nothing taken from the code that is tested."""
    messages = [SYSTEM, DEVELOPER, *chat("hi", "think", "yo"), text("user", "and?"), *chat()[1:]]
    ((ids, spans),) = rendered(pipeline, [encoded(messages)])
    runs: list[tuple[Any, str]] = []
    for token, span in zip(ids, spans, strict=True):
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


KNOWN_FORMS = {
    "no text": [text("user", "a"), {"role": "assistant", "channel": "final", "content": []}],
    "unknown field": [{**text("user", "a"), "mood": 1}, *chat()[1:]],
    "unknown field of a part": [{"role": "user", "content": [{"type": "text", "text": "a", "more": []}]}, *chat()[1:]],
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
    for row in (encoded(KNOWN_FORMS[name], **spelling) for spelling in SPELLINGS):
        ((ids, spans),) = rendered(pipeline, [row])
        assert (ids, spans) == officially(official, row)
        assert ids.count(EOD) == 1, "a spelled control token stays text"


GOOD = encoded(chat())
TWO_LISTS = GOOD[:-1] + b"," + GOOD[len(b'{"messages": ') :]
"""No JSON: closes its list and opens another; looks like two rows when rows are decoded together."""
FAILING: dict[str, list[Any]] = {
    "no_messages": [None, b'{"messages": []}', b"{}", b"[]", b'{"messages": 3}'],
    "invalid_json": [
        *[b"", b"{", b'{"messages": [}', b"[" * 100_000, GOOD[:-1], GOOD + b"]", TWO_LISTS, TWO_LISTS[:-2] + b"}"],
    ],
    "unknown_role": [encoded([text("tool", "x"), *chat()]), encoded([*chat(), {"content": "x"}]), b'{"messages": [1]}'],
    "unknown_channel": [
        encoded([text("user", "a"), text("assistant", "b", **channel)])
        for channel in ({}, {"channel": "commentary"}, {"channel": ["final"]})
    ],
    "no_assistant": [encoded([text("user", "a")]), encoded([SYSTEM])],
    "harmony_refused": [
        *[encoded([text("user", "lone \ud800"), *chat()]), encoded([{"role": "user"}, *chat()])],
        encoded([{**SYSTEM, "role": "user"}, *chat()]),
        *(
            encoded([{"role": "user", "content": content}, *chat()])
            for content in (None, [{"type": "image"}], ["x"], [{"type": "input_text", "text": "x"}], [{"text": "x"}])
        ),
    ],
    "not_utf8": [encoded(chat("x")).replace(b"x", b"\xff")],
    "several_contents": [encoded([text("user", "a"), {**chat()[1], "content": text("x", "b")["content"] * 2}])],
}


@pytest.mark.parametrize("code", FAILING)
def test_rows_that_fail_say_why_and_leave_the_others_alone(
    pipeline: Pipeline, official: OfficialRows, code: str
) -> None:
    good = officially(official, GOOD)
    for bad in FAILING[code]:
        assert rendered(pipeline, [GOOD, bad, GOOD]) == [good, code, good]
        assert rendered(pipeline, [bad]) == [code]
        if code != "several_contents":  # the official renderer encodes them one by one
            assert officially(official, bad) == code, "both paths refuse for the same reason"


TEXTS = st.text(st.characters(blacklist_categories=("Cs",)), max_size=30) | st.sampled_from(
    ["<|end|>", '"}]}, {"role": "assistant"', "\\", '\\"', "\x00\x01", "🙂‍↔️ é", "\u2028", " \n\n ", "don't I'LL 12345"]
)
FIELDS: list[dict[str, Any]] = [
    *[{}, {}, {"name": "a<|end|>"}, {"recipient": "all"}, {"recipient": "functions.f"}, {"content_type": "json"}],
    {"x": 1},
]
CHANNELS = ["analysis", "final", "final", "commentary", None]
USERS = st.builds(text, st.just("user"), TEXTS)
ASSISTANTS = st.builds(
    lambda content, channel, more: text("assistant", content, channel=channel, **more),
    *(TEXTS, st.sampled_from(CHANNELS), st.sampled_from(FIELDS)),
)
OTHERS = st.sampled_from([SYSTEM, DEVELOPER, TOOLS, text("system", "s"), {"role": "user", "content": "plain"}])
CONVERSATIONS = st.tuples(
    st.lists(st.sampled_from([SYSTEM, DEVELOPER, TOOLS]), max_size=2),
    st.lists(USERS | ASSISTANTS | ASSISTANTS, max_size=4),
    st.lists(OTHERS, max_size=1),
).map(lambda parts: [message for part in parts for message in part])


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(st.lists(st.tuples(CONVERSATIONS, st.sampled_from(SPELLINGS)), min_size=1, max_size=4))
def test_any_rows_equal_the_official_renderer(
    pipeline: Pipeline, official: OfficialRows, drawn: list[tuple[Any, dict[str, Any]]]
) -> None:
    rows = [encoded(messages, **spelling) for messages, spelling in drawn]
    assert rendered(pipeline, rows) == [officially(official, row) for row in rows]


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
    rows = [whole, *(whole.replace(b"@0", a).replace(b"@1", b).replace(b"@2", c) for a, b, c in drawn), whole]
    for row, made in zip(rows, rendered(pipeline, rows), strict=True):
        if made == "several_contents":
            assert b'"},' in row
        else:
            assert made == officially(official, row)


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

"""Rows of query, reasoning and answer as Harmony shards: byte for byte the published form, or a clear error."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chatmill import write_synth_harmony
from chatmill.distill.input_shards import GLOB
from chatmill.distill.synth_harmony import COLUMNS, DEFAULT_OPENING, HarmonyRows, opening_messages
from chatmill.errors import ConfigError, DataError, RecordError, UnknownNameError
from tests.cli.run import here
from tests.compiler.builds import write_jsonl
from tests.distill.inputs import REAL, real_rows

ROW = {"query": "2 + 2?", "reasoning": "Easy.", "answer": "4", "synth_id": "a-1", "language": "en", "exercise": "math"}


def messages_of(row: dict[str, str]) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = json.loads(row["messages_json"])["messages"]
    return messages


def shard_rows(out: Path) -> list[dict[str, str]]:
    return [row for path in sorted(out.glob(GLOB)) for row in pq.read_table(path).to_pylist()]


def test_the_real_rows_come_out_as_published(tmp_path: Path) -> None:
    """All 500 taken apart and written again, from Parquet and from JSONL: every column equal, and the schema."""
    rows: list[dict[str, Any]] = []
    for row in real_rows():
        query, reasoning, answer = (message["content"][0]["text"] for message in messages_of(row)[2:])
        texts = {"query": query, "synthetic_reasoning": reasoning, "synthetic_answer": answer}
        rows.append({"synth_id": row["synth_id"], **texts, "words": 12})
    system, developer = (message["content"][0] for message in messages_of(real_rows()[0])[:2])
    opening = {"system": {**system}, "developer": developer["instructions"]}
    del opening["system"]["type"]
    folder, out = tmp_path / "in", tmp_path / "out"
    folder.mkdir()
    pq.write_table(pa.Table.from_pylist(rows[:250]), folder / "a.parquet", row_group_size=37)
    write_jsonl(folder / "b.jsonl.gz", rows[250:])
    (folder / "notes.txt").write_text("not read")
    result = write_synth_harmony(folder, out, opening=opening)
    assert shard_rows(out) == real_rows()
    manifest, published = (json.loads((path / "manifest.json").read_text()) for path in (out, REAL))
    assert manifest == result.manifest
    for name in ("schema_version", "columns", "glob", "total_rows"):
        assert manifest[name] == published[name]
    assert [(s["path"], s["rows"]) for s in manifest["shards"]] == [(s["path"], s["rows"]) for s in published["shards"]]
    for shard in manifest["shards"]:
        data = (out / shard["path"]).read_bytes()
        assert (shard["bytes"], shard["sha256"]) == (len(data), hashlib.sha256(data).hexdigest())
        assert pq.read_schema(out / shard["path"]).equals(pq.read_schema(REAL / shard["path"]), check_metadata=True)
    assert [Path(entry["path"]).name for entry in manifest["inputs"]] == ["a.parquet", "b.jsonl.gz"]
    assert {path.name for path in out.iterdir()} == {"manifest.json", *(shard["path"] for shard in manifest["shards"])}


@settings(max_examples=100)
@given(*[st.text(st.characters(exclude_categories=["Cs"]), min_size=1)] * 3)
def test_any_text_is_spelled_as_json_does(query: str, reasoning: str, answer: str) -> None:
    rows = HarmonyRows(opening=opening_messages(DEFAULT_OPENING), columns=COLUMNS)
    written = rows.row({"query": query, "reasoning": reasoning, "answer": answer, "id": 7})[0]
    decoded = json.loads(written)
    assert json.dumps(decoded, ensure_ascii=False) == written
    texts = [message["content"][0].get("text") for message in decoded["messages"]]
    assert texts == [None, None, query, reasoning, answer]
    assert [message.get("channel") for message in decoded["messages"]] == [None, None, None, "analysis", "final"]


def test_other_columns_and_another_opening(tmp_path: Path) -> None:
    rows = [
        {"id": 7, "q": "why?", "think": "hm", "response": "so", "model": "m1"},
        {"id": "8", "q": "who?", "think": "", "response": "me", "model": None},
    ]
    columns = {"query": "q", "reasoning": "think", "answer": "response"}
    system = {"model_identity": "You are Mill.", "reasoning_effort": "Low"}
    source = write_jsonl(tmp_path / "rows.jsonl", rows)
    options: dict[str, Any] = {"columns": columns, "allow_no_reasoning": True, "opening": {"system": system}}
    first, second = shard_rows(write_synth_harmony(source, tmp_path / "out", **options).directory)
    assert [json.loads(row["metadata_json"]) for row in (first, second)] == [{"synth_id": "7"}, {"synth_id": "8"}]
    messages = messages_of(second)
    assert [message["role"] for message in messages] == ["system", "user", "assistant"]
    assert messages[0]["content"] == [{"type": "system_content", **system}]
    assert messages[2]["channel"] == "final"


BAD: list[tuple[Any, str, str]] = [
    ({**ROW, "answer": None}, "no_answer", r"'answer' is null"),
    ({**ROW, "query": ""}, "no_query", r"'query' is empty"),
    ({**ROW, "reasoning": ""}, "no_reasoning", r"allow_no_reasoning=true"),
    ({k: v for k, v in ROW.items() if k != "reasoning"}, "no_reasoning", r"no 'reasoning' or 'synthetic_reasoning'"),
    ({k: v for k, v in ROW.items() if k != "synth_id"}, "no_synth_id", r"no 'synth_id' or 'id'; it has query"),
    ({**ROW, "synth_id": ""}, "no_synth_id", r"'synth_id' is empty"),
    ({**ROW, "synth_id": ["a"]}, "no_synth_id", r"'synth_id' is a list"),
    ({**ROW, "answer": 4}, "field_type", r"'answer' must be a string, found a number"),
    ({**ROW, "language": ["en"]}, "field_type", r"'language' must be a string, found a list"),
    ({**ROW, "query": "a\ud800"}, "lone_surrogate", r"lone surrogate U\+D800"),
    (["a", "list"], "not_an_object", r"found a list"),
    ("{broken", "invalid_json", "not JSON"),
]


def test_bad_rows_in_quarantine(tmp_path: Path) -> None:
    rows = [row if isinstance(row, str) else json.dumps(row) for row, _, _ in BAD]
    (tmp_path / "rows.jsonl").write_text("\n".join([*rows, json.dumps(ROW), "\n"]))
    result = write_synth_harmony(tmp_path / "rows.jsonl", tmp_path / "out", on_error="quarantine")
    assert (result.rows, result.rejected, len(shard_rows(tmp_path / "out"))) == (1, len(BAD), 1)
    lines = [json.loads(line) for line in (tmp_path / "out" / "rejected.jsonl").read_bytes().splitlines()]
    for place, (line, (_, code, message)) in enumerate(zip(lines, BAD, strict=True), 1):
        assert (line["reason"], line["where"].rsplit(":", 1)[1]) == (code, str(place))
        assert line["id"] == ("" if code in ("no_synth_id", "not_an_object", "invalid_json") else "a-1")
        assert re.search(message, line["message"]), line
    assert result.manifest["rejected"]["no_synth_id"] == 3


def test_all_missing_columns_are_named_at_once_with_the_likely_ones(tmp_path: Path) -> None:
    (tmp_path / "qa.csv").write_text("question,answer\n2 + 2?,4\n3 + 3?,6\n")
    with pytest.raises(DataError, match="no 'query', no 'reasoning' or 'synthetic_reasoning', no 'synth_id'") as caught:
        write_synth_harmony(tmp_path / "qa.csv", tmp_path / "out")
    ways = "it has question, answer. Use --column query=question --column reasoning=YOURS --column synth_id=YOURS"
    assert ways in str(caught.value)
    assert "number_rows=true (--set)" in str(caught.value)
    assert "allow_no_reasoning=true (--set)" in str(caught.value)
    columns = {"query": "question"}
    numbered = write_synth_harmony(
        tmp_path / "qa.csv", tmp_path / "out", columns=columns, allow_no_reasoning=True, number_rows=True
    )
    ids = [row["synth_id"] for row in shard_rows(numbered.directory)]
    assert ids == [f"{tmp_path}/qa.csv:row {number}" for number in (1, 2)]


@pytest.mark.parametrize(
    ("error", "match", "wrong"),
    [
        (DataError, r"none of the 3 rows could be used; the first: .*--column synth_id=YOURS", {"inputs": "bad"}),
        (DataError, "there is no row", {"inputs": "empty"}),
        (ConfigError, "holds no file", {"inputs": "folder"}),
        (ConfigError, "is there already", {"out": "folder"}),
        (UnknownNameError, "unknown column 'anwser'", {"columns": {"anwser": "x"}}),
        (UnknownNameError, "unknown field of a system message 'model'", {"opening": {"system": {"model": "x"}}}),
        (UnknownNameError, "unknown message of the opening 'sytem'", {"opening": {"sytem": {}}}),
        (ConfigError, "the system message cannot be used", {"opening": {"system": {"reasoning_effort": "huge"}}}),
        (UnknownNameError, "unknown on_error 'skip'", {"on_error": "skip"}),
        (ConfigError, "shards is 0", {"shards": 0}),
    ],
)
def test_what_does_not_fit_is_refused_and_leaves_nothing(
    tmp_path: Path, error: type[Exception], match: str, wrong: dict[str, Any]
) -> None:
    for name, rows in (("good", [ROW]), ("bad", [{"prompt": "x"}] * 3), ("empty", [])):
        write_jsonl(tmp_path / f"{name}.jsonl", rows)
    (tmp_path / "folder").mkdir()
    before = sorted(tmp_path.iterdir())
    source, out = wrong.pop("inputs", "good"), wrong.pop("out", "out")
    place = tmp_path / (source if source == "folder" else f"{source}.jsonl")
    with pytest.raises(error, match=match):
        write_synth_harmony(place, tmp_path / out, **{"on_error": "quarantine", **wrong})
    assert sorted(tmp_path.iterdir()) == before


def test_workers_change_no_byte_and_a_run_that_fails_leaves_nothing(tmp_path: Path) -> None:
    """Three files of rows, with blank lines and a bad row in the last."""
    rows = [{**ROW, "synth_id": f"n-{n}", "answer": f"{n} " * (n % 7 + 1)} for n in range(150)]
    rows[140]["answer"] = ""
    lines = [json.dumps(row) + "\n" * (1 + (n % 5 == 0 and n != 140)) for n, row in enumerate(rows)]
    source = [tmp_path / f"{number}.jsonl" for number in range(3)]
    for number, path in enumerate(source):
        path.write_text("".join(lines[number * 50 : number * 50 + 50]))
    found = []
    for workers in (0, 2):
        out = tmp_path / f"out{workers}"
        made = write_synth_harmony(source, out, workers=workers, on_error="quarantine", shards=3)
        assert [shard["rows"] for shard in made.manifest["shards"]] == [50, 50, 49]
        found.append({path.name: path.read_bytes() for path in out.iterdir()})
    assert found[0] == found[1]
    names = [f"n-{n}" for n in range(150) if n != 140]
    assert [row["synth_id"] for row in shard_rows(tmp_path / "out0")] == names, "blank lines are no rows"
    before = sorted(tmp_path.iterdir())
    with pytest.raises(RecordError, match="'answer' is empty") as caught:
        write_synth_harmony(source, tmp_path / "out", workers=0, shards=3)
    assert (caught.value.code, caught.value.record_id) == ("no_answer", "n-140")
    assert caught.value.where == f"{source[2]}:49"
    assert sorted(tmp_path.iterdir()) == before


def test_the_command(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "rows.jsonl", [ROW, {**ROW, "answer": ""}])
    (tmp_path / "opening.yaml").write_text("system: {model_identity: You are Mill.}\ndeveloper: Be brief.\n")
    given = ["synth-harmony", source, "--on-error", "quarantine"]
    done = here(*given, "--out", tmp_path / "out", "--set", f"opening={tmp_path / 'opening.yaml'}")
    assert done.returncode == 0, done.stderr
    assert "1 conversations" in done.stdout
    assert "rejected: 1 rows, no_answer" in done.stdout
    (row,) = shard_rows(tmp_path / "out")
    system, developer = (message["content"][0] for message in messages_of(row)[:2])
    assert system == {"type": "system_content", "model_identity": "You are Mill."}
    assert developer["instructions"] == "Be brief."
    assert json.loads(here(*given, "-o", tmp_path / "json", "--json").stdout)["total_rows"] == 1
    assert here(*given, "-o", tmp_path / "none", "--column", "answer").returncode == 2
    assert not (tmp_path / "none").exists()

"""Rows of query, reasoning and answer as Harmony shards: byte for byte the published form, or a clear error."""

from __future__ import annotations

import gzip
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

from chatmill.distill import synth_harmony
from chatmill.distill.synth_harmony import COLUMNS, DEFAULT_OPENING, HarmonyRows, opening_messages, write_synth_harmony
from chatmill.errors import ConfigError, DataError, RecordError, UnknownNameError
from tests.cli.run import here
from tests.compiler.builds import write_jsonl
from tests.conftest import DATA
from tests.distill.inputs import real_rows

REAL = sorted((DATA / "synth_harmony").glob("*.parquet"))
ROW = {"query": "2 + 2?", "reasoning": "Easy.", "answer": "4", "synth_id": "a-1", "language": "en", "exercise": "math"}


def taken_apart(row: dict[str, str]) -> dict[str, str]:
    """The SYNTH row that a real conversation was made from."""
    texts = [message["content"][0].get("text") for message in json.loads(row["messages_json"])["messages"]]
    return {
        "synth_id": row["synth_id"],
        "query": texts[2],
        "synthetic_reasoning": texts[3],
        "synthetic_answer": texts[4],
        "words": 12,  # type: ignore[dict-item]
    }


def real_opening() -> dict[str, Any]:
    system, developer = json.loads(real_rows()[0]["messages_json"])["messages"][:2]
    fields = {name: value for name, value in system["content"][0].items() if name != "type"}
    return {"system": fields, "developer": developer["content"][0]["instructions"]}


def shard_rows(out: Path) -> list[dict[str, str]]:
    return [row for path in sorted(out.glob(synth_harmony.GLOB)) for row in pq.read_table(path).to_pylist()]


def test_the_real_rows_come_out_as_published(tmp_path: Path) -> None:
    """All 500 taken apart and written again, from Parquet and from JSONL: every column equal, and the schema."""
    rows = [taken_apart(row) for row in real_rows()]
    assert len(rows) == 500
    folder = tmp_path / "in"
    folder.mkdir()
    pq.write_table(pa.Table.from_pylist(rows[:250]), folder / "a.parquet", row_group_size=37)
    (folder / "b.jsonl.gz").write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows[250:]).encode()))
    (folder / "notes.txt").write_text("not read")
    result = write_synth_harmony(folder, tmp_path / "out", opening=real_opening())
    assert shard_rows(tmp_path / "out") == real_rows()
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest == result.manifest
    published = json.loads((DATA / "synth_harmony" / "manifest.json").read_text())
    same = ("schema_version", "columns", "glob", "total_rows")
    assert {name: manifest[name] for name in same} == {name: published[name] for name in same}
    assert [(s["path"], s["rows"]) for s in manifest["shards"]] == [(s["path"], s["rows"]) for s in published["shards"]]
    for shard, path in zip(manifest["shards"], REAL, strict=True):
        data = (tmp_path / "out" / shard["path"]).read_bytes()
        assert (shard["bytes"], shard["sha256"]) == (len(data), hashlib.sha256(data).hexdigest())
        assert pq.read_schema(tmp_path / "out" / shard["path"]).equals(pq.read_schema(path), check_metadata=True)
    assert [Path(entry["path"]).name for entry in manifest["inputs"]] == ["a.parquet", "b.jsonl.gz"]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "manifest.json",
        "synth_harmony_shard_00.parquet",
        "synth_harmony_shard_01.parquet",
    ]


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
    write_jsonl(tmp_path / "rows.jsonl", rows)
    columns = {"query": "q", "reasoning": "think", "answer": "response"}
    write_synth_harmony(
        tmp_path / "rows.jsonl", tmp_path / "out", columns=columns, allow_no_reasoning=True,
        opening={"system": {"model_identity": "You are Mill.", "reasoning_effort": "Low"}},
    )  # fmt: skip
    first, second = shard_rows(tmp_path / "out")
    assert json.loads(first["metadata_json"]) == {"synth_id": "7"}
    assert json.loads(second["metadata_json"]) == {"synth_id": "8"}
    messages = json.loads(second["messages_json"])["messages"]
    assert [message["role"] for message in messages] == ["system", "user", "assistant"]
    assert messages[0]["content"] == [
        {"type": "system_content", "model_identity": "You are Mill.", "reasoning_effort": "Low"}
    ]
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
]


def test_bad_rows_in_quarantine(tmp_path: Path) -> None:
    rows = [json.dumps(row) for row, _, _ in BAD]
    (tmp_path / "rows.jsonl").write_text("\n".join([*rows, json.dumps(ROW), "{broken", "\n"]))
    result = write_synth_harmony(tmp_path / "rows.jsonl", tmp_path / "out", on_error="quarantine")
    assert (result.rows, result.rejected) == (1, len(BAD) + 1)
    lines = [json.loads(line) for line in (tmp_path / "out" / "rejected.jsonl").read_bytes().splitlines()]
    *bad, broken = lines
    assert (broken["reason"], broken["where"].rsplit(":", 1)[1]) == ("invalid_json", str(len(BAD) + 2))
    for place, (line, (_, code, message)) in enumerate(zip(bad, BAD, strict=True), 1):
        assert (line["reason"], line["where"].rsplit(":", 1)[1]) == (code, str(place))
        assert line["id"] == ("" if code in ("no_synth_id", "not_an_object") else "a-1")
        assert re.search(message, line["message"]), line
    assert result.manifest["rejected"]["no_synth_id"] == 3
    assert len(shard_rows(tmp_path / "out")) == 1


def test_nothing_usable_and_nothing_there(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "rows.jsonl", [{"prompt": "x"}] * 3)
    with pytest.raises(DataError, match=r"none of the 3 rows could be used; the first: .*Use --column synth_id=YOURS"):
        write_synth_harmony(tmp_path / "rows.jsonl", tmp_path / "out", on_error="quarantine")
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(DataError, match="there is no row"):
        write_synth_harmony(tmp_path / "empty.jsonl", tmp_path / "out")
    (tmp_path / "folder").mkdir()
    with pytest.raises(ConfigError, match="holds no file"):
        write_synth_harmony(tmp_path / "folder", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_options_that_do_not_fit(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "rows.jsonl", [ROW])
    for error, match, wrong in (
        (UnknownNameError, "unknown column 'anwser'", {"columns": {"anwser": "x"}}),
        (UnknownNameError, "unknown field of a system message 'model'", {"opening": {"system": {"model": "x"}}}),
        (UnknownNameError, "unknown message of the opening 'sytem'", {"opening": {"sytem": {}}}),
        (ConfigError, "the system message cannot be used", {"opening": {"system": {"reasoning_effort": "huge"}}}),
        (UnknownNameError, "unknown on_error 'skip'", {"on_error": "skip"}),
        (ConfigError, "shards is 0", {"shards": 0}),
    ):
        with pytest.raises(error, match=match):
            write_synth_harmony(source, tmp_path / "out", **wrong)  # type: ignore[arg-type]
    (tmp_path / "out").mkdir()
    with pytest.raises(ConfigError, match="is there already"):
        write_synth_harmony(source, tmp_path / "out")


def digests(out: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(out.iterdir())}


def numbered(folder: Path) -> list[Path]:
    """Three files of rows, with blank lines and a bad row in the last."""
    rows = [
        json.dumps({**ROW, "synth_id": f"n-{n}", "answer": f"{n} " * (n % 7 + 1)}) + "\n" * (1 + (n % 5 == 0))
        for n in range(150)
    ]
    rows[140] = json.dumps({**ROW, "synth_id": "n-140", "answer": ""}) + "\n"
    for number in range(3):
        (folder / f"{number}.jsonl").write_text("".join(rows[number * 50 : number * 50 + 50]))
    return [folder / f"{number}.jsonl" for number in range(3)]


def test_workers_change_no_byte_and_a_run_that_fails_leaves_nothing(tmp_path: Path) -> None:
    source = numbered(tmp_path)
    options: dict[str, Any] = {"shards": 3}
    for workers in (0, 2):
        made = write_synth_harmony(
            source, tmp_path / f"out{workers}", workers=workers, on_error="quarantine", **options
        )
        assert [shard["rows"] for shard in made.manifest["shards"]] == [50, 50, 49]
    assert digests(tmp_path / "out0") == digests(tmp_path / "out2")
    names = [f"n-{n}" for n in range(150) if n != 140]
    assert [row["synth_id"] for row in shard_rows(tmp_path / "out0")] == names, "blank lines are no rows"
    before = sorted(tmp_path.iterdir())
    with pytest.raises(RecordError, match="'answer' is empty") as caught:
        write_synth_harmony(source, tmp_path / "out", workers=0, **options)
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
    system, developer = json.loads(row["messages_json"])["messages"][:2]
    assert system["content"][0] == {"type": "system_content", "model_identity": "You are Mill."}
    assert developer["content"][0]["instructions"] == "Be brief."
    assert json.loads(here(*given, "-o", tmp_path / "json", "--json").stdout)["total_rows"] == 1
    assert here(*given, "-o", tmp_path / "none", "--column", "answer").returncode == 2
    assert not (tmp_path / "none").exists()

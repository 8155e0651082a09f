"""Distillation builds with bad rows, bad input or wrong options, and builds that are resumed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from chatmill.compiler.run import Outcome
from chatmill.distill.check import verify_synth_kd
from chatmill.distill.run import build_synth_kd
from chatmill.errors import ConfigError, DataError, RecordError, TokenizerError, UnknownNameError
from tests.compiler.builds import digest
from tests.distill.inputs import (
    REAL,
    chat,
    in_chunks_of,
    listed_files,
    manifest_of,
    row,
    small,
    text,
    write_input,
)

BAD_ROWS = {
    "no_synth_id": (row(None, chat()), "has no synth_id"),
    "unknown_role": (row("bad", [text("tool", "x"), *chat()]), r"messages\[0\].role: role 'tool'"),
    "unknown_channel": (row("bad", [*chat()[:1], text("assistant", "x", channel="commentary")]), "'commentary'"),
    "no_assistant": (row("bad", chat()[:1]), "no assistant message"),
    "no_messages": (row("bad", []), "no messages"),
    "invalid_json": (row("bad", '{"messages": ['), "not JSON"),
    "harmony_refused": (row("bad", [{"role": "user", "content": None}, *chat()]), "the Harmony renderer takes"),
}


@pytest.mark.parametrize("code", BAD_ROWS)
def test_a_bad_row_fails_with_its_id_or_is_put_aside(fast: Path, code: str) -> None:
    bad, message = BAD_ROWS[code]
    good = [row(f"id-{n}", chat(f"question {n}")) for n in range(6)]
    source = write_input(fast / "in", [[*good[:3], bad, *good[3:]]], group=2)
    with pytest.raises(RecordError, match=message) as caught:
        in_chunks_of(2, source, fast / "out", workers=0)
    assert caught.value.code == code
    assert "synth_harmony_shard_00.parquet:row 4" in str(caught.value)
    assert (bad["synth_id"] or "") in str(caught.value)
    assert "--on-error quarantine" in str(caught.value)
    assert not (fast / "out" / "manifest.json").exists()
    result = in_chunks_of(2, source, fast / "out", workers=0, on_error="quarantine", resume=True)
    assert result.manifest["failed"]["reasons"] == {code: 1}
    (line,) = (fast / "out" / "quarantine.jsonl").read_text().splitlines()
    entry = json.loads(line)
    assert entry["where"].endswith("synth_harmony_shard_00.parquet:row 4")
    assert (entry["id"], entry["reason"]) == (bad["synth_id"] or "", code)
    assert entry["message"]
    clean = write_input(fast / "clean", [good])
    build_synth_kd(clean, fast / "expected", workers=0)
    for name in listed_files(fast / "expected"):
        assert (fast / "out" / name).read_bytes() == (fast / "expected" / name).read_bytes(), "the others are as ever"
    assert verify_synth_kd(fast / "out").passed


def test_input_where_every_row_is_bad(fast: Path) -> None:
    source = write_input(fast / "in", [[row("a", []), row("b", "{")]])
    with pytest.raises(DataError, match=r"no record of the input could be built"):
        build_synth_kd(source, fast / "out", workers=0, on_error="quarantine")


def test_a_corrupt_row_group(fast: Path) -> None:
    source = small(fast / "in", 64)
    path = source / "synth_harmony_shard_00.parquet"
    column = pq.ParquetFile(path).metadata.row_group(2).column(0)
    data = bytearray(path.read_bytes())
    at = column.data_page_offset
    data[at : at + column.total_compressed_size // 2] = bytes(column.total_compressed_size // 2)
    path.write_bytes(data)
    with pytest.raises(DataError, match=r"synth_harmony_shard_00.parquet cannot be read as Parquet"):
        in_chunks_of(16, source, fast / "out", workers=0)
    assert not (fast / "out" / "manifest.json").exists()


def test_inputs_that_are_not_there_or_of_another_kind(fast: Path, tmp_path: Path) -> None:
    out = fast / "out"
    source = small(fast / "in")
    (source / "manifest.json").rename(source / "kept")
    with pytest.raises(DataError, match=r"there is no .*manifest\.json.*synth_harmony_v1"):
        build_synth_kd(source, out)
    (source / "manifest.json").write_text('{"schema_version": "v0"}')
    with pytest.raises(DataError, match="schema_version 'v0'; this build reads 'synth_harmony_v1'"):
        build_synth_kd(source, out)
    listed = {"path": "synth_harmony_shard_00.parquet", "rows": 11}
    (source / "manifest.json").write_text(json.dumps({"schema_version": "synth_harmony_v1", "shards": [listed]}))
    with pytest.raises(DataError, match=r"has 10 rows, but .*manifest.json says 11"):
        build_synth_kd(source, out)
    listed["path"] = "synth_harmony_shard_07.parquet"
    (source / "manifest.json").write_text(json.dumps({"schema_version": "synth_harmony_v1", "shards": [listed]}))
    with pytest.raises(DataError, match=r"lists synth_harmony_shard_07.parquet, which is not in the folder"):
        build_synth_kd(source, out)
    (source / "kept").replace(source / "manifest.json")
    (source / "synth_harmony_shard_00.parquet").write_bytes(b"PAR1 no more")
    with pytest.raises(DataError, match="cannot be read as Parquet"):
        build_synth_kd(source, out)
    (source / "synth_harmony_shard_00.parquet").unlink()
    with pytest.raises(DataError, match="has no shards"):
        build_synth_kd(source, out)
    pq.write_table(
        pq.read_table(REAL / "synth_harmony_shard_00.parquet").drop(["synth_id"]),
        source / "synth_harmony_shard_00.parquet",
    )
    with pytest.raises(DataError, match="has no column 'synth_id'"):
        build_synth_kd(source, out)
    assert not out.exists(), "mistakes are told before anything is made"


def test_a_wrong_vocabulary_file(fast: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = small(fast / "in")
    (fast / "wrong.tiktoken").write_bytes(b"aGk= 0\n")
    with pytest.raises(TokenizerError, match=r"its sha256 is [0-9a-f]{64}, expected 446a9538"):
        build_synth_kd(source, fast / "out", tokenizer_path=fast / "wrong.tiktoken")
    monkeypatch.setenv("O200K_HARMONY_VOCAB_PATH", str(fast / "missing"))
    with pytest.raises(TokenizerError, match="no such file"):
        build_synth_kd(source, fast / "out")
    assert not (fast / "out").exists()


def test_wrong_options(fast: Path) -> None:
    source = small(fast / "in")
    for options, message in (
        ({"on_error": "skip"}, "unknown on_error 'skip'"),
        ({"engine": "dask"}, "unknown engine 'dask'"),
    ):
        with pytest.raises(UnknownNameError, match=message):
            build_synth_kd(source, fast / "out", **options)
    with pytest.raises(ConfigError, match="audit is 2"):
        build_synth_kd(source, fast / "out", audit=2)
    with pytest.raises(ConfigError, match=r"valid_fraction is -0\.1"):
        build_synth_kd(source, fast / "out", valid_fraction=-0.1)
    assert not (fast / "out").exists()


def test_an_existing_root_is_refused_or_continued(fast: Path) -> None:
    source = small(fast / "in")
    (fast / "out").mkdir()
    build_synth_kd(source, fast / "out", workers=0)  # an empty folder is fine
    before = digest(fast / "out")
    with pytest.raises(ConfigError, match=r"holds a finished dataset: nothing is ever overwritten.*--resume"):
        build_synth_kd(source, fast / "out", workers=0)
    again = build_synth_kd(source, fast / "out", workers=0, resume=True)
    assert again.outcome is Outcome.ALREADY_BUILT
    assert again.manifest == manifest_of(fast / "out")
    with pytest.raises(ConfigError, match="holds another dataset"):
        build_synth_kd(source, fast / "out", workers=0, resume=True, valid_fraction=0.5)
    assert digest(fast / "out") == before
    (fast / "mine").mkdir()
    (fast / "mine" / "thesis.txt").write_text("keep")
    for resume in (False, True):
        with pytest.raises(ConfigError, match=r"not empty \(thesis.txt\) and holds no build"):
            build_synth_kd(source, fast / "mine", workers=0, resume=resume)
    assert [path.name for path in (fast / "mine").iterdir()] == ["thesis.txt"]


def test_resuming_with_changed_input_is_refused(fast: Path) -> None:
    source = write_input(fast / "in", [[row(f"id-{n}", chat(f"{n}") if n < 9 else []) for n in range(10)]], group=2)
    with pytest.raises(RecordError):
        in_chunks_of(2, source, fast / "out", workers=0)
    assert len(list((fast / "out/.build/dataset/.build/receipts").glob("*.json"))) == 4, "finished chunks are kept"
    with pytest.raises(ConfigError, match="holds an unfinished build: nothing is ever overwritten"):
        build_synth_kd(source, fast / "out", workers=0)
    shutil.rmtree(source)
    write_input(fast / "in", [[row(f"id-{n}", chat(f"{n}")) for n in range(10)]], group=2)
    with pytest.raises(ConfigError, match="an unfinished build of something else"):
        build_synth_kd(source, fast / "out", workers=0, resume=True)


def test_a_build_that_failed_goes_on_with_quarantine(fast: Path) -> None:
    """Chunks that are whole are left alone; that a damaged one is made again is shown for any build."""
    rows = [row(f"id-{n}", chat(f"{n}") if n < 9 else []) for n in range(10)]
    source = write_input(fast / "in", [rows], group=2)
    with pytest.raises(RecordError):
        in_chunks_of(2, source, fast / "out", workers=0)
    receipts = fast / "out/.build/dataset/.build/receipts"
    kept = {path.name: path.stat().st_mtime_ns for path in receipts.glob("*.json")}
    with pytest.raises(RecordError):
        in_chunks_of(2, source, fast / "out", workers=0, resume=True)
    assert {path.name: path.stat().st_mtime_ns for path in receipts.glob("*.json")} == kept
    in_chunks_of(2, source, fast / "out", workers=0, resume=True, on_error="quarantine")
    build_synth_kd(source, fast / "whole", workers=0, on_error="quarantine")
    assert digest(fast / "out") == digest(fast / "whole")


def test_rows_that_were_put_aside_do_not_pass_unseen(fast: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A build with quarantine, stopped at its end and resumed without."""
    source = write_input(fast / "in", [[row("a", chat()), row("b", [])]])
    with monkeypatch.context() as stopped:
        stopped.setattr("chatmill.distill.run.make_manifest", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            build_synth_kd(source, fast / "out", workers=0, on_error="quarantine")
    with pytest.raises(ConfigError, match="1 records were put aside"):
        build_synth_kd(source, fast / "out", workers=0, resume=True)
    result = build_synth_kd(source, fast / "out", workers=0, resume=True, on_error="quarantine")
    assert result.manifest["failed"]["reasons"] == {"no_messages": 1}

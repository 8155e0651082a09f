"""Distillation builds with bad rows, bad input or wrong options, and builds that are resumed."""

from __future__ import annotations

import json
import math
import re
import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from chatmill.compiler.run import Outcome
from chatmill.distill.check import verify_synth_kd
from chatmill.distill.run import build_synth_kd
from chatmill.errors import ConfigError, DataError, RecordError, UnknownNameError
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


def test_bad_rows_fail_with_their_ids_or_are_put_aside(fast: Path) -> None:
    good = [row(f"id-{n}", chat(f"question {n}")) for n in range(6)]
    source = write_input(fast / "in", [[*good[:3], *(bad for bad, _ in BAD_ROWS.values()), *good[3:]]], group=2)
    with pytest.raises(RecordError, match="has no synth_id") as caught:
        in_chunks_of(2, source, fast / "out", workers=0)
    assert caught.value.code == "no_synth_id"
    assert "synth_harmony_shard_00.parquet:row 4" in str(caught.value)
    assert "--on-error quarantine" in str(caught.value)
    assert not (fast / "out" / "manifest.json").exists()
    result = in_chunks_of(2, source, fast / "out", workers=0, on_error="quarantine", resume=True)
    assert result.manifest["failed"]["reasons"] == dict.fromkeys(BAD_ROWS, 1)
    lines = [json.loads(line) for line in (fast / "out" / "quarantine.jsonl").read_text().splitlines()]
    for place, (entry, (code, (bad, message))) in enumerate(zip(lines, BAD_ROWS.items(), strict=True), 4):
        assert entry["where"].endswith(f"synth_harmony_shard_00.parquet:row {place}")
        assert (entry["id"], entry["reason"]) == (bad["synth_id"] or "", code)
        assert re.search(message, f"{entry['field']}: {entry['message']}")
    clean = write_input(fast / "clean", [good])
    build_synth_kd(clean, fast / "expected", workers=0)
    for name in listed_files(fast / "expected"):
        assert (fast / "out" / name).read_bytes() == (fast / "expected" / name).read_bytes(), "the others are as ever"
    assert verify_synth_kd(fast / "out").passed


def test_inputs_that_are_not_there_or_of_another_kind(fast: Path, tmp_path: Path) -> None:
    out = fast / "out"
    source = small(fast / "in")
    (source / "manifest.json").rename(source / "kept")
    with pytest.raises(DataError, match=r"there is no .*manifest\.json.*synth_harmony_v1"):
        build_synth_kd(source, out)
    (source / "manifest.json").write_text('{"schema_version": "v0"}')
    with pytest.raises(DataError, match="schema_version 'v0'; this build reads 'synth_harmony_v1'"):
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
    for share in (-0.1, 1.5, math.nan):
        with pytest.raises(ConfigError, match=rf"valid_fraction is {share}.*from 0 to 1"):
            build_synth_kd(source, fast / "out", valid_fraction=share)
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

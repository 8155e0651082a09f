"""Distillation builds with bad rows, bad input or wrong options, and builds that are resumed."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from chatmill.compiler.run import Outcome
from chatmill.distill.check import verify_synth_kd
from chatmill.distill.input_shards import read_input
from chatmill.distill.run import build_synth_kd
from chatmill.errors import ConfigError, DataError, RecordError
from tests.compiler.builds import digest
from tests.distill.inputs import (
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


LISTED = [{"path": f"data/synth_harmony_shard_{number:02}.parquet"} for number in range(4)]


def states(**content: Any) -> Callable[[Path], object]:
    """Give the input another manifest."""
    text = json.dumps({"schema_version": "synth_harmony_v1", **content})
    return lambda source: (source / "manifest.json").write_text(text)


def without_ids(source: Path) -> None:
    path = source / SHARD
    pq.write_table(pq.read_table(path).drop(["synth_id"]), path)


SHARD = "synth_harmony_shard_02.parquet"
INPUTS: list[tuple[Callable[[Path], object], str]] = [
    (lambda source: (source / "manifest.json").unlink(), r"there is no .*manifest\.json.*synth_harmony_v1"),
    (states(schema_version="v0"), "schema_version 'v0'; this build reads 'synth_harmony_v1'"),
    (lambda source: (source / SHARD).write_bytes(b"PAR1 no more"), "cannot be read as Parquet"),
    (lambda source: [path.unlink() for path in source.glob("*.parquet")], "has no shards"),
    (without_ids, "has no column 'synth_id'"),
    (states(total_rows=31), "says 31 total_rows, but the 3 shards next to it have 30"),
    (states(shards=LISTED), r"synth_harmony_shard_03.parquet is in one of them only"),
    (states(storage={"shards": LISTED}), r"synth_harmony_shard_03.parquet is in one of them only"),
    (states(shards=LISTED[:2]), r"synth_harmony_shard_02.parquet is in one of them only"),
    (
        lambda source: (source / SHARD).rename(source / "synth_harmony_shard_2.parquet"),
        r"holds synth_harmony_shard_2.parquet, which is no .* would be left out",
    ),
]


@pytest.mark.parametrize("case", range(len(INPUTS)))
def test_an_input_that_is_not_what_it_says_is_refused(fast: Path, case: int) -> None:
    source, (damage, message) = small(fast / "in", shards=3), INPUTS[case]
    states(total_rows=30, shards=LISTED[:3])(source)
    assert len(read_input(source).shards) == 3
    damage(source)
    with pytest.raises(DataError, match=message):
        build_synth_kd(source, fast / "out")
    assert not (fast / "out").exists(), "mistakes are told before anything is made"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"on_error": "skip"}, "unknown on_error 'skip'"),
        ({"engine": "dask"}, "unknown engine 'dask'"),
        ({"audit": 2}, "audit is 2"),
        *(({"valid_fraction": share}, rf"valid_fraction is {share}.*from 0 to 1") for share in (-0.1, 1.5, math.nan)),
        ({"max_rows": 0}, "max_rows is 0"),
        ({"max_tokens_per_shard": 0}, "max_tokens_per_shard is 0"),
        ({"max_tokens": 3}, "no row fits"),
    ],
)
def test_wrong_options(fast: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_synth_kd(small(fast / "in"), fast / "out", workers=0, **options)
    assert not (fast / "out").exists()


def test_an_existing_root_is_refused_or_continued(fast: Path) -> None:
    source, out = small(fast / "in"), fast / "out"
    out.mkdir()
    build_synth_kd(source, out, workers=0)  # an empty folder is fine
    before = digest(out)
    with pytest.raises(ConfigError, match=r"holds a finished dataset: nothing is ever overwritten.*--resume"):
        build_synth_kd(source, out, workers=0)
    again = build_synth_kd(source, out, workers=0, resume=True)
    assert (again.outcome, again.manifest) == (Outcome.ALREADY_BUILT, manifest_of(out))
    with pytest.raises(ConfigError, match="holds another dataset"):
        build_synth_kd(source, out, workers=0, resume=True, valid_fraction=0.5)
    assert digest(out) == before
    (fast / "mine").mkdir()
    (fast / "mine" / "thesis.txt").write_text("keep")
    for resume in (False, True):
        with pytest.raises(ConfigError, match=r"not empty \(thesis.txt\) and holds no build"):
            build_synth_kd(source, fast / "mine", workers=0, resume=resume)


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

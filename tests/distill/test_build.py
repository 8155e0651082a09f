"""The build of the distillation dataset: its bytes and its manifest, and that nothing but the input matters."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from chatmill import build_synth_kd, verify_synth_kd
from chatmill.compiler.run import Outcome
from chatmill.distill.audit import FIRST_ROWS, AuditError, audited
from chatmill.distill.manifest import KDConfig
from chatmill.export.megatron import MegatronShard
from chatmill.store.kd_shard import KDShard
from tests.cli.run import here
from tests.compiler.builds import digest
from tests.compiler.killing import check, reports_of
from tests.distill import straightforward
from tests.distill.inputs import REAL, chat, in_chunks_of, leftovers, listed_files, manifest_of, row, small, write_input

FRACTION = 0.05
"""Of the real rows, so that both splits have some."""
COLUMNS = ("tokens", "lossmask", "span")


@pytest.fixture(scope="module")
def whole(fast_module: Path) -> Path:
    """The real rows, built in this process in chunks of 60 rows."""
    result = in_chunks_of(60, REAL, fast_module / "whole", valid_fraction=FRACTION, workers=0)
    assert result.outcome is Outcome.BUILT
    assert result.audited >= 2 * FIRST_ROWS
    return result.root


@pytest.mark.filterwarnings("ignore")  # Megatron's own, while it is imported
def test_files_equal_a_straightforward_build_with_megatrons_writer(whole: Path, fast: Path) -> None:
    assert straightforward.build(REAL, fast, valid_fraction=FRACTION)["rows"] == 500
    theirs = {path.relative_to(fast).as_posix(): path for path in fast.rglob("*.*")}
    assert theirs.keys() == listed_files(whole)
    assert len(theirs) == 2 * 2 * 3 * 2
    for name, path in theirs.items():
        assert (whole / name).read_bytes() == path.read_bytes(), name


def test_workers_chunks_and_audit_change_no_byte(whole: Path, fast: Path) -> None:
    in_chunks_of(250, REAL, fast / "out", valid_fraction=FRACTION, workers=2, audit=0.01)
    assert digest(fast / "out") == digest(whole)
    assert leftovers(fast / "out") == []


def test_the_manifest(whole: Path) -> None:
    manifest = manifest_of(whole)
    assert manifest["created_unix_s"] > 1_700_000_000
    assert manifest["schema_version"] == "synth_kd_v1"
    assert manifest["config"] == KDConfig(valid_fraction=FRACTION).as_json()
    text_of_config = json.dumps(manifest["config"], sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    assert manifest["config_hash"] == hashlib.sha256(text_of_config.encode()).hexdigest()
    assert not {"workers", "engine", "audit", "renderer"} & set(manifest["config"])
    assert (manifest["tokenizer"]["vocab_size"], manifest["tokenizer"]["eod_id"]) == (201088, 199999)
    assert manifest["tokenizer"]["sha256"].startswith("446a9538")
    assert manifest["input"]["manifest_path"] == str(REAL / "manifest.json")
    assert manifest["input"]["manifest_sha256"] == hashlib.sha256((REAL / "manifest.json").read_bytes()).hexdigest()
    assert manifest["input"]["glob"] == "synth_harmony_shard_*.parquet"
    assert manifest["renderer"]["library"] == "openai-harmony"
    assert manifest["renderer"]["flags"]["auto_drop_analysis"] is False
    assert manifest["split"]["valid_fraction"] == FRACTION
    for name, split in manifest["splits"].items():
        for shard in split["shards"]:
            files = sorted(f"{name}/{shard['name']}_{column}.{kind}" for column in COLUMNS for kind in ("bin", "idx"))
            assert [file["path"] for file in shard["files"]] == files
    assert verify_synth_kd(whole).passed, "its counts and hashes are those of the files"


@pytest.mark.parametrize(("fraction", "empty", "full"), [(0.0, "valid", "train"), (1.0, "train", "valid")])
def test_a_split_without_rows_has_no_files_and_is_listed(fast: Path, fraction: float, empty: str, full: str) -> None:
    build_synth_kd(small(fast / "in", shards=2), fast / "out", valid_fraction=fraction, workers=0)
    splits = manifest_of(fast / "out")["splits"]
    assert not (fast / "out" / empty).exists()
    assert splits[empty]["shards"] == [{"name": f"shard_0{n}", "rows": 0, "tokens": 0, "files": []} for n in (0, 1)]
    assert splits[full]["rows"] == 20
    assert verify_synth_kd(fast / "out").passed


# Caps: the first rows of each shard, whatever the chunks.


@pytest.fixture(scope="module")
def source(fast_module: Path) -> Path:
    """Three shards of 30 rows of different lengths; row 4 of the first fails."""
    words = ["word " * (number % 7 + 1) for number in range(30)]
    shards = [[row(f"id-{n}-{number}", chat(final=text)) for number, text in enumerate(words)] for n in range(3)]
    shards[0][4] = row("bad", "no JSON")
    return write_input(fast_module / "in", shards)


CAPPED: dict[str, Any] = {"workers": 0, "on_error": "quarantine", "audit": 0}


def lengths(root: Path) -> list[list[int]]:
    """The tokens of every document, by shard; everything is in `train`."""
    prefixes = [root / "train" / f"shard_{number:02d}_tokens" for number in range(3)]
    return [KDShard.open(p).tokens.lengths.tolist() if p.with_suffix(".idx").exists() else [] for p in prefixes]


@pytest.fixture(scope="module")
def everything(source: Path, fast_module: Path) -> list[list[int]]:
    return lengths(build_synth_kd(source, fast_module / "all", valid_fraction=0.0, **CAPPED).root)


@pytest.mark.parametrize(
    ("total", "each"), [(700, None), (None, 333), (1200, 500), (10**9, 10**9), ("exact", None), ("one less", None)]
)
def test_caps_in_tokens_take_whole_rows_in_order(
    source: Path, everything: list[list[int]], fast: Path, total: Any, each: int | None
) -> None:
    if isinstance(total, str):
        total = sum(everything[0]) + everything[1][0] - (total == "one less")
    options: dict[str, Any] = {"max_tokens": total, "max_tokens_per_shard": each, "valid_fraction": 0.0, **CAPPED}
    result = build_synth_kd(source, fast / "a", **options)
    wanted, left = [], total if total is not None else 10**12
    for sizes in everything:
        cap = min(left, each or 10**12)
        taken = sizes[: int(np.searchsorted(np.cumsum(sizes), cap, side="right"))]
        stopped = len(taken) < len(sizes) and (each is None or left <= each)
        left = 0 if stopped else left - sum(taken)
        wanted.append(taken)
    assert lengths(fast / "a") == wanted
    config = result.manifest["config"]
    assert (config.get("max_tokens"), config.get("max_tokens_per_shard")) == (total, each)
    assert verify_synth_kd(fast / "a").passed
    in_chunks_of(7, source, fast / "b", **options)
    assert digest(fast / "b") == digest(fast / "a")


@pytest.mark.parametrize(
    ("caps", "wanted"),
    [
        ({"max_rows": 33}, [(30, 29), (3, 3), (0, 0)]),  # failed rows are counted
        ({"max_rows_per_shard": 5}, [(5, 4), (5, 5), (5, 5)]),
        ({"max_rows_per_shard": 5, "max_rows": 7}, [(5, 4), (2, 2), (0, 0)]),
        ({"max_rows": 1000}, [(30, 29), (30, 30), (30, 30)]),
    ],
)
def test_caps_count_input_rows_in_shard_order(source: Path, fast: Path, caps: dict[str, int], wanted: Any) -> None:
    manifest = in_chunks_of(3, source, fast / "out", **CAPPED, **caps).manifest
    built = [sum(split["shards"][shard]["rows"] for split in manifest["splits"].values()) for shard in range(3)]
    used = [entry["rows_used"] for entry in manifest["input"]["shards"]]
    assert list(zip(used, built, strict=True)) == wanted
    assert manifest["failed"]["rows"] == 1


# The audit.


def planted(place: int, column: str, value: int, token: int) -> Any:
    """Write one value where it must not be, at a token of a row of the user's text."""
    append = MegatronShard.append

    def changed(self: MegatronShard, ids: Any, lengths: Any, span: Any) -> None:
        columns = {"tokens": ids.copy(), "span": span.copy()}
        columns[column][int(lengths[:place].sum()) + token] = value
        append(self, columns["tokens"], lengths, columns["span"])

    return changed


def test_the_audit_sees_a_planted_difference(fast: Path) -> None:
    """One value of one row after the first 64 is changed: found exactly when that row is in the sample."""
    source = small(fast / "in", 400)
    target = next(n for n in range(300, 400) if not audited(n, 1, 1 / 200)[0])
    chosen = next(n for n in range(200, 400) if audited(n, 1, 1 / 200)[0])
    options: dict[str, Any] = {"workers": 0, "valid_fraction": 0}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MegatronShard, "append", planted(target, "tokens", 1000, 5))
        build_synth_kd(source, fast / "unseen", **options)
        message = rf"token 5 \(record 'id-0-{target}', .*row {target + 1}\)(.|\n)*report the row"
        with pytest.raises(AuditError, match=message):
            build_synth_kd(source, fast / "seen", audit=1, **options)
        assert not (fast / "seen" / "manifest.json").exists()
    for column, value, token in (("tokens", 1000, 5), ("span", 1, 2)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(MegatronShard, "append", planted(chosen, column, value, token))
            with pytest.raises(AuditError, match=rf"_{column}.bin, .*token {token} .*row {chosen + 1}\)"):
                build_synth_kd(source, fast / column, **options)
            with pytest.raises(AuditError, match=rf"_{column}.bin, .*row {chosen + 1}\)"):  # texts were not kept
                build_synth_kd(source, fast / column, audit=1, resume=True, **options)
            build_synth_kd(source, fast / f"switched off {column}", audit=0, **options)


def test_which_rows_are_audited() -> None:
    chosen = np.flatnonzero(audited(0, 100_000, 1 / 200))
    assert chosen[:FIRST_ROWS].tolist() == list(range(64))
    behind = chosen[chosen >= 200]
    assert np.array_equal(behind // 200, np.arange(1, 500)), "one in each stretch of 200"
    assert len(set((behind % 200).tolist())) > 100, "not always the same place"
    pieces = [audited(first, 1000, 1 / 200) for first in range(0, 100_000, 1000)]
    assert np.array_equal(np.flatnonzero(np.concatenate(pieces)), chosen), "chunks do not matter"
    assert audited(0, 500, 1.0).all()
    assert not audited(0, 500, 0.0).any()


def test_the_command(fast: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small(fast / "data" / "synth_harmony", 8, shards=2)
    monkeypatch.chdir(fast)
    given = ["synth-kd", "--max-rows-per-shard", "5", "--workers", "0"]
    shown = here(*given, "--audit", "1")
    assert shown.returncode == 0, shown.stderr
    manifest = manifest_of(fast / "data/megatron/synth_kd_v1")  # the default folder
    assert manifest["input"]["path"] == "data/synth_harmony", "paths as given"
    assert manifest["git_sha"] is None, "outside of a checkout there is no commit"
    assert "10 rows compared with the official renderer" in shown.stdout
    assert "train" in shown.stdout
    assert json.loads(here(*given, "--resume", "--json").stdout)["splits"]["train"]["rows"] == 10
    assert here(*given).returncode == 2


@pytest.mark.parametrize("kill", ["kinds", pytest.param("everywhere", marks=pytest.mark.slow)])
def test_builds_that_are_killed_and_resumed_equal_builds_that_nothing_disturbed(fast: Path, kill: str) -> None:
    rows = [row(f"id-{n}", chat(f"question {n}", "x" * n)) for n in range(20)]
    rows[9] = row("bad", [])
    source = write_input(fast / "in", [rows[:10], rows[10:]], group=5)
    reports = reports_of({"home": str(fast), "distil": str(source), "kill": kill})
    check(reports)
    assert reports[0]["operations"] > 75
    assert len(reports) >= (reports[0]["operations"] if kill == "everywhere" else 20)

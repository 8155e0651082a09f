"""The build of the distillation dataset: its bytes and its manifest, and that nothing but the input matters."""

from __future__ import annotations

import hashlib
import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from chatmill.compiler.run import Outcome
from chatmill.distill.audit import FIRST_ROWS, AuditError, audited
from chatmill.distill.check import verify_synth_kd
from chatmill.distill.manifest import KDConfig
from chatmill.distill.run import build_synth_kd
from chatmill.errors import FormatError
from chatmill.export.megatron import MegatronShard
from chatmill.store.kd_shard import KDShard
from chatmill.store.receipts import receipt_bytes, sealed
from tests.cli.run import here
from tests.compiler.builds import digest
from tests.compiler.killing import check, reports_of
from tests.damage import flip
from tests.distill import straightforward
from tests.distill.inputs import (
    REAL,
    chat,
    in_chunks_of,
    leftovers,
    listed_files,
    manifest_of,
    row,
    small,
    write_input,
)

FRACTION = 0.05
"""Of the real rows, so that both splits have some."""
CHUNK = 60
COLUMNS = ("tokens", "lossmask", "span")


@pytest.fixture(scope="module")
def whole(fast_module: Path) -> Path:
    """The real rows, built in this process in chunks of 60 rows."""
    root = fast_module / "whole"
    result = in_chunks_of(CHUNK, REAL, root, valid_fraction=FRACTION, workers=0)
    assert result.outcome is Outcome.BUILT
    assert result.audited >= 2 * FIRST_ROWS
    return root


def test_files_equal_a_straightforward_build_with_megatrons_writer(whole: Path, fast: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Megatron's own, while it is imported
        made = straightforward.build(REAL, fast / "slow", valid_fraction=FRACTION)
    assert made["rows"] == 500
    theirs = {path.relative_to(fast / "slow").as_posix(): path for path in (fast / "slow").rglob("*.*")}
    assert theirs.keys() == listed_files(whole)
    assert len(theirs) == 2 * 2 * 3 * 2
    for name, path in theirs.items():
        assert (whole / name).read_bytes() == path.read_bytes(), name


def test_workers_change_no_byte(whole: Path, fast: Path) -> None:
    in_chunks_of(250, REAL, fast / "out", valid_fraction=FRACTION, workers=2, audit=0.01)
    assert digest(fast / "out") == digest(whole)
    assert leftovers(fast / "out") == []


def test_the_manifest(whole: Path, fast: Path) -> None:
    in_chunks_of(CHUNK, REAL, fast / "again", valid_fraction=FRACTION, workers=0, audit=0)
    again, manifest = manifest_of(fast / "again"), manifest_of(whole)
    assert again.pop("created_unix_s") >= manifest.pop("created_unix_s") > 1_700_000_000
    assert again.pop("contents_sha256") != "" != manifest.pop("contents_sha256")
    assert again == manifest, "nothing else differs"
    assert manifest["schema_version"] == "synth_kd_v1"
    assert manifest["config"] == KDConfig(valid_fraction=FRACTION).as_json()
    text_of_config = json.dumps(manifest["config"], sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    assert manifest["config_hash"] == hashlib.sha256(text_of_config.encode()).hexdigest()
    assert not {"workers", "engine", "audit", "renderer"} & set(manifest["config"])
    assert manifest["tokenizer"]["vocab_size"] == 201088
    assert manifest["tokenizer"]["eod_id"] == 199999
    assert manifest["tokenizer"]["sha256"].startswith("446a9538")
    assert manifest["input"]["manifest_path"] == str(REAL / "manifest.json")
    assert manifest["input"]["manifest_sha256"] == hashlib.sha256((REAL / "manifest.json").read_bytes()).hexdigest()
    assert manifest["input"]["glob"] == "synth_harmony_shard_*.parquet"
    assert manifest["renderer"]["library"] == "openai-harmony"
    assert manifest["renderer"]["flags"]["auto_drop_analysis"] is False
    assert manifest["split"]["valid_fraction"] == FRACTION
    shards = [(name, shard) for name, split in manifest["splits"].items() for shard in split["shards"]]
    for name, shard in shards:
        assert [f["path"] for f in shard["files"]] == sorted(
            f"{name}/{shard['name']}_{column}.{kind}" for column in COLUMNS for kind in ("bin", "idx")
        )
    assert verify_synth_kd(whole).passed, "its counts and hashes are those of the files"


def test_a_split_without_rows_has_no_files_and_is_listed(fast: Path) -> None:
    source = small(fast / "in", shards=2)
    for fraction, empty, full in ((0.0, "valid", "train"), (1.0, "train", "valid")):
        root = fast / f"out{fraction}"
        build_synth_kd(source, root, valid_fraction=fraction, workers=0)
        splits = manifest_of(root)["splits"]
        assert not (root / empty).exists()
        assert [(s["name"], s["rows"], s["files"]) for s in splits[empty]["shards"]] == [
            ("shard_00", 0, []),
            ("shard_01", 0, []),
        ]
        assert splits[full]["rows"] == 20
        assert verify_synth_kd(root).passed


PLANTED = {"tokens": (1000, 5), "span": (1, 2)}
"""What is written where it must not be, and at which token of a row: one of the user's text each time."""


def test_the_audit_sees_a_planted_difference(fast: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One value of one row after the first 64 is changed: found exactly when that row is in the sample."""
    source = small(fast / "in", 400)
    target = next(n for n in range(300, 400) if not audited(n, 1, 1 / 200)[0])
    chosen = next(n for n in range(200, 400) if audited(n, 1, 1 / 200)[0])

    def planted(place: int, column: str) -> Any:
        value, token = PLANTED[column]

        def append(self: MegatronShard, ids: Any, lengths: Any, span: Any) -> None:
            at = int(lengths[:place].sum()) + token
            columns = {"tokens": ids.copy(), "span": span.copy()}
            columns[column][at] = value
            appended(self, columns["tokens"], lengths, columns["span"])

        return append

    appended = MegatronShard.append
    monkeypatch.setattr(MegatronShard, "append", planted(target, "tokens"))
    build_synth_kd(source, fast / "unseen", workers=0, valid_fraction=0)
    with pytest.raises(
        AuditError, match=rf"token 5 \(record 'id-0-{target}', .*row {target + 1}\)(.|\n)*report the row"
    ):
        build_synth_kd(source, fast / "seen", workers=0, audit=1, valid_fraction=0)
    assert not (fast / "seen" / "manifest.json").exists()
    for column, (_, token) in PLANTED.items():
        monkeypatch.setattr(MegatronShard, "append", planted(chosen, column))
        with pytest.raises(AuditError, match=rf"_{column}.bin, .*token {token} .*row {chosen + 1}\)"):
            build_synth_kd(source, fast / f"by default {column}", workers=0, valid_fraction=0)
        with pytest.raises(AuditError, match=rf"_{column}.bin, .*row {chosen + 1}\)"):  # whose texts were not kept
            build_synth_kd(source, fast / f"by default {column}", workers=0, valid_fraction=0, audit=1, resume=True)
        build_synth_kd(source, fast / f"switched off {column}", workers=0, audit=0, valid_fraction=0)


def test_which_rows_are_audited() -> None:
    chosen = np.flatnonzero(audited(0, 100_000, 1 / 200))
    assert chosen[:FIRST_ROWS].tolist() == list(range(64))
    behind = chosen[chosen >= 200]
    assert len(behind) == 100_000 // 200 - 1, "one in 200"
    assert np.array_equal(behind // 200, np.arange(1, 500)), "one in each stretch of 200"
    assert len(set((behind % 200).tolist())) > 100, "not always the same place"
    pieces = [audited(first, 1000, 1 / 200) for first in range(0, 100_000, 1000)]
    assert np.array_equal(np.flatnonzero(np.concatenate(pieces)), chosen), "chunks do not matter"
    assert audited(0, 500, 1.0).all()
    assert not audited(0, 500, 0.0).any()


def test_verify_finds_what_was_changed(whole: Path, fast: Path) -> None:
    assert verify_synth_kd(whole).passed
    root = fast / "root"

    def findings(damage: Any) -> str:
        shutil.rmtree(root, ignore_errors=True)
        shutil.copytree(whole, root)
        damage()
        report = verify_synth_kd(root)
        assert not report.passed
        return "\n".join(map(str, report.findings))

    span, mask = root / "train/shard_00_span.bin", root / "train/shard_00_lossmask.bin"

    def edit(change: Any) -> None:
        manifest = manifest_of(root)
        change(manifest)
        (root / "manifest.json").write_bytes(receipt_bytes(sealed(manifest)))

    assert "train/shard_00_span.bin: was changed" in findings(lambda: flip(span, 700))
    assert "document 0 has the mask" in findings(lambda: flip(mask, 700))
    behind = KDShard.open(whole / "train/shard_00_tokens").place(1).start + 300  # not in the sample that opening takes
    assert "train episode 1, token 300: lossmask is not 1 exactly where" in findings(lambda: flip(mask, behind))
    assert "the file was cut" in findings(lambda: span.write_bytes(span.read_bytes()[:-1]))
    assert "231 sequences, but shard_00_tokens.idx next to it has 229" in findings(
        lambda: [
            shutil.copy(path.with_name(path.name.replace("00", "01")), path)
            for path in (span, span.with_suffix(".idx"))
        ]
    )
    assert "missing; the manifest names it" in findings(mask.unlink)
    assert "not in the manifest" in findings(lambda: (root / "train" / "more.bin").write_bytes(b"x"))
    assert "train: trained_tokens is 1," in findings(
        lambda: edit(lambda m: m["splits"]["train"].update(trained_tokens=1))
    )
    (root / "manifest.json").unlink()
    with pytest.raises(FormatError, match="holds no finished distillation dataset"):
        verify_synth_kd(root)


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


# Distillation builds that are killed: resumed, they are equal to builds that nothing disturbed.


def kills(home: Path, kill: str) -> list[dict[str, Any]]:
    rows = [row(f"id-{n}", chat(f"question {n}", "x" * n)) for n in range(20)]
    rows[9] = row("bad", [])
    source = write_input(home / "in", [rows[:10], rows[10:]], group=5)
    return reports_of({"home": str(home), "distil": str(source), "kill": kill})


@pytest.mark.parametrize("kill", ["kinds", pytest.param("everywhere", marks=pytest.mark.slow)])
def test_killed_at_operations_on_files(fast: Path, kill: str) -> None:
    reports = kills(fast, kill)
    check(reports)
    assert reports[0]["operations"] > 75
    assert len(reports) >= (reports[0]["operations"] if kill == "everywhere" else 20)

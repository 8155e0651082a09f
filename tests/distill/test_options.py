"""Caps in tokens, and manifests of the input in all their forms: what they list is there, and nothing else is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from chatmill.distill.check import verify_synth_kd
from chatmill.distill.input_shards import read_input
from chatmill.distill.run import build_synth_kd
from chatmill.errors import ConfigError, DataError
from chatmill.store.kd_shard import KDShard
from tests.cli.run import here
from tests.compiler.builds import digest
from tests.conftest import DATA
from tests.distill.inputs import chat, in_chunks_of, row, write_input


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three shards of 30 rows of different lengths; row 4 of the first fails."""
    shards = [
        [row(f"id-{shard}-{number}", chat(final="word " * (number % 7 + 1))) for number in range(30)]
        for shard in range(3)
    ]
    shards[0][4] = row("bad", "no JSON")
    return write_input(tmp_path_factory.mktemp("caps") / "in", shards)


def lengths(root: Path) -> list[list[int]]:
    """The tokens of every document, by shard; everything is in `train`."""
    prefixes = [root / "train" / f"shard_{number:02d}_tokens" for number in range(3)]
    return [KDShard.open(p).tokens.lengths.tolist() if p.with_suffix(".idx").exists() else [] for p in prefixes]


@pytest.fixture(scope="module")
def everything(source: Path, tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    out = tmp_path_factory.mktemp("all") / "out"
    build_synth_kd(source, out, valid_fraction=0.0, workers=0, on_error="quarantine")
    return lengths(out)


def fitting(sizes: list[int], cap: int) -> list[int]:
    return sizes[: int(np.searchsorted(np.cumsum(sizes), cap, side="right"))]


@pytest.mark.parametrize(
    ("total", "each"), [(700, None), (None, 333), (1200, 500), (10**9, 10**9), ("exact", None), ("one less", None)]
)
def test_caps_in_tokens_take_whole_rows_in_order(
    source: Path, everything: list[list[int]], tmp_path: Path, total: Any, each: int | None
) -> None:
    if total == "exact":
        total = sum(everything[0]) + everything[1][0]
    elif total == "one less":
        total = sum(everything[0]) + everything[1][0] - 1
    options: dict[str, Any] = {"max_tokens": total, "max_tokens_per_shard": each, "valid_fraction": 0.0}
    result = build_synth_kd(source, tmp_path / "a", workers=0, on_error="quarantine", **options)
    wanted, left = [], total if total is not None else 10**12
    for sizes in everything:
        taken = fitting(sizes, min(left, each or 10**12))
        stopped = len(taken) < len(sizes) and (each is None or left <= each)
        left = 0 if stopped else left - sum(taken)
        wanted.append(taken)
    assert lengths(tmp_path / "a") == wanted
    config = result.manifest["config"]
    assert (config.get("max_tokens"), config.get("max_tokens_per_shard")) == (total, each)
    assert verify_synth_kd(tmp_path / "a").passed
    in_chunks_of(7, source, tmp_path / "b", workers=0, on_error="quarantine", **options)
    assert digest(tmp_path / "b") == digest(tmp_path / "a")


def test_a_cap_that_no_row_fits_into(source: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no row fits"):
        build_synth_kd(source, tmp_path / "out", workers=0, max_tokens=3)
    with pytest.raises(ConfigError, match="max_tokens_per_shard is 0"):
        build_synth_kd(source, tmp_path / "out", workers=0, max_tokens_per_shard=0)
    assert not (tmp_path / "out").exists()


# --- the manifest of the input ------------------------------------------------------------------------------------


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    return write_input(tmp_path / "in", [[row(f"{shard}-{n}", chat()) for n in range(30)] for shard in range(3)])


def write_manifest(folder: Path, **content: Any) -> None:
    (folder / "manifest.json").write_text(json.dumps({"schema_version": "synth_harmony_v1", **content}))


def test_rows_in_all_and_files_of_other_names(copied: Path) -> None:
    write_manifest(copied, total_rows=91)
    with pytest.raises(DataError, match="says 91 total_rows, but the 3 shards next to it have 90"):
        read_input(copied)
    listed = [{"path": f"data/synth_harmony_shard_{number:02}.parquet"} for number in range(4)]
    for lists in ({"shards": listed}, {"storage": {"shards": listed}}, {"shards": listed[:2]}):
        write_manifest(copied, **lists)
        with pytest.raises(DataError, match=r"synth_harmony_shard_0[23].parquet is in one of them only"):
            read_input(copied)
    write_manifest(copied, total_rows=90, shards=listed[:3])
    assert len(read_input(copied).shards) == 3
    (copied / "synth_harmony_shard_02.parquet").rename(copied / "synth_harmony_shard_2.parquet")
    with pytest.raises(DataError, match=r"holds synth_harmony_shard_2.parquet, which is no .* would be left out"):
        read_input(copied)


# --- commands -----------------------------------------------------------------------------------------------------


def test_training_on_such_a_root_is_one_clear_error(tmp_path: Path) -> None:
    build_synth_kd(DATA / "synth_harmony", tmp_path / "kd", workers=0, max_tokens=5000, audit=0)
    recipe = {
        "out": str(tmp_path / "run"),
        "model": "tiny",
        "dataset_dir": str(tmp_path / "kd"),
        "batch_size": 1,
        "block_size": 64,
    }
    (tmp_path / "train.yaml").write_text(json.dumps(recipe))
    done = here("train", str(tmp_path / "train.yaml"))
    assert done.returncode == 2
    assert "Megatron's indexed datasets" in done.stderr

"""Caps in tokens and rows: the first rows of each shard, whatever the chunks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from chatmill.distill.check import verify_synth_kd
from chatmill.distill.run import build_synth_kd
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
    build_synth_kd(source, out, valid_fraction=0.0, workers=0, on_error="quarantine", audit=0)
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
    options: dict[str, Any] = {"max_tokens": total, "max_tokens_per_shard": each, "valid_fraction": 0.0, "audit": 0}
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


def test_caps_count_input_rows_in_shard_order(source: Path, tmp_path: Path) -> None:
    for number, (caps, wanted) in enumerate(
        (
            ({"max_rows": 33}, [(30, 29), (3, 3), (0, 0)]),  # failed rows are counted
            ({"max_rows_per_shard": 5}, [(5, 4), (5, 5), (5, 5)]),
            ({"max_rows_per_shard": 5, "max_rows": 7}, [(5, 4), (2, 2), (0, 0)]),
            ({"max_rows": 1000}, [(30, 29), (30, 30), (30, 30)]),
        )
    ):
        options: dict[str, Any] = {"workers": 0, "on_error": "quarantine", "audit": 0, **caps}
        manifest = in_chunks_of(3, source, tmp_path / str(number), **options).manifest
        built = [sum(split["shards"][shard]["rows"] for split in manifest["splits"].values()) for shard in range(3)]
        used = [entry["rows_used"] for entry in manifest["input"]["shards"]]
        assert list(zip(used, built, strict=True)) == wanted
        assert manifest["failed"]["rows"] == 1


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

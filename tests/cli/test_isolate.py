"""`chatmill isolate` on a small saved model: verdict, exit status, other ways to call, JSON."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from chatmill.errors import ChatmillError, ConfigError, DataError
from chatmill.load.boundary_keys import HYBRIDS, Needs
from tests.cli.run import invoke
from tests.load.hybrids import tiny_config

run = partial(invoke, "isolate")


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import torch
    import transformers as hf

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    folder = tmp_path_factory.mktemp("model")
    hf.LlamaForCausalLM(hf.LlamaConfig(vocab_size=97, initializer_range=0.5, **sizes)).save_pretrained(folder)
    return folder


def test_float64_passes_though_eager_attention_takes_its_softmax_in_float32(model_dir: Path) -> None:
    result = run(model_dir, "--max-length", 32, "--set", "dtype=float64", "--set", "attention=eager", "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.output)
    assert report["moved"] == 0
    assert report["alone"] <= report["alone_tolerance"]


def test_every_way_to_call_is_tried(model_dir: Path) -> None:
    result = run(model_dir, "--max-length", 32)
    assert result.exit_code == 0, result.output
    assert result.output.startswith("isolated: 9 documents, 0 leak")
    table, end = result.output.split("the same rows, called with")[1].split("\n\n")
    ways = ("position_ids", "+ cu_seq_lens_q/k", "+ seq_idx", "+ cu_seq_lens_q/k, seq_idx", "+ seq_idx, cu_seqlens",
            "+ cu_seq_lens_q/k, seq_idx, cu_seqlens", "+ 4D float mask", "+ 4D float mask, seq_idx")  # fmt: skip
    lines = [(line[:42].strip(), line.split()[-1]) for line in table.splitlines()[1:]]
    assert lines == [(way, "isolated") for way in ways]
    assert end.strip() == "The fewest keys that isolate: position_ids, use_cache"
    assert max(map(len, result.output.splitlines())) <= 80


@pytest.mark.parametrize("kind", ["qwen3_5_text", "kimi_linear", "jamba"])
def test_a_hybrid_gets_the_fewest_keys_that_isolate_it(kind: str, tmp_path: Path) -> None:
    tiny_config(kind).save_pretrained(tmp_path)
    options = ["--random-weights", "--max-length", 24, "--rows", 1, "--json"]
    result = run(tmp_path, *options, "--reference-kernels")
    found, keys = json.loads(result.output), HYBRIDS[kind]
    assert result.exit_code == (keys is None)
    assert found["passed"] is (keys is not None)
    assert found["ways"]["position_ids"]["passed"] is False
    smallest = None if keys is None else ["position_ids", "use_cache", *Needs.of_recurrent(keys).names]
    assert found["smallest"] == smallest


def test_a_kernel_that_is_not_installed_is_named(tmp_path: Path) -> None:
    tiny_config("lfm2").save_pretrained(tmp_path)
    result = run(tmp_path, "--random-weights", "--max-length", 24, "--rows", 1)
    assert result.exit_code == 1
    assert "+ seq_idx" in result.output
    told = " ".join(result.output.split("\n\n")[-1].split())
    assert told.startswith("Nothing isolates here. ValueError: `causal_conv1d_fn` can't keep packed sequences apart")
    assert told.endswith("--reference-kernels shows which keys the model reads.")


ROW = list(range(20))


@pytest.mark.parametrize(
    "boundaries",
    [
        {"input_ids": [[5] * 12, ROW], "document_starts": [[0], [0, 6, 11]]},
        {"input_ids": [ROW], "seq_lengths": [[6, 5, 9]]},  # as `to_hf_dataset` packs them
    ],
)
def test_stored_rows_and_json(model_dir: Path, tmp_path: Path, boundaries: dict[str, Any]) -> None:
    pq.write_table(pa.table(boundaries), tmp_path / "packed.parquet")
    result = run(model_dir, tmp_path / "packed.parquet", "--json", "--random-weights")
    assert result.exit_code == 0, result.output
    report = json.loads(result.output)
    assert report["passed"] is True
    assert [(d["start"], d["length"]) for d in report["documents"]] == [(0, 6), (6, 5), (11, 9)]
    assert [way["passed"] for way in report["ways"].values()] == [True] * 8


@pytest.mark.parametrize(
    ("rows", "error", "words"),
    [
        ({"input_ids": [ROW], "document_starts": [[0]]}, DataError, "no rows of two documents"),
        ({"input_ids": [ROW], "seq_lengths": [[6, 25]]}, DataError, "seq_lengths of block 0 are"),
        (None, ConfigError, "--random-weights"),
    ],
)
def test_rows_and_folders_that_cannot_be_checked(
    model_dir: Path, tmp_path: Path, rows: dict[str, Any] | None, error: type[ChatmillError], words: str
) -> None:
    if rows is None:  # a folder without weights
        (tmp_path / "config.json").write_bytes((model_dir / "config.json").read_bytes())
    else:
        pq.write_table(pa.table(rows), tmp_path / "packed.parquet")
    with pytest.raises(error, match=words):
        raise run(*((model_dir, tmp_path / "packed.parquet") if rows else (tmp_path,))).exception

"""Exports to trainers: what the rules of each reader make of the files is the dataset, token by token.

The readers' rules are written here from their documentation. `tests/export/test_own_readers.py` reads the same files
with the trainers' own packages.
"""

from __future__ import annotations

import dataclasses
import gzip
import itertools
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from chatmill.errors import ChatmillError, ConfigError
from chatmill.export import export as export_module
from chatmill.export.check import verify_export
from chatmill.export.export import export_dataset
from chatmill.export.hf_rows import to_hf_dataset
from chatmill.export.registry import TARGETS
from chatmill.load.row_source import RowSource
from chatmill.store import split as split_module
from chatmill.store.documents import open_dataset
from chatmill.store.episode_writer import EpisodeWriter
from chatmill.store.episodes import EpisodeDataset
from tests.compiler.builds import write_jsonl
from tests.export.sets import CAPACITY, END, Document, aligned, built, cut, documents_of


@pytest.fixture(scope="module")
def episodes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(tmp_path_factory.mktemp("built") / "episodes")


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(tmp_path_factory.mktemp("built") / "rows", pack={"length": CAPACITY})


Write = Callable[..., Path]


@pytest.fixture
def write(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Write:
    """Writes documents by hand, and says of their tokenizer what a manifest would say."""

    def written(documents: list[tuple[list[int], list[float]]], **tokenizer: int) -> Path:
        with EpisodeWriter(tmp_path / "written", "train") as writer:
            for ids, weights in documents:
                writer.append(ids, weights)
        if tokenizer:
            opened = dataclasses.replace(open_dataset(tmp_path / "written"), about={"tokenizer": tokenizer})
            monkeypatch.setattr(export_module, "open_dataset", lambda *arguments: opened)
        return tmp_path / "written"

    return written


def same(found: list[Document], folder: Path, split: str = "train") -> None:
    wanted = documents_of(folder, split)
    assert len(wanted) > 20
    assert Counter(found) == Counter(wanted)


# The readers' rules.


def read_axolotl(out: Path, split: str) -> list[Document]:
    table = datasets.Dataset.load_from_disk(str(out / split))
    assert table.column_names == ["input_ids", "attention_mask", "labels"]
    assert all(row["attention_mask"] == [1] * len(row["input_ids"]) for row in table)
    return [one for row in table for one in cut(row["input_ids"], row["labels"], [0])]


def read_llamafactory(out: Path, split: str) -> list[Document]:
    table = datasets.load_from_disk(str(out))[{"train": "train", "val": "validation"}[split]]
    found = []
    for row in table:
        numbers = row["attention_mask"]
        used = len(numbers) - numbers.count(0)
        assert 0 not in numbers[:used]
        assert set(row["labels"][used:]) <= {-100}
        starts = [place for place in range(used) if place == 0 or numbers[place] != numbers[place - 1]]
        if "position_ids" in row:
            params = row["packing_params"]
            assert params["sequence_boundaries"] == [*starts, used, len(numbers)]
            assert params["right_padding_length"] == len(numbers) - used
            assert [place for place in range(used) if row["position_ids"][place] == 0] == starts
            assert max(numbers) == len(starts)
        found += cut(row["input_ids"][:used], row["labels"][:used], starts)
    return found


def read_megatron_bridge(out: Path, split: str) -> list[Document]:
    found = []
    names = sorted(path.name for path in (out / split).iterdir())
    assert all(name.endswith(".idx.parquet") for name in names)
    for row in pq.ParquetDataset([out / split / name for name in names]).read().to_pylist():
        bounds = [*row["seq_start_id"], len(row["input_ids"])]
        assert bounds[0] == 0
        for start, end in itertools.pairwise(bounds):
            # Inputs are the tokens but the last, labels those but the first, and the mask is read next to the inputs.
            mask = row["loss_mask"][start : end - 1]
            ids = row["input_ids"][start:end]
            found.append((tuple(ids), tuple(place + 1 for place, value in enumerate(mask) if value)))
    return found


def read_olmo_core(out: Path, split: str, eos: int = 0, dtype: str = "uint16") -> list[Document]:
    found = []
    for path in sorted((out / split).glob("token_ids_part_*.npy")):
        ids = np.fromfile(path, dtype=dtype)
        mask = np.fromfile(str(path).replace("token_ids", "labels_mask"), dtype=np.bool_)
        ends = np.flatnonzero(ids == eos) + 1
        starts = [0, *ends[:-1].tolist()]
        assert ends[-1] == len(ids) == len(mask)
        bounds = gzip.decompress(Path(str(path).replace(".npy", ".csv.gz")).read_bytes()).decode()
        assert bounds == "".join(f"{a},{b}\n" for a, b in zip(starts, ends.tolist(), strict=True))
        labels = np.where(mask, ids.astype(np.int64), -100).tolist()
        found += cut(ids.tolist(), labels, starts)
    return found


def read_skyrl(out: Path, split: str) -> list[Document]:
    found: list[Document] = []
    for row in pq.read_table(out / split).to_pylist():
        assert set(row["loss_mask"]) <= {0, 1}
        labels = [i if value else -100 for i, value in zip(row["input_ids"], row["loss_mask"], strict=True)]
        found += cut(row["input_ids"], labels, [0])
    return found


def read_levanter(out: Path, split: str, eos: int | None = None) -> list[Document]:
    """One document a row where `eos` is None, ended by padding, whose id is 258."""
    found = []
    for row in pq.read_table(out / split).to_pylist():
        ids = row["input_ids"]
        used = max(place + 1 for place, token in enumerate(ids) if token != 258)
        assert not any(row["loss_weights"][used - 1 :])
        starts = [0, *(place + 1 for place in range(used - 1) if ids[place] == eos)]
        weighed = [-100, *(ids[place + 1] if row["loss_weights"][place] else -100 for place in range(used - 1))]
        found += cut(ids[:used], weighed, starts)
    return found


def read_torchtitan(out: Path, split: str) -> list[Document]:
    source = RowSource(out / split)
    found = []
    for number in range(len(source)):
        inputs, shifted = source[number]
        labels, positions = aligned(shifted.tolist()), inputs["positions"].tolist()
        starts = [place for place, position in enumerate(positions) if position == 0]
        for start, end in zip(starts, [*starts[1:], len(positions)], strict=True):
            assert positions[start:end] == list(range(end - start))
        documents = list(cut(inputs["input"].tolist(), labels, starts))
        if set(documents[-1][0]) == {258}:
            assert documents.pop()[1] == ()
        found += documents
    return found


OPTIONS: dict[str, dict[str, Any]] = {
    "olmo-core": {"eod_id": 0},
    "levanter": {"max_length": CAPACITY, "packing_strategy": "alone"},
    "torchtitan": {"max_length": CAPACITY},
}
READERS: dict[str, Callable[..., list[Document]]] = {
    "axolotl": read_axolotl,
    "llamafactory": read_llamafactory,
    "megatron-bridge": read_megatron_bridge,
    "olmo-core": read_olmo_core,
    "skyrl": read_skyrl,
    "levanter": read_levanter,
    "torchtitan": read_torchtitan,
}


@pytest.mark.parametrize("to", READERS)
def test_the_reader_gets_the_tokens_and_targets_of_the_dataset(
    episodes: Path, tmp_path: Path, to: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(split_module, "BATCH_TOKENS", 20_000)
    result = export_dataset(episodes, to, tmp_path / "out", shard_tokens=50_000, **OPTIONS.get(to, {}))
    for split in ("train", "val"):
        found = READERS[to](tmp_path / "out", split)
        if to == "olmo-core":  # the end token that was asked for stands after each, untrained
            assert all(ids[-1] == 0 for ids, _ in found)
            found = [(ids[:-1], places) for ids, places in found]
        same(found, episodes, split)
        assert result.splits[split]["trained"] == sum(len(places) for _, places in found)
    assert verify_export(tmp_path / "out").passed
    assert str(tmp_path / "out") in result.config
    assert any("record_id" in sentence and "kinds" in sentence for sentence in result.not_held)


@pytest.mark.parametrize("to", ["llamafactory", "megatron-bridge", "torchtitan"])
def test_packed_rows_are_those_of_the_plan(rows: Path, tmp_path: Path, to: str) -> None:
    result = export_dataset(rows, to, tmp_path / "out")
    same(READERS[to](tmp_path / "out", "train"), rows)
    plan = open_dataset(rows).splits["train"].plan
    assert plan is not None
    assert result.splits["train"]["rows"] == len(plan) < result.splits["train"]["documents"]
    assert str(CAPACITY) in result.config
    if to == "megatron-bridge":
        schema = pq.read_schema(tmp_path / "out" / "train" / "shard_00000.idx.parquet")
        types = {field.name: str(field.type.value_type) for field in schema}
        assert types == {"input_ids": "int32", "seq_start_id": "int32", "loss_mask": "int8"}
        sizes = json.loads((tmp_path / "out" / "packed_metadata.json").read_text())
        longest = [max(len(ids) for ids, _ in documents_of(rows, split)) for split in ("train", "val")]
        assert [one["dataset_max_seqlen"] for one in sizes] == longest


@pytest.mark.parametrize("length", [1, 7, 8, 255, 2047, 2048, 3001, 4096, 8192])
def test_rows_of_llamafactory_fit_what_it_pads_and_hold_a_token_of_padding(
    write: Write, tmp_path: Path, length: int
) -> None:
    documents = [([5] * size, [1.0] * size) for size in (length, max(1, length // 2), max(1, length // 3))]
    result = export_dataset(write(documents), "llamafactory", tmp_path / "out", max_length=length)
    rows = datasets.load_from_disk(str(tmp_path / "out"))["train"]
    assert len(rows) < len(documents) or length == 1
    for row in rows:
        width = len(row["input_ids"])
        assert {len(row[name]) for name in ("labels", "attention_mask", "position_ids")} == {width}
        assert width % 8 == 0
        assert length < width <= length + 8
        params = row["packing_params"]
        assert width - params["right_padding_length"] == params["sequence_boundaries"][-2] <= length
        assert len(params["sequence_boundaries"]) > 2
    assert f"cutoff_len: {length}" in result.config


@pytest.mark.parametrize("to", ["axolotl", "olmo-core", "skyrl"])
def test_a_trainer_that_packs_itself_gets_documents(rows: Path, tmp_path: Path, to: str) -> None:
    result = export_dataset(rows, to, tmp_path / "out", **OPTIONS.get(to, {}))
    assert result.splits["train"]["rows"] == result.splits["train"]["documents"]
    assert any("packs again" in sentence for sentence in result.not_held)


# What a format cannot hold.


ENDED = [([5, 6, 2], [0, 1, 1]), ([7, 2], [0, 1])]
INSIDE = [([5, 2, 6, 2], [0, 1, 0, 1]), ([7, 2], [0, 1])]
OPEN = [([5, 6], [0, 1]), ([7, 2], [0, 1])]
WEIGHED: Any = [([5, 6, 0], [0, 0.5, 1])]
EOS = {"eos_id": 2, "pad_id": 258, "vocab_size": 300}
WEIGHTS = r"another weight than 0 and 1, and .* only reads trained or not: export to lev"
REFUSED: list[tuple[str, Any, dict[str, int], dict[str, Any], str]] = [
    *((to, WEIGHED, {}, OPTIONS.get(to, {}), WEIGHTS) for to in READERS if to != "levanter"),
    *((to, ENDED, {}, {}, r"no pack plan: give --max-length .*--pack alone") for to in ("levanter", "torchtitan")),
    *((to, ENDED, {}, {"max_length": 9}, "itself: leave out max_length") for to in ("axolotl", "olmo-core", "skyrl")),
    ("torchtitan", ENDED, {}, {"max_length": 2, "packing_strategy": "alone"}, "longer than a row of 2 tokens"),
    ("levanter", ENDED, {}, {"max_length": 6}, r"not known of this dataset, and Levanter .* --pack alone"),
    ("levanter", INSIDE, EOS, {"max_length": 6}, "the end token 2 occurs 1 times inside documents"),
    ("levanter", OPEN, EOS, {"max_length": 6}, "1 documents do not end in the end token 2"),
    ("olmo-core", INSIDE, {}, {}, "names none: give one with --eod-id"),
    ("olmo-core", INSIDE, EOS, {}, "end token 2 occurs 1 times inside documents, and OLMo-core cuts them"),
    ("olmo-core", OPEN, EOS, {}, r"1 documents do not end in the end token 2, .* --eod-id 2 adds it"),
    ("olmo-core", ENDED, EOS, {"eod_id": 300}, "the vocabulary has 300 tokens"),
    ("olmo-core", OPEN, {"eos_id": 2, "vocab_size": 6}, {}, "a token has the id 7; the vocabulary has 6"),
    ("megatron-bridge", [([5, 6, 2, 7, 8], [0, 1, 1, 1, 0])], EOS, {}, "1 trained tokens follow the end token 2"),
]


@pytest.mark.parametrize("case", range(len(REFUSED)))
def test_what_a_trainer_would_read_otherwise_is_refused(write: Write, tmp_path: Path, case: int) -> None:
    to, documents, tokenizer, options, message = REFUSED[case]
    with pytest.raises(ChatmillError, match=message):
        export_dataset(write(documents, **tokenizer), to, tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


PAIRS_ALONE = {"trl-dpo", "trl-kto", "trl-reward"}
PLACES = {"olmo-core": {"eod_id": 0}, **{to: {"max_length": 64} for to in ("torchtitan", "megatron-bridge")}}
PLACES["levanter"] = {"max_length": 64, "packing_strategy": "alone"}


@pytest.mark.parametrize("to", sorted(TARGETS.keys() - PAIRS_ALONE))
def test_every_stored_column_is_in_the_export_or_is_said_not_to_be(tmp_path: Path, to: str) -> None:
    sampled = {"role": "assistant", "content": "ok", "token_ids": [111, 107, END], "logprobs": [-0.5, -1.0, -2.0]}
    chats = [{"id": f"r{n}", "messages": [{"role": "user", "content": "q" * n}, sampled]} for n in range(1, 9)]
    folder = built(tmp_path / "built", sources=[{"path": str(write_jsonl(tmp_path / "a.jsonl", chats))}], logprobs=True)
    documents = open_dataset(folder).splits["train"]
    assert isinstance(documents, EpisodeDataset)
    stored = {"record_id", "source", "turns", "kinds", "logprobs"}
    assert stored == set(documents.columns) - {"ids", "mask", "trained"}
    result = export_dataset(folder, to, tmp_path / "out", **PLACES.get(to, {}))
    held: set[str] = set()
    if to in ("hf", "trl"):
        held = set(datasets.load_from_disk(str(tmp_path / "out"))["train"].column_names)
    if to == "parquet":
        held = set(pq.read_table(tmp_path / "out" / "train").column_names)
    unsaid = {name for name in stored - held if not any(name in sentence for sentence in result.not_held)}
    assert not unsaid


FIRSTS = [([5, 6], [1, 0]), ([7, 8], [0, 1])]
DROPS = "1 documents have nothing to train: {} drops them"
READ: list[tuple[str, Any, dict[str, int], int | None, list[Document], str]] = [
    ("levanter", ENDED, {"max_length": 6}, 2, [((7, 2), (1,)), ((5, 6, 2), (1, 2))], "loss_weights"),
    ("olmo-core", INSIDE, {"eod_id": 9}, 9, [((7, 2, 9), (1,)), ((5, 2, 6, 2, 9), (1, 3))], "eos_token_id=9"),
    ("olmo-core", OPEN, {"eod_id": 2}, 2, [((7, 2), (1,)), ((5, 6, 2), (1,))], "eos_token_id=2"),
    ("axolotl", FIRSTS, {}, None, [((5, 6), ()), ((7, 8), (1,))], DROPS.format("Axolotl")),
    ("skyrl", FIRSTS, {}, None, [((5, 6), ()), ((7, 8), (1,))], DROPS.format("SkyRL")),
]


@pytest.mark.parametrize("case", range(len(READ)))
def test_documents_end_as_the_trainer_wants_and_those_that_it_drops_are_counted(
    write: Write, tmp_path: Path, case: int
) -> None:
    to, documents, options, eos, wanted, said = READ[case]
    result = export_dataset(write(documents, **EOS), to, tmp_path / "out", **options)
    found = READERS[to](tmp_path / "out", "train", **({} if eos is None else {"eos": eos}))
    assert sorted(found, key=lambda one: len(one[0])) == wanted
    sentences = f"{result.config} {' '.join(result.not_held)}"
    assert said in sentences
    assert ("1 trained tokens are the first of a document" in sentences) == (documents is FIRSTS)


def test_levanter_holds_weights_and_moves_them_by_one(write: Write, tmp_path: Path) -> None:
    folder = write([([5, 6, 7], [1, 0.5, 2]), ([8, 9], [0, 1])])
    result = export_dataset(folder, "levanter", tmp_path / "out", max_length=4, packing_strategy="alone")
    table = pq.read_table(tmp_path / "out" / "train")
    assert table.schema.field("loss_weights").type == pa.list_(pa.float32())
    assert table.schema.field("input_ids").type == pa.list_(pa.int32())
    assert table.to_pylist() == [
        {"input_ids": [5, 6, 7, 0], "loss_weights": [0.5, 2, 0, 0]},
        {"input_ids": [8, 9, 0, 0], "loss_weights": [1, 0, 0, 0]},
    ]
    assert any("1 trained tokens are the first of a document" in sentence for sentence in result.not_held)


def test_megatron_bridge_is_told_that_no_end_token_is_known(write: Write, tmp_path: Path) -> None:
    assert "not known" in export_dataset(write(INSIDE), "megatron-bridge", tmp_path / "out").not_held[-1]


@pytest.mark.parametrize(("size", "dtype"), [(256, "uint8"), (257, "uint16"), (65_536, "uint16"), (65_537, "uint32")])
def test_olmo_core_arrays_are_as_wide_as_the_vocabulary(write: Write, tmp_path: Path, size: int, dtype: str) -> None:
    folder = write([([5, 6, 2], [0, 1, 1])], eos_id=2, vocab_size=size)
    assert f'dtype="{dtype}"' in export_dataset(folder, "olmo-core", tmp_path / "out").config
    written = (tmp_path / "out" / "train" / "token_ids_part_00000.npy").read_bytes()
    assert written == np.array([5, 6, 2], dtype).tobytes()


# Recurrent layers.


def for_model(tmp_path: Path, kind: str) -> dict[str, Any]:
    """Options to pack the split `val` for a model."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, "vocab_size": 384}))
    return {"max_length": CAPACITY, "model": str(tmp_path), "split": "val"}


@pytest.mark.parametrize(
    ("kind", "reads"),
    [
        ("qwen3_5_text", "cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k, seq_idx;"),
        ("kimi_linear", "seq_idx, cu_seqlens;"),
        ("llama", ""),
    ],
)
def test_rows_for_a_hybrid_say_what_their_batches_need(kind: str, reads: str, episodes: Path, tmp_path: Path) -> None:
    packed = for_model(tmp_path, kind)
    *needs, by_trl, by_us = export_dataset(episodes, "hf", tmp_path / "hf", **packed).config.splitlines()
    assert [line.startswith(f"# {kind} reads {reads}") for line in needs] == ([True] if reads else [])
    assert by_trl.startswith("TRL: SFTConfig(padding_free=True, max_length=None)") == (kind != "kimi_linear")
    assert "model=model" in by_us
    other = export_dataset(episodes, "llamafactory", tmp_path / "other", **packed)
    assert any("packed documents see each other" in one for one in other.not_held) == (kind != "llama")


def test_rows_for_a_hybrid_that_cannot_be_packed_are_refused(episodes: Path, tmp_path: Path) -> None:
    packed = for_model(tmp_path, "jamba")
    for to in ("hf", "parquet", "llamafactory"):
        with pytest.raises(ConfigError, match=r"jamba has layers .* --pack alone"):
            export_dataset(episodes, to, tmp_path / to, **packed)
    with pytest.raises(ConfigError, match=r"jamba .* packed=False"):
        to_hf_dataset(episodes, "val", packed=True, max_length=CAPACITY, model=tmp_path)
    alone = export_dataset(episodes, "hf", tmp_path / "alone", packing_strategy="alone", **packed)
    assert alone.splits["val"]["rows"] == alone.splits["val"]["documents"]

"""Exports: round trips give the same bytes, other libraries read the same rows, and what is lost is said."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chatmill.compiler.run import run_build
from chatmill.core.checksums import Hash
from chatmill.core.harmony_ids import EOD
from chatmill.core.kinds import MARK, Part, RoleCode, kind, role_of
from chatmill.core.publish import StorageError
from chatmill.core.tokens import offsets_of
from chatmill.errors import ConfigError, DataError, FormatError, UnknownNameError
from chatmill.export.check import is_export, verify_export
from chatmill.export.export import export_dataset
from chatmill.export.hf_rows import to_hf_dataset
from chatmill.export.megatron import spans_of
from chatmill.export.registry import TARGETS
from chatmill.pack.plan import Plan
from chatmill.store import split as split_module
from chatmill.store.episode_writer import EpisodeWriter
from chatmill.store.episodes import EpisodeDataset
from chatmill.store.kd import find_kd_root, synth_kd_blend
from chatmill.store.kd_shard import KDShard
from chatmill.store.split import Documents
from tests.cli.run import here
from tests.conftest import DATA
from tests.export.sets import CAPACITY, built
from tests.faults import active
from tests.load.sets import state_rows


@pytest.fixture(scope="module")
def episodes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = built(tmp_path_factory.mktemp("built") / "episodes", shard_bytes=30_000)
    assert len(EpisodeDataset(out).shards) > 2
    return out


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(tmp_path_factory.mktemp("built") / "rows", pack={"length": CAPACITY}, shard_bytes=32 << 20)


def plan_of(folder: Path, split: str = "train") -> Plan:
    found = EpisodeDataset(folder, split).plan
    assert found is not None
    return found


def files_of(folder: Path) -> dict[str, str]:
    return {p.relative_to(folder).as_posix(): Hash.SHA256.of_file(p) for p in sorted(folder.rglob("*")) if p.is_file()}


def labels_of(ids: list[int], weights: Any) -> list[int]:
    return [i if w > 0 else -100 for i, w in zip(ids, weights.tolist(), strict=True)]


def test_hf_and_parquet_hold_every_episode(episodes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(split_module, "BATCH_TOKENS", 10_000)
    assert export_dataset(episodes, "hf", tmp_path / "hf").not_held == ()
    assert export_dataset(episodes, "parquet", tmp_path / "out", shard_tokens=5_000).not_held == ()
    names = sorted(path.name for path in (tmp_path / "out" / "train").iterdir())
    assert names[:2] == ["shard_00000.parquet", "shard_00001.parquet"]
    files = [pq.read_table(tmp_path / "out" / "train" / name)["input_ids"].to_pylist() for name in names]
    assert all(len(rows) == 1 or sum(map(len, rows)) <= 5_000 for rows in files), "also where a batch has more"
    opened = datasets.load_from_disk(str(tmp_path / "hf"))
    assert list(opened) == ["train", "val"]
    for split, rows in opened.items():
        stored: Any = list(EpisodeDataset(episodes, split))
        facts = ("record_id", "source", "turns")
        wanted = [
            {"input_ids": one.ids.tolist(), "kinds": one.kinds.tolist(), **{name: getattr(one, name) for name in facts}}
            for one in stored
        ]
        assert len(wanted) > 20
        assert [{name: row[name] for name in wanted[0]} for row in rows] == wanted
        assert rows["labels"][:] == [labels_of(one.ids.tolist(), one.weights) for one in stored]
        same = to_hf_dataset(episodes, split)
        assert same["input_ids"][:] == rows["input_ids"][:]
        assert same["labels"][:] == rows["labels"][:]
        in_parquet = pq.read_table(tmp_path / "out" / split).to_pylist()
        assert [row.pop("loss_mask") for row in in_parquet] == [one.weights.tolist() for one in stored]
        assert in_parquet == wanted


def test_hf_rows_are_the_packed_rows(rows: Path, tmp_path: Path) -> None:
    import datasets

    result = export_dataset(rows, "hf", tmp_path / "out", split="train")
    found = datasets.load_from_disk(str(tmp_path / "out"))
    names = ["input_ids", "labels", "kinds", "document_starts", "documents", "seq_lengths"]
    assert found.column_names == [*names, "record_id", "source", "turns"]
    stored, plan = EpisodeDataset(rows), plan_of(rows)
    assert len(found) == len(plan) > 3
    for number, row in enumerate(found):
        episodes = [stored[episode] for episode in plan.bin(number).tolist()]
        assert row["documents"] == [episode.index for episode in episodes]
        assert row["record_id"] == [episode.record_id for episode in episodes]
        assert row["input_ids"] == [token for episode in episodes for token in episode.ids.tolist()]
        assert row["seq_lengths"] == [len(episode) for episode in episodes]
        assert row["document_starts"] == np.cumsum([0, *row["seq_lengths"][:-1]]).tolist()
        labels = [labels_of(episode.ids.tolist(), episode.weights) for episode in episodes]
        assert row["labels"] == [label for one in labels for label in (-100, *one[1:])]
    assert any(f"{CAPACITY:,} tokens, is in export.json" in sentence for sentence in result.not_held)
    assert result.manifest["source"]["layout"] == {"train": "rows"}


def test_packing_on_the_way_gives_the_rows_of_a_packed_build(episodes: Path, rows: Path, tmp_path: Path) -> None:
    export_dataset(episodes, "parquet", tmp_path / "a", max_length=CAPACITY)
    export_dataset(rows, "parquet", tmp_path / "b")
    for split in ("train", "val"):
        a, b = (pq.read_table(tmp_path / name / split) for name in "ab")
        assert a.equals(b)
        assert len(a) == len(plan_of(rows, split))
    export_dataset(rows, "parquet", tmp_path / "c", max_length=2 * CAPACITY)
    assert len(pq.read_table(tmp_path / "c" / "train")) < len(plan_of(rows))


def write(folder: Path, *documents: tuple[list[int], list[float] | None], shard_tokens: int | None = None) -> Path:
    with EpisodeWriter(folder, "train", shard_tokens) as writer:
        for ids, weights in documents:
            writer.append(ids, weights)
    return folder


def test_weights_that_labels_cannot_hold(tmp_path: Path) -> None:
    import datasets

    weights = [[1, 0, 1, 1], [0.25, 0, 1], [0, 3]]
    documents = zip(([5, 6, 7, 8], [9, 10, 11], [12, 13]), weights, strict=True)
    fractional = write(tmp_path / "a", *documents, shard_tokens=6)
    result = export_dataset(fractional, "hf", tmp_path / "hf", split="train")
    rows = datasets.load_from_disk(str(tmp_path / "hf"))
    assert rows["loss_weights"][:] == weights
    assert rows["labels"][:] == [[5, -100, 7, 8], [9, -100, 11], [-100, 13]]
    assert [s for s in result.not_held if "2 tokens have another weight than 0 and 1" in s]
    packed = export_dataset(fractional, "hf", tmp_path / "packed", max_length=9)
    assert any("2 trained tokens are the first of a document" in s for s in packed.not_held)
    assert export_dataset(fractional, "parquet", tmp_path / "out").not_held == ()
    table = pq.read_table(tmp_path / "out" / "train")
    assert table.column_names == ["input_ids", "loss_mask", "weights"]
    assert table["weights"].to_pylist() == weights
    assert table["loss_mask"].to_pylist() == [[1, 0, 1, 1], [1, 0, 1], [0, 1]]


@pytest.mark.parametrize("to", [name for name in sorted(TARGETS) if not name.startswith("trl-")])
def test_every_target_gives_the_same_bytes_again(episodes: Path, tmp_path: Path, to: str) -> None:
    options: dict[str, Any] = {"levanter": {"packing_strategy": "alone"}, "olmo-core": {"eod_id": 0}}.get(to, {})
    options |= {"max_length": CAPACITY} if to in ("levanter", "torchtitan") else {}
    first = export_dataset(episodes, to, tmp_path / "one", **options)
    export_dataset(episodes, to, tmp_path / "two", **options)
    assert files_of(tmp_path / "one") == files_of(tmp_path / "two")
    manifest = json.loads((tmp_path / "one" / "export.json").read_text())
    assert manifest == first.manifest
    built = json.loads((episodes / "manifest.json").read_text())
    assert manifest["source"]["fingerprint"] == built["fingerprint"]
    assert manifest["source"]["about"]["tokenizer"] == built["tokenizer"]
    found = {k: v for k, v in files_of(tmp_path / "one").items() if k != "export.json"}
    assert {name: record["sha256"] for name, record in manifest["files"].items()} == found
    stored = EpisodeDataset(episodes)
    assert first.splits["train"]["documents"] == len(stored)
    assert first.splits["train"]["tokens"] == stored.tokens == built["splits"]["train"]["tokens"]
    assert first.splits["train"]["trained"] == int(stored.column("trained").sum())
    assert not list(tmp_path.glob(".tmp-*"))
    assert is_export(tmp_path / "one")
    (tmp_path / "one" / "cache-123.arrow").write_bytes(b"made by datasets.map")
    report = verify_export(tmp_path / "one")
    assert report.passed
    assert report.counts["files"] == len(manifest["files"]) > 1
    assert report.counts["tokens"] == sum(split["tokens"] for split in manifest["splits"].values())


@pytest.mark.parametrize(
    ("to", "options", "error", "words"),
    [
        ("tfrecord", {}, UnknownNameError, r"Known: hf, trl, .*parquet, megatron, .*olmo-core"),
        ("parquet", {"max_length": 500}, DataError, r"longer than a row of 500 tokens: \w+-\d+ \([\d,]+\), .* an over"),
        ("parquet", {"max_length": CAPACITY, "packing_strategy": "best"}, UnknownNameError, "packing strategy"),
        ("parquet", {"packing_strategy": "greedy"}, ConfigError, r"packed anew.*give max_length"),
        ("parquet", {"eod_id": 1}, ConfigError, "exports to megatron"),
        ("megatron", {"max_length": 100}, ConfigError, "sequence_length"),
        ("megatron", {"eod_id": 2**31}, ConfigError, "int32"),
        ("hf", {"split": "test"}, UnknownNameError, "unknown split 'test'"),
    ],
)
def test_what_is_refused(
    episodes: Path, tmp_path: Path, to: str, options: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        export_dataset(episodes, to, tmp_path / "out", **options)
    assert not list(tmp_path.iterdir())


def test_folders_that_are_refused_and_a_full_disk(episodes: Path, tmp_path: Path) -> None:
    with active("before:/out$:1:enospc"), pytest.raises(StorageError, match=r"out: cannot .*No space left"):
        export_dataset(episodes, "parquet", tmp_path / "out")
    assert not list(tmp_path.iterdir())
    with pytest.raises(ConfigError, match="inside the dataset"):
        export_dataset(episodes, "hf", episodes / "hf")
    with pytest.raises(FormatError, match="no such folder"):
        export_dataset(tmp_path / "none", "hf", tmp_path / "out")
    (tmp_path / "out").mkdir()
    with pytest.raises(ConfigError, match="is there already"):
        export_dataset(episodes, "hf", tmp_path / "out")


def test_the_command(episodes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = here("export", episodes, "--to", "skyrl", "--out", "here", columns=100)
    assert done.returncode == 0, done.stderr
    assert "Not held by this export (skyrl):" in done.stdout
    assert "kinds: SkyRL reads none of them" in done.stdout
    done = here("export", episodes, "--to", "parquet", "--split", "val", "--json", "--out", "here-parquet")
    manifest = json.loads(done.stdout)
    assert (manifest["not_held"], list(manifest["splits"])) == ([], ["val"])
    assert manifest["source"]["about"]["template"]["name"] == "chatml"


# To Megatron Core's indexed datasets: every value where spec 5 wants it.


def obvious_spans(kinds: list[int], weights: list[float]) -> list[int]:
    """The span of each token of one document, by looking at one token after the other."""
    spans = []
    for place, weight in enumerate(weights):
        if not weight:
            spans.append(0)
        elif role_of(kinds[place]) is not RoleCode.ASSISTANT:
            spans.append(2)
        else:
            opened = place
            while opened < len(kinds) and kinds[opened] == kind(RoleCode.ASSISTANT, Part.HEADER):
                opened += 1
            is_reasoning = opened < len(kinds) and kinds[opened] & ~MARK == kind(RoleCode.ASSISTANT, Part.REASONING)
            spans.append(1 if is_reasoning else 2)
    return spans


KIND = st.sampled_from([kind(role, part) for role in (RoleCode.USER, RoleCode.ASSISTANT) for part in Part][1:])
TOKENS = st.lists(st.tuples(KIND, st.sampled_from([0, 1])), min_size=1, max_size=9)


@settings(max_examples=150)
@given(st.lists(TOKENS, min_size=1, max_size=5))
def test_spans_equal_a_walk_over_single_tokens(documents: list[list[tuple[int, int]]]) -> None:
    kinds = np.array([k for document in documents for k, _ in document], dtype=np.uint8)
    weights = np.array([w for document in documents for _, w in document], dtype=np.uint8)
    offsets = offsets_of(np.array([len(document) for document in documents]))
    some = Documents(ids=np.zeros(len(kinds), np.uint32), offsets=offsets, weights=weights, kinds=kinds)
    wanted = [span for d in documents for span in obvious_spans([k for k, _ in d], [w for _, w in d])]
    assert spans_of(some).tolist() == wanted
    bare = Documents(ids=some.ids, offsets=offsets, weights=weights, kinds=None)
    assert spans_of(bare).tolist() == (2 * weights).tolist()


@pytest.fixture(scope="module")
def harmony(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Real Harmony conversations: analysis, final, wrappers trained."""
    path = DATA / "synth_harmony" / "synth_harmony_shard_00.parquet"
    rules = {"tokenizer": "o200k", "template": "harmony", "policy": "synth_kd", "split": {"val_fraction": 0.2}}
    out = tmp_path_factory.mktemp("built") / "harmony"
    run_build({"sources": [{"path": str(path), "max_records": 60}], **rules}, out, workers=0)
    return out


def test_every_value_of_a_real_dataset_packed_or_not(harmony: Path, tmp_path: Path) -> None:
    result = export_dataset(harmony, "megatron", tmp_path / "out", eod_id=EOD)
    root = find_kd_root(tmp_path / "out")
    assert list(root.splits) == ["train", "val"]
    seen = set()
    for split, prefixes in root.splits.items():
        (prefix,) = prefixes
        shard, episodes = KDShard.open(prefix), EpisodeDataset(harmony, split)
        assert len(shard) == len(episodes) > 3
        assert shard.tokens.dtype == np.int32
        for number, episode in enumerate(episodes):
            ids, mask, span = shard.document(number)
            assert episode.weights is not None
            assert episode.kinds is not None
            spans = obvious_spans(episode.kinds.tolist(), episode.weights.tolist())
            assert ids.tolist() == [*episode.ids.tolist(), EOD]
            assert span.tolist() == [*spans[1:], 0, 0]
            assert mask.tolist() == [int(value > 0) for value in span]
            seen |= set(span.tolist())
        assert result.splits[split]["documents"] == len(shard)
    assert seen == {0, 1, 2}
    manifest = json.loads((tmp_path / "out" / "export.json").read_text())
    assert manifest["options"]["eod_id"] == EOD
    stems = [f"{split}/shard_00_{column}" for split in root.splits for column in ("tokens", "lossmask", "span")]
    assert set(manifest["files"]) == {f"{stem}.{kind}" for stem in stems for kind in ("bin", "idx")}
    assert [said.split(":")[0] for said in result.not_held] == ["record_id, source, turns", "kinds are not kept"]
    assert synth_kd_blend(tmp_path / "out", "val").weights[0] == result.splits["val"]["tokens"] + len(shard)
    shutil.copytree(harmony, tmp_path / "rows")
    for split in ("train", "val"):
        state_rows(tmp_path / "rows" / split, 8000)
    packed = export_dataset(tmp_path / "rows", "megatron", tmp_path / "one", eod_id=EOD)
    assert "Megatron packs again" in packed.not_held[0]
    assert packed.manifest["files"] == result.manifest["files"]


def test_what_megatron_cannot_hold_is_said(tmp_path: Path) -> None:
    result = export_dataset(
        write(tmp_path / "set", ([5, 6, 7, 9], [1, 0.5, 0, 1]), ([8, 9], [0, 0.25])), "megatron", eod_id=9
    )
    assert result.directory == tmp_path / "set-megatron"
    shard = KDShard.open(result.directory / "train" / "shard_00_tokens")
    assert [column.tolist() for column in shard.document(0)] == [[5, 6, 7, 9], [1, 0, 1, 0], [2, 0, 2, 0]]
    assert shard.document(1)[0].tolist() == [8, 9]  # ends in the EOD already
    said = " ".join(result.not_held)
    assert "2 tokens have another weight than 0 and 1" in said
    assert "1 trained tokens are the first of a document" in said
    assert "every trained token has the span 2" in said
    assert "--eod-id" not in said
    result = export_dataset(write(tmp_path / "bare", ([5, 6, 7], None)), "megatron", tmp_path / "out")
    shard = KDShard.open(tmp_path / "out" / "train" / "shard_00_tokens")
    assert [column.tolist() for column in shard.document(0)] == [[5, 6, 7], [1, 1, 0], [2, 2, 0]]
    said = " ".join(result.not_held)
    assert "stores no masks" in said
    assert "--eod-id" in said


@pytest.mark.parametrize("shard_tokens", [1, 7, 12, 10_000])
def test_shards_hold_whole_documents_in_order(tmp_path: Path, shard_tokens: int) -> None:
    documents: Any = [([10 * n + i for i in range(1 + n % 5)], [0.0] * (1 + n % 5)) for n in range(1, 20)]
    export_dataset(write(tmp_path / "set", *documents), "megatron", tmp_path / "out", shard_tokens=shard_tokens)
    shards = [KDShard.open(prefix) for prefix in synth_kd_blend(tmp_path / "out").prefixes]
    back = [shard.document(n)[0].tolist() for shard in shards for n in range(len(shard))]
    assert back == [ids for ids, _ in documents]
    sizes = [shard.tokens.values for shard in shards]
    assert all(size <= shard_tokens or len(shard) == 1 for size, shard in zip(sizes, shards, strict=True))
    for (one, size), after in zip(zip(shards, sizes, strict=True), shards[1:], strict=False):
        assert size + int(after.tokens.lengths[0]) > shard_tokens, one.prefix
    assert len(shards) == {1: 19, 10_000: 1}.get(shard_tokens, len(shards)) > 0

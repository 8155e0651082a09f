"""What can be looked at: every layout opens by one function, and columns, items and passes agree with the stores."""

from __future__ import annotations

import json
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from chatmill.auditor.open import open_tokenized
from chatmill.core.kinds import KINDS, Part, part_of, role_of
from chatmill.core.trainer_columns import BOUNDARIES, MASKS, read_columns
from chatmill.errors import ChatmillError, ConfigError, DataError, FormatError, UnknownNameError
from chatmill.look import splits
from chatmill.look.counting import count_tokens
from chatmill.look.dataset import LookDataset, open_for_looking
from chatmill.look.items import Item, message_starts
from chatmill.look.splits import LookLayout, LookSplit
from chatmill.store import split as split_module
from chatmill.store.episode_writer import EpisodeWriter
from chatmill.store.episodes import EpisodeDataset
from tests.kd_manifest import write_kd_manifest
from tests.look.sets import HOSTILE, folder, tokenizer_once, write_columns
from tests.megatron.kd_sets import make_documents, on_disk

LAYOUTS = {
    "episodes": LookLayout.EPISODES,
    "rows": LookLayout.ROWS,
    "hf": LookLayout.PACKED,
    "parquet": LookLayout.PACKED,
    "kd": LookLayout.KD,
}


@pytest.fixture(autouse=True)
def _tokenizers_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("chatmill.look.decoder.load_tokenizer", tokenizer_once)


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_opens_and_one_split_of_it_by_its_folder(name: str) -> None:
    dataset = open_for_looking(folder() / name)
    assert dataset.layout is LAYOUTS[name]
    first, second = dataset.splits
    assert first == "train"
    for split in dataset.splits.values():
        check_columns(split)
    assert dataset.decoder is not None
    assert dataset.decoder_problem == ""
    assert (dataset.ledger is not None) == (name in ("episodes", "rows", "kd")), "exports say little of it"
    with pytest.raises(UnknownNameError, match="unknown split 'test'"):
        open_for_looking(folder() / name, ["test"])
    assert list(open_for_looking(folder() / name, [second]).splits) == [second]
    if name != "parquet":
        alone = open_for_looking(folder() / name / second)
        assert list(alone.splits) == [second]
        assert len(alone.split()) == len(dataset.split(second))
        assert alone.decoder is not None, "the manifest above it names the tokenizer"


def check_columns(split: LookSplit) -> None:
    """Columns and passes against the items one by one."""
    items = [split.item(number) for number in range(len(split))]
    assert len(items) == len(split) > 0
    assert split.tokens.tolist() == [len(item) for item in items]
    assert split.documents.tolist() == [len(item.starts) for item in items]
    lengths = [last - first for item in items for first, last in item.borders]
    assert split.document_lengths.tolist() == lengths
    trained = count_tokens(split).trained
    assert trained.tolist() == [int((item.is_trained).sum()) for item in items]
    assert split.stored_trained is None or split.stored_trained.tolist() == trained.tolist()
    assert 0 < trained.sum() <= split.total_tokens == sum(lengths)
    batches = list(split.batches())
    numbers = [number for batch in batches for number in batch.items.tolist()]
    assert numbers == [item.number for item in items for _ in item.starts]
    assert np.concatenate([np.diff(batch.offsets) for batch in batches]).tolist() == lengths
    for name in ("ids", "weights", "kinds", "spans"):
        stored = [getattr(item, name) for item in items]
        read = [getattr(batch, name) for batch in batches]
        assert (stored[0] is None) == (read[0] is None)
        if stored[0] is not None:
            assert np.array_equal(np.concatenate(stored), np.concatenate(read))


def test_small_batches_and_released_files_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(split_module, "BATCH_TOKENS", 300)
    monkeypatch.setattr(splits, "RELEASE_TOKENS", 5)
    for name, least in (("episodes", 5), ("rows", 5), ("kd", 0)):
        split: Any = open_for_looking(folder() / name).split("train")
        assert len(list(split.batches())) > least
        check_columns(split)
        if name != "kd":
            split.item(0)
            assert split.stored.shards[0].files.get.cache_info().currsize > 0
            for _ in split.batches():
                pass
            assert split.stored.shards[0].files.get.cache_info().currsize == 0, "a pass unmaps what it has read"


def test_rows_that_have_their_order_in_a_file_of_indices_are_refused(tmp_path: Path) -> None:
    state = {"_data_files": [{"filename": "data-0.arrow"}], "_indices_data_files": [{"filename": "indices.arrow"}]}
    (tmp_path / "state.json").write_text(json.dumps(state))
    for opens in (open_for_looking, open_tokenized):
        with pytest.raises(ConfigError, match="keeps the order of its rows in a file of its own"):
            opens(tmp_path)


def test_items_are_what_the_stores_hold() -> None:
    opened: Any = open_for_looking(folder() / "episodes").split("train")
    stored = EpisodeDataset(folder() / "episodes")
    assert len(stored) > 20
    for number, episode in enumerate(stored):
        item = opened.item(number)
        assert np.array_equal(item.ids, episode.ids)
        assert (item.record_id, item.source, item.turns) == (episode.record_id, episode.source, episode.turns)
        assert opened.record_id(number) == episode.record_id
        assert opened.source_names[opened.sources[number]] == episode.source
    rows: Any = open_for_looking(folder() / "rows").split("train")
    stored = EpisodeDataset(folder() / "rows")
    assert stored.plan is not None
    assert len(rows) == len(stored.plan) > 3
    for number in range(len(rows)):
        item, episodes = rows.item(number), [stored[episode] for episode in stored.plan.bin(number).tolist()]
        parts = [item.ids[first:last].tolist() for first, last in item.borders]
        assert parts == [episode.ids.tolist() for episode in episodes]
        assert parts == [rows.alone.item(episode.index).ids.tolist() for episode in episodes]
        assert len(item.ids) == sum(map(len, parts))
        assert item.document_ids == tuple(episode.record_id for episode in episodes)
        assert item.padding == 1024 - int(stored.plan.bin_lengths(stored.lengths)[number])
        assert all(number in rows.find(episode.record_id) for episode in episodes)


def test_a_split_without_a_plan_is_episodes(tmp_path: Path) -> None:
    shutil.copytree(folder() / "rows", tmp_path / "set")
    path = tmp_path / "set" / "val" / "episodes.json"
    path.write_text(json.dumps(json.loads(path.read_bytes()) | {"rows": None}))
    assert open_for_looking(tmp_path / "set").layout is LookLayout.EPISODES
    assert open_for_looking(tmp_path / "set" / "train").layout is LookLayout.ROWS


def test_a_row_whose_boundaries_cannot_be_right_is_one_document(tmp_path: Path) -> None:
    ids = [[1, 2, 3], [4, 5], [6], []]
    for name, values in (("document_starts", [[0, 2], [0, 5], None, []]), ("seq_lengths", [[2, 1], [1, 2], None, []])):
        pq.write_table(pa.table({"input_ids": ids, name: values}), tmp_path / "rows.parquet")
        split = open_for_looking(tmp_path / "rows.parquet").split()
        check_columns(split)
        assert split.documents.tolist() == [2, 1, 1, 0]
        assert split.document_lengths.tolist() == [2, 1, 2, 1]


def test_weights_of_any_type_of_number_are_what_they_are(tmp_path: Path) -> None:
    for kind in (pa.int64(), pa.int16(), pa.float64()):
        rows = {"input_ids": [[65, 66, 67]], "weights": pa.array([[256, 0, -1]], pa.list_(kind))}
        pq.write_table(pa.table(rows), tmp_path / "rows.parquet")
        split = open_for_looking(tmp_path / "rows.parquet").split()
        assert split.item(0).weights.tolist() == [256, 0, -1]  # type: ignore[union-attr]
        assert count_tokens(split).trained.tolist() == [1]


def test_plain_files_without_columns(tmp_path: Path) -> None:
    with EpisodeWriter(tmp_path / "set", "train") as writer:
        writer.append([65, 66, 67])
        writer.append([68])
    (tmp_path / "set" / "train" / "episodes.json").unlink()
    dataset = open_for_looking(tmp_path / "set")
    split = dataset.split()
    assert count_tokens(split).trained.tolist() == [3, 1], "without a mask every token is a target"
    assert split.sources is None
    assert dataset.decoder is None
    assert "--tokenizer" in dataset.decoder_problem
    with pytest.raises(ConfigError, match=r"episodes are stored without record ids: .* --episode"):
        dataset.find("a")
    assert open_for_looking(tmp_path / "set", tokenizer="bytes").decoder.text(split.item(0).ids) == "ABC"  # type: ignore[union-attr]


def test_records_are_found_by_id() -> None:
    dataset = open_for_looking(folder() / "episodes")
    for record_id in HOSTILE:
        ((split, number),) = dataset.find(record_id)
        assert split.item(number).record_id == record_id
    for wanted, words in (("scrip", "in train, val; close ones: 'script'$"), ("speled", "; close ones: .*'spelled'"),
                          ("nothing like it", "in train, val$")):  # fmt: skip
        with pytest.raises(ConfigError, match=f"no record '{wanted}' .*{words}"):
            dataset.find(wanted)


def test_ids_that_are_inside_others(tmp_path: Path) -> None:
    ids = [f"r{number}" for number in range(40)] + ["xa", "aa", "aaa", "é", "aa"]
    with EpisodeWriter(tmp_path / "set", "train", shard_tokens=10) as writer:
        for record_id in ids:
            writer.append([1], record_id=record_id)
    split = open_for_looking(tmp_path / "set").split()
    for record_id in ids:
        assert split.find(record_id) == [n for n, found in enumerate(ids) if found == record_id]
    assert split.find("r") == []
    assert split.find("") == []


@pytest.mark.parametrize(
    ("name", "content", "error", "words"),
    [
        ("nothing", None, ConfigError, "does not exist"),
        (".", None, FormatError, "holds no split"),
        ("a.txt", b"hello", FormatError, "is not a dataset"),
        ("manifest.json", b"{}", FormatError, "'format' is missing"),
        ("a.parquet", b"PAR1 no", DataError, "cannot be read"),
    ],
)
def test_what_is_no_dataset_is_refused(
    tmp_path: Path, name: str, content: bytes | None, error: type[ChatmillError], words: str
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(error, match=words):
        open_for_looking(tmp_path if name == "manifest.json" else tmp_path / name)


def test_a_tokenizer_that_is_not_there_or_another(tmp_path: Path) -> None:
    about = open_for_looking(folder() / "episodes").about
    gone = {**about, "tokenizer": {**about["tokenizer"], "given_as": str(tmp_path / "gone.json")}}
    dataset = LookDataset(tmp_path, {}, gone)
    assert dataset.decoder is None
    assert "does not load" in dataset.decoder_problem
    other = {**about, "tokenizer": {**about["tokenizer"], "fingerprint": "0" * 64}}
    dataset = LookDataset(tmp_path, {}, other)
    assert dataset.decoder is not None
    assert "the text may be wrong" in dataset.decoder_problem


def test_ids_beyond_the_vocabulary_are_shown_as_numbers() -> None:
    decoder = open_for_looking(folder() / "episodes").decoder
    assert decoder is not None
    assert decoder.text(np.array([65, 999_999, 66])) == "A[id 999999]B"
    end = decoder.tokenizer.control("<|im_end|>")
    assert decoder.parts(np.array([65, 66, end, end, 67])) == [
        (False, "AB"), (True, "<|im_end|>"), (True, "<|im_end|>"), (False, "C"),
    ]  # fmt: skip
    assert decoder.parts(np.empty(0, dtype=np.int64)) == []


TOKEN = st.tuples(st.integers(0, KINDS - 1), st.sampled_from([0, 1]), st.booleans())


@settings(max_examples=60)
@given(st.lists(TOKEN, min_size=1, max_size=30))
def test_messages_and_runs_against_a_loop(tokens: list[tuple[int, int, bool]]) -> None:
    kinds, weights, borders = zip(*tokens, strict=True)
    starts = np.array([at for at, border in enumerate(borders) if border or not at], dtype=np.int64)
    columns = {"ids": np.arange(len(kinds)), "weights": np.array(weights), "kinds": np.array(kinds, np.uint8)}
    item = Item(split="train", number=0, starts=starts, **columns)
    messages, runs = [], []
    for at in range(len(kinds)):
        new = at in starts or role_of(kinds[at]) != role_of(kinds[at - 1])
        ended = part_of(kinds[at - 1]) in (Part.TERMINATOR, Part.SEPARATOR)
        new = new or (part_of(kinds[at]) is Part.HEADER and ended)
        if new:
            messages.append(at)
        if new or kinds[at] != kinds[at - 1] or weights[at] != weights[at - 1]:
            runs.append(at)
    assert message_starts(item.kinds, starts).tolist() == messages  # type: ignore[arg-type]
    assert item.run_starts().tolist() == runs


def slow_starts(count: int, values: list[int], name: str) -> list[int]:
    """Where the documents of one row start; one document where its boundaries cannot be right."""
    whole = [0][:count]
    if name == "seq_lengths":  # what the lengths leave of the row is a document of its own
        right = sum(values) <= count and all(value >= 0 for value in values)
        ends = [sum(values[: i + 1]) for i in range(len(values))]
        return sorted({*whole, *(end for end in ends if end < count)}) if right else whole
    starts = [value for value in values if value >= 0]
    right = starts[:1] == whole and all(start < count for start in starts)
    return starts if right and all(a < b for a, b in pairwise([*starts, count])) else whole


@settings(max_examples=150)
@given(
    st.lists(st.tuples(st.integers(0, 5), st.lists(st.integers(-1, 5), max_size=4)), max_size=6),
    st.sampled_from(["document_starts", "seq_lengths"]),
)
def test_boundaries_of_many_rows_against_one_at_a_time(rows: list[tuple[int, list[int]]], name: str) -> None:
    tokens = np.arange(sum(count for count, _ in rows))
    flat = np.array([value for _, values in rows for value in values], dtype=np.int64)
    offsets = np.cumsum([0, *(count for count, _ in rows)])
    columns = {"input_ids": (tokens, offsets), name: (flat, np.cumsum([0, *(len(values) for _, values in rows)]))}
    found = read_columns(columns)
    slow = [slow_starts(count, values, name) for count, values in rows]
    begins = [int(first) + start for first, row in zip(offsets, slow, strict=False) for start in row]
    assert found.documents.tolist() == sorted({*begins, len(tokens)})


FLAGS = st.lists(st.sampled_from([0, 1]), min_size=6, max_size=6)
FLAGGED = st.fixed_dictionaries({}, optional=dict.fromkeys((*MASKS, "labels", "weights", *BOUNDARIES[-3:]), FLAGS))


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(FLAGGED, min_size=1, max_size=4))
def test_inspect_and_audit_read_the_same_columns(tmp_path: Path, rows: list[dict[str, list[int]]]) -> None:
    names = [name for name in rows[0] if all(name in row for row in rows)]
    ids = [[number * 10 + i for i in range(6)] for number in range(len(rows))]
    columns = {"input_ids": ids, **{name: [row[name] for row in rows] for name in names}}
    if "labels" in columns:
        columns["labels"] = np.where(columns["labels"], ids, -100).tolist()
    split, audited = read_both(tmp_path, columns)
    deciding = ["labels"] if "labels" in names else [name for name in names if name in MASKS]
    deciding += ["weights"] if "weights" in names else []
    wanted = [[all(row[name][i] for name in deciding) for i in range(6)] for row in rows]
    assert split.has_weights == (audited.trained is not None)
    shown = [split.item(number) for number in range(len(split))]
    assert [item.is_trained.tolist() for item in shown] == wanted
    if audited.trained is not None:
        assert audited.trained.reshape(-1, 6).tolist() == wanted
    assert [6 * item.number + start for item in shown for start in item.starts] == audited.documents[:-1].tolist()
    assert count_tokens(split).trained.tolist() == list(map(sum, wanted))
    assert split.documents.tolist() == [len(item.starts) for item in shown]


def read_both(folder: Path, columns: dict[str, Any]) -> tuple[Any, Any]:
    """Rows of Parquet as inspect and as audit read them."""
    pq.write_table(pa.table(columns), folder / "rows.parquet")
    return open_for_looking(folder / "rows.parquet").split(), read_columns(open_tokenized(folder / "rows.parquet"))


def test_labels_that_are_shifted_show_the_tokens_they_train(tmp_path: Path) -> None:
    ids = [[10 * row + i for i in range(8)] for row in range(6)]
    labels = [[-100, -100, *row[3:], -100] for row in ids]
    split, audited = read_both(tmp_path, {"input_ids": ids, "labels": labels})
    wanted = [[False] * 3 + [True] * 5] * 6
    assert [split.item(row).is_trained.tolist() for row in range(6)] == wanted
    assert audited.trained.reshape(6, 8).tolist() == wanted


TRAIN = [make_documents(30, 1, 1000), make_documents(11, 2, 50_000)]
VALID = [make_documents(6, 3, 90_000)]


def test_every_token_of_a_distillation_set_has_its_own_span(tmp_path: Path) -> None:
    for name, shards in (("train", TRAIN), ("valid", VALID)):
        (tmp_path / "kd" / name).mkdir(parents=True)
        for number, made in enumerate(shards):
            write_columns(tmp_path / "kd" / name / f"shard_{number:02d}", on_disk(made))
    write_kd_manifest(tmp_path / "kd")
    found = open_for_looking(tmp_path / "kd")
    assert list(found.splits) == ["train", "valid"]
    for name, shards in (("train", TRAIN), ("valid", VALID)):
        documents = [document for shard in shards for document in shard]
        split = found.splits[name]
        assert (len(split), split.layout, split.has_spans) == (len(documents), LookLayout.KD, True)
        assert split.tokens.tolist() == [len(document.ids) for document in documents]
        trained = [[span > 0 for span in document.spans] for document in documents]
        for number, document in enumerate(documents):
            item: Any = split.item(number)
            assert (item.ids.tolist(), item.spans.tolist()) == (document.ids, document.spans)
            assert item.is_trained.tolist() == trained[number]
            assert item.trained == sum(trained[number]) > 0
        assert count_tokens(split).trained.tolist() == [sum(one) for one in trained]
    train: Any = found.splits["train"]
    assert train.item(30).source == "shard_01 document 0"
    assert np.bincount(train.sources).tolist() == [30, 11]
    assert train.source_names == ("shard_00", "shard_01")

"""Small rules of the store, each by itself: what is refused, and what a reader takes at a time."""

from __future__ import annotations

import resource
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chatmill.errors import ConfigError, FormatError
from chatmill.store import mapped
from chatmill.store.episode_writer import EpisodeWriter
from chatmill.store.episodes import EpisodeDataset
from chatmill.store.kd import KDDocuments, _check_listed, check_added
from chatmill.store.kd_shard import KDShard
from chatmill.store.megatron import MegatronWriter
from chatmill.store.model_ids import refuse_ids_beyond
from chatmill.store.split import even_ranges
from chatmill.store.teacher import PartWriter, TeacherAnswer, ids_hash
from chatmill.store.tree_rows import RowsOfTrees


@given(st.lists(st.integers(1, 9), max_size=12), st.integers(1, 20))
def test_ranges_take_what_fits(sizes: list[int], most: int) -> None:
    wanted: list[list[int]] = []
    for number, size in enumerate(sizes):
        if wanted and sum(sizes[n] for n in wanted[-1]) + size <= most:
            wanted[-1].append(number)
        else:
            wanted.append([number])
    found = [list(range(first, last)) for first, last in even_ranges(np.array(sizes, dtype=np.int64), most)]
    assert found == wanted


def test_a_dataset_maps_as_many_files_as_descriptors_allow(monkeypatch: pytest.MonkeyPatch) -> None:
    for soft, most in ((1024, 192), (300, 16), (resource.RLIM_INFINITY, 1 << 16)):
        monkeypatch.setattr(resource, "getrlimit", lambda what, soft=soft: (soft, 1 << 20))
        assert mapped._most_files() == most


def test_ids_are_read_where_the_tokenizer_has_more_than_the_model_or_is_not_known() -> None:
    read: list[int] = []

    def shard_columns(number: int) -> Any:
        read.append(number)
        return (np.array([3, 9 + number]),)

    split: Any = SimpleNamespace(shards=["a", "b"], shard_columns=shard_columns)
    refuse_ids_beyond(split, {"tokenizer": {"vocab_size": 11}}, 11)
    assert read == []
    for about in ({}, {"tokenizer": {"vocab_size": 12}}):
        refuse_ids_beyond(split, about, 11)
        with pytest.raises(ConfigError, match="10"):
            refuse_ids_beyond(split, about, 10)
    assert read == [0, 1] * 4


def test_files_have_the_sizes_that_a_receipt_states(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"abc")
    _check_listed(tmp_path, {"files": {"x": {"bytes": 3}}})
    for manifest in (
        {"files": {"x": {"bytes": 4}}},
        {"splits": {"train": {"shards": [{"files": [{"path": "x", "bytes": 2}]}]}}},
    ):
        with pytest.raises(FormatError, match=r"x: 3 bytes, but the manifest says [24]"):
            _check_listed(tmp_path, manifest)


def test_rows_of_trees_have_what_the_trees_have(tmp_path: Path) -> None:
    with EpisodeWriter(tmp_path, "train") as writer:
        writer.append([1, 2, 3, 2, 5], [0, 0, 1, 0, 1], kinds=[1, 1, 34, 1, 34], branches=[(3, 1)])
    stored = EpisodeDataset(tmp_path)
    for has in (True, False):
        stored.has_sides = stored.has_logprobs = has
        rows = RowsOfTrees(stored)
        assert (rows.has_sides, rows.has_logprobs, rows.has_masks, rows.has_kinds) == (has, has, True, True)


def write_kd(
    folder: Path, *, lengths: list[int], span: str = "uint8", dtype: str = "int32", shard: str = "shard_00"
) -> Path:
    """A shard without labels, as an export has it."""
    for name, kind in (("tokens", dtype), ("lossmask", "uint8"), ("span", span), ("weight", "float32")):
        with MegatronWriter(folder / f"{shard}_{name}", kind) as writer:
            values = np.arange(sum(lengths)) if name == "tokens" else np.zeros(sum(lengths))
            writer.append(values.astype(kind), np.array(lengths, dtype=np.int32))
    return folder / f"{shard}_tokens"


def test_a_shard_of_documents_and_sidecars_is_opened_whole_or_refused(tmp_path: Path) -> None:
    folders = [tmp_path / name / "train" for name in "abcdef"]
    for folder in folders:
        folder.mkdir(parents=True)
    for dtype, folder in zip(("int32", "uint16"), folders, strict=False):
        shard = KDShard.open(write_kd(folder, lengths=[3, 2], dtype=dtype), ["weight"])
        assert shard.document(1)[0].tolist() == [3, 4]
        documents = KDDocuments([shard.prefix]).gather(np.array([1, 0]))
        assert (documents.ids.dtype, documents.ids.tolist()) == (np.uint32, [3, 4, 0, 1, 2])
    with pytest.raises(FormatError, match="holds no document"):
        KDShard.open(write_kd(folders[2], lengths=[]))
    with pytest.raises(FormatError, match="token ids are integers"):
        KDShard.open(write_kd(folders[3], lengths=[2], dtype="float32"))
    with pytest.raises(FormatError, match="a sidecar holds uint8"):
        KDShard.open(write_kd(folders[4], lengths=[2], span="int32"))
    emptied = write_kd(folders[5], lengths=[2, 1, 1])
    index = bytearray(emptied.with_suffix(".idx").read_bytes())
    index[34:46] = np.array([2, 2, 0], dtype="<i4").tobytes()
    index[62:70] = np.array([16], dtype="<i8").tobytes()  # where the third one begins
    emptied.with_suffix(".idx").write_bytes(index)
    with pytest.raises(FormatError, match="document 2 is empty"):
        KDShard.open(emptied)
    both = KDDocuments([shard.prefix, str(write_kd(folders[1], lengths=[1, 1], shard="shard_01"))])
    assert both.facts("source", np.array([3, 1, 2, 0])) == ["shard_01", "shard_00", "shard_01", "shard_00"]
    assert both.gather(np.array([3, 1])).ids.tolist() == [1, 3, 4]
    assert both.facts("record_id", np.array([0])) is None
    names = ["train/shard_00_weight.bin", "train/shard_00_weight.idx", "train/x"]
    assert check_added(tmp_path / "a", names) == ({"train/x": ""}, ["train/shard_00_weight"], [])


def test_a_teacher_names_any_token_of_its_vocabulary_and_documents_of_its_split_alone(tmp_path: Path) -> None:
    with EpisodeWriter(tmp_path, "train") as writer:
        writer.append([5, 6], [0, 1])
        writer.append([7, 8, 9], [1, 1, 0])
        writer.append([4], [1])  # the first token is nobody's target

    def column(document: int, vocabulary: int) -> Any:
        dataset = EpisodeDataset(tmp_path)
        part = PartWriter(dataset, tmp_path / "teacher" / "train", 2, vocabulary)
        read = dataset[document % 3].ids[:2]
        logprobs = np.log(np.array([[0.75, 0.25]], dtype=np.float32))
        answer = {"ids": np.array([[vocabulary - 1, 0]], dtype=np.uint32), "logprobs": logprobs, "rest": np.zeros(1)}
        part.add(TeacherAnswer(document=document, tokens=2, hash=ids_hash(read), **answer))
        part.publish()
        return EpisodeDataset(tmp_path).teacher

    most = 1 << 16  # beyond it, ids take more than two bytes
    half = column(0, most)
    assert [numbers.tolist() for numbers, _ in half.unanswered()] == [[1]]
    with pytest.raises(ConfigError, match="has answered 1 of 3 documents, and not document 1"):
        half.check_whole()
    whole = column(1, most + 1)
    whole.check_whole()
    found = whole.gather(np.array([1, 0]))
    assert (found.at.tolist(), found.ids.tolist()) == ([1, 4], [[most, 0], [most - 1, 0]])
    assert whole.gather(np.array([1, 0]), np.array([3, 0])).at.tolist() == [1]
    assert list(whole.problems(most + 1)) == []
    assert [said for _, said in whole.problems(most)] == ["an id that is not in the vocabulary of 65,536"]
    for nobody in (-1, 3):
        with pytest.raises(FormatError, match="about documents that are not there"):
            column(nobody, most)
        for path in set((tmp_path / "teacher" / "train").iterdir()) - set(whole.parts):
            path.unlink()

"""The reader: random access, columns, fingerprints, what a teacher adds, and every fault one clear error."""

from __future__ import annotations

import json
import pickle
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
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
from chatmill.store.model_ids import refuse_ids_beyond
from chatmill.store.split import even_ranges
from chatmill.store.teacher import PartWriter, TeacherAnswer, ids_hash
from chatmill.store.token_files import TokenFiles
from tests.damage import flip


def write(directory: Path, shard_tokens: int | None = None) -> Path:
    with EpisodeWriter(directory, "train", shard_tokens) as writer:
        for i in range(12):
            n = 2 + i % 5
            columns = {"kinds": [34] * n, "source": f"s{i % 2}", "turns": i, "record_id": f"id-{i}"}
            writer.append([10 * i + t for t in range(n)], [t % 2 for t in range(n)], **columns)  # type: ignore[arg-type]
    return directory


@pytest.mark.parametrize(("shard_tokens", "shards"), [(None, 1), (9, 7)])
def test_random_access(tmp_path: Path, shard_tokens: int | None, shards: int) -> None:
    dataset = EpisodeDataset(write(tmp_path, shard_tokens))
    assert (len(dataset), len(dataset.shards)) == (12, shards)
    for i in (0, 11, 5, 3, -1, -12):
        episode = dataset[i]
        assert (episode.index, episode.record_id) == (i % 12, f"id-{i % 12}")
        assert episode.ids.tolist() == [10 * (i % 12) + t for t in range(2 + i % 12 % 5)]
        assert not episode.ids.flags.writeable
    for i in (12, -13):
        with pytest.raises(IndexError, match="of 12"):
            dataset[i]
    lengths = [2 + i % 5 for i in range(12)]
    assert [len(e) for e in dataset] == dataset.lengths.tolist() == lengths
    assert dataset.column("turns").tolist() == [e.index for e in dataset] == list(range(12))
    assert dataset.column("trained").tolist() == [n // 2 for n in lengths]
    assert dataset.source_names == ("s0", "s1")
    with pytest.raises(ConfigError, match="turns"):
        dataset.column("no such column")
    assert "12 episodes" in repr(dataset)


def test_three_files_are_a_split_and_its_index_has_any_order_and_overlaps(tmp_path: Path) -> None:
    folder = tmp_path / "train"
    folder.mkdir()
    np.arange(10, dtype="<u4").tofile(folder / "tokens.bin")
    np.array([[7, 3], [0, 4], [2, 5], [10, 0]], dtype="<u8").tofile(folder / "episodes.idx")
    np.arange(10, dtype="u1").tofile(folder / "mask.bin")
    for episode, wanted in zip(EpisodeDataset(tmp_path), ([7, 8, 9], [0, 1, 2, 3], [2, 3, 4, 5, 6], []), strict=True):
        assert episode.weights is not None
        assert episode.ids.tolist() == episode.weights.tolist() == wanted
        assert (episode.kinds, episode.source) == (None, None)


def test_a_copy_in_another_process_maps_the_files_itself(tmp_path: Path) -> None:
    dataset = EpisodeDataset(write(tmp_path, 9))
    before = [e.ids.tolist() for e in dataset]
    assert not dataset.lengths.flags.writeable
    data = pickle.dumps(dataset)
    assert len(data) < 40_000
    copy = pickle.loads(data)
    assert "lengths" not in copy.__dict__
    assert ([e.ids.tolist() for e in copy], copy.manifest) == (before, dataset.manifest)
    (tmp_path / "new").write_bytes(b"\0" * 4)
    (tmp_path / "new").replace(tmp_path / "train/shard_00000/tokens.bin")
    assert [e.ids.tolist() for e in dataset] == before, "what is mapped stays as it was"


def test_fingerprints_tell_data_apart(tmp_path: Path) -> None:
    one, same, sharded = write(tmp_path / "a"), write(tmp_path / "b"), write(tmp_path / "c", 9)
    prints = [EpisodeDataset(d).fingerprint for d in (one, same, sharded)]
    assert prints[0] == prints[1] != prints[2]
    for name in ("tokens.bin", "mask.bin", "episodes.idx"):
        changed = write(tmp_path / name)
        flip(changed / "train" / name, -8)
        with pytest.raises(FormatError, match=f"{name} is not the file that episodes.json names"):
            _ = EpisodeDataset(changed).fingerprint
        (changed / "train/episodes.json").unlink()
        plain = EpisodeDataset(changed).fingerprint
        flip(changed / "train" / name, -8)
        assert EpisodeDataset(changed).fingerprint != plain, "of files alone, the bytes tell"


def test_more_shards_than_open_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with EpisodeWriter(tmp_path, "train", 2) as writer:
        for i in range(400):
            writer.append([10 * i, 1])
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (300, limit[1]))
    try:
        dataset = EpisodeDataset(tmp_path)
        assert len(dataset.shards) == 400
        order = np.random.RandomState(0).permutation(400).tolist()
        assert all(dataset[i].ids[0] == 10 * i for i in order)
        files = TokenFiles(tmp_path / "train")
        assert all(files.shards[i].token_ids[0] == 10 * i for i in order)
        assert dataset.lengths.sum() == files.tokens.sum()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limit)
    for soft, most in ((1024, 192), (300, 16), (resource.RLIM_INFINITY, 1 << 16)):
        monkeypatch.setattr(resource, "getrlimit", lambda what, soft=soft: (soft, 1 << 20))
        assert mapped._most_files() == most


Damage = Callable[[Path], object]


def cut(**lost: int) -> Damage:
    """Take bytes from the ends of files; `_` is the dot of a name."""
    paths = [(name.replace("_", "."), size) for name, size in lost.items()]
    return lambda folder: [(folder / name).write_bytes((folder / name).read_bytes()[:-size]) for name, size in paths]


def indexed(number: int, start: int, length: int) -> Damage:
    def damage(folder: Path) -> None:
        index = np.fromfile(folder / "episodes.idx", dtype="<u8").reshape(-1, 2)
        index[number] = (start, length)
        index.tofile(folder / "episodes.idx")

    return damage


def stated(old: str, new: str) -> Damage:
    return lambda split: (split / "episodes.json").write_text((split / "episodes.json").read_text().replace(old, new))


def gone(name: str) -> Damage:
    return lambda split: shutil.rmtree(split / name) if (split / name).is_dir() else (split / name).unlink()


def twice(name: str, other: str) -> Damage:
    return lambda split: shutil.copytree(split / name, split / other)


FAULTS: list[tuple[str, int | None, Damage, str]] = [
    ("tokens cut", None, cut(tokens_bin=4, mask_bin=1), "episodes.idx: record 11 .* tokens.bin has 44 tokens"),
    ("tokens in half", None, cut(tokens_bin=177), "tokens.bin: 3 bytes is no multiple"),
    ("index cut", None, cut(episodes_idx=5), r"episodes.idx: .* 16-byte records .*11 bytes\)"),
    ("start outside", None, indexed(5, 1_000_000, 2), "record 5 is start 1,000,000"),
    ("wrapping length", None, indexed(3, 9, 2**64 - 8), "record 3 .* at token 18,446,744,073,709,551,617"),
    ("mask too short", None, cut(mask_bin=1), "44 bytes for 45 tokens"),
    ("no index", None, gone("episodes.idx"), "episodes.idx is missing"),
    ("no tokens", None, gone("tokens.bin"), "tokens.bin is missing"),
    ("no column", None, gone("kinds.u8"), "kinds.u8 is missing"),
    ("column cut", None, cut(turns_u32=44), "turns.u32: 4 bytes"),
    ("another format", None, stated("chatmill-episodes", "x"), "episodes.json.*found 'x'"),
    ("another version", 3, stated('"version": 4', '"version": 9'), "found 9"),
    ("broken manifest", None, lambda f: (f / "episodes.json").write_text("{"), "episodes.json.*not JSON"),
    ("a column elsewhere", None, stated("kinds.u8", "../x"), "plain file name"),
    ("a file elsewhere", 3, stated('"tokens.bin"', '"../tokens.bin"'), "plain file name"),
    ("a shard elsewhere", 3, stated('"name": "shard_00001"', '"name": "../elsewhere"'), "plain file name"),
    ("two layouts", None, lambda f: (f / "shard_00000").mkdir(), "both"),
    ("no episodes", None, cut(tokens_bin=180, episodes_idx=192, mask_bin=45), "its index has no episodes"),
    ("nothing", None, lambda f: [path.unlink() for path in f.iterdir()], "an empty split"),
    ("no folder", None, shutil.rmtree, "train: no such folder"),
    ("no dataset", None, lambda f: shutil.rmtree(f.parent), "no such folder"),
    ("no index in a shard", 9, gone("shard_00002/episodes.idx"), "shard_00002"),
    ("no mask in a shard", 9, gone("shard_00001/mask.bin"), "shard_00001: mask.bin is missing"),
    ("no shard", 9, gone("shard_00002"), "shard_00002 is missing"),
    ("no last shard", 9, gone("shard_00006"), "names 7 shards, 6 are there; different: shard_00006"),
    ("one shard more", 9, twice("shard_00006", "shard_00007"), "names 7 shards, 8 are there; different: shard_00007"),
    ("a source", None, lambda f: np.full(12, 7, "<u4").tofile(f / "source.u32"), "source code 7; the manifest has 2"),
]


@pytest.mark.parametrize(
    ("shard_tokens", "damage", "says"), [row[1:] for row in FAULTS], ids=[row[0] for row in FAULTS]
)
def test_each_fault_is_one_clear_error(tmp_path: Path, shard_tokens: int | None, damage: Damage, says: str) -> None:
    damage(write(tmp_path, shard_tokens) / "train")
    with pytest.raises(FormatError, match=says) as caught:
        list(EpisodeDataset(tmp_path))
    assert str(tmp_path) in str(caught.value)


def test_a_reader_that_is_not_strict_does_without_masks(tmp_path: Path) -> None:
    (write(tmp_path, 9) / "train" / "shard_00001" / "mask.bin").unlink()
    loose = EpisodeDataset(tmp_path, strict=False)
    assert not loose.has_masks
    assert "shard_00001" in loose.mask_problem
    assert loose[0].weights is None


@pytest.mark.parametrize("offsets", [(9, 4), (4, 2**63), (2**64 - 5, 4), (59, 59)])
def test_texts_whose_offsets_do_not_fit_are_refused(tmp_path: Path, offsets: tuple[int, int]) -> None:
    """Offsets that run backwards would give each text the bytes of others."""
    path = write(tmp_path) / "train" / "record_id.offsets"
    stored = np.fromfile(path, dtype="<u8")
    assert stored[-1] == 50
    stored[2:4] = offsets
    stored.tofile(path)
    with pytest.raises(FormatError, match="the offsets of record_id do not fit its 50 bytes"):
        EpisodeDataset(tmp_path)[2]


def test_the_reader_needs_numpy_and_msgspec_alone(tmp_path: Path) -> None:
    script = (
        "import sys\n"
        "from chatmill.store.episodes import EpisodeDataset\n"
        f"dataset = EpisodeDataset({str(write(tmp_path))!r})\n"
        "print(dataset[3].ids.tolist(), sys.modules.keys() & {'torch', 'pydantic', 'pyarrow', 'rich', 'yaml'})\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "[30, 31, 32, 33, 34] set()\n"


def test_a_shard_may_have_source_codes_of_its_own(tmp_path: Path) -> None:
    """As shards have that were written by workers who did not know of each other."""
    path = write(tmp_path, 3) / "train" / "episodes.json"
    before = [one.source for one in EpisodeDataset(tmp_path)]
    manifest = json.loads(path.read_bytes())
    shard, names = manifest["shards"][1], manifest["sources"]
    file = path.parent / shard["name"] / "source.u32"
    codes = np.fromfile(file, "<u4").tolist()
    shard["sources"] = ["unused", *dict.fromkeys(names[code] for code in codes)]
    np.array([shard["sources"].index(names[code]) for code in codes], dtype="<u4").tofile(file)
    path.write_text(json.dumps(manifest | {"sources": [*names, "unused"]}))
    dataset = EpisodeDataset(tmp_path)
    assert [one.source for one in dataset] == before
    assert [dataset.source_names[code] for code in dataset.column("source").tolist()] == before
    np.array([9] * len(codes), dtype="<u4").tofile(file)
    with pytest.raises(FormatError, match="source code"):
        [one.source for one in EpisodeDataset(tmp_path)]


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

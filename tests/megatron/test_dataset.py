"""`SynthKDDataset` through Megatron's own builder, against documents written down one after another; sidecars."""

from __future__ import annotations

import builtins
import importlib
import os
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from chatmill.core.harmony_ids import EOD
from chatmill.core.shift import shift_left
from chatmill.errors import ChatmillError, ConfigError, FormatError, MissingExtraError
from chatmill.store.kd import synth_kd_blend
from chatmill.store.kd_shard import KDShard, sidecar_prefix
from chatmill.store.megatron import MegatronWriter
from tests.megatron import kd_sets
from tests.megatron.kd_sets import LENGTH, SERVED, TRAIN, VALID, Document, dataset, make_documents, plain, write_root

NAME = "teacher_logprob"


@pytest.fixture(scope="module", autouse=True)
def one_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Megatron's blends ask for a rank before they write their cache."""
    store = tmp_path_factory.mktemp("store") / "file"
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Documents whose ids tell where a token came from."""
    return write_root(tmp_path / "kd", {"train": TRAIN, "valid": VALID})


def build(root: Path, cache: Path | None, samples: int | None = 60, **options: Any) -> list[Any]:
    """Train, valid and test by Megatron's own builder."""
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder

    from chatmill.megatron import SynthKDDataset

    blends = [synth_kd_blend(root), (synth_kd_blend(root, "valid").prefixes, None), None]
    made = kd_sets.config(blends, path_to_cache=None if cache is None else str(cache), **options)
    return BlendedMegatronDatasetBuilder(SynthKDDataset, [samples, None, None], lambda: True, made).build()


def expected_samples(dataset: Any, documents: list[Document]) -> list[dict[str, list[int]]]:
    """Every sample of one shard, in the order it is served: windows of the concatenated documents."""
    everything = kd_sets.flat(documents, dataset.document_index.tolist())
    samples = []
    for number in dataset.shuffle_index.tolist():
        begin = number * LENGTH
        ids = everything["ids"][begin : begin + LENGTH + 1].tolist()
        spans = everything["spans"][begin : begin + LENGTH].tolist()
        real = len(ids)
        spans = spans[: real - 1] + [0] * (LENGTH - real + 1)
        ids += [0] * (LENGTH + 1 - real)
        mask = [int(span > 0) for span in spans]
        samples.append(dict(zip(SERVED, (ids[:-1], ids[1:], spans, mask), strict=True)))
    return samples


def test_every_position_of_every_sample_through_the_blended_builder(root: Path, tmp_path: Path) -> None:
    train, valid, test = build(root, tmp_path / "cache")
    assert test is None
    assert len(train) >= 60
    assert {int(train[i]["dataset_id"]) for i in range(len(train))} == {0, 1}
    crossing = 0
    for shard, documents in zip([*train.datasets, valid], [*TRAIN, *VALID], strict=True):
        found = plain(shard)
        assert found == expected_samples(shard, documents)
        assert len(found) > 3
        crossing += sum(EOD in one["tokens"][:-1] for one in found)
        for one in found:  # nobody is trained to predict the first token of the next document, nor the EOD
            for token, label, span, mask in zip(*(one[name] for name in SERVED), strict=True):
                assert EOD not in (token, label) or mask == span == 0
    assert crossing > 20
    sample, filler = valid[0], valid[None]
    assert set(sample) == {"tokens", "labels", "loss_mask", "position_ids", "span_id"}
    assert (sample["loss_mask"].dtype, sample["span_id"].dtype) == (torch.float32, torch.int64)
    assert int(filler["loss_mask"].sum()) == int(filler["span_id"].sum()) == 0
    assert torch.equal(filler["tokens"], sample["tokens"])


def test_the_cache_is_used_again_and_not_for_another_build(root: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    first = plain(build(root, cache)[0], range(60))
    written = {path: path.stat().st_mtime_ns for path in cache.iterdir()}
    assert len(written) >= 3 * 4 + 3
    for options in ({}, {"defer_npy_index_mmap": True}, {"mmap_bin_files": False}, {"fast_cache_load": True}):
        assert plain(build(root, cache, **options)[0], range(60)) == first
        assert {path: path.stat().st_mtime_ns for path in cache.iterdir()} == written
    # The same documents in another order under the same paths: same sizes, other content.
    for path in (root / "train").glob("shard_01_*"):
        path.unlink()
    turned = TRAIN[1][::-1]
    kd_sets.write_shard(root / "train" / "shard_01", turned)
    train, _, _ = build(root, cache)
    assert set(cache.iterdir()) > set(written)
    assert plain(train.datasets[1]) == expected_samples(train.datasets[1], turned)


WITH_PAD_IDS = [Document(ids=[7, 3, 3, 8, 3, EOD], spans=[0, 1, 1, 2, 2, 0])] * 8


@pytest.mark.parametrize(("documents", "pad"), [(VALID[0], None), (WITH_PAD_IDS, 3)])
def test_padding_is_never_trained_and_real_tokens_with_its_id_stay(
    tmp_path: Path, documents: list[Document], pad: int | None
) -> None:
    """The last validation sample is padded; the base class then shares zeros with all later samples."""
    root = write_root(tmp_path / "kd", {"train": [documents], "valid": [documents]})
    _, valid, _ = build(root, None, pad=pad, samples=2, drop_last_partial_validation_sequence=False)
    expected = expected_samples(valid, documents)
    (padded,) = (i for i in range(len(valid)) if valid.shuffle_index[i] == len(valid) - 1)
    assert (sum(len(document.ids) for document in documents) - 1) % LENGTH
    assert plain(valid, [padded, *range(len(valid))]) == [expected[padded], *expected]
    assert sum(sum(sample["loss_mask"]) for sample in expected) > 20


def test_without_the_extra_token_the_last_position_is_not_trained(root: Path) -> None:
    from megatron.core.datasets.gpt_dataset import GPTDataset

    _, valid, _ = build(root, None, add_extra_token_to_sequence=False)
    everything = kd_sets.flat(VALID[0], valid.document_index.tolist())
    assert len(valid) > 3
    for number in range(len(valid)):
        begin = int(valid.shuffle_index[number]) * LENGTH
        sample = valid[number]
        assert sample["tokens"].tolist() == everything["ids"][begin : begin + LENGTH].tolist()
        assert sample["span_id"].tolist() == [*everything["spans"][begin : begin + LENGTH - 1].tolist(), 0]
        assert torch.equal(sample["labels"], GPTDataset.__getitem__(valid, number)["labels"])


def test_pickling_and_workers(root: Path, tmp_path: Path) -> None:
    train, _, _ = build(root, tmp_path / "cache")
    expected = plain(train, range(40))
    data = pickle.dumps(train)
    assert plain(pickle.loads(data), range(40)) == expected
    some = torch.utils.data.Subset(train, range(40))
    batches = list(torch.utils.data.DataLoader(some, batch_size=4, num_workers=2))
    assert len(batches) == 10
    for number, batch in enumerate(batches):
        for name in SERVED:
            assert batch[name].tolist() == [sample[name] for sample in expected[4 * number : 4 * number + 4]]
    for column in ("lossmask", "span"):
        path = root / "train" / f"shard_00_{column}.bin"
        path.write_bytes(bytes(path.stat().st_size))
    with pytest.raises(FormatError, match="when the dataset was pickled"):
        pickle.loads(data)


# A third sidecar.


def with_sidecar(folder: Path, documents: list[Document], values: list[Any], dtype: str = "float32") -> str:
    """A shard with token-aligned values, written label-aligned; its prefix."""
    prefix = kd_sets.write_shard(folder / "train" / "shard_00", documents)
    with MegatronWriter(sidecar_prefix(prefix, NAME), dtype) as writer:
        for one in values:
            writer.append(shift_left(np.array(one)).astype(dtype), np.array([len(one)]))
    return prefix


@pytest.mark.parametrize(
    ("dtype", "served"), [("float32", torch.float32), ("float64", torch.float64), ("int16", torch.int64)]
)
@pytest.mark.parametrize("mapped", [True, False])
def test_a_sidecar_of_any_dtype_is_served_beside_its_label_and_opened_again_when_pickled(
    tmp_path: Path, dtype: str, served: torch.dtype, mapped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The value of a token is a function of its id, so every sample says by itself whether it is aligned."""
    documents, scale = make_documents(20, 1, 100), 4 if dtype[0] == "f" else 1
    values = [np.array([number % 1000 / scale for number in document.ids]) for document in documents]
    prefix = with_sidecar(tmp_path, documents, values, dtype)
    found = dataset(prefix, NAME, mmap_bin_files=mapped)
    trained = 0
    for number in range(len(found)):
        sample = found[number]
        assert sample[NAME].dtype == served
        inside = sample["loss_mask"] > 0
        assert torch.equal(sample[NAME][inside].double(), (sample["labels"] % 1000 / scale)[inside].double())
        trained += int(inside.sum())
    assert trained > 100
    assert int(found[None][NAME].abs().sum()) == 0
    kind = type(found)
    kind.__qualname__, kind.__module__ = "WithSidecars", __name__
    monkeypatch.setitem(globals(), "WithSidecars", kind)
    data = pickle.dumps(found)
    assert torch.equal(pickle.loads(data)[1][NAME], found[1][NAME])
    with Path(f"{sidecar_prefix(prefix, NAME)}.bin").open("r+b") as file:
        file.write(np.array([75], dtype).tobytes())
    with pytest.raises(FormatError, match="when the dataset was pickled"):
        pickle.loads(data)


def test_a_sidecar_that_does_not_fit_is_refused_at_opening(tmp_path: Path) -> None:
    documents = make_documents(20, 1, 100)
    prefix = with_sidecar(tmp_path, documents, [np.zeros(len(document.ids)) for document in documents])
    path = Path(f"{sidecar_prefix(prefix, NAME)}.bin")
    np.ones(path.stat().st_size // 4, dtype=np.float32).tofile(path)
    with pytest.raises(FormatError, match=r"the last value of teacher_logprob is not 0 .*: document 0"):
        KDShard.open(prefix, [NAME])
    os.truncate(path, path.stat().st_size - 4)
    with pytest.raises(FormatError, match=f"shard_00_{NAME}.bin: .* bytes, but its index"):
        dataset(prefix, NAME)
    assert len(KDShard.open(prefix)) == 20, "who does not ask for it is not stopped by it"
    with pytest.raises(ConfigError, match="no name for a sidecar"):
        KDShard.open(prefix, ["span"])


def test_the_builder_and_the_class_itself_refuse_too(root: Path) -> None:
    """A dataset made by hand looks at its sidecars as well, whatever was checked before."""
    made = dataset(synth_kd_blend(root).prefixes[0])
    kd_sets.swapped(root / "train")
    with pytest.raises(FormatError, match="document 0"):
        build(root, None)
    with pytest.raises(FormatError, match="document 0"):
        type(made)(made.dataset, made.dataset_path, made.indices, None, made.index_split, made.config)


@pytest.mark.parametrize(
    ("lacks", "error", "message"),
    [
        ("megatron.core", MissingExtraError, r"SynthKDDataset needs the package 'megatron.core'.*chatmill\[megatron\]"),
        ("triton", ConfigError, "needs 'triton' to be imported: pip install triton"),
    ],
)
def test_what_is_not_installed_is_named(
    monkeypatch: pytest.MonkeyPatch, lacks: str, error: type[ChatmillError], message: str
) -> None:
    known = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name == "megatron.core.datasets.gpt_dataset":
            raise ModuleNotFoundError(f"No module named '{lacks}'", name=lacks)
        return known(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    monkeypatch.delitem(sys.modules, "chatmill.megatron", raising=False)
    with pytest.raises(error, match=message):
        importlib.import_module("chatmill.megatron")

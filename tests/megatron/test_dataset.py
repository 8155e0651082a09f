"""`SynthKDDataset` through Megatron's own builder, against documents written down one after another."""

from __future__ import annotations

import importlib
import pickle
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from chatmill.errors import ConfigError, FormatError, MissingExtraError, UnknownNameError
from chatmill.store.kd import synth_kd_blend
from chatmill.store.kd_shard import KDShard
from tests.megatron.kd_sets import EOD, Document, Tokenizer, flat, make_documents, on_disk, write_column, write_root
from tests.megatron.kd_sets import write_shard as write_shard_files

LENGTH = 16


@pytest.fixture(scope="module", autouse=True)
def one_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Megatron's blends ask for a rank before they write their cache."""
    store = tmp_path_factory.mktemp("store") / "file"
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return write_root(tmp_path / "kd", {"train": TRAIN, "valid": VALID})


TRAIN = [make_documents(30, 1, 1000), make_documents(11, 2, 50_000)]
VALID = [make_documents(6, 3, 90_000)]


def config(root: Path, cache: Path | None, **options: Any) -> Any:
    from megatron.core.datasets.gpt_dataset import GPTDatasetConfig

    pad = options.pop("pad", None)
    blends = options.pop("blends", None) or [synth_kd_blend(root), (synth_kd_blend(root, "valid").prefixes, None), None]
    return GPTDatasetConfig(
        random_seed=5,
        sequence_length=LENGTH,
        blend_per_split=[None if blend is None else tuple(blend) for blend in blends],
        path_to_cache=None if cache is None else str(cache),
        tokenizer=Tokenizer(pad),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
        mid_level_dataset_surplus=0.5,
        **options,
    )


def build(root: Path, cache: Path | None, samples: int | None = 60, **options: Any) -> list[Any]:
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder

    from chatmill.megatron import SynthKDDataset

    made = config(root, cache, **options)
    return BlendedMegatronDatasetBuilder(SynthKDDataset, [samples, None, None], lambda: True, made).build()


def expected_samples(dataset: Any, documents: list[Document]) -> list[dict[str, list[int]]]:
    """Every sample of one shard, in the order it is served: windows of the concatenated documents."""
    everything = flat(documents, dataset.document_index.tolist())
    samples = []
    for number in dataset.shuffle_index.tolist():
        begin = number * LENGTH
        ids = everything["ids"][begin : begin + LENGTH + 1].tolist()
        spans = everything["spans"][begin : begin + LENGTH].tolist()
        real = len(ids)
        spans = spans[: real - 1] + [0] * (LENGTH - real + 1)
        ids += [0] * (LENGTH + 1 - real)
        samples.append(
            {
                "tokens": ids[:-1],
                "labels": ids[1:],
                "span_id": spans,
                "loss_mask": [int(span > 0) for span in spans],
            }
        )
    return samples


def plain(sample: dict[str, Any]) -> dict[str, list[int]]:
    return {name: sample[name].tolist() for name in ("tokens", "labels", "span_id", "loss_mask")}


def served(root: Path, cache: Path) -> list[dict[str, list[int]]]:
    """The first 60 samples of the train blend, built anew."""
    train = build(root, cache)[0]
    return [plain(train[i]) for i in range(60)]


def test_every_position_of_every_sample_through_the_blended_builder(root: Path, tmp_path: Path) -> None:
    train, valid, test = build(root, tmp_path / "cache")
    assert test is None
    assert len(train) >= 60
    assert {int(train[i]["dataset_id"]) for i in range(len(train))} == {0, 1}
    crossing = 0
    for shard, documents in zip([*train.datasets, valid], [*TRAIN, *VALID], strict=True):
        expected = expected_samples(shard, documents)
        assert len(expected) == len(shard) > 3
        for number, wanted in enumerate(expected):
            got = plain(shard[number])
            assert got == wanted
            inside = EOD in got["tokens"][:-1]
            crossing += inside
            # Nobody is trained to predict the first token of the next document, nor the EOD.
            for place, token in enumerate(got["tokens"]):
                if token == EOD or got["labels"][place] == EOD:
                    assert got["loss_mask"][place] == got["span_id"][place] == 0
    assert crossing > 20


def test_dtypes_and_keys(root: Path) -> None:
    _, valid, _ = build(root, None)
    sample = valid[0]
    assert set(sample) == {"tokens", "labels", "loss_mask", "position_ids", "span_id"}
    assert (sample["loss_mask"].dtype, sample["span_id"].dtype) == (torch.float32, torch.int64)
    filler = valid[None]
    assert int(filler["loss_mask"].sum()) == int(filler["span_id"].sum()) == 0
    assert torch.equal(filler["tokens"], valid[0]["tokens"])


def test_the_cache_is_used_again_and_not_for_another_build(root: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    first = served(root, cache)
    written = {path: path.stat().st_mtime_ns for path in cache.iterdir()}
    assert len(written) >= 3 * 4 + 3
    again = served(root, cache)
    assert again == first
    assert {path: path.stat().st_mtime_ns for path in cache.iterdir()} == written
    # The same documents in another order under the same paths: same sizes, other content.
    for path in (root / "train").glob("shard_01_*"):
        path.unlink()
    turned = TRAIN[1][::-1]
    write_shard_files(root / "train" / "shard_01", turned)
    train, _, _ = build(root, cache)
    assert set(cache.iterdir()) > set(written)
    expected = expected_samples(train.datasets[1], turned)
    assert [plain(train.datasets[1][i]) for i in range(len(expected))] == expected


def test_deferred_indices_and_unmapped_files(root: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    train, _, _ = build(root, cache)
    first = [plain(train[i]) for i in range(60)]
    for options in ({"defer_npy_index_mmap": True}, {"mmap_bin_files": False}, {"fast_cache_load": True}):
        again, _, _ = build(root, cache, **options)
        assert [plain(again[i]) for i in range(60)] == first


def test_padding_is_never_trained_and_the_next_sample_is_not_touched(tmp_path: Path) -> None:
    """The last validation sample is padded; the base class then shares zeros with all later samples."""
    root = write_root(tmp_path / "kd", {"train": TRAIN, "valid": VALID})
    _, valid, _ = build(root, None, drop_last_partial_validation_sequence=False)
    expected = expected_samples(valid, VALID[0])
    padded = [i for i in range(len(valid)) if valid.shuffle_index[i] == len(valid) - 1]
    tokens = sum(len(document.ids) for document in VALID[0])
    assert len(padded) == 1
    assert (tokens - 1) % LENGTH
    for number in [*padded, *range(len(valid))]:
        assert plain(valid[number]) == expected[number]
    assert sum(sum(sample["loss_mask"]) for sample in expected) > 20


def test_real_tokens_with_the_pad_id_stay(tmp_path: Path) -> None:
    documents = [Document(ids=[7, 3, 3, 8, 3, EOD], spans=[0, 1, 1, 2, 2, 0])] * 8
    root = write_root(tmp_path / "kd", {"train": [documents], "valid": [documents]})
    _, valid, _ = build(root, None, pad=3, samples=2, drop_last_partial_validation_sequence=False)
    expected = expected_samples(valid, documents)
    assert [plain(valid[i]) for i in range(len(valid))] == expected
    assert sum(sample["tokens"].count(3) for sample in expected) > 10


def test_without_the_extra_token_the_last_position_is_not_trained(root: Path) -> None:
    from megatron.core.datasets.gpt_dataset import GPTDataset

    _, valid, _ = build(root, None, add_extra_token_to_sequence=False)
    everything = flat(VALID[0], valid.document_index.tolist())
    assert len(valid) > 3
    for number in range(len(valid)):
        begin = int(valid.shuffle_index[number]) * LENGTH
        sample = valid[number]
        assert sample["tokens"].tolist() == everything["ids"][begin : begin + LENGTH].tolist()
        assert sample["span_id"].tolist() == [*everything["spans"][begin : begin + LENGTH - 1].tolist(), 0]
        assert torch.equal(sample["labels"], GPTDataset.__getitem__(valid, number)["labels"])


def test_pickling_and_workers(root: Path, tmp_path: Path) -> None:
    from torch.utils.data import DataLoader

    train, _, _ = build(root, tmp_path / "cache")
    expected = [plain(train[i]) for i in range(40)]
    copied = pickle.loads(pickle.dumps(train))
    assert [plain(copied[i]) for i in range(40)] == expected
    loader = DataLoader(torch.utils.data.Subset(train, range(40)), batch_size=4, num_workers=2)
    batches = list(loader)
    assert len(batches) == 10
    for number, batch in enumerate(batches):
        for name in ("tokens", "labels", "span_id", "loss_mask"):
            assert batch[name].tolist() == [sample[name] for sample in expected[4 * number : 4 * number + 4]]
    data = pickle.dumps(train)
    lossmask = np.fromfile(root / "train" / "shard_00_lossmask.bin", dtype=np.uint8)
    np.zeros_like(lossmask).tofile(root / "train" / "shard_00_lossmask.bin")
    np.zeros_like(lossmask).tofile(root / "train" / "shard_00_span.bin")
    with pytest.raises(FormatError, match="when the dataset was pickled"):
        pickle.loads(data)


# --- refused at opening -------------------------------------------------------------------------------------------


def swap_columns(train: Path) -> None:
    for kind in ("bin", "idx"):
        shutil.move(train / f"shard_00_lossmask.{kind}", train / f"other.{kind}")
        shutil.move(train / f"shard_00_span.{kind}", train / f"shard_00_lossmask.{kind}")
        shutil.move(train / f"other.{kind}", train / f"shard_00_span.{kind}")


def sidecar_of_another_shard(train: Path) -> None:
    for kind in ("bin", "idx"):
        shutil.copy(train / f"shard_01_span.{kind}", train / f"shard_00_span.{kind}")


def replace(train: Path, column: str, values: list[list[int]], dtype: Any = np.uint8) -> None:
    for kind in ("bin", "idx"):
        (train / f"shard_00_{column}.{kind}").unlink()
    write_column(train / f"shard_00_{column}", values, dtype)


def other_lengths(train: Path) -> None:
    """The same number of documents and of values, one border moved."""
    values = on_disk(TRAIN[0])["span"]
    values[4], values[5] = values[4] + values[5][:1], values[5][1:]
    replace(train, "span", values)


def token_aligned(train: Path) -> None:
    for column in ("lossmask", "span"):
        replace(train, column, [[2 if column == "span" else 1] * len(document.ids) for document in TRAIN[0]])


def unknown_span(train: Path) -> None:
    replace(train, "span", [[3 if value else 0 for value in values] for values in on_disk(TRAIN[0])["span"]])


def first_document_differs(train: Path) -> None:
    values = on_disk(TRAIN[0])["lossmask"]
    values[0][0] ^= 1
    replace(train, "lossmask", values)


TOKENS_0 = sum(len(document.ids) for document in TRAIN[0])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (swap_columns, r"document 0 has the mask 2 and the span 1 at position \d+"),
        (sidecar_of_another_shard, r"shard_00_span.idx: 11 sequences, but shard_00_tokens.idx next to it has 30"),
        (other_lengths, r"shard_00_span.idx: document 4 has the length \d+, but in shard_00_tokens.idx next to it \d+"),
        (token_aligned, r"the last value of lossmask is not 0 .*: document 0 has the mask 1"),
        (unknown_span, r"document 0 has the mask 1 and the span 3"),
        (first_document_differs, r"document 0 has the mask \d and the span \d at position 0 \(1 of its"),
    ],
)
def test_misaligned_sidecars_are_refused(root: Path, damage: Any, message: str) -> None:
    blends = [synth_kd_blend(root), None, None]
    damage(root / "train")
    with pytest.raises(FormatError, match=message):
        build(root, None, blends=blends)


def test_the_class_itself_refuses_too(root: Path) -> None:
    """Not only the builder's way: a dataset made by hand looks at its sidecars as well."""
    from megatron.core.datasets.indexed_dataset import IndexedDataset
    from megatron.core.datasets.utils import Split

    from chatmill.megatron import SynthKDDataset

    prefix = synth_kd_blend(root).prefixes[0]
    made = config(root, None)
    tokens = IndexedDataset(prefix)
    assert len(SynthKDDataset(tokens, prefix, np.arange(30, dtype=np.int32), None, Split.train, made)) > 10
    swap_columns(root / "train")
    with pytest.raises(FormatError, match="document 0"):
        SynthKDDataset(tokens, prefix, np.arange(30, dtype=np.int32), None, Split.train, made)


def test_prefixes_and_roots_that_do_not_fit(root: Path, tmp_path: Path) -> None:
    from chatmill.megatron import SynthKDDataset

    blend = synth_kd_blend(root)
    assert [Path(prefix).name for prefix in blend.prefixes] == ["shard_00_tokens", "shard_01_tokens"]
    assert blend.weights == [float(TOKENS_0), float(sum(len(document.ids) for document in TRAIN[1]))]
    with pytest.raises(ConfigError, match=r"did you mean .*shard_00_tokens\?"):
        KDShard.open(root / "train" / "shard_00")
    with pytest.raises(ConfigError, match="object storage"):
        SynthKDDataset.build_low_level_dataset("s3://bucket/shard_00_tokens", None)
    with pytest.raises(UnknownNameError, match=r"unknown split 'val'.*Known: train, valid"):
        synth_kd_blend(root, "val")
    (root / "manifest.json").unlink()
    with pytest.raises(FormatError, match="not finished"):
        synth_kd_blend(root)
    with pytest.raises(FormatError, match="no such folder"):
        synth_kd_blend(tmp_path / "nowhere")


def test_without_megatron_the_message_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "megatron.core.datasets.gpt_dataset", None)
    monkeypatch.delitem(sys.modules, "chatmill.megatron", raising=False)
    with pytest.raises(
        MissingExtraError, match=r"SynthKDDataset needs the package 'megatron.core'.*chatmill\[megatron\]"
    ):
        importlib.import_module("chatmill.megatron")


def test_what_megatron_itself_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import builtins

    known = builtins.__import__

    def without_triton(name: str, *rest: Any) -> Any:
        if name == "megatron.core.datasets.gpt_dataset":
            raise ModuleNotFoundError("No module named 'triton'", name="triton")
        return known(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without_triton)
    monkeypatch.delitem(sys.modules, "chatmill.megatron", raising=False)
    with pytest.raises(ConfigError, match="needs 'triton' to be imported: pip install triton"):
        importlib.import_module("chatmill.megatron")


def test_finding_shards_imports_neither_megatron_nor_torch(root: Path) -> None:
    code = (
        "import sys, chatmill.look.splits, chatmill.export.megatron\n"
        "from chatmill.store.kd import synth_kd_blend\n"
        f"assert len(synth_kd_blend({str(root)!r}).prefixes) == 2\n"
        "assert not {'torch', 'megatron'} & set(sys.modules), set(sys.modules) & {'torch', 'megatron'}"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr

"""A third sidecar of any dtype, record ids, blend arguments, and shards whose sidecars are off by one."""

from __future__ import annotations

import importlib.util
import json
import os
import pickle
import shlex
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from chatmill.core.shift import shift_left
from chatmill.distill.check import verify_synth_kd
from chatmill.distill.run import build_synth_kd
from chatmill.errors import ConfigError, FormatError
from chatmill.export.check import verify_export
from chatmill.store.kd import blend_arguments, synth_kd_blend, synth_kd_blends
from chatmill.store.kd_shard import KDShard, sidecar_prefix
from chatmill.store.megatron import MegatronWriter
from tests.conftest import DATA
from tests.megatron.kd_sets import EOD, Document, Tokenizer, make_documents, write_root, write_shard

LENGTH = 16
NAME = "teacher_logprob"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real build."""
    out = tmp_path_factory.mktemp("kd") / "root"
    build_synth_kd(DATA / "synth_harmony", out, workers=0, max_rows_per_shard=20, valid_fraction=0.3)
    return out


@pytest.fixture
def copied(built: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(built, tmp_path / "root"))


def dataset(prefix: str, kind: Any, **options: Any) -> Any:
    from megatron.core.datasets.gpt_dataset import GPTDatasetConfig
    from megatron.core.datasets.utils import Split

    config = GPTDatasetConfig(
        random_seed=1, sequence_length=LENGTH, blend_per_split=[([prefix], None), None, None], tokenizer=Tokenizer(),
        reset_position_ids=False, reset_attention_mask=False, eod_mask_loss=False, create_attention_mask=False,
        drop_last_partial_validation_sequence=False, **options,
    )  # fmt: skip
    low = kind.build_low_level_dataset(prefix, config)
    everything = np.arange(len(low.sequence_lengths), dtype=np.int32)
    return kind(low, prefix, everything, None, Split.valid, config)


def with_sidecar(name: str) -> Any:
    from chatmill.megatron import SynthKDDataset

    return type("WithSidecar", (SynthKDDataset,), {"sidecars": (name,)})


def write_sidecar(prefix: str, documents: list[Any], dtype: str = "float32") -> None:
    """Write token-aligned values label-aligned."""
    with MegatronWriter(sidecar_prefix(prefix, NAME), dtype) as writer:
        for values in documents:
            writer.append(shift_left(values).astype(dtype), np.array([len(values)]))


# --- a third sidecar ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "served"), [("float32", torch.float32), ("float64", torch.float64), ("int16", torch.int64)]
)
@pytest.mark.parametrize("mapped", [True, False])
def test_a_sidecar_of_any_dtype_is_served_beside_its_label(
    tmp_path: Path, dtype: str, served: torch.dtype, mapped: bool
) -> None:
    """The value of a token is a function of its id, so every sample says by itself whether it is aligned."""
    documents = make_documents(20, 1, 100)
    prefix = write_shard(tmp_path / "train" / "shard_00", documents)
    values = [
        np.array([number % 1000 / 4 if dtype[0] == "f" else number % 1000 for number in d.ids]) for d in documents
    ]
    write_sidecar(prefix, values, dtype)
    found = dataset(prefix, with_sidecar(NAME), mmap_bin_files=mapped)
    trained = 0
    for number in range(len(found)):
        sample = found[number]
        assert sample[NAME].dtype == served
        wanted = sample["labels"] % 1000 / (4 if dtype[0] == "f" else 1)
        inside = sample["loss_mask"] > 0
        assert torch.equal(sample[NAME][inside].double(), wanted[inside].double())
        trained += int(inside.sum())
    assert trained > 100
    assert int(found[None][NAME].abs().sum()) == 0


class Teacher:
    """Stands at module level, so that datasets can be pickled; made when Megatron is there."""


def test_pickling_opens_the_sidecar_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    documents = make_documents(20, 1, 100)
    prefix = write_shard(tmp_path / "train" / "shard_00", documents)
    write_sidecar(prefix, [np.array(d.ids, dtype=np.float32) for d in documents])
    kind = with_sidecar(NAME)
    monkeypatch.setitem(globals(), "Teacher", kind)
    kind.__qualname__, kind.__module__ = "Teacher", __name__
    found = dataset(prefix, kind)
    again = pickle.loads(pickle.dumps(found))
    assert torch.equal(again[1][NAME], found[1][NAME])
    with (tmp_path / "train" / f"shard_00_{NAME}.bin").open("r+b") as file:
        file.write(np.float32(7.5).tobytes())
    with pytest.raises(FormatError, match="when the dataset was pickled"):
        pickle.loads(pickle.dumps(found))


def test_a_sidecar_that_does_not_fit_is_refused_at_opening(tmp_path: Path) -> None:
    documents = make_documents(20, 1, 100)
    prefix = write_shard(tmp_path / "train" / "shard_00", documents)
    write_sidecar(prefix, [np.zeros(len(d.ids), dtype=np.float32) for d in documents])
    path = tmp_path / "train" / f"shard_00_{NAME}.bin"
    np.ones(path.stat().st_size // 4, dtype=np.float32).tofile(path)
    with pytest.raises(FormatError, match=r"the last value of teacher_logprob is not 0 .*: document 0"):
        KDShard.open(prefix, [NAME])
    os.truncate(path, path.stat().st_size - 4)
    with pytest.raises(FormatError, match=f"shard_00_{NAME}.bin: .* bytes, but its index"):
        dataset(prefix, with_sidecar(NAME))
    assert len(KDShard.open(prefix)) == 20, "who does not ask for it is not stopped by it"
    with pytest.raises(ConfigError, match="no name for a sidecar"):
        KDShard.open(prefix, ["span"])


def test_the_example_adds_one_by_record_id(copied: Path) -> None:
    path = Path(__file__).parents[2] / "examples" / "megatron" / "add_teacher_logprob.py"
    spec = importlib.util.spec_from_file_location("add_teacher_logprob", path)
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    assert example.add_teacher(str(copied)) == 40
    shard = KDShard.open(synth_kd_blend(copied).prefixes[0], [NAME])
    ids, mask, _ = shard.document(3)
    found = shard.values(NAME)[shard.place(3)]
    everything = shard.values("tokens")
    at = int(np.flatnonzero(mask)[0])
    assert found[at] == pytest.approx(np.log((everything == ids[at + 1]).mean()), rel=1e-6)
    sample = dataset(shard.prefix, example.teacher_dataset())[0]
    assert bool((sample[NAME][sample["loss_mask"] > 0] < 0).all())
    report = verify_synth_kd(copied)
    assert report.passed
    assert sum(NAME in sentence and "added later" in sentence for sentence in report.unchecked) == 4
    shutil.copy(copied / "train" / f"shard_01_{NAME}.bin", copied / "train" / f"shard_00_{NAME}.bin")
    assert not verify_synth_kd(copied).passed


# --- off by one ---------------------------------------------------------------------------------------------------


def roll_tokens(train: Path) -> None:
    path = train / "shard_00_tokens.bin"
    np.roll(np.fromfile(path, dtype=np.int32), 1).tofile(path)


def token_aligned(train: Path) -> None:
    """Every document begins with a message that is not trained, so this is what `values` were before `values[1:]`."""
    for column in ("lossmask", "span"):
        path = train / f"shard_00_{column}.bin"
        np.roll(np.fromfile(path, dtype=np.uint8), 1).tofile(path)


def span_is_the_mask(train: Path) -> None:
    shutil.copy(train / "shard_00_lossmask.bin", train / "shard_00_span.bin")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (roll_tokens, "EOD inside of a document, or none at its end: document 0"),
        (token_aligned, "a span is not that of the message by its role and channel: document 0"),
        (span_is_the_mask, "a span is not that of the message by its role and channel: document 0"),
    ],
)
def test_sidecars_that_are_off_by_one_are_refused(copied: Path, damage: Any, message: str) -> None:
    prefix = synth_kd_blend(copied).prefixes[0]
    damage(copied / "train")
    with pytest.raises(FormatError) as caught:
        KDShard.open(prefix)
    assert message in str(caught.value)
    assert any(message.split(":")[0] in str(finding) for finding in verify_synth_kd(copied).findings)


def test_one_document_in_the_middle_is_found_by_verify(copied: Path) -> None:
    """Opening looks at a sample; `verify` looks at everything, also where a neighbour is no Harmony document."""
    prefix = synth_kd_blend(copied).prefixes[0]
    tokens = np.memmap(f"{prefix}.bin", dtype=np.int32, mode="r+")
    tokens[KDShard.open(prefix).place(2).start] = 17
    tokens.flush()
    findings = [str(finding) for finding in verify_synth_kd(copied).findings]
    assert any("does not begin with <|start|>" in finding for finding in findings)


# --- what Megatron leaves behind ----------------------------------------------------------------------------------


def test_verify_passes_after_megatron_wrote_its_index_cache(copied: Path) -> None:
    from chatmill.megatron import SynthKDDataset

    dataset(synth_kd_blend(copied).prefixes[0], SynthKDDataset)
    assert list(copied.rglob("*.npy"))
    report = verify_synth_kd(copied)
    assert report.passed
    assert any("index cache" in sentence for sentence in report.unchecked)
    (copied / "train" / "stray.npy").write_bytes(b"")
    assert not verify_synth_kd(copied).passed


# --- blends -------------------------------------------------------------------------------------------------------


def test_blend_arguments_are_what_megatron_lm_reads(tmp_path: Path) -> None:
    """Parsed as `get_blend_and_blend_per_split` of Megatron-LM does it, from a folder with a space in its name."""
    from megatron.core.datasets.utils import get_blend_from_list

    shards = [make_documents(5, 1), make_documents(9, 2)]
    root = write_root(tmp_path / "my data" / "kd", {"train": shards})
    name, *words = shlex.split(blend_arguments(root))
    assert name == "--train-data-path"
    assert get_blend_from_list(words) == tuple(synth_kd_blend(root))
    assert synth_kd_blends(root) == [synth_kd_blend(root), None, None]


def test_exports_say_them(built: Path, tmp_path: Path) -> None:
    from chatmill.compiler.run import run_build
    from chatmill.export.export import export_dataset

    assert "--valid-data-path " in blend_arguments(built)
    source = {"path": str(next((DATA / "synth_harmony").glob("*.parquet")))}
    run_build(
        {"sources": [source], "tokenizer": "o200k", "template": "harmony", "policy": "synth_kd"},
        tmp_path / "built",
        workers=0,
    )
    result = export_dataset(tmp_path / "built", "megatron", tmp_path / "out", eod_id=EOD)
    assert shlex.split(result.config)[2::2] == synth_kd_blend(tmp_path / "out").prefixes
    shard = KDShard.open(synth_kd_blend(tmp_path / "out").prefixes[0])
    assert verify_export(tmp_path / "out").passed
    dataset(shard.prefix, with_sidecar("x").__base__)
    assert verify_export(tmp_path / "out").passed


def test_an_export_whose_tokens_were_rolled_is_refused(tmp_path: Path) -> None:
    """All that is known of an export is its EOD."""
    documents = [Document(ids=[5, 6, 7, 2], spans=[0, 2, 2, 0])] * 3
    prefix = write_shard(tmp_path / "train" / "shard_00", documents)
    (tmp_path / "export.json").write_text(json.dumps({"options": {"eod_id": 2}}))
    assert len(KDShard.open(prefix)) == 3
    roll_tokens(tmp_path / "train")
    with pytest.raises(FormatError, match=r"none at its end: document 0 .* at position 3 .* the token is 7;"):
        KDShard.open(prefix)

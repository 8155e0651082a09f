"""Full disks and used-up memory are named as such, wherever they are met, with what helps."""

from __future__ import annotations

import errno
import mmap
import os
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from chatmill.core.machine_limits import is_full_disk, is_out_of_memory
from chatmill.core.publish import StorageError
from chatmill.errors import ChatmillError, ConfigError, OutOfMemoryError
from chatmill.load.episodes import GPTEpisodeDataLoader
from chatmill.read.files import read_records
from chatmill.store.episode_writer import EpisodeWriter
from chatmill.store.mapped import map_file
from chatmill.tokenizer.backends import HuggingFaceBackend
from chatmill.tokenizer.load import load_tokenizer
from chatmill.train.checkpoint import checkpoints
from chatmill.train.trainer import fit
from tests.data.tokenizer_files import unpacked
from tests.load.sets import items, write_set
from tests.train.tiny import tiny_model


def full(*args: Any, **more: Any) -> Any:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def no_memory(*args: Any, **more: Any) -> Any:
    raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))


def test_what_is_a_full_disk() -> None:
    for error in (
        OSError(errno.ENOSPC, "x"),
        OSError(errno.EDQUOT, "x"),
        Exception("Error while serializing: I/O error: No space left on device (os error 28)"),
    ):
        assert is_full_disk(error)
    for error in (OSError(errno.EIO, "No space left on device"), ValueError("x")):
        assert not is_full_disk(error)


def test_what_is_used_up_memory() -> None:
    for error in (
        MemoryError(),
        pyarrow.ArrowMemoryError("malloc of size 64 failed"),
        OSError(errno.ENOMEM, "x"),
        ImportError("libx.so: failed to map segment from shared object"),
        RuntimeError("CUDA out of memory. Tried to allocate 2 GiB"),
        RuntimeError("can't start new thread"),
    ):
        assert is_out_of_memory(error), error
    for other in (OSError(errno.EIO, "Cannot allocate memory"), ValueError("out of memory"), ImportError("no module")):
        assert not is_out_of_memory(other), other


@pytest.mark.parametrize("at", ["temporary_folder", "EpisodeWriter._write", "publish_folder"])
def test_an_episode_writer_on_a_full_disk_names_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    monkeypatch.setattr(f"chatmill.store.episode_writer.{at}", full)
    with (
        pytest.raises(StorageError, match=r"No space left on device \(ENOSPC\); free some space there"),
        EpisodeWriter(tmp_path, "train") as writer,
    ):
        writer.append([1, 2, 3])


def test_a_checkpoint_on_a_full_disk_leaves_the_last_one_and_says_how_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any, **more: Any) -> Any:
        raise Exception("I/O error: No space left on device (os error 28)")  # as safetensors reports it

    write_set(tmp_path / "set", items(8))
    config = {"batch_size": 2, "block_size": 8, "pad_token_id": 0, "use_loss_mask": True}

    def run(steps: int) -> Any:
        loader = GPTEpisodeDataLoader(config, dataset_dir=tmp_path / "set")
        return fit(tiny_model(8000), loader, steps=steps, out=tmp_path / "run")

    run(1)
    monkeypatch.setattr("torch.save", refuse)
    with pytest.raises(ConfigError, match=r"disk is full.*Free some space.*resumes from the newest checkpoint"):
        run(2)
    folder = tmp_path / "run" / "checkpoints"
    assert [path.name for path in folder.iterdir()] == ["step_00000001"]
    assert len(checkpoints(tmp_path / "run")) == 1


def test_a_file_that_cannot_be_mapped_is_no_damaged_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    np.arange(4, dtype="<u4").tofile(tmp_path / "a.bin")
    monkeypatch.setattr(mmap, "mmap", no_memory)
    with pytest.raises(OutOfMemoryError, match=r"a\.bin cannot be mapped: there is not enough memory: use fewer"):
        map_file(tmp_path / "a.bin", "<u4")


def test_parquet_that_does_not_fit_into_memory_is_no_damaged_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any, **more: Any) -> Any:
        raise pyarrow.ArrowMemoryError("malloc of size 64 failed")

    pyarrow.parquet.write_table(pyarrow.table({"a": [1]}), tmp_path / "a.parquet")
    monkeypatch.setattr(pyarrow.parquet, "ParquetFile", refuse)
    with pytest.raises(OutOfMemoryError, match=r"a\.parquet"):
        list(read_records(tmp_path / "a.parquet"))


def test_packed_files_that_cannot_be_unpacked_for_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.jsonl.zst").write_bytes(b"")
    monkeypatch.setattr(pyarrow, "CompressedInputStream", no_memory)
    with pytest.raises(OutOfMemoryError, match=r"a\.jsonl\.zst"):
        list(read_records(tmp_path / "a.jsonl.zst"))


def test_a_tokenizer_that_does_not_fit_into_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(text: bytes) -> Any:
        raise MemoryError

    monkeypatch.setattr(HuggingFaceBackend, "from_json", refuse)  # other tests may have loaded the engine
    with pytest.raises(OutOfMemoryError, match="gpt2") as caught:
        load_tokenizer(unpacked("gpt2"))
    assert isinstance(caught.value, ChatmillError)
    assert isinstance(caught.value, MemoryError)

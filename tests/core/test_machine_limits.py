"""Full disks and used-up memory are named as such, wherever they are met, with what helps; folders of the machine."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from chatmill.core.cache_folders import chatmill_cache, user_cache
from chatmill.core.machine_limits import is_full_disk, is_out_of_memory
from chatmill.core.publish import StorageError
from chatmill.errors import ChatmillError, ConfigError, OutOfMemoryError
from chatmill.load.episodes import GPTEpisodeDataLoader
from chatmill.read.files import read_records
from chatmill.store.episode_writer import EpisodeWriter
from chatmill.store.mapped import map_file
from chatmill.tokenizer.load import load_tokenizer
from chatmill.train.checkpoint import checkpoints
from chatmill.train.trainer import fit
from tests.data.tokenizer_files import unpacked
from tests.load.sets import items, write_set
from tests.train.tiny import tiny_model

FULL, NO_MEMORY = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), OSError(errno.ENOMEM, "x")
BY_SAFETENSORS = Exception("Error while serializing: I/O error: No space left on device (os error 28)")
BY_ARROW = pyarrow.ArrowMemoryError("malloc of size 64 failed")


def raising(error: BaseException) -> Callable[..., Any]:
    def refuse(*args: Any, **more: Any) -> Any:
        raise error

    return refuse


def test_what_is_a_full_disk_and_what_is_used_up_memory() -> None:
    for error in (FULL, OSError(errno.EDQUOT, "x"), BY_SAFETENSORS):
        assert is_full_disk(error)
    for error in (OSError(errno.EIO, "No space left on device"), ValueError("x")):
        assert not is_full_disk(error)
    for used_up in (
        *(MemoryError(), BY_ARROW, NO_MEMORY, ImportError("libx.so: failed to map segment from shared object")),
        *(RuntimeError("CUDA out of memory. Tried to allocate 2 GiB"), RuntimeError("can't start new thread")),
    ):
        assert is_out_of_memory(used_up), used_up
    for other in (OSError(errno.EIO, "Cannot allocate memory"), ValueError("out of memory"), ImportError("no module")):
        assert not is_out_of_memory(other), other


@pytest.mark.parametrize("at", ["temporary_folder", "EpisodeWriter._write", "publish_folder"])
def test_a_writer_on_a_full_disk_names_the_way_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str) -> None:
    monkeypatch.setattr(f"chatmill.store.episode_writer.{at}", raising(FULL))
    with (
        pytest.raises(StorageError, match=r"No space left on device \(ENOSPC\); free some space there"),
        EpisodeWriter(tmp_path, "train") as writer,
    ):
        writer.append([1, 2, 3])


def test_a_full_disk_leaves_the_last_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_set(tmp_path / "set", items(8))
    config = {"batch_size": 2, "block_size": 8, "pad_token_id": 0, "use_loss_mask": True}

    def run(steps: int) -> Any:
        loader = GPTEpisodeDataLoader(config, dataset_dir=tmp_path / "set")
        return fit(tiny_model(8000), loader, steps=steps, out=tmp_path / "run")

    run(1)
    monkeypatch.setattr("torch.save", raising(BY_SAFETENSORS))
    with pytest.raises(ConfigError, match=r"disk is full.*Free some space.*resumes from the newest checkpoint"):
        run(2)
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step_00000001"]
    assert len(checkpoints(tmp_path / "run")) == 1


@pytest.mark.parametrize(
    "case",
    [
        ("mmap.mmap", NO_MEMORY, lambda folder: map_file(folder / "a.bin", "<u4"), r"a\.bin cannot be mapped: .*fewer"),
        ("pyarrow.parquet.ParquetFile", BY_ARROW, lambda folder: list(read_records(folder / "a.parquet")), "a.parquet"),
        ("pyarrow.CompressedInputStream", NO_MEMORY, lambda folder: list(read_records(folder / "a.jsonl.zst")), "zst"),
        (
            "chatmill.tokenizer.backends.HuggingFaceBackend.from_json",  # other tests may have loaded the engine
            *(MemoryError(), lambda folder: load_tokenizer(unpacked("gpt2")), "gpt2"),
        ),
    ],
    ids=["a mapped file", "parquet", "a packed file", "a tokenizer"],
)
def test_used_up_memory_is_no_damaged_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: Any) -> None:
    target, error, work, message = case
    for name in ("a.bin", "a.jsonl.zst"):
        (tmp_path / name).write_bytes(b"1234")
    pyarrow.parquet.write_table(pyarrow.table({"a": [1]}), tmp_path / "a.parquet")
    monkeypatch.setattr(target, raising(error))
    with pytest.raises(OutOfMemoryError, match=message) as caught:
        work(tmp_path)
    assert isinstance(caught.value, ChatmillError)
    assert isinstance(caught.value, MemoryError)


def test_caches_are_in_the_home_folder_or_where_variables_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("XDG_CACHE_HOME", "CHATMILL_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert user_cache() == tmp_path / ".cache"
    assert chatmill_cache() == tmp_path / ".cache" / "chatmill"
    monkeypatch.setenv("XDG_CACHE_HOME", "~/caches")
    assert chatmill_cache() == tmp_path / "caches" / "chatmill"
    monkeypatch.setenv("CHATMILL_CACHE", "~/mill")
    assert chatmill_cache() == tmp_path / "mill"

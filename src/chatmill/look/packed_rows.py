"""Reads packed blocks from Arrow and Parquet files and from Hugging Face datasets saved to disk, with pyarrow alone."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chatmill.errors import ConfigError, FormatError, UnknownNameError

WANTED = "a .parquet or .arrow file, a folder of them, or a folder made by Dataset.save_to_disk"


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedRow:
    """One block as stored."""

    index: int
    """Counted from 0 over all files."""
    columns: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedFiles:
    """The files of one packed dataset, in order."""

    path: Path
    files: tuple[Path, ...]

    def rows(self, start: int = 0, count: int | None = None) -> Iterator[PackedRow]:
        """`count` rows (else all) from row `start` on; only what is asked for is decoded."""
        end = None if count is None else start + count
        first = 0
        for file in self.files:
            for batch in _record_batches(file):
                for i in range(max(start - first, 0), len(batch)):
                    if end is not None and first + i >= end:
                        return
                    columns = {name: batch.column(name)[i].as_py() for name in batch.schema.names}
                    yield PackedRow(index=first + i, columns=columns)
                first += len(batch)
                if end is not None and first >= end:
                    return

    def __len__(self) -> int:
        return sum(_count(file) for file in self.files)


def open_packed(path: str | Path, split: str | None = None) -> PackedFiles:
    """Find the files of a packed dataset; `split` chooses one of a `DatasetDict`."""
    path = Path(path)
    if path.is_file():
        files: Sequence[Path] = [path]
    elif path.is_dir():
        path = _one_split(path, split)
        files = _files_of_folder(path)
    else:
        raise ConfigError(f"{path} does not exist: give {WANTED}")
    wrong = [file for file in files if file.suffix not in (".parquet", ".arrow", ".feather")]
    if wrong or not files:
        raise FormatError(f"{wrong[0] if wrong else path} is no packed dataset: give {WANTED}")
    return PackedFiles(path=path, files=tuple(files))


def _one_split(folder: Path, split: str | None) -> Path:
    if not (folder / "dataset_dict.json").is_file():
        return folder
    splits = json.loads((folder / "dataset_dict.json").read_text())["splits"]
    if split is None and len(splits) > 1:
        raise ConfigError(f"{folder} has the splits {', '.join(splits)}: choose one with --split")
    chosen = split or splits[0]
    if chosen not in splits:
        raise UnknownNameError("split", chosen, splits)
    return folder / chosen


def _files_of_folder(folder: Path) -> list[Path]:
    state = folder / "state.json"
    if state.is_file():
        return [folder / entry["filename"] for entry in json.loads(state.read_text())["_data_files"]]
    return sorted(file for file in folder.iterdir() if file.suffix in (".parquet", ".arrow"))


def _record_batches(file: Path) -> Iterator[Any]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        if file.suffix == ".parquet":
            yield from pq.ParquetFile(file).iter_batches(batch_size=64)
        else:
            yield from _arrow_reader(file)
    except (pa.ArrowInvalid, OSError) as error:
        raise FormatError(f"{file} cannot be read: {error}") from None


def _arrow_reader(file: Path) -> Iterator[Any]:
    import pyarrow as pa

    source = pa.memory_map(str(file))
    if source.read(6) == b"ARROW1":  # the file form; what `datasets` saves is the stream form
        source.seek(0)
        reader = pa.ipc.open_file(source)
        return (reader.get_batch(i) for i in range(reader.num_record_batches))
    source.seek(0)
    return iter(pa.ipc.open_stream(source))


def _count(file: Path) -> int:
    import pyarrow.parquet as pq

    if file.suffix == ".parquet":
        return int(pq.ParquetFile(file).metadata.num_rows)
    return sum(len(batch) for batch in _record_batches(file))

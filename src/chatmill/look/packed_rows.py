"""Reads packed blocks from Arrow and Parquet files and from Hugging Face datasets saved to disk, with pyarrow alone."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from chatmill.errors import ConfigError, FormatError, UnknownNameError
from chatmill.read.folders import SPLITS_FILE, STATE, saved_files, saved_splits

WANTED = "a .parquet or .arrow file, a folder of them, or a folder made by Dataset.save_to_disk"
READ_ROWS = 64
"""Rows of a Parquet file that are decoded at a time."""


class PackedFiles:
    """The files of one packed dataset, in order."""

    def __init__(self, path: Path, files: Sequence[Path]) -> None:
        self.path, self.files = path, files

    @cached_property
    def _arrow(self) -> dict[Path, list[Any]]:
        """All batches of Arrow files: they are mapped, so they cost no memory, and any row is found at once."""
        return {file: list(_arrow_batches(file)) for file in self.files if file.suffix != ".parquet"}

    @cached_property
    def _pieces(self) -> list[tuple[Path, int]]:
        """The parts that can be read alone, row groups of Parquet and batches of Arrow: file, and number in it."""
        return [(file, number) for file in self.files for number in range(len(self._rows_of_pieces(file)))]

    @cached_property
    def _ends(self) -> NDArray[np.int64]:
        """The number of the row behind the last one of each piece."""
        return np.cumsum([rows for file in self.files for rows in self._rows_of_pieces(file)], dtype=np.int64)

    def _rows_of_pieces(self, file: Path) -> list[int]:
        return _row_groups(file) if file.suffix == ".parquet" else list(map(len, self._arrow[file]))

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def row(self, number: int) -> Any:
        """One row, as a record batch of its own."""
        piece = int(np.searchsorted(self._ends, number, side="right"))
        file, part = self._pieces[piece]
        place = number - (int(self._ends[piece - 1]) if piece else 0)
        for batch in _parquet_batches(file, [part]) if file.suffix == ".parquet" else [self._arrow[file][part]]:
            if place < len(batch):
                return batch.slice(place, 1)
            place -= len(batch)
        raise FormatError(f"{file} has fewer rows than it says")

    def batches(self, columns: Sequence[str] | None = None) -> Iterator[tuple[int, Any]]:
        """(number of its first row, record batch) of all rows; `columns` chooses some."""
        first = 0
        for file in self.files:
            parquet = file.suffix == ".parquet"
            for batch in _parquet_batches(file, None, columns) if parquet else _arrow_batches(file, columns):
                yield first, batch
                first += len(batch)

    @property
    def column_names(self) -> tuple[str, ...]:
        """The columns of the first file."""
        return tuple(_schema(self.files[0]).names)


def is_packed(path: Path) -> bool:
    """Whether a path looks like a packed dataset."""
    if path.is_file():
        return path.suffix in (".parquet", ".arrow", ".feather")
    if not path.is_dir():
        return False
    if any((path / name).is_file() for name in (SPLITS_FILE, STATE)):
        return True
    return any(file.suffix in (".parquet", ".arrow") for file in path.iterdir()) or bool(_parquet_splits(path))


def packed_splits(path: Path) -> list[str]:
    """The splits of a saved `DatasetDict`, or of a folder with a folder of Parquet files each; none for one dataset."""
    if (path / SPLITS_FILE).is_file():
        return saved_splits(path)
    if path.is_file() or any(file.suffix in (".parquet", ".arrow") for file in path.iterdir()):
        return []
    return _parquet_splits(path)


def _parquet_splits(folder: Path) -> list[str]:
    folders = [f for f in folder.iterdir() if f.is_dir() and not f.name.startswith(".")]
    return sorted(f.name for f in folders if any(file.suffix in (".parquet", ".arrow") for file in f.iterdir()))


def open_packed(path: str | Path, split: str | None = None) -> PackedFiles:
    """Find the files of a packed dataset; `split` chooses one of a `DatasetDict`."""
    path = Path(path)
    if path.is_file() and split is None:
        files: Sequence[Path] = [path]
    elif path.exists():
        path = _one_split(path, split)
        files = files_of_folder(path)
    else:
        raise ConfigError(f"{path} does not exist: give {WANTED}")
    wrong = [file for file in files if file.suffix not in (".parquet", ".arrow", ".feather")]
    if wrong or not files:
        raise FormatError(f"{wrong[0] if wrong else path} is not a packed dataset: give {WANTED}")
    return PackedFiles(path, files)


def _one_split(folder: Path, split: str | None) -> Path:
    splits = packed_splits(folder)
    if not splits and split is None:
        return folder
    if split is None and len(splits) > 1:
        raise ConfigError(f"{folder} has the splits {', '.join(splits)}: choose one with --split")
    chosen = split or splits[0]
    if chosen not in splits:
        raise UnknownNameError("split", chosen, splits or ["(none: this is one dataset)"])
    return folder / chosen


def files_of_folder(folder: Path) -> list[Path]:
    """The files of the rows of one dataset, in order."""
    if (folder / STATE).is_file():
        return list(map(Path, saved_files(folder)))
    return sorted(file for file in folder.iterdir() if file.suffix in (".parquet", ".arrow"))


@contextmanager
def _readable(file: Path) -> Iterator[None]:
    """Turn errors of pyarrow into one that names the file."""
    import pyarrow as pa

    try:
        yield
    except (pa.ArrowInvalid, OSError) as error:
        raise FormatError(f"{file} cannot be read: {error}") from None


def _parquet_batches(file: Path, row_groups: list[int] | None, columns: Sequence[str] | None = None) -> Iterator[Any]:
    import pyarrow.parquet as pq

    with _readable(file):
        yield from pq.ParquetFile(file).iter_batches(batch_size=READ_ROWS, row_groups=row_groups, columns=columns)


def _arrow_batches(file: Path, columns: Sequence[str] | None = None) -> Iterator[Any]:
    """The batches of an Arrow file, mapped; some columns are read, since passes would pile up mapped pages."""
    with _readable(file):
        reader = _arrow_reader(file, columns)
        if hasattr(reader, "num_record_batches"):
            yield from (reader.get_batch(i) for i in range(reader.num_record_batches))
        else:
            yield from reader


def _arrow_reader(file: Path, columns: Sequence[str] | None = None) -> Any:
    import pyarrow as pa

    options = None
    if columns is not None:
        schema = _arrow_reader(file).schema
        options = pa.ipc.IpcReadOptions(included_fields=[schema.get_field_index(name) for name in columns])
    source = pa.memory_map(str(file)) if columns is None else pa.OSFile(str(file))
    is_file_form = source.read(6) == b"ARROW1"  # what `datasets` saves is the stream form
    source.seek(0)
    open_reader = pa.ipc.open_file if is_file_form else pa.ipc.open_stream
    return open_reader(source, options=options)


def read_table(file: Path, wanted: Collection[str]) -> Any:
    """The columns of a file that are among `wanted`, whole."""
    import pyarrow.parquet as pq

    names = [name for name in _schema(file).names if name in wanted]
    with _readable(file):
        if file.suffix == ".parquet":
            return pq.read_table(file, columns=names)
        return _arrow_reader(file).read_all().select(names)


def _row_groups(file: Path) -> list[int]:
    import pyarrow.parquet as pq

    with _readable(file):
        about = pq.ParquetFile(file).metadata
        return [about.row_group(i).num_rows for i in range(about.num_row_groups)]


def _schema(file: Path) -> Any:
    import pyarrow.parquet as pq

    with _readable(file):
        return pq.read_schema(file) if file.suffix == ".parquet" else _arrow_reader(file).schema

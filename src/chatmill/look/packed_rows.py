"""Reads packed blocks from Arrow and Parquet files and from Hugging Face datasets saved to disk, with pyarrow alone."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from chatmill.errors import ConfigError, FormatError, UnknownNameError
from chatmill.read.folders import SPLITS_FILE, STATE, saved_files, saved_splits

WANTED = "a .parquet or .arrow file, a folder of them, or a folder made by Dataset.save_to_disk"
READ_ROWS = 64
"""Rows of a Parquet file that are decoded at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedFiles:
    """The files of one packed dataset, in order."""

    path: Path
    files: tuple[Path, ...]
    _pieces: dict[Path, list[int]] = field(default_factory=dict, init=False, repr=False, compare=False)
    _mapped: dict[Path, list[Any]] = field(default_factory=dict, init=False, repr=False, compare=False)

    def row(self, number: int) -> Any:
        """One row, as a record batch of its own."""
        first, batch = next(self.batches(number))
        return batch.slice(number - first, 1)

    def batches(self, start: int = 0, columns: Sequence[str] | None = None) -> Iterator[tuple[int, Any]]:
        """(number of its first row, record batch) of every piece that ends behind row `start`.

        `columns` chooses some, for passes over all rows (`start` is 0 then).
        """
        assert columns is None or start == 0
        first = 0
        for file in self.files:
            pieces = self._rows_of_pieces(file)
            skipped = int(np.searchsorted(first + np.cumsum(pieces), start, side="right"))
            at = first + sum(pieces[:skipped])
            for batch in self._record_batches(file, skipped, columns) if skipped < len(pieces) else ():
                if at + len(batch) > start:
                    yield at, batch
                at += len(batch)
            first += sum(pieces)

    def _record_batches(self, file: Path, skipped: int, columns: Sequence[str] | None) -> Iterator[Any]:
        """The record batches of a file without its first `skipped` pieces.

        Some columns are asked for by passes over whole files: those read, since pages that were mapped pile up.
        """
        if file.suffix == ".parquet":
            yield from _parquet_batches(file, skipped, columns)
        elif columns is None:
            yield from self._arrow_batches(file)[skipped:]
        else:
            yield from _read_arrow(file, columns)

    def _arrow_batches(self, file: Path) -> list[Any]:
        """All batches of an Arrow file: they are mapped, so they cost no memory, and any row is found at once."""
        if file not in self._mapped:
            self._mapped[file] = list(_read_arrow(file))
        return self._mapped[file]

    def _rows_of_pieces(self, file: Path) -> list[int]:
        """Rows of the parts of a file that can be passed over: row groups of Parquet, batches of Arrow."""
        if file not in self._pieces:
            parquet = file.suffix == ".parquet"
            self._pieces[file] = _row_groups(file) if parquet else list(map(len, self._arrow_batches(file)))
        return self._pieces[file]

    @property
    def column_names(self) -> tuple[str, ...]:
        """The columns of the first file."""
        return tuple(_schema(self.files[0]).names)

    def __len__(self) -> int:
        return sum(sum(self._rows_of_pieces(file)) for file in self.files)


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
        raise FormatError(f"{wrong[0] if wrong else path} is no packed dataset: give {WANTED}")
    return PackedFiles(path=path, files=tuple(files))


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


def _parquet_batches(file: Path, skipped: int, columns: Sequence[str] | None) -> Iterator[Any]:
    import pyarrow.parquet as pq

    with _readable(file):
        parquet = pq.ParquetFile(file)
        groups = list(range(skipped, parquet.num_row_groups))
        wanted = None if columns is None else list(columns)
        yield from parquet.iter_batches(batch_size=READ_ROWS, row_groups=groups, columns=wanted)


def _read_arrow(file: Path, columns: Sequence[str] | None = None) -> Iterator[Any]:
    """The batches of an Arrow file: whole ones are mapped, some columns of them are read."""
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

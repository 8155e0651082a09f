"""Finds and reads Arrow and Parquet files and Hugging Face datasets saved to disk, with pyarrow alone."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from chatmill.errors import ConfigError, DataError, FormatError, UnknownNameError
from chatmill.read.files import parquet_file
from chatmill.read.folders import SPLITS_FILE, STATE, saved_files, saved_splits

WANTED = "a .parquet or .arrow file, a folder of them, or a folder made by Dataset.save_to_disk"
IN_FOLDERS = (".parquet", ".arrow")
SUFFIXES = (*IN_FOLDERS, ".feather")


def is_list(kind: Any) -> bool:
    """Return whether values of a type of Arrow are lists."""
    import pyarrow as pa

    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def packed_parts(path: Path) -> dict[str, Path]:
    """Find the folder of each split of a packed dataset; the dataset itself under the name "" if it has no splits.

    Splits are those of a saved `DatasetDict`, or folders with Parquet or Arrow files. Nothing for anything else.
    """
    if not path.is_dir():
        return {"": path} if path.is_file() and path.suffix in SUFFIXES else {}
    if (path / SPLITS_FILE).is_file():
        return {name: path / name for name in saved_splits(path)}
    if (path / STATE).is_file() or _has_rows(path):
        return {"": path}
    folders = sorted(folder for folder in path.iterdir() if folder.is_dir() and not folder.name.startswith("."))
    return {folder.name: folder for folder in folders if _has_rows(folder)}


def _has_rows(folder: Path) -> bool:
    return any(file.suffix in IN_FOLDERS for file in folder.iterdir())


def packed_files(path: str | Path, split: str | None = None) -> list[Path]:
    """Find the files of a packed dataset, in order; `split` chooses one of several, by default `train`."""
    path = Path(path)
    if not path.exists():
        raise ConfigError(f"{path} does not exist: give {WANTED}")
    parts = packed_parts(path)
    name = chosen_split([name for name in parts if name], split, str(path))
    place = parts.get(name, path)
    files = [place] if place.is_file() else _files_of_folder(place)
    wrong = [file for file in files if file.suffix not in SUFFIXES]
    if wrong or not files:
        raise FormatError(f"{wrong[0] if wrong else place} is not a packed dataset: give {WANTED}")
    return files


def chosen_split(names: Sequence[str], split: str | None, where: str) -> str:
    """Choose a split: the one that is named, else `train`, else the only one; empty if there are no splits."""
    if split is not None and split not in names:
        raise UnknownNameError("split", split, list(names) or ["(none: this is one dataset)"])
    if split is None and "train" not in names and len(names) > 1:
        raise ConfigError(f"{where} has several splits, and none is 'train': name one with --split: {', '.join(names)}")
    return split or ("train" if "train" in names else next(iter(names), ""))


def _files_of_folder(folder: Path) -> list[Path]:
    if (folder / STATE).is_file():
        return list(map(Path, saved_files(folder)))
    return sorted(file for file in folder.iterdir() if file.suffix in IN_FOLDERS)


@contextmanager
def _readable(file: Path) -> Iterator[None]:
    """Turn errors of pyarrow into one that names the file."""
    import pyarrow as pa

    try:
        yield
    except (pa.ArrowInvalid, OSError) as error:
        raise DataError(f"{file} cannot be read as Arrow: {error}") from None


def arrow_batches(file: Path) -> Iterator[Any]:
    """Map the batches of an Arrow file."""
    with _readable(file):
        reader = _arrow_reader(file)
        if hasattr(reader, "num_record_batches"):
            yield from (reader.get_batch(i) for i in range(reader.num_record_batches))
        else:
            yield from reader


def _arrow_reader(file: Path) -> Any:
    import pyarrow as pa

    source = pa.memory_map(str(file))
    is_file_form = source.read(6) == b"ARROW1"  # what `datasets` saves is the stream form
    source.seek(0)
    return pa.ipc.open_file(source) if is_file_form else pa.ipc.open_stream(source)


def read_table(file: Path, wanted: Collection[str]) -> Any:
    """Read the columns of a file that are among `wanted`."""
    names = [name for name in schema_of(file).names if name in wanted]
    if file.suffix == ".parquet":
        with parquet_file(file) as opened:
            return opened.read(names)
    with _readable(file):
        return _arrow_reader(file).read_all().select(names)


def schema_of(file: Path) -> Any:
    """Read the schema of a file."""
    if file.suffix == ".parquet":
        with parquet_file(file) as opened:
            return opened.schema_arrow
    with _readable(file):
        return _arrow_reader(file).schema

"""Folders as inputs: those that `datasets` saved to disk, and plain ones with files of records."""

from __future__ import annotations

import os
from pathlib import Path

from chatmill.core.json_files import read_object
from chatmill.errors import ConfigError, FormatError
from chatmill.read.file_format import SUFFIXES
from chatmill.read.run_folders import agent_inputs, packed_copies, run_files

MANIFEST = "manifest.json"
STATE, INFO, SPLITS_FILE = "state.json", "dataset_info.json", "dataset_dict.json"
"""What `Dataset.save_to_disk` and `DatasetDict.save_to_disk` leave next to the rows."""


def folder_files(path: str | os.PathLike[str]) -> list[str]:
    """Return the files of records in a folder, in order.

    Of a folder that `save_to_disk` made, the files of its rows. Of another one, all files in it (not in folders below)
    whose endings are known. Of one with runs of agents, the files and folders of these.
    """
    folder = Path(path)
    runs = agent_inputs(folder)
    if runs:
        return runs
    if (folder / SPLITS_FILE).is_file():
        return _one_split(folder)
    if (folder / STATE).is_file():
        return saved_files(folder)
    if (folder / MANIFEST).is_file():
        raise ConfigError(f"{folder} is a built dataset, not a folder of conversations: see chatmill inspect")
    names = sorted(name for name in os.listdir(folder) if not name.startswith("."))
    packed = packed_copies(names)
    read = [name for name in names if is_readable(name) and (folder / name).is_file() and name not in packed]
    files = [os.path.join(path, name) for name in read]
    if files:
        return files
    below = [f"{name}/" for name in names if (folder / name).is_dir()]
    has = f"It has: {', '.join([*below, *(name for name in names if f'{name}/' not in below)][:5])}" if names else ""
    raise ConfigError(
        f"the folder {str(path)!r} holds no file of conversations ({', '.join(SUFFIXES)}). {has or 'It is empty'}"
    )


def not_read(path: str | os.PathLike[str]) -> tuple[list[str], list[str]]:
    """Return what `folder_files` passes over in a folder of files: files with other endings, and folders."""
    folder = Path(path)
    if any((folder / name).is_file() for name in (SPLITS_FILE, STATE)):
        return [], []
    if run_files(folder) is not None:
        return [], []
    runs = agent_inputs(folder)
    read = {Path(run).relative_to(folder).parts[0] for run in runs}
    names = sorted(name for name in os.listdir(folder) if not name.startswith("."))
    # The session of a folder with subagents is read with these.
    read |= {f"{name}.jsonl" for name in read}
    names = [name for name in names if name not in read]
    folders = [name for name in names if (folder / name).is_dir()]
    others = [name for name in names if name not in folders and (runs or not is_readable(name))]
    return [name for name in others if name not in (STATE, INFO, SPLITS_FILE)], folders


def is_readable(name: str) -> bool:
    """Return whether a file of this name may hold records; what `datasets` writes next to them does not."""
    return name.lower().endswith((*SUFFIXES, ".ndjson")) and name not in (STATE, INFO, SPLITS_FILE)


def holds_records(folder: Path) -> bool:
    """Return whether a folder is one of records, and not a built dataset."""
    if (folder / MANIFEST).is_file():
        return False
    if any((folder / name).is_file() for name in (STATE, SPLITS_FILE)) or any(map(is_readable, os.listdir(folder))):
        return True
    return bool(agent_inputs(folder))


def _one_split(folder: Path) -> list[str]:
    splits = saved_splits(folder)
    if len(splits) != 1:
        named = " or ".join(str(folder / split) for split in splits) or "nothing"
        raise ConfigError(f"{folder} holds {len(splits)} splits; name the one to read: {named}")
    return saved_files(folder / splits[0])


def saved_splits(folder: Path) -> list[str]:
    """Return the splits of a folder that `DatasetDict.save_to_disk` made: folders in it."""
    splits = read_object(folder / SPLITS_FILE).get("splits")
    if not isinstance(splits, list) or not all(isinstance(s, str) and Path(s).name == s != ".." for s in splits):
        raise FormatError(f"{folder / SPLITS_FILE} does not list splits; was it written by datasets?")
    return splits


def saved_files(folder: Path) -> list[str]:
    """Return the files of the rows in a folder that `Dataset.save_to_disk` made."""
    state = read_object(folder / STATE)
    if any(state.get(key) for key in ("_indices_files", "_indices_data_files")):
        raise ConfigError(
            f"{folder} keeps the order of its rows in a file of its own: write it again with a newer 'datasets', or "
            "after dataset.flatten_indices()"
        )
    try:
        return [str(folder / file["filename"]) for file in state["_data_files"]]
    except (KeyError, TypeError):
        raise FormatError(
            f"{folder / STATE} does not list the files of the rows; was it written by datasets?"
        ) from None

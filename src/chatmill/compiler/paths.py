"""Turns the file names and globs of a recipe into a list of files; a pattern without a match says what is there."""

from __future__ import annotations

import difflib
import glob
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from chatmill.errors import ConfigError
from chatmill.read.folders import folder_files, not_read
from chatmill.read.places import STDIN, Place, is_elsewhere, matches, place

_SHOWN = 5


def resolve_paths(patterns: Sequence[str]) -> list[Place]:
    """Return the files that names, folders, URLs and globs (`*`, `?`, `[ab]`, `**` for any folders) stand for.

    Patterns keep their order, the files of one pattern are sorted by name, a file that comes twice keeps its first
    place. A folder stands for the files of records in it; a glob stands for files, never for folders. A name that is a
    file is that file, whatever signs are in it.
    """
    if not patterns:
        raise ConfigError("no input files are named")
    files: dict[str, Place] = {}
    for pattern in patterns:
        if is_elsewhere(pattern):
            files |= {url: place(url) for url in _urls(pattern) if url not in files}
            continue
        for path in _matches(os.path.expanduser(pattern), pattern):
            files.setdefault(os.path.abspath(path), Path(path))
    return list(files.values())


def local_paths(patterns: Sequence[str]) -> list[Path]:
    """Return the same for commands that read files of this machine alone."""
    paths = resolve_paths(patterns)
    for path in paths:
        if not isinstance(path, Path):
            raise ConfigError(f"{path} is not a file on this machine, and this command reads no others: copy it first")
    return [path for path in paths if isinstance(path, Path)]


def not_read_sentences(patterns: Sequence[str]) -> list[str]:
    """Name, in a sentence each, folders in which something is not read, and files named twice."""
    local = [(os.path.expanduser(pattern), pattern) for pattern in patterns if not is_elsewhere(pattern)]
    unread = ((name, *not_read(folder)) for folder, name in dict(local).items() if os.path.isdir(folder))
    sentences = [_not_read_sentence(name, files, below) for name, files, below in unread if files or below]
    paths = Counter(os.path.relpath(path) for path, name in local if name != STDIN)
    if again := [path for path, count in paths.items() if count > 1]:
        sentences.append(
            f"Named more than once and read once: {_listed(again)}. The weight of a source repeats records."
        )
    return sentences


def _not_read_sentence(folder: str, files: list[str], below: list[str]) -> str:
    kinds = (("files of unknown endings", files), ("folders", [f"{name}/" for name in below]))
    return f"Not read in {folder}: {' and '.join(f'{kind} ({_listed(names)})' for kind, names in kinds if names)}."


def _listed(names: list[str]) -> str:
    rest = f" and {len(names) - _SHOWN:,} more" if len(names) > _SHOWN else ""
    return f"{', '.join(names[:_SHOWN])}{rest}"


def _matches(pattern: str, name: str) -> list[str]:
    if not pattern:
        raise ConfigError("an input file has an empty name")
    if os.path.isdir(pattern):
        return folder_files(pattern)
    if os.path.lexists(pattern):
        return [pattern]
    paths = sorted(glob.glob(pattern, recursive=True))
    files = [path for path in paths if not os.path.isdir(path)]
    if files:
        return files
    if paths:
        raise ConfigError(f"{name!r} matches folders alone, such as {paths[0]!r}; name the files in them")
    missing = "no file matches" if glob.has_magic(pattern) else "there is no file"
    raise ConfigError(f"{missing} {name!r}. {_what_is_there(pattern)}")


def _urls(pattern: str) -> list[str]:
    urls = matches(pattern)
    if not urls:
        raise ConfigError(f"no file matches {pattern!r}")
    return urls


def _what_is_there(pattern: str) -> str:
    """A sentence about the files that may have been meant: those of the nearest folder above that can be read."""
    path = Path(pattern)
    folder = next(parent for parent in path.parents if os.access(parent, os.R_OK) and parent.is_dir())
    missing = path.relative_to(folder).parts[0]
    names = sorted(entry.name + "/" * entry.is_dir() for entry in folder.iterdir() if not entry.name.startswith("."))
    if close := difflib.get_close_matches(missing, names, n=1):
        return f"Did you mean {str(folder / close[0])!r}?"
    return f"In {str(folder)!r} there is: {_listed(names) if names else 'nothing'}"

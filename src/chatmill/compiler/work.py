"""The folder of a build: held by one build at a time, and the work folder in it, whose removal never follows a link."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from chatmill.compiler.chunk_output import STATE
from chatmill.compiler.publish import (
    TEMPORARY,
    canonical_json,
    storing,
    sweep_orphans,
    temporary_beside,
    write_atomic,
)
from chatmill.core.whole_file import sync_file, sync_folder
from chatmill.errors import ConfigError, FormatError
from chatmill.store.documents import WORK
from chatmill.store.durable import lock, remove_path, sync_tree
from chatmill.store.receipts import MANIFEST

FINISHED, UNFINISHED = "a finished dataset", "an unfinished build"
MARK = ".chatmill-work"
"""In a folder behind a link: a build made this folder, so a build may remove it."""


@contextlib.contextmanager
def folder_lock(folder: Path, *, shared: bool) -> Iterator[None]:
    """Hold a folder; `shared` lets other shared holders in (the shares of one build), else nobody.

    Nothing is written, and the lock ends with its process, however that ends. Where the system or the file system has
    no such locks, nothing is held.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        held = f"{folder}: another build is at work in this folder now; wait until it ends, or choose another folder"
        lock(descriptor, held, shared=shared)
        yield
    finally:
        os.close(descriptor)


def work_folder(directory: Path) -> Path:
    """Where the build into `directory` keeps its unfinished work; nothing is created.

    `.build` itself, or, where that is a link to a folder (a scratch disk), a folder of the build's own in there.
    """
    work = directory / WORK
    return work / f"{directory.resolve().name}{WORK}" if work.is_symlink() else work


def claim_work(directory: Path) -> Path:
    """The work folder, found to be safe to write into: what a link leads to is a folder, and it holds no links."""
    work, link = work_folder(directory), directory / WORK
    if not link.is_symlink():
        if link.exists() and not link.is_dir():
            raise ConfigError(f"{link} is no folder, and a build keeps its work there: remove it")
    elif not link.is_dir():
        raise ConfigError(f"{link} is a link to {os.readlink(link)}, which is no folder: remove the link, or make it")
    else:
        _claim_behind_link(work)
    for place, folders, names in os.walk(work):
        for name in (*folders, *names):
            if os.path.islink(os.path.join(place, name)):
                raise ConfigError(
                    f"{os.path.join(place, name)} is a link, and no build made it: remove it, or delete {work}"
                )
    return work


def _claim_behind_link(work: Path) -> None:
    """Make the folder of this build and mark it as made by one; a folder that is there without the mark is not ours."""
    if work.is_symlink():
        raise ConfigError(f"{work} is a link, and no build made it: remove it")
    with storing(work, "create the folder"):
        work.mkdir(exist_ok=True)
        there = [name for name in os.listdir(work) if not TEMPORARY.fullmatch(name)]
        if MARK in there:
            return
        if there:
            raise ConfigError(
                f"{work} is not empty ({', '.join(sorted(there)[:5])}) and no build made it: let {work.parent} be a "
                "link to another folder"
            )
        write_atomic(work / MARK, b"", step="work_mark")


def unfinished_state(directory: Path) -> dict[str, Any] | None:
    """What the build that was stopped in `directory` has noted of itself in `begin_work`; None: there is none."""
    path = work_folder(directory) / STATE
    try:
        state: dict[str, Any] = json.loads(path.read_bytes())
        state["fingerprint"]
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise FormatError(f"{path} cannot be read: {error!r}; delete {directory} and build again") from None
    return state


def what_it_holds(directory: Path) -> str:
    """`FINISHED`, `UNFINISHED`, or nothing where a build may begin; a folder with anything else in it is refused."""
    if not directory.exists():
        return ""
    with storing(directory, "read the folder"):
        names = {path.name for path in directory.iterdir() if not TEMPORARY.fullmatch(path.name)}
    if MANIFEST in names:
        return FINISHED
    if (work_folder(directory) / STATE).exists():
        return UNFINISHED
    if others := sorted(names - {WORK}):
        raise ConfigError(
            f"{directory} is not empty ({', '.join(others[:5])}) and holds no build; choose an empty folder"
        )
    return ""


def refuse_other(directory: Path, fingerprint: str, manifest: Mapping[str, Any] | None) -> bool:
    """Whether the build of this fingerprint has begun here; a `ConfigError` where the folder has that of another one.

    `manifest` is that of the folder, if it has one.
    """
    held = manifest or unfinished_state(directory)
    if held is None:
        return False
    found = str(held["fingerprint"])
    if found != fingerprint:
        what, way_out = "an unfinished build of something else", f", or delete {work_folder(directory)}"
        if manifest is not None:
            clean_up(directory)
            what, way_out = "another dataset", ""
        raise ConfigError(
            f"{directory} holds {what} (fingerprint {found[:12]}, this build is {fingerprint[:12]}): "
            f"another input, other options, another tokenizer or package version. Choose another folder{way_out}."
        )
    return True


def begin_work(work: Path, state: Mapping[str, Any]) -> None:
    """Note in the work folder, which is made, which build is at work there; `state` has its `fingerprint`."""
    with storing(work, "create the folder"):
        work.mkdir(exist_ok=True)
    write_atomic(work / STATE, canonical_json(state), step="state")


def clean_up(directory: Path) -> None:
    """Remove what is no part of a finished dataset: left by a kill at the very end, or by looking at packed input."""
    remove_work(directory)
    sweep_orphans(directory)


def remove_work(directory: Path) -> None:
    """Remove the work folder. A link stays, as does all that a build did not make behind it."""
    work = work_folder(directory)
    with storing(work, "remove"):
        if work.is_symlink() or not work.is_dir():
            return
        if work != directory / WORK and not (work / MARK).is_file():
            return
        remove_path(work)


def move_path(source: Path, target: Path) -> None:
    """Rename a file or folder, also to another file system, where it is copied, synced and renamed in one step."""
    try:
        os.replace(source, target)
        return
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
    copy = temporary_beside(target)
    if source.is_dir():
        shutil.copytree(source, copy, symlinks=True)
        sync_tree(copy)
    else:
        shutil.copy2(source, copy)
        sync_file(copy)
    os.replace(copy, target)
    sync_folder(target.parent)
    remove_path(source)

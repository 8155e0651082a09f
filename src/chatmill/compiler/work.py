"""The folder of a build: held by one build at a time, and the work folder in it, whose removal never follows a link."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from chatmill.compiler.chunk_output import STATE
from chatmill.compiler.gates import GateError
from chatmill.core.canonical import canonical_json
from chatmill.core.publish import TEMPORARY, lock, remove_path, storing, sweep_orphans, write_whole
from chatmill.errors import ConfigError, DataError, FormatError
from chatmill.store.episode_layout import MANIFEST, WORK

FINISHED, UNFINISHED = "a finished dataset", "an unfinished build"
FAILED = "failed"
"""In what a build notes of itself: it ended with a mistake in data, options or gates."""


@contextlib.contextmanager
def folder_lock(folder: Path, *, shared: bool) -> Iterator[None]:
    """Lock a folder; `shared` lets other shared holders in (the shares of one build).

    Nothing is written, and the lock ends with its process, however that ends (see `lock`).
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        message = f"{folder}: another build is at work in this folder now; wait until it ends, or choose another folder"
        lock(descriptor, message, shared=shared)
        yield
    finally:
        os.close(descriptor)


def work_folder(directory: Path) -> Path:
    """Where the build into `directory` keeps its unfinished work; a link there is refused, so none is ever followed."""
    work = directory / WORK
    if work.is_symlink() or (work.exists() and not work.is_dir()):
        raise ConfigError(f"{work} is no folder, and a build keeps its work there: remove it")
    return work


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
    """Return whether the build of this fingerprint has begun here; raise `ConfigError` if another one has.

    `manifest` is that of the folder, if it has one.
    """
    state = manifest or unfinished_state(directory)
    if state is None:
        return False
    other = str(state["fingerprint"])
    if other != fingerprint:
        content, way_out = "an unfinished build of something else", f", or delete {work_folder(directory)}"
        if manifest is not None:
            clean_up(directory)
            content, way_out = "another dataset", ""
        raise ConfigError(
            f"{directory} holds {content} (fingerprint {other[:12]}, this build is {fingerprint[:12]}): "
            f"another input, other options, another tokenizer or package version. Choose another folder{way_out}."
        )
    return True


def begin_work(work: Path, state: Mapping[str, Any]) -> None:
    """Note in the work folder, which is made, which build is at work there; `state` has its `fingerprint`."""
    with storing(work, "create the folder"):
        work.mkdir(exist_ok=True)
    write_whole(work / STATE, canonical_json(state))


@contextlib.contextmanager
def failure_noted(work: Path) -> Iterator[None]:
    """Note in the work folder that its build ended with a mistake in data, options or gates.

    Such a build is corrected and not resumed; one that was stopped, or whose disk or machine failed, is resumed.
    """
    try:
        yield
    except (DataError, ConfigError, GateError):
        path = work / STATE
        with contextlib.suppress(OSError, ValueError):
            write_whole(path, canonical_json({**json.loads(path.read_bytes()), FAILED: True}))
        raise


def forget_failed(directory: Path, folders: Sequence[str], receipts: str, fingerprint: str) -> bool:
    """Remove another build that published nothing and left nothing to resume; return whether there was one.

    It failed, or none of its chunks is done. `folders` are those it writes, `receipts` is the folder of its chunks'
    receipts in the work folder.
    """
    state = unfinished_state(directory)
    if state is None or state["fingerprint"] == fingerprint or (directory / MANIFEST).exists():
        return False
    work = work_folder(directory)
    if FAILED not in state and (work / receipts).is_dir() and any((work / receipts).iterdir()):
        return False
    with storing(directory, "remove"):
        for path in (*(directory / name for name in folders), work / receipts, work / STATE):
            remove_path(path)
    return True


def clean_up(directory: Path) -> None:
    """Remove what is no part of a finished dataset: the work folder, and what killed processes have left."""
    work = work_folder(directory)
    with storing(work, "remove"):
        remove_path(work)
    sweep_orphans(directory)

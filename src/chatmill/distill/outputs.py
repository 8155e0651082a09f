"""The second stage of a distillation command: jobs that write its files from what its chunks became.

Each job publishes a folder in the work folder, with a receipt in it. When all are there, their files are moved to their
places in the output.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from chatmill.compiler.chunk_output import RECEIPT, publish_with_receipt
from chatmill.compiler.chunk_runs import run_jobs
from chatmill.compiler.engines.jobs import Executor
from chatmill.core.publish import remove_path, storing, sync_folder, sync_tree
from chatmill.errors import FormatError
from chatmill.store.names import is_inner_path

EXPORTED = "exported"
"""In the work folder: what jobs have published, by their names."""
Receipt = dict[str, Any]
"""What a job says of its work; `files` has size and hash of each file by its path in the output."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputJob:
    """The order to write some files of the output; small and picklable."""

    name: str
    """Of what it writes; no other job has it."""
    work: str
    """The work folder of the run."""

    @property
    def label(self) -> str:
        """The job in words."""
        return f"writing {self.name}"

    @property
    def folder(self) -> Path:
        """Where its files are published."""
        return Path(self.work) / EXPORTED / self.name


Job = TypeVar("Job", bound=OutputJob)


def publish_output(job: OutputJob, write: Callable[[Path], Receipt]) -> Receipt:
    """In a worker: let `write` fill a folder, and publish it with the receipt; it is then on the disk."""
    receipt = publish_with_receipt(job.folder, write)
    with storing(job.folder):
        sync_tree(job.folder)
        sync_folder(job.folder.parent)
    return receipt


def whole_outputs(jobs: Sequence[OutputJob], root: Path) -> dict[str, Receipt]:
    """The receipts of jobs that an earlier run has done, by name; what is left of others is removed.

    A receipt that names a file elsewhere is refused.
    """
    found: dict[str, Receipt] = {}
    for job in jobs:
        try:
            receipt: Receipt = json.loads((job.folder / RECEIPT).read_bytes())
            if all(_is_whole(job.folder, root, path, record["bytes"]) for path, record in receipt["files"].items()):
                found[job.name] = receipt
        except FormatError:
            raise
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            pass
        if job.name not in found:
            remove_path(job.folder)
    return found


def _is_whole(folder: Path, root: Path, path: str, size: int) -> bool:
    """Whether a file is there with its size: where it was published, or moved to its place."""
    if not is_inner_path(path):
        raise FormatError(f"{folder / RECEIPT} names {path!r}, which is outside; delete {folder} and resume")
    places = [place for place in (folder / path, root / path) if place.is_file()]
    return bool(places) and places[0].stat().st_size == size


def run_outputs(
    function: Callable[[Job], Receipt],
    jobs: Sequence[Job],
    executor: Executor,
    on_done: Callable[[Job], None] = lambda job: None,
) -> dict[str, Receipt]:
    """Do jobs; their receipts by name."""
    made = run_jobs(function, jobs, executor, on_done)
    return {job.name: receipt for job, receipt in zip(jobs, made, strict=True)}


def move_outputs(jobs: Sequence[OutputJob], receipts: Mapping[str, Mapping[str, Any]], root: Path) -> None:
    """Move the files of all jobs to their places, unless they are there already."""
    places = [(job.folder / path, root / path) for job in jobs for path in receipts[job.name]["files"]]
    for source, target in places:
        target.parent.mkdir(exist_ok=True)
        if source.exists():
            os.replace(source, target)
    for folder in {target.parent for _, target in places}:
        sync_folder(folder)

"""Fetch jobs: executors copy inputs that are behind URLs into the folder of spools: they are read more than once."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from chatmill.compiler.engines.jobs import Executor, results_of
from chatmill.compiler.inputs import InputScan
from chatmill.core.publish import storing
from chatmill.read.places import STDIN, Elsewhere, fetch, is_elsewhere, place, store_settings

FETCHES = 8
"""Files that one process copies at a time, as most of the time it waits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchJob:
    """The order to copy some files; small and picklable."""

    scans: tuple[InputScan, ...]
    settings: dict[str, Any]
    """Of fsspec, as the driver has them."""

    @property
    def label(self) -> str:
        """The job in words, for messages."""
        return f"fetching {self.scans[0].path}"


def fetched(scans: Sequence[InputScan], executor: Executor | None = None) -> list[InputScan]:
    """Return the same orders, with copies of the files that are behind URLs or are standard input.

    Standard input is that of this process, so this process copies it.
    """
    found = [_fetched(scan) if scan.path == STDIN else scan for scan in scans]
    numbers = [number for number, scan in enumerate(found) if not scan.copy and is_elsewhere(scan.path)]
    settings = store_settings() if numbers else {}
    jobs = [
        FetchJob(scans=tuple(found[number] for number in numbers[start : start + FETCHES]), settings=settings)
        for start in range(0, len(numbers), FETCHES)
    ]
    copied = (scan for scans in results_of(executor, fetch_files, jobs) for scan in scans)
    for number, scan in zip(numbers, copied, strict=True):
        found[number] = scan
    return found


def fetch_files(job: FetchJob) -> list[InputScan]:
    """Copy the files of a job."""
    store_settings(job.settings)
    with ThreadPoolExecutor(FETCHES) as threads:
        return list(threads.map(_fetched, job.scans))


def _fetched(scan: InputScan) -> InputScan:
    """Copy one file."""
    where = place(scan.path)
    assert isinstance(where, Elsewhere)
    with storing(scan.spool, "copy the input into"):
        return replace(scan, copy=str(fetch(where, Path(scan.base, scan.spool, "fetched")).absolute()))

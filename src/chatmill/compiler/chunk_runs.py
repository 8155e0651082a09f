"""Runs the chunks of a build by an executor: those that are whole are kept, the others are made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from chatmill.compiler.engines.jobs import Executor
from chatmill.core.ledger import records_read

Receipt = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildProgress:
    """What a display may show; given to `on_progress` after every chunk."""

    stage: str
    chunks_done: int = 0
    chunks: int = 0
    bytes_done: int = 0
    bytes: int = 0
    tokens: int = 0
    """Tokens written by the chunks of this run."""
    records: int = 0


OnProgress = Callable[[BuildProgress], None]


class ChunkOrder(Protocol):
    """The order to make one chunk; small and picklable."""

    @property
    def number(self) -> int:
        """Place of the chunk in the build's order."""

    @property
    def label(self) -> str:
        """The chunk in words."""

    @property
    def bytes(self) -> int:
        """Bytes of its input, about."""


Order = TypeVar("Order", bound=ChunkOrder)
Job = TypeVar("Job")


def run_chunks(
    function: Callable[[Order], Receipt],
    jobs: Sequence[Order],
    executor: Executor,
    on_progress: OnProgress | None,
    receipts: dict[int, Receipt],
    *,
    stage: str = "compile",
    on_made: Callable[[Order, Receipt], None] = lambda job, receipt: None,
) -> None:
    """Make the chunks that have no receipt yet, and add theirs, by number; `on_made` is told of each."""
    todo = [job for job in jobs if job.number not in receipts]
    total_bytes = sum(job.bytes for job in jobs)
    bytes_done, tokens, records = total_bytes - sum(job.bytes for job in todo), 0, 0

    def tell(done: int) -> None:
        if on_progress is not None:
            on_progress(
                BuildProgress(
                    stage=stage,
                    chunks_done=len(jobs) - len(todo) + done,
                    chunks=len(jobs),
                    bytes_done=bytes_done,
                    bytes=total_bytes,
                    tokens=tokens,
                    records=records,
                )
            )

    tell(0)
    for done, (index, receipt) in enumerate(executor.map(function, todo), 1):
        receipts[todo[index].number] = receipt
        on_made(todo[index], receipt)
        bytes_done += todo[index].bytes
        tokens += sum(split["tokens"] for split in receipt["splits"].values())
        records += records_read(receipt["ledger"])
        tell(done)


def run_jobs(
    function: Callable[[Job], Any],
    jobs: Sequence[Job],
    executor: Executor,
    on_done: Callable[[Job], None] = lambda job: None,
) -> list[Any]:
    """Do jobs whose progress nobody is shown; what each of them gave, in order. `on_done` is told of each."""
    found: dict[int, Any] = {}
    for index, given in executor.map(function, jobs):
        found[index] = given
        on_done(jobs[index])
    return [found[index] for index in range(len(jobs))]

"""A progress bar for builds: chunks, records, tokens and megabytes a second, and the time left; quiet elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from chatmill.compiler.chunk_runs import BuildProgress, OnProgress

REFRESHES = 4
"""How often a second the bar is drawn: spinner and seconds move each time, also while no chunk is finished."""


@contextmanager
def shown_progress() -> Iterator[OnProgress | None]:
    """A callback for `run_build` that draws on standard error; None when that is no terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.progress import BarColumn, Progress, TimeRemainingColumn

    from chatmill.console import plain_column, plain_console, spinner_column

    progress = Progress(
        spinner_column(),
        plain_column("{task.description}"),
        BarColumn(),
        plain_column("{task.fields[count]}"),
        plain_column("{task.elapsed:.1f} s"),
        TimeRemainingColumn(),
        plain_column("{task.fields[rate]}"),
        console=plain_console(stderr=True),
        refresh_per_second=REFRESHES,
    )
    started = time.monotonic()
    with progress:
        task = progress.add_task("read inputs", total=None, count="0 chunks", rate="")

        def on_progress(state: BuildProgress) -> None:
            seconds = max(time.monotonic() - started, 1e-9)
            retried = f", {state.retries} retried" if state.retries else ""
            late = f", waiting for {state.late[0]}" if state.late else ""
            rate = (
                f"{state.records:,} records, {state.tokens / seconds / 1e6:.1f} M tokens/s, "
                f"{state.bytes_done / seconds / 1e6:.0f} MB/s{retried}{late}"
            )
            count = f"{state.chunks_done:,}/{state.chunks:,} chunks"
            progress.update(
                task,
                description=state.stage,
                total=state.chunks,
                completed=state.chunks_done,
                count=count,
                rate=rate,
            )

        yield on_progress

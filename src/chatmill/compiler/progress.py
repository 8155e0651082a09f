"""A progress bar for builds: chunks, records, tokens and megabytes a second, and the time left; quiet elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from chatmill.console import shown_count


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


def rate_words(tokens: int, seconds: float) -> str:
    """Tokens a second, in millions only if there are some."""
    rate = tokens / max(seconds, 1e-9)
    return f"{rate / 1e6:.1f} M tokens/s" if rate >= 1e5 else f"{rate:,.0f} tokens/s"


@contextmanager
def shown_progress(quiet: bool = False) -> Iterator[OnProgress | None]:
    """A callback for `run_build` that draws on standard error; None when that is no terminal, or `quiet`."""
    with shown_count(quiet, first="read inputs", unit=" chunks", stays=True) as show:
        if show is None:
            yield None
            return
        started = time.monotonic()

        def draw(state: BuildProgress) -> None:
            words, seconds = "", max(time.monotonic() - started, 1e-9)
            if state.records:
                rates = f"{rate_words(state.tokens, seconds)}, {state.bytes_done / seconds / 1e6:.0f} MB/s"
                words = f"{state.records:,} records, {rates}"
            show(state.stage, state.chunks_done, state.chunks, words)

        yield draw

"""A progress bar for builds: chunks, records, tokens and megabytes a second, and the time left; quiet elsewhere."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from chatmill.compiler.chunk_notes import ChunkNotes
from chatmill.console import shown_count

LOOK_SECONDS = 0.5
"""How often the notes of workers are read."""


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
    notes: ChunkNotes | None = None
    """What workers note of the chunks that are not done, if a display asks for it."""


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
        bar, ended = _Bar(show), threading.Event()

        def look() -> None:
            while not ended.wait(LOOK_SECONDS):
                bar.draw()

        thread = threading.Thread(target=look, name="chatmill-progress", daemon=True)
        thread.start()
        try:
            yield bar.take
        finally:
            ended.set()
            thread.join()


class _Bar:
    """The last state of a build, drawn with what workers have noted since."""

    def __init__(self, show: Callable[..., None]) -> None:
        self._show, self._started = show, time.monotonic()
        self._state: BuildProgress | None = None
        self._drawn = 0.0
        self._lock = threading.Lock()

    def take(self, state: BuildProgress) -> None:
        """The next state."""
        with self._lock:
            if self._state is None or self._state.stage != state.stage:
                self._drawn = 0.0
                if state.notes is not None:
                    state.notes.begin()
            self._state = state
        self.draw()

    def draw(self) -> None:
        """Draw what is done; never less than before, as a chunk may be done again."""
        with self._lock:
            state = self._state
            if state is None:
                return
            inside = 0.0 if state.notes is None else state.notes.read()
            self._drawn = max(self._drawn, min(state.chunks_done + inside, state.chunks))
            seconds = max(time.monotonic() - self._started, 1e-9)
            done = state.bytes_done + inside * state.bytes / max(state.chunks, 1)
            words = f"{done / seconds / 1e6:.0f} MB/s" if inside or state.records else ""
            if state.records:
                words = f"{state.records:,} records, {rate_words(state.tokens, seconds)}, {words}"
            self._show(state.stage, state.chunks_done, state.chunks, words, self._drawn)

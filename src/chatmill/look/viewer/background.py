"""Work that is done once, in a thread, while pages are answered."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Background:
    """Work that is started once and reports why it failed; requests may share it."""

    def __init__(self, work: Callable[[], None], name: str) -> None:
        self._work, self._name = work, name
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self.problem = ""
        """Why it could not be finished."""

    def start(self) -> None:
        """Begin, once."""
        with self._lock:
            if self._thread is not None:
                return
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()  # with the lock held: a thread that has not begun cannot be waited for

    def wait(self) -> None:
        """Until it is over."""
        self.start()
        assert self._thread is not None
        self._thread.join()

    def _run(self) -> None:
        try:
            self._work()
        except Exception as error:
            # any failure, that of a damaged file too, is reported: a page must not wait for ever
            self.problem = str(error) or type(error).__name__
